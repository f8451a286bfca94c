"""A kept run as a user sees it: for how long it is kept, its GPUs, and its newest cell."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from nbdist.cluster.run_owner import ELSEWHERE, KEPT, Run
from nbdist.core.failures import ranks_are
from nbdist.core.units import one_line, shown, span

CODE_CHARS = 50


def first_line(code: str) -> str:
    """The first line of a cell that is no comment, cut; its magic is a comment once it is sent."""
    lines = [line for line in code.splitlines() if line.strip()]
    first = next((line for line in lines if not line.startswith("#")), "".join(lines[:1]))
    return one_line(first, CODE_CHARS)


@dataclass(frozen=True, slots=True)
class NewestCell:
    """The newest cell of kept ranks, as far as this machine sees their journals.

    Attributes:
        number: The notebook's; None where there was none.
        began_s: In Unix time; `ended_s` too.
        ended_s: None while ranks run it.
        failed: Ranks on which it has failed.
        gone: Ranks whose process ended in it.
        unseen: Ranks whose journals are on other machines.
    """

    number: int | None
    code: str
    began_s: float
    ended_s: float | None
    failed: tuple[int, ...] = ()
    gone: tuple[int, ...] = ()
    unseen: tuple[int, ...] = ()

    def phrase(self, now_s: float) -> str:
        """`[7] for batch in loader:, running for 12 min`."""
        parts = [f"[{self.number or ' '}] {first_line(self.code)}"]
        if self.ended_s is None:
            parts.append(f"running for {shown(span(now_s - self.began_s))}")
        else:
            parts.append(f"ended {shown(span(now_s - self.ended_s))} ago")
        if self.failed:
            parts.append(f"failed on {ranks_are(self.failed).rsplit(' ', 1)[0]}")
        if self.gone:
            parts.append(f"{ranks_are(self.gone)} gone")
        return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class KeptRun:
    """A run that outlives its notebook, held by one or by none.

    Attributes:
        cell: The newest; None without one, or where no journal is seen from this machine.
        has_guardian: A process ends its ranks in time; one that a notebook holds has.
    """

    run: Run
    cell: NewestCell | None
    has_guardian: bool = True

    @property
    def gpus(self) -> str:
        """`2 NVIDIA H100`, or `none`."""
        counts = Counter(self.run.keep.gpus if self.run.keep else ())
        return ", ".join(f"{count} {name}" for name, count in counts.items()) or "none"

    @property
    def holder(self) -> str:
        """The holder of the run, `kernel 4711`; empty where no kernel holds it."""
        owner = self.run.owner
        if self.run.state == KEPT or owner is None:
            return ""
        on_host = f" on {owner.machine.host}" if self.run.state == ELSEWHERE else ""
        return f"kernel {shown(owner.pid)}{on_host}"

    def age(self, now_s: float) -> str:
        """How long its ranks are up."""
        assert self.run.keep is not None
        return shown(span(now_s - self.run.keep.since_s))

    def left(self, now_s: float) -> str:
        """Say how long the run is kept, and what happens then."""
        keep, detachment = self.run.keep, self.run.detachment
        assert keep is not None
        if self.holder or detachment is None:
            left = f"{span(keep.keep_s)} from the notebook's end"
        elif not self.has_guardian:
            return "until `nbdist stop`: its guardian was killed"
        elif now_s < detachment.until_s:
            left = shown(span(detachment.until_s - now_s))
        else:
            return f"over, being saved to {keep.save}" if keep.save else "over"
        return f"{left}, then saved to {keep.save}" if keep.save else left

    def phrase(self, now_s: float) -> str:
        """All of it on a line, without its name."""
        state = f"held by {self.holder}" if self.holder else "kept"
        cell = self.cell.phrase(now_s) if self.cell else "none"
        return (
            f"{state}, time left {self.left(now_s)}, up for {self.age(now_s)}, GPUs {self.gpus}, "
            f"newest cell {cell}"
        )
