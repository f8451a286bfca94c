"""How far something is that takes long: one record for all of it, on ranks and in the notebook.

How work reports, a checkpoint for example:

    on a rank         with progress.during("checkpoint"):                 # nbdist.rpc.rank.progress
                          progress.tell("writing", done_bytes, total_bytes, "bytes")
    the notebook      with progress.of_ranks(session, "checkpoint"):      # cells.kernel
    waits for ranks       session.call_all(...)
    the notebook      with progress.during("plan") as tell:               # cells.kernel
    itself works          tell("counting fsdp", 3, 9, "strategies")

That is all: the cell's output and the panel show it, after half a second, and take it away at the
end. `tell` costs some microseconds and meets nobody. Outside of `during` it does nothing, so shared
code (nbdist.parallel.reshard.redistribute) tells without knowing for whom.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from nbdist.core import units
from nbdist.core.ranks import rank_label

# Is told a sentence at each stage of what takes long, such as a start.
Reporter = Callable[[str], None]

BYTES = "bytes"
# Ranks that are ahead of the last one by less are in step with it.
_AHEAD = 0.05


@dataclass(frozen=True, slots=True)
class Progress:
    """How far one thing is.

    Attributes:
        name: What: "switch", "checkpoint", "trace".
        what: What is done now: "planning", "moving", "reading what ranks recorded".
        done: Of `total`, in `unit`.
        total: 0 where nobody knows how much there is.
        unit: BYTES, or a noun in the plural.
        phase: The how manieth `what` of this thing.
        ranks: Who is last and what the others do, where they are not in step; "" else.
    """

    name: str
    what: str
    done: float = 0.0
    total: float = 0.0
    unit: str = ""
    phase: int = 0
    ranks: str = ""

    @property
    def share(self) -> float | None:
        """0 to 1; None where the total is not known."""
        return min(1.0, max(0.0, self.done / self.total)) if self.total > 0 else None

    def after(self, before: Progress | None) -> Progress:
        """Return this record as the successor of another one, with its phase counted."""
        if before is None or before.name != self.name:
            return replace(self, phase=1)
        return replace(self, phase=before.phase + (before.what != self.what))

    def __str__(self) -> str:
        """`switch: moving 1.2 GB of 3.4 GB, 35%`."""
        text = f"{self.name}: {self.what}" if self.what else self.name
        noun = f" {self.unit}" if self.unit and self.unit != BYTES else ""
        if self.total > 0:
            assert self.share is not None
            text += (
                f" {self._count(self.done)} of {self._count(self.total)}{noun}, {self.share:.0%}"
            )
        elif self.done > 0:
            text += f" {self._count(self.done)}{noun}"
        return f"{text} ({self.ranks})" if self.ranks else text

    def _count(self, number: float) -> str:
        return units.size(number) if self.unit == BYTES else f"{number:,.0f}"


def together(by_rank: Mapping[int, Progress | None]) -> Progress | None:
    """Merge all ranks' progress: the record of the last one, with the places of the others.

    None is a rank that does nothing that is told of.
    """
    reported = {rank: progress for rank, progress in by_rank.items() if progress is not None}
    if not reported:
        return None
    positions = {rank: (p.phase, p.share or 0.0) for rank, p in reported.items()}
    last = reported[min(positions, key=lambda rank: positions[rank])]
    mark = last.phase, (last.share or 0.0) + _AHEAD
    ahead = {rank: p for rank, p in reported.items() if positions[rank] > mark}
    if not ahead:
        return last
    behind = rank_label([rank for rank in reported if rank not in ahead])
    shares = [progress.share for progress in ahead.values() if progress.phase == last.phase]
    span = _span([share for share in shares if share is not None])
    later = {progress.what: None for progress in ahead.values() if progress.phase != last.phase}
    there = ", ".join(filter(None, [span, *later]))
    return replace(last, ranks=f"rank {behind}; {rank_label(sorted(ahead))}: {there}")


def _span(shares: list[float]) -> str:
    """`40-62%`."""
    if not shares:
        return ""
    least, most = (f"{share:.0%}" for share in (min(shares), max(shares)))
    return least if least == most else f"{least[:-1]}-{most}"
