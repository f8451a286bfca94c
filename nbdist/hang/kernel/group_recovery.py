"""After a cell that failed: are the groups still in step, and if not, make them anew."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from nbdist.cluster.kernel import run_dir
from nbdist.cluster.kernel.ranks import Ranks
from nbdist.core.failures import ranks_are, ranks_phrase
from nbdist.hang import diagnose, recovery
from nbdist.hang.kernel.health import Health
from nbdist.hang.records import FlightRecorderEntry
from nbdist.rpc.kernel.functions import RankFunction

COUNT_S = 1.0
COMPARE_S = 2.0
# Longer than the ranks themselves wait: they name who has not come.
RECOVER_S = recovery.DEADLINE_S + 5.0
# How often it is looked whether a rank has ended that the others wait for.
LOOK_S = 0.1

newest: RankFunction[[], dict[str, FlightRecorderEntry]] = RankFunction("newest")
checksums: RankFunction[[], dict[str, str]] = RankFunction(
    "nbdist.hang.rank.reset_models:checksums"
)


@dataclass(frozen=True, slots=True)
class RecoveryOutcome:
    """What became of the groups.

    Attributes:
        is_recovered: They were made anew.
        lines: What there is to say of it.
        problem: Why they could not be; empty where they could, or did not have to be.
    """

    is_recovered: bool = False
    lines: tuple[str, ...] = ()
    problem: str = ""


class GroupRecovery:
    """Counts the calls of all ranks, and makes their groups anew where the counts differ.

    Where they do not, it compares the models' parameters.
    """

    def __init__(self, ranks: Ranks, health: Health, now_s: float, *, is_certain: bool):
        """Begin; `step` goes on.

        Args:
            ranks: They are idle, or have been given up on.
            health: Theirs.
            now_s: Monotonic clock.
            is_certain: The groups are broken in any case.
        """
        self.on_answer: Callable[[], None] = lambda: None
        self.outcome: RecoveryOutcome | None = None
        self._ranks = ranks
        self._health = health
        self._newest: dict[int, Future[Any]] = {}
        self._comparing: dict[int, Future[Any]] = {}
        self._recovering: dict[int, Future[Any]] = {}
        self._end_s = now_s + COUNT_S
        if is_certain:
            self._recover(now_s)
        else:
            self._newest = self._listen(ranks.ask_all(newest))

    def step(self, now_s: float) -> float | None:
        """Take in what has come; how long to wait at most in seconds, or None when it is over."""
        if self.outcome is None and (self._has_all() or now_s >= self._end_s):
            if self._recovering and not self._is_any_lost():
                self.outcome = self._recovery_outcome()
            elif self._comparing:
                self.outcome = self._comparison_outcome()
            elif self._recovering or self._is_out_of_step():
                self._recover(now_s)
            else:
                self._compare(now_s)
        elif self.outcome is None and self._is_any_lost():
            self._break_off()
        if self.outcome is not None:
            return None
        return max(0.0, min(self._end_s - now_s, LOOK_S if self._recovering else COUNT_S))

    def give_up(self) -> None:
        """End now: the next cell begins with what is still to be done."""
        if self.outcome is None and self._comparing:
            self.outcome = RecoveryOutcome()
        elif self.outcome is None:
            self._health.needs_recovery = True
            self.outcome = RecoveryOutcome(problem="the groups are recreated before the next cell")

    def _listen(self, futures: dict[int, Future[Any]]) -> dict[int, Future[Any]]:
        for future in futures.values():
            future.add_done_callback(lambda _: self.on_answer())
        return futures

    def _has_all(self) -> bool:
        is_reachable = self._ranks.is_connected
        return all(
            future.done() or not is_reachable(rank)
            for asked in (self._newest, self._comparing, self._recovering)
            for rank, future in asked.items()
        )

    def _is_any_lost(self) -> bool:
        """Whether a rank has ended in this recovery: the others would wait for it."""
        return not all(map(self._ranks.is_connected, self._recovering))

    def _break_off(self) -> None:
        for rank, future in self._recovering.items():
            if not future.done() and self._ranks.is_connected(rank):
                self._ranks.interrupt(rank)

    def _is_out_of_step(self) -> bool:
        newest: dict[int, Mapping[str, FlightRecorderEntry]] = {
            rank: future.result()
            for rank, future in self._newest.items()
            if future.done() and future.exception() is None
        }
        boxes = self._health.boxes()
        living = [box for rank, box in boxes.items() if rank in self._newest]
        return diagnose.counts_differ(living, newest)

    def _compare(self, now_s: float) -> None:
        """A rank may have taken its step and another not, with equal calls before."""
        ranks, self._newest = self._ranks, {}
        has_calls = any(
            group.calls for box in self._health.boxes().values() for group in box.groups.values()
        )
        if not has_calls or ranks.busy_ranks:
            self.outcome = RecoveryOutcome()
            return
        self._end_s = now_s + COMPARE_S
        self._comparing = self._listen(
            {r: checksums(ranks.call, r) for r in ranks.ranks if ranks.is_connected(r)}
        )
        if not self._comparing:
            self.outcome = RecoveryOutcome()

    def _comparison_outcome(self) -> RecoveryOutcome:
        by_rank = {
            rank: future.result()
            for rank, future in self._comparing.items()
            if future.done() and future.exception() is None
        }
        return RecoveryOutcome(lines=recovery.parameter_differences(by_rank))

    def _recover(self, now_s: float) -> None:
        self._newest = {}
        busy = self._ranks.busy_ranks
        if busy:
            self._health.needs_recovery = True
            problem = f"the groups are recreated once {ranks_are(busy)} back"
            self.outcome = RecoveryOutcome(problem=problem)
            return
        self._end_s = now_s + RECOVER_S
        self._recovering = self._listen(self._health.begin_recovery())
        if not self._recovering:
            self.outcome = RecoveryOutcome()

    def _recovery_outcome(self) -> RecoveryOutcome:
        failed = {rank: reason for rank, f in self._recovering.items() if (reason := _failure(f))}
        self._health.needs_recovery = bool(failed)
        # Space on the disk for the next recovery: the last one has used it.
        run_dir.reserve(self._ranks.cluster.run_dir)
        if failed:
            rank, why = min(failed.items())
            problem = (
                f"{ranks_phrase(sorted(failed))} could not recreate the groups "
                f"(rank {rank}: {why}); %dist_reset starts afresh"
            )
            return RecoveryOutcome(problem=problem)
        results = {rank: future.result() for rank, future in self._recovering.items()}
        return RecoveryOutcome(is_recovered=True, lines=recovery.notes(results))


def _failure(future: Future[Any]) -> str:
    """Why there is no answer; empty where there is one."""
    if not future.done():
        return f"no answer in {RECOVER_S:.0f} s"
    error = future.exception()
    return "" if error is None else str(getattr(error, "evalue", error))
