"""The watchdog tells a deadlock once, in time, and never takes a slow rank for one."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import cast

import pytest

from nbdist.hang.kernel.health import LOOK_PAUSE_S, Health
from nbdist.hang.kernel.watchdog import AFTER_S, LATE_S, PAUSE_S, Watchdog
from nbdist.hang.records import (
    CallLog,
    FlightRecorderEntry,
    GroupRecord,
    RankView,
    ThreadSnapshot,
)
from tests.support import call_logs
from tests.support.call_logs import WORLD, reduce

GRACE_S = 5.0


def log(
    rank: int, state: str = "running", waits_since_s: float | None = None, world: int = 2
) -> CallLog:
    """A rank that has made no call, or waits in its first one."""
    calls = [] if waits_since_s is None else [reduce("waiting", began_s=waits_since_s)]
    groups = {WORLD: tuple(range(world))}
    return replace(call_logs.log(rank, *calls, groups=groups, state=state), since_s=0.0)


class FakeHealth:
    """Call logs that the test writes."""

    def __init__(self, logs: Mapping[int, CallLog]):
        self.logs = dict(logs)
        self.asked: list[int] = []
        self.stopped: set[int] = set()
        self.answers: dict[int, ThreadSnapshot] = {}
        self.snapshots: dict[int, tuple[ThreadSnapshot, float]] = {}
        self.is_deaf = False

    def forget_snapshots(self) -> None:
        """Keep the look: these tests set it."""

    def forget_snapshot(self, _rank: int) -> None:
        """Keep the look: these tests set it."""

    def ask(self, ranks: Iterable[int], now_s: float, *, newer_than_s: float = 0.0) -> None:
        """Note who was asked; the answer is there at the next look, and kept for half a second."""
        for rank in ranks:
            self.asked.append(rank)
            _, looked_s = self.snapshots.get(rank, (None, 0.0))
            if not self.is_deaf and not newer_than_s <= looked_s > now_s - LOOK_PAUSE_S:
                idle = ThreadSnapshot(None, (), False, False)
                self.snapshots[rank] = self.answers.get(rank, idle), now_s

    def views(self, states: dict[int, tuple[str, str]]) -> list[RankView]:
        """As Health does, without processes."""
        now = states | dict.fromkeys(self.stopped, ("stopped", ""))
        return [
            RankView(r, *now[r], log, *self.snapshots.get(r, ())) for r, log in self.logs.items()
        ]


class Watch:
    """A watchdog, its logs, and a clock that goes forward in its own pauses."""

    def __init__(self, logs: Mapping[int, CallLog], *, is_quiet: bool = False):
        self.health = FakeHealth(logs)
        self.states = {rank: (log.state, "") for rank, log in logs.items()}
        self.dog = Watchdog(cast("Health", self.health), 0.0, GRACE_S, is_quiet=is_quiet)

    def until(self, end_s: float) -> list[tuple[float, str]]:
        """Let the time pass; what is reported in it."""
        reported = []
        while self.dog.next_s <= end_s:
            now_s = self.dog.next_s
            reported += [(now_s, line) for line in self.dog.look(now_s, lambda: self.states)]
        return reported


def test_a_missing_call_is_told_once_within_two_seconds() -> None:
    """By the line, and after the grace it is due to be aborted."""
    watch = Watch({0: log(0, waits_since_s=0.1), 1: log(1, "finished")})
    [(reported_s, line)] = watch.until(20.0)

    assert line == (
        "rank 0 waits in all_reduce(float32[3]) at line 7 of cell [12]: dist.all_reduce(x); "
        "rank 1 finished without calling it"
    )
    assert 0.1 + AFTER_S <= reported_s <= 2.1
    assert watch.dog.abort_s == pytest.approx(reported_s + GRACE_S)
    assert watch.dog.deadlock is not None
    assert list(watch.dog.waiting) == [0]


def test_a_slow_peer_is_told_late_and_never_aborted() -> None:
    """It may still come: no deadlock, and a line only after a while."""
    watch = Watch({0: log(0, waits_since_s=0.1), 1: log(1)})
    early = watch.until(LATE_S - PAUSE_S)
    [(_, line)] = watch.until(LATE_S + 3 * PAUSE_S)
    again = watch.until(50.0)

    assert early == again == []
    assert "rank 1 has not come to it yet" in line
    assert watch.dog.deadlock is None
    assert watch.dog.abort_s == float("inf")


def test_stored_outputs_have_no_line_that_depends_on_time() -> None:
    """A slow rank is not told; a deadlock is."""
    watch = Watch({0: log(0, waits_since_s=0.1), 1: log(1)}, is_quiet=True)
    slow = watch.until(30.0)
    watch.states[1] = "raised", "ValueError"
    watch.health.logs[1] = log(1, "raised")
    [(_, line)] = watch.until(32.0)

    assert slow == []
    assert "rank 1 raised ValueError before it" in line


def test_a_call_that_comes_in_the_grace_takes_the_abort_back() -> None:
    """A peer that was thought to be done makes the call from another thread."""
    watch = Watch({0: log(0, waits_since_s=0.1), 1: log(1, "finished")})
    watch.until(3.0)
    was_due = watch.dog.abort_s
    watch.health.logs = {0: log(0), 1: log(1, "finished")}
    watch.until(4.0)

    assert was_due < 10.0
    assert watch.dog.abort_s == float("inf")
    assert watch.dog.deadlock is None


def test_a_stopped_rank_is_told_at_once_and_again_when_it_stops_again() -> None:
    """By its process state: it does not answer, and it is not aborted."""
    watch = Watch({0: log(0), 1: log(1)})
    watch.health.stopped = {1}
    [(_, first)] = watch.until(1.5)
    watch.health.stopped = set()
    resumed = watch.until(2.0)
    watch.health.stopped = {1}
    [(_, second)] = watch.until(3.0)

    assert first.startswith("rank 1 is stopped (SIGSTOP)")
    assert (resumed, second) == ([], first)
    assert watch.dog.deadlock is None


def test_ranks_are_asked_when_nobody_makes_a_call_or_somebody_is_done() -> None:
    """A cell whose ranks make calls all the time is not disturbed."""
    watch = Watch({0: log(0), 1: log(1)})
    for tenths in range(100):
        now_s = tenths / 10
        watch.health.logs = {r: replace(log(r), since_s=now_s) for r in (0, 1)}
        watch.until(now_s)
    quiet = list(watch.health.asked)
    watch.until(13.0)

    assert quiet == []
    assert set(watch.health.asked) == {0, 1}


def test_an_old_answer_beside_a_new_box_is_no_deadlock() -> None:
    """Rank 1 may have left its call since it answered; only a new answer tells."""
    pending = FlightRecorderEntry("all_gather", "float32[3]", 1, is_pending=True)
    watch = Watch({0: log(0), 1: log(1)})
    watch.health.answers[0] = ThreadSnapshot(
        None, (), False, False, {"0": replace(pending, number=0)}
    )
    watch.health.answers[1] = ThreadSnapshot(None, (), True, True, {"0": pending})
    watch.until(1.0)  # asked, as nobody makes a call
    watch.health.is_deaf = True
    watch.health.logs[0] = log(0, "finished")
    watch.states[0] = "finished", ""
    old = watch.until(4.0)
    watch.health.is_deaf = False

    assert old == []
    assert [line.partition(" in ")[0] for _, line in watch.until(5.0)] == ["rank 1 waits"]


def test_a_deadlock_is_told_only_when_its_ranks_have_answered_since() -> None:
    """Else nobody knows whether a rank that has ended the cell has a thread that goes on."""
    watch = Watch({0: log(0, waits_since_s=0.1), 1: log(1, "finished")})
    watch.health.is_deaf = True
    deaf = watch.until(8.0)
    watch.health.is_deaf = False

    assert deaf == []
    assert len(watch.until(10.0)) == 1


def test_a_rank_whose_other_thread_goes_on_is_only_late() -> None:
    """It has finished the cell, and may make the call all the same."""
    watch = Watch({0: log(0, waits_since_s=0.1), 1: log(1, "finished")})
    watch.health.answers[1] = ThreadSnapshot(None, (), False, False, free_threads=("loader",))
    [(reported_s, line)] = watch.until(30.0)

    assert line.endswith("rank 1 has not come to it yet, but may in the background (loader)")
    assert reported_s >= LATE_S
    assert watch.dog.deadlock is None


def test_the_next_call_of_the_same_line_is_another_finding() -> None:
    """In a loop the words are the same: only one that lasts is told."""
    watch = Watch({0: log(0, waits_since_s=0.0), 1: log(1, "finished")})
    for number in range(1, 40):
        call = replace(log(0, waits_since_s=0.0).calls[0], number=number)
        group = GroupRecord("0", (0, 1), number)
        waiting_log = call_logs.with_calls(watch.health.logs[0], call)
        watch.health.logs[0] = replace(waiting_log, groups={"0": group})
        assert watch.until(number * PAUSE_S) == []


def test_a_call_that_nobody_can_complete_is_told_before_the_last_rank_is_there() -> None:
    """And aborted only then: the rank that computes is left alone."""
    waiting = log(0, waits_since_s=0.1, world=3)
    watch = Watch({0: waiting, 1: log(1, "finished", world=3), 2: log(2, world=3)})
    [(reported_s, line)] = watch.until(20.0)
    abort_s = watch.dog.abort_s
    watch.health.logs[2] = replace(waiting, rank=2)
    again = watch.until(30.0)

    assert reported_s <= 2.1
    assert "rank 1 finished without calling it" in line
    assert "rank 2 has not come to it yet" in line
    assert abort_s == float("inf")
    assert again == []
    assert watch.dog.deadlock is not None
    assert watch.dog.abort_s < 30.0
