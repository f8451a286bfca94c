"""The outcome of an ended cell: its result, or the one error that says what happened."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath

from nbdist.cells.outputs import CellResult, RankResult
from nbdist.core import failures as failing
from nbdist.core.failures import RankFailure, is_follower, ranks_are, ranks_phrase
from nbdist.core.ranks import rank_label
from nbdist.core.stacks import is_library, is_ours
from nbdist.core.units import is_stored
from nbdist.errors import CellTimeout, Deadlock, DistributedError, Interrupted, RankGone
from nbdist.hang.kernel.group_recovery import RecoveryOutcome
from nbdist.hang.records import SourceLine
from nbdist.hang.text import place_text

UNTOUCHED = RecoveryOutcome()
# The interrupt of a cell in the user's words, and of a program of `nbdist run`.
STOP = {False: "the stop button", True: "Ctrl-C"}
INTERRUPT_NAMES = frozenset({"KeyboardInterrupt", "CancelledError"})
# The number of different places of interrupted ranks that are listed; one line has the rest.
MOST_PLACES = 8

# IPython's first line of a frame, `Cell In[4], line 3, in step(x)` or `File ~/train.py:12, in
# main()`, and its mark of the line that was running.
_FRAME = re.compile(
    r"\s*(?:Cell In\[(?P<cell>\d+)\], line (?P<line>\d+)|File (?P<file>.+?):(?P<at>\d+)(?:,|$))",
    re.MULTILINE,
)
# For these frames IPython shows the cell's first line in place of theirs (9.18, in a kernel).
_COMPREHENSION = re.compile(r".*, in .*<(?:\w+comp|genexpr)>")
_RUNNING = re.compile(r"^-+> *\d+ (.*)$", re.MULTILINE)


def is_by_interrupt(failure: tuple[str, str, tuple[str, ...]], *, was_aborted: bool) -> bool:
    """Whether a rank ended because it was interrupted, or released from a collective for it."""
    name, message, _ = failure
    return name in INTERRUPT_NAMES or (was_aborted and is_follower(message))


def waiting_message(waiting: Mapping[int, str]) -> str:
    """`rank 0 was waiting in barrier at line 3 of cell [4]`, for ranks that an interrupt aborts."""
    return "; ".join(
        f"{ranks_phrase(ranks)} {'were' if len(ranks) > 1 else 'was'} {text}"
        for text, ranks in _ranks_by_text(waiting).items()
    )


def _ranks_by_text(texts: Mapping[int, str]) -> dict[str, list[int]]:
    by_text: dict[str, list[int]] = {}
    for rank, text in texts.items():
        by_text.setdefault(text, []).append(rank)
    return by_text


def place_of(failure: RankFailure) -> str:
    """`line 3 of cell [4]: sleep(9)`: the innermost line of the user's in IPython's traceback.

    Empty where the traceback has none, or has another form.
    """
    for text in map(failing.plain, reversed(failure.traceback)):
        frame, running = _FRAME.match(text), _RUNNING.search(text)
        if frame is None or _COMPREHENSION.match(text):
            continue
        if is_library(file := frame["file"] or "") or is_ours(file):
            continue
        cell = int(frame["cell"]) if frame["cell"] else None
        line = int(frame["line"] or frame["at"])
        source = running[1] if running else ""
        return place_text(SourceLine(cell, PurePath(file).name, line, source))
    return ""


def unresponsive_message(
    ranks: Sequence[int],
    places: Mapping[int, str],
    stopped: Collection[int],
    *,
    can_replace: bool,
    is_program: bool = False,
) -> str:
    """Say which ranks take no interrupt, why and where, and what the next press does."""
    halted = [rank for rank in ranks if rank in stopped]
    running = [rank for rank in ranks if rank not in stopped]
    where = "; ".join(f"rank {r}: {places[r]}" for r in running if places.get(r))
    next_press = "gives the notebook back at once"
    if is_program:
        next_press = "ends the program"
    elif can_replace:
        next_press = f"ends and replaces {ranks_phrase(ranks)}, whose variables are then lost"
    reasons = []
    if halted:
        reasons.append(f"{ranks_are(halted)} stopped (SIGSTOP): no interrupt until kill -CONT")
    if running:
        reasons.append(
            f"{ranks_are(running)} not back yet"
            + (f" ({where})" if where else "")
            + ": C code handles an interrupt when it returns, and code that catches it continues"
        )
    return f"{'; '.join(reasons)}. Another press {next_press}"


def still_aborting_message(
    ranks: Sequence[int],
    waiting: Collection[int],
    *,
    is_interrupted: bool,
    is_program: bool = False,
    can_restart: bool = True,
) -> tuple[str, ...]:
    """Which ranks have not come back although all collectives were aborted, as lines.

    A rank that waits in no collective computes, never was in it or has left it. After an
    interrupt such a rank gets no line here: `unresponsive_message` names it, and the notebook is
    given back by itself. Where outputs are stored none is named: on a busy machine there are more.
    """
    in_collective = [rank for rank in ranks if rank in waiting]
    if in_collective:
        next_press = "ends the program"
        if not is_program:
            restart = f"%dist_restart {rank_label(in_collective)}" if can_restart else "%dist_reset"
            next_press = f"gives the notebook back; then replace with {restart}"
        line = (
            f"{ranks_are(in_collective)} not back from the abort: {STOP[is_program]} {next_press}"
        )
    else:
        line = (
            f"{ranks_are(ranks)} still running, in no collective: the "
            f"{'program' if is_program else 'cell'} ends with {ranks_phrase(ranks)} "
            f"({STOP[is_program]} interrupts)"
        )
    return (line,) if in_collective or not (is_interrupted or is_stored()) else ()


@dataclass(frozen=True, slots=True)
class CellOutcome:
    """How a cell ended, as far as its ranks' results do not show it.

    Attributes:
        lost: Why nothing more can be heard from the ranks, and what to do; or "".
        is_interrupted: The user, or a timeout, interrupted it.
        aborted: Lines on who waited for whom when collectives were aborted; empty if none were.
        is_deadlock: The collectives were aborted because they could not end.
        grace_s: The time between the report of the deadlock and the abort.
        replaced: Ranks in C code that the user gave up on.
        stopped: Ranks whose process a signal has stopped.
        is_program: The ranks end with it: nothing is said of what they have.
        waiting: Ranks that were aborted inside a collective; `aborted` has where.
        places: Where ranks were when they were last seen, as far as that is known.
        unmatched: A call that some ranks made and others did not, though all have ended.
        can_restart: Single ranks can be replaced.
    """

    lost: str
    is_interrupted: bool
    timeout_s: float | None
    aborted: str = ""
    is_deadlock: bool = False
    grace_s: float = 0.0
    outcome: RecoveryOutcome = UNTOUCHED
    replaced: tuple[int, ...] = ()
    stopped: frozenset[int] = frozenset()
    is_program: bool = False
    waiting: frozenset[int] = frozenset()
    places: Mapping[int, str] = field(default_factory=dict)
    unmatched: str = ""
    can_restart: bool = True

    def raise_for(self, result: CellResult, explain: Callable[[RankFailure], RankFailure]) -> None:
        """Raise what the cell has to fail with; return where it has not failed.

        Raises:
            RankGone: If the ranks cannot be heard any more.
            Deadlock: If its collectives were aborted because they could not end, or not all
                ranks made the same.
            DistributedError: If the code failed on a rank, or a rank died.
            CellTimeout: If it ran past its timeout.
            Interrupted: If the user interrupted it.
        """
        if self.lost:
            raise RankGone(self.lost)
        failures = [
            explain(r.failure)
            for r in result.ranks
            if r.failure is not None
            and r.status != "interrupted"
            and not (self.aborted and is_follower(r.failure.message))
        ]
        after = self._after(result)
        cause = self.aborted if self.is_deadlock else self.unmatched
        if cause:
            after = f"{cause}; {after}"
        if failures:
            message = failing.summary(failures)
            if self.aborted or self.outcome.problem:
                message = f"{message}; {after}"
            raise DistributedError(
                message + self._interrupted_at(result),
                ranks=tuple(failure.rank for failure in failures),
                traceback_text=failing.traceback_text(failures),
                advice=failing.advice(failures),
            )
        if cause:
            raise Deadlock(after)
        if not self.is_interrupted:
            return
        if self.timeout_s is not None:
            raise CellTimeout(
                f"The cell ran longer than --timeout {self.timeout_s:g} and was interrupted: "
                f"{after}.{self._interrupted_at(result)}"
            )
        raise Interrupted((after + self._interrupted_at(result)).lstrip())

    def _interrupted_at(self, result: CellResult) -> str:
        """Places of interrupted ranks, a line each: `[0-1] at line 3 of cell [4]: sleep(9)`.

        Ranks that had ended the cell are named only beside others.
        """
        places = {r.rank: self._place(r) for r in result.ranks if r.rank not in self.waiting}
        if not self.is_interrupted or not any(text.startswith("at ") for text in places.values()):
            return ""
        by_text = _ranks_by_text({rank: text for rank, text in places.items() if text})
        others = sorted(rank for text in [*by_text][MOST_PLACES:] for rank in by_text.pop(text))
        if others:
            by_text["at other lines"] = others
        return "".join(f"\n[{rank_label(ranks)}] {text}" for text, ranks in by_text.items())

    def _place(self, result: RankResult) -> str:
        if result.status == "ok":
            return f"had finished the {'program' if self.is_program else 'cell'}"
        place = place_of(result.failure) if result.failure is not None else ""
        place = place or self.places.get(result.rank, "")
        return f"at {place}" if place and result.status in {"interrupted", "unfinished"} else ""

    def _after(self, result: CellResult) -> str:
        """`aborted after 5 s: ranks 0-1 are back, variables kept, groups recovered`."""
        summary = "" if self.is_program else self._state_of_ranks(result)
        if self.is_deadlock:
            head = f"aborted after {self.grace_s:g} s"
            return f"{head}: {summary}" if summary else head
        return "; ".join(filter(None, [summary, self.aborted]))

    def _state_of_ranks(self, result: CellResult) -> str:
        lost = {"unfinished", "died"}
        back = [r.rank for r in result.ranks if r.status not in lost]
        unfinished = [
            r.rank for r in result.ranks if r.status == "unfinished" and r.rank not in self.replaced
        ]
        parts = []
        if back:
            groups = ", groups recovered" if self.outcome.is_recovered else ""
            parts.append(f"{ranks_are(back)} back, variables kept{groups}")
        if self.replaced:
            verb = "were" if len(self.replaced) > 1 else "was"
            parts.append(
                f"{ranks_phrase(self.replaced)} {verb} ended and will be replaced before the next "
                "cell"
            )
        if halted := [rank for rank in unfinished if rank in self.stopped]:
            parts.append(
                f"{ranks_are(halted)} stopped (SIGSTOP): kill -CONT lets {ranks_phrase(halted)} go "
                f"on, and cells there are refused until then. {self._replacing(halted)}"
            )
        if running := [rank for rank in unfinished if rank not in self.stopped]:
            parts.append(
                f"{ranks_are(running)} not back yet: C code takes no interrupt. Until it returns, "
                "cells there are refused and what it prints is not shown. %dist_status --stacks "
                f"shows where; {self._replacing(running)}"
            )
        if self.outcome.problem:
            parts.append(self.outcome.problem)
        return "; ".join(parts)

    def _replacing(self, ranks: Sequence[int]) -> str:
        if not self.can_restart:
            return "%dist_reset restarts all ranks"
        label, who = rank_label(ranks), ranks_phrase(ranks)
        return f"%dist_restart {label} replaces {who}, without the variables"
