"""After a cell that failed: are the groups still in step, and if not, make them anew."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal

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

newest: RankFunction[[], dict[tuple[str, str], FlightRecorderEntry]] = RankFunction("newest")
checksums: RankFunction[[], dict[str, str]] = RankFunction(
    "nbdist.hang.rank.reset_models:checksums"
)


@dataclass(frozen=True, slots=True)
class RecoveryOutcome:
    """The groups after a recovery was tried.

    Attributes:
        is_recovered: The groups were made anew.
        lines: Lines that report the recovery.
        problem: Why they could not be made anew; empty if they were, or did not have to be.
    """

    is_recovered: bool = False
    lines: tuple[str, ...] = ()
    problem: str = ""


class GroupRecovery:
    """Counts the calls of all ranks, and makes their groups anew where the counts differ.

    Where they do not, it compares the models' parameters.
    """

    def __init__(self, ranks: Ranks, health: Health, now_s: float, *, is_certain: bool):
        """Begin, with ranks that are idle or have been given up on; `step` goes on.

        If it is certain, the groups are broken in any case.
        """
        self.on_answer: Callable[[], None] = lambda: None
        self.outcome: RecoveryOutcome | None = None
        self._ranks = ranks
        self._health = health
        self._stage: Literal["count", "compare", "recover"] = "count"
        self._end_s = now_s + COUNT_S
        self._futures: dict[int, Future[Any]] = {}
        if is_certain:
            self._recover(now_s)
        else:
            self._listen(ranks.ask_all(newest))

    def step(self, now_s: float) -> float | None:
        """Take in what has come; how long to wait at most in seconds, or None when it is over."""
        is_recovering = self._stage == "recover"
        lost = {rank for rank in self._futures if not self._ranks.is_connected(rank)}
        missing = [rank for rank, f in self._futures.items() if not (f.done() or rank in lost)]
        if self.outcome is None and (not missing or now_s >= self._end_s):
            if self._stage == "compare":
                lines = recovery.parameter_differences(self._answers())
                self.outcome = RecoveryOutcome(lines=lines)
            elif is_recovering and not lost:
                self.outcome = self._recovery_outcome()
            elif is_recovering or self._is_out_of_step():
                self._recover(now_s)
            else:
                self._compare(now_s)
        elif self.outcome is None and is_recovering and lost:  # the others would wait for it
            for rank in missing:
                self._ranks.interrupt(rank)
        if self.outcome is not None:
            return None
        pause_s = LOOK_S if self._stage == "recover" else COUNT_S
        return max(0.0, min(self._end_s - now_s, pause_s))

    def give_up(self) -> None:
        """End now: the next cell begins with the work that is left."""
        if self.outcome is None and self._stage == "compare":
            self.outcome = RecoveryOutcome()
        elif self.outcome is None:
            self._health.needs_recovery = True
            self.outcome = RecoveryOutcome(problem="the groups are recreated before the next cell")

    def _listen(self, futures: dict[int, Future[Any]]) -> None:
        self._futures = futures
        for future in futures.values():
            future.add_done_callback(lambda _: self.on_answer())

    def _answers(self) -> dict[int, Any]:
        return {
            rank: future.result()
            for rank, future in self._futures.items()
            if future.done() and future.exception() is None
        }

    def _is_out_of_step(self) -> bool:
        logs = self._health.logs()
        living = [log for rank, log in logs.items() if rank in self._futures]
        return diagnose.counts_differ(living, self._answers())

    def _compare(self, now_s: float) -> None:
        """A rank may have taken its step and another not, with equal calls before."""
        ranks, self._stage = self._ranks, "compare"
        has_calls = any(
            group.calls for log in self._health.logs().values() for group in log.groups.values()
        )
        living = [rank for rank in ranks.ranks if ranks.is_connected(rank)]
        if not has_calls or ranks.busy_ranks or not living:
            self.outcome = RecoveryOutcome()
            return
        self._end_s = now_s + COMPARE_S
        self._listen({rank: checksums(ranks.call, rank) for rank in living})

    def _recover(self, now_s: float) -> None:
        self._stage = "recover"
        busy = self._ranks.busy_ranks
        if busy:
            self._health.needs_recovery = True
            problem = f"the groups are recreated once {ranks_are(busy)} back"
            self.outcome = RecoveryOutcome(problem=problem)
            return
        self._end_s = now_s + RECOVER_S
        self._listen(self._health.begin_recovery())
        if not self._futures:
            self.outcome = RecoveryOutcome()

    def _recovery_outcome(self) -> RecoveryOutcome:
        failed = {rank: reason for rank, f in self._futures.items() if (reason := _failure(f))}
        self._health.needs_recovery = bool(failed)
        # Space on the disk for the next recovery: the last one has used it.
        run_dir.reserve(self._ranks.cluster.run_dir)
        if failed:
            rank, why = min(failed.items())
            # A rank that knows whom to replace has said so.
            advice = "" if "%dist_restart" in why else self._advice(sorted(failed))
            problem = (
                f"{ranks_phrase(sorted(failed))} could not recreate the groups "
                f"(rank {rank}: {why}){advice}"
            )
            return RecoveryOutcome(problem=problem)
        lines = recovery.notes(self._answers(), self._ranks.restart_verb)
        return RecoveryOutcome(is_recovered=True, lines=lines)

    def _advice(self, failed: Sequence[int]) -> str:
        """Advice on how to bring the groups back: if all ranks failed, a new one may be enough."""
        replaced = failed if len(failed) < len(self._ranks.ranks) else failed[-1:]
        verb = self._ranks.restart_verb(replaced)
        if "%dist_restart" not in verb:
            return "; %dist_reset starts afresh"
        return (
            f"; {verb} replaces {ranks_phrase(replaced)} and keeps the other ranks' variables, "
            "%dist_reset starts afresh"
        )


def _failure(future: Future[Any]) -> str:
    """Why there is no answer; empty where there is one."""
    if not future.done():
        return f"no answer in {RECOVER_S:.0f} s"
    error = future.exception()
    return "" if error is None else str(getattr(error, "evalue", error))
