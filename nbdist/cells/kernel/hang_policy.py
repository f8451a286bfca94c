"""The measures for a cell whose ranks wait in vain: report, abort, recovery of the groups."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from nbdist.cells.kernel.cell_outcome import (
    still_aborting_message,
    unresponsive_message,
    waiting_message,
)
from nbdist.cells.kernel.cell_ranks import CellRanks
from nbdist.cells.kernel.cell_request import CellRequest
from nbdist.cells.kernel.interrupt import NEVER_S, InterruptEscalation
from nbdist.hang.kernel.group_recovery import GroupRecovery, RecoveryOutcome
from nbdist.hang.kernel.watchdog import States
from nbdist.hang.records import UnmatchedCall, WaitFinding

# Ranks are back from an abort in milliseconds; those that are not by then are named.
ABORTED_S = 3.0
# A call that only some ranks have made counts if it is so for this long after the cell's end:
# threads of the user's may make calls behind it, on each rank at another moment.
SETTLED_S = 0.5


class HangPolicy:
    """Aborts a cell's collectives that cannot end, and brings the groups back in step after it.

    Nothing here blocks. The cell asks at each of its steps, in the thread that waits.

    Attributes:
        on_answer: Called, in any thread, when a rank has answered the recovery.
        abort_reason: Who waited for whom when the collectives were aborted; empty before.
        aborted_ranks: The ranks that were inside a collective then.
        is_deadlock: The collectives were aborted because they could not end.
        unmatched: A call that only some ranks have made, though all have ended.
        replaced: Ranks in C code that the user gave up on.
    """

    def __init__(
        self,
        ranks: CellRanks,
        request: CellRequest,
        escalation: InterruptEscalation,
        began_s: float,
        run_id: int,
    ):
        self.on_answer: Callable[[], None] = lambda: None
        self.abort_reason = ""
        self.aborted_ranks: frozenset[int] = frozenset()
        self.is_deadlock = False
        self.unmatched: UnmatchedCall | None = None
        self.replaced: tuple[int, ...] = ()
        self._ranks = ranks
        self._request = request
        self._escalation = escalation
        self._run_id = run_id
        self._watchdog = ranks.watchdog(began_s, is_quiet=request.is_patient)
        self._recovery: GroupRecovery | None = None
        self._aborted_s = NEVER_S
        self._settled_s = NEVER_S

    @property
    def deadlock(self) -> WaitFinding | None:
        """The certain deadlock that was reported, while it lasts."""
        return self._watchdog.deadlock

    @property
    def places(self) -> Mapping[int, str]:
        """Places of ranks in the user's code, as far as they have answered."""
        return self._watchdog.places

    @property
    def stopped(self) -> frozenset[int]:
        """The ranks whose process a signal has stopped."""
        return self._watchdog.stopped

    @property
    def is_recovering(self) -> bool:
        """Whether the groups are being, or have been, compared or recreated."""
        return self._recovery is not None

    @property
    def outcome(self) -> RecoveryOutcome | None:
        """The outcome of the groups' recovery; None where there was none, or not yet."""
        return None if self._recovery is None else self._recovery.outcome

    @property
    def next_s(self) -> float:
        """When `watch` has something to do, if nothing arrives before."""
        return min(self._watchdog.next_s, self._aborted_s + ABORTED_S)

    def watch(
        self, now_s: float, missing: Sequence[int], states: Callable[[], States]
    ) -> list[str]:
        """Abort what cannot end, or what the user wants to end; the lines to show.

        `missing` are the ranks that have not ended; `states` says what every rank does.
        """
        watchdog, escalation = self._watchdog, self._escalation
        lines = watchdog.look(now_s, states, is_urgent=escalation.has_begun)
        lines += self._ranks.maintenance.take_notes()
        deadlock = watchdog.deadlock
        if not self.abort_reason and deadlock is not None and now_s >= watchdog.abort_s:
            self.is_deadlock = True
            self._abort(now_s, deadlock.text)
        if not self.abort_reason and now_s >= escalation.abort_s and watchdog.waiting:
            self._abort(now_s, deadlock.text if deadlock else waiting_message(watchdog.waiting))
        return lines + self._unresponsive(now_s, missing) + self._still_aborting(now_s, missing)

    def _unresponsive(self, now_s: float, missing: Collection[int]) -> list[str]:
        """Name ranks that take no interrupt. Ranks that were aborted are about to come back."""
        watchdog = self._watchdog
        stuck = sorted({*missing} - {*watchdog.waiting} - self.aborted_ranks)
        if not stuck or now_s < self._escalation.warn_s:
            return []
        self._escalation.warned(now_s)
        message = unresponsive_message(
            stuck,
            watchdog.places,
            watchdog.stopped,
            can_replace=self._can_replace,
            is_program=self._request.is_program,
        )
        return [message]

    def _still_aborting(self, now_s: float, missing: Sequence[int]) -> list[str]:
        """Name ranks that have not come back from the abort in time."""
        if now_s < self._aborted_s + ABORTED_S:
            return []
        self._aborted_s = NEVER_S
        if self._watchdog.deadlock is not None:  # its code has caught the error, and waits again
            self._ranks.health.abort()
        lines = still_aborting_message(
            missing,
            self._watchdog.waiting,
            is_interrupted=self._escalation.has_begun,
            is_program=self._request.is_program,
            can_restart=self._ranks.maintenance.can_replace,
        )
        return [*lines]

    def _abort(self, now_s: float, reason: str) -> None:
        self.abort_reason = reason
        self._aborted_s = now_s
        self._escalation.aborted(now_s)
        self.aborted_ranks = frozenset(self._watchdog.waiting)
        self._ranks.health.abort()

    @property
    def _can_replace(self) -> bool:
        return self._ranks.maintenance.can_replace and not self._request.is_program

    def replace(self, missing: tuple[int, ...]) -> None:
        """End ranks that take no interrupt, once; the next cell begins with their replacement."""
        if missing and not self.replaced and self._can_replace:
            self.replaced = missing
            self._ranks.maintenance.give_up(missing)

    def find_unmatched(self, now_s: float) -> float:
        """Note a call that only some ranks have made, all of which ended well.

        Returns:
            Seconds to wait until that is certain.
        """
        call = self._ranks.health.unmatched(self._run_id, self._request.ranks)
        if self._settled_s == NEVER_S:
            self.unmatched, self._settled_s = call, now_s + SETTLED_S
        elif call != self.unmatched:  # it was made, and the next one may be: threads go on
            self.unmatched = None
        return max(0.0, self._settled_s - now_s) if self.unmatched else 0.0

    def recover(self, now_s: float, *, is_broken: bool) -> float | None:
        """Compare the groups of ranks that have all ended, and recreate those out of step.

        Args:
            now_s: The time of the monotonic clock.
            is_broken: A rank has died, or failed because another one did.

        Returns:
            How long to wait at most, in seconds; None when it is over.
        """
        if self._recovery is None:
            is_certain = bool(self.abort_reason or self.unmatched) or is_broken
            self._recovery = GroupRecovery(
                self._ranks, self._ranks.health, now_s, is_certain=is_certain
            )
            self._recovery.on_answer = self.on_answer
        give_back_s = self._escalation.give_back_s
        if now_s >= give_back_s:
            self._recovery.give_up()
        pause_s = self._recovery.step(now_s)
        return None if pause_s is None else min(pause_s, give_back_s - now_s)
