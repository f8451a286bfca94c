"""What a cell that has ended comes to: its result, or the one error that tells what happened."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nbdist.core import failures as failing
from nbdist.core.cells import CellResult
from nbdist.core.failures import RankFailure, ranks_are
from nbdist.errors import CellTimeout, DistributedError, Interrupted, RankGone


@dataclass(frozen=True, slots=True)
class Ending:
    """How a cell ended, as far as its ranks' results do not tell.

    Attributes:
        lost: Why nothing more can be heard from the ranks, as the begin of a sentence; or "".
        is_interrupted: The user, or a timeout, interrupted it.
        timeout_s: The timeout that it ran past, or None.
    """

    lost: str
    is_interrupted: bool
    timeout_s: float | None

    def raise_for(
        self, result: CellResult, explained: Callable[[RankFailure], RankFailure]
    ) -> None:
        """Raise what the cell has to fail with; return where it has not failed.

        Raises:
            RankGone: If the ranks cannot be heard any more.
            DistributedError: If the code failed on a rank, or a rank died.
            CellTimeout: If it ran past its timeout.
            Interrupted: If the user interrupted it.
        """
        if self.lost:
            raise RankGone(
                f"{self.lost} while this cell ran, so nothing more can be heard from the ranks. "
                "%dist_reset starts afresh."
            )
        unfinished = [r.rank for r in result.ranks if r.status == "unfinished"]
        _raise_failures(
            [
                explained(r.failure)
                for r in result.ranks
                if r.failure is not None and r.status != "interrupted"
            ],
            unfinished,
        )
        if not self.is_interrupted:
            return
        back = [r.rank for r in result.ranks if r.status not in {"unfinished", "died"}]
        told = f"{ranks_are(back)} back, variables kept" if back else ""
        if unfinished:
            told = "; ".join(filter(None, [told, _still_running(unfinished)]))
        if self.timeout_s is not None:
            raise CellTimeout(
                f"The cell ran longer than --timeout {self.timeout_s:g} and was interrupted: "
                f"{told}."
            )
        raise Interrupted(told)


def _raise_failures(failures: list[RankFailure], unfinished: list[int]) -> None:
    if not failures:
        return
    message = failing.summary(failures)
    if unfinished:
        message += f"; {_still_running(unfinished)}"
    raise DistributedError(
        message,
        ranks=tuple(failure.rank for failure in failures),
        traceback_text=failing.traceback_text(failures),
    )


def _still_running(ranks: Sequence[int]) -> str:
    return (
        f"{ranks_are(ranks)} still in a call that an interrupt does not end: a collective that "
        "waits for another rank, or other C code. Until it returns, cells there are refused and "
        "what it prints is not shown. %dist_status tells; %dist_reset starts afresh, without the "
        "variables"
    )
