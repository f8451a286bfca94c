"""After a failed cell: groups that are out of step are made anew, others are left alone."""

import tempfile
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from nbdist.cluster.kernel.ranks import Ranks
from nbdist.core.ranks import rank_label
from nbdist.hang.kernel.group_recovery import (
    COUNT_S,
    LOOK_S,
    RECOVER_S,
    GroupRecovery,
    RecoveryOutcome,
)
from nbdist.hang.kernel.health import Health
from nbdist.hang.records import CallLog
from nbdist.hang.recovery import RecoveryResult
from tests.support.call_logs import WORLD, log, reduce

RECOVERED = RecoveryResult({}, {"model": 2}, {"model": "aa/bb"})


def done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


class FakeRanks:
    """Two ranks that have made so many calls, and their health."""

    def __init__(self, *calls: int, busy: tuple[int, ...] = ()):
        self.needs_recovery = False
        self.calls = calls
        self.newest: dict[int, Future[Any]] = {rank: done({}) for rank in range(len(calls))}
        self.lost: set[int] = set()
        self.recoveries: list[dict[int, Future[Any]]] = []
        self.busy_ranks = busy
        self.interrupted: list[int] = []
        self.cluster = SimpleNamespace(run_dir=Path(tempfile.gettempdir()) / "no-such-run")
        self.checksums: dict[int, dict[str, str]] = {}
        self.restart_verb = lambda ranks: f"%dist_restart {rank_label(ranks)}"

    def logs(self) -> dict[int, CallLog]:
        groups = {WORLD: (0, 1)}
        return {
            rank: log(rank, *[reduce()] * n, groups=groups) for rank, n in enumerate(self.calls)
        }

    def begin_recovery(self) -> dict[int, Future[Any]]:
        self.recoveries.append({rank: Future() for rank in {0, 1} - self.lost})
        return self.recoveries[-1]

    def interrupt(self, rank: int) -> None:
        self.interrupted.append(rank)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Those that the test has given checksums."""
        return tuple(self.checksums)

    def is_connected(self, rank: int) -> bool:
        """Until the test lets it end."""
        return rank not in self.lost

    def ask_all(self, _question: object) -> dict[int, Future[Any]]:
        return self.newest

    def call(self, rank: int, _name: str) -> Future[Any]:
        return done(self.checksums[rank])


def begin(session: FakeRanks, *, is_certain: bool = False) -> GroupRecovery:
    return GroupRecovery(
        cast("Ranks", session), cast("Health", session), 100.0, is_certain=is_certain
    )


def outcome_of(recovery: GroupRecovery) -> RecoveryOutcome:
    """What it came to; it is over."""
    assert recovery.step(100.3) is None
    assert recovery.outcome is not None
    return recovery.outcome


def test_groups_in_step_are_left_alone() -> None:
    """Both ranks have made the same calls: over at once."""
    session = FakeRanks(3, 3)
    recovery = begin(session)

    assert not outcome_of(recovery).is_recovered
    assert session.recoveries == []


def test_groups_out_of_step_are_made_anew() -> None:
    """One rank has made a call more; what the ranks say of it is told."""
    session = FakeRanks(3, 4)
    recovery = begin(session)
    woken: list[int] = []
    recovery.on_answer = lambda: woken.append(1)
    pause_s = recovery.step(100.0)
    for future in session.recoveries[0].values():
        future.set_result(RECOVERED)

    assert pause_s == LOOK_S
    assert len(woken) == 2
    outcome = outcome_of(recovery)
    assert outcome.is_recovered
    assert "model" in " ".join(outcome.lines)
    assert not session.needs_recovery


def test_ranks_that_do_not_tell_their_counts_are_not_waited_for() -> None:
    """A rank without a flight recorder's answer costs a second at most."""
    session = FakeRanks(3, 3)
    session.newest[1] = Future()
    recovery = begin(session)

    assert recovery.step(100.0) == COUNT_S
    assert recovery.step(100.0 + COUNT_S) is None


def test_an_abort_recovers_without_counting() -> None:
    """The connections are gone in any case."""
    session = FakeRanks(3, 3)
    begin(session, is_certain=True)

    assert len(session.recoveries) == 1


def test_a_busy_rank_puts_the_recovery_off() -> None:
    """It takes all ranks: the next cell begins with it."""
    session = FakeRanks(3, 3, busy=(1,))
    recovery = begin(session, is_certain=True)

    assert "once rank 1 is back" in outcome_of(recovery).problem
    assert session.needs_recovery
    assert session.recoveries == []


def test_a_recovery_that_fails_is_told_and_tried_again_later() -> None:
    """With the rank and its reason, also where it never answers."""
    failed, silent = FakeRanks(3, 4), FakeRanks(3, 4)
    failed.checksums = silent.checksums = {0: {}, 1: {}}
    first, second = begin(failed), begin(silent)
    first.step(100.0)
    second.step(100.0)
    failed.recoveries[0][0].set_result(RECOVERED)
    failed.recoveries[0][1].set_exception(RuntimeError("no store"))

    problem = outcome_of(first).problem
    assert "rank 1 could not recreate the groups (rank 1: no store)" in problem
    assert second.step(100.1) is not None
    assert second.step(100.0 + RECOVER_S) is None
    assert "ranks 0-1 could not" in outcome_of(second).problem
    for outcome in (outcome_of(first), outcome_of(second)):  # a new process may be enough
        assert outcome.problem.endswith(
            "; %dist_restart 1 replaces rank 1 and keeps the other ranks' variables, %dist_reset "
            "starts afresh"
        )
    assert failed.needs_recovery
    assert silent.needs_recovery


def test_a_death_during_the_recovery_begins_another_without_that_rank() -> None:
    """The others are interrupted, who would wait for it; what they raise then is no problem."""
    session = FakeRanks(3, 4)
    recovery = begin(session, is_certain=True)
    session.lost.add(1)
    pause_s = recovery.step(100.1)
    session.recoveries[0][0].set_exception(KeyboardInterrupt())
    recovery.step(100.2)
    session.recoveries[1][0].set_result(RECOVERED)

    assert pause_s == LOOK_S
    assert session.interrupted == [0]
    assert outcome_of(recovery).is_recovered
    assert [set(recovery) for recovery in session.recoveries] == [{0, 1}, {0}]
    assert not session.needs_recovery


def test_with_nobody_left_there_is_nothing_to_recover() -> None:
    """All ranks have ended: the cell fails with that alone."""
    session = FakeRanks(3, 4)
    recovery = begin(session, is_certain=True)
    session.lost |= {0, 1}

    assert not outcome_of(recovery).problem


def test_giving_up_leaves_the_rest_to_the_next_cell() -> None:
    """The notebook is given back in time."""
    session = FakeRanks(3, 4)
    recovery = begin(session, is_certain=True)
    recovery.give_up()

    assert recovery.step(100.1) is None
    assert session.needs_recovery


def test_parameters_that_differ_are_told_although_the_calls_are_in_step() -> None:
    """An interrupt came after one rank's step and before the other's."""
    session = FakeRanks(3, 3)
    session.checksums = {0: {"model": "aa/b", "same": "c/d"}, 1: {"model": "ee/b", "same": "c/x"}}
    recovery = begin(session)
    recovery.step(100.0)

    outcome = outcome_of(recovery)
    assert not outcome.is_recovered
    (line,) = outcome.lines
    assert line.startswith("model: the parameters of rank 0 and rank 1 differ")
    assert "%dist_sync_model" in line


def test_models_are_not_compared_where_nobody_has_made_a_call() -> None:
    """A failure before any training costs nothing."""
    session = FakeRanks(0, 0)
    session.checksums = {0: {"model": "aa/b"}, 1: {"model": "ee/b"}}
    recovery = begin(session)

    assert outcome_of(recovery).lines == ()
