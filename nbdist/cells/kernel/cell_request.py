"""A cell to run, where its output goes, and what one rank has done with it so far."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from nbdist.cells.outputs import CellResult, Event, OutputReducer, RankResult
from nbdist.core.failures import RankFailure
from nbdist.rpc.kernel.channel import Message, failure_of


class Sink(Protocol):
    """Receiver of a cell's output."""

    def draw(self, events: Sequence[Event]) -> None:
        """Show these events, in order."""

    def close(self, result: CellResult) -> None:
        """Show the remaining output; nothing is drawn after it."""


@dataclass(frozen=True, slots=True)
class CellRequest:
    """Source that runs as one cell on the chosen ranks.

    Attributes:
        ranks: Where, in rank order.
        number: The notebook's cell number, for tracebacks; None where there is none.
        timeout_s: Interrupt the ranks after this long; None for never.
        is_patient: See LineMerger.
        keeps_outputs: Whether results carry each rank's outputs (for tabs).
        is_program: It runs a program of `nbdist run`, with which the ranks end.
        began_s: When ranks of this host began it, by the monotonic clock; None for now.
    """

    code: str
    ranks: tuple[int, ...]
    number: int | None = None
    timeout_s: float | None = None
    is_patient: bool = False
    keeps_outputs: bool = False
    is_program: bool = False
    began_s: float | None = None


class CellHook:
    """The work of a feature with each cell that ranks run; this class does nothing."""

    def before(self, metadata: dict[str, Any]) -> Iterable[str]:
        """Lines to show above the output of a cell that is about to be sent.

        The metadata goes along with it, and may be added to.
        """
        return ()

    def message(self, run_id: int, rank: int, message: Message) -> bool:
        """Whether a raw message of a rank was for this feature; in the client's thread."""
        return False

    def during(self, run_id: int) -> Iterable[str]:
        """Lines to show among the output, after a message that was for this feature."""
        return ()

    def after(self, run_id: int, *, is_ok: bool) -> Iterable[str]:
        """Lines to show below the output of a cell that has ended, well or not."""
        return ()

    def advice(self, failure: RankFailure) -> str:
        """Lines of advice on a failure; empty if there is none."""
        return ""


@dataclass(slots=True)
class RankState:
    """A rank's progress with a cell; the status is empty until the cell has ended there."""

    status: str = ""
    elapsed_s: float = 0.0
    reply: Any = None
    exit_seen_s: float | None = None
    begun_s: float | None = None
    interrupted_s: float | None = None
    is_told: bool = False


# A status of RankState or RankResult as the diagnosis calls it (hang.records.RankView).
VIEWED = {
    "": "running",
    "unfinished": "running",
    "ok": "finished",
    "error": "raised",
    "interrupted": "raised",
    "died": "ended",
}


def failure_in(rank: int, state: RankState, feed: OutputReducer) -> RankFailure:
    """The error that the rank displayed, or that of its reply where it displayed none."""
    displayed = feed.failure(rank)
    if displayed is not None:
        return displayed
    name, message, lines = failure_of(state.reply) or ("Error", "", ())
    return RankFailure(rank, name, message, lines)


def result_of(
    rank: int, state: RankState, feed: OutputReducer, death: Callable[[int], str]
) -> RankResult:
    """A rank's result once its cell has ended; `death` says how a process ended."""
    failure = None
    if state.status == "died":
        failure = RankFailure(rank, "RankDied", death(rank))
    elif state.status in {"error", "interrupted"}:
        failure = failure_in(rank, state, feed)
    return RankResult(
        rank=rank,
        status=state.status,
        elapsed_s=state.elapsed_s,
        text=feed.text(rank),
        failure=failure,
        outputs=feed.outputs(rank),
    )
