"""What call logs tell after a cell: wrong shapes, counts out of step, the last call."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nbdist.hang.diagnose import counts_differ, last_words, mismatches, unmatched
from nbdist.hang.records import Call, CallLog, RankView, UnmatchedCall
from nbdist.hang.text import last_call, place_text, state_of
from tests.support.call_logs import REDUCE, RUN, WORLD, at, call, inner, log, reduce, snapshot, view

PAIR = {WORLD: (0, 1)}
PLACE = at(3, "loss.backward()")


def test_wrong_shapes_that_ended_are_told_afterwards() -> None:
    """Gloo adds 3 and 4 floats without a word."""
    logs = [
        log(0, reduce(place=at(2)), groups=PAIR, state="finished"),
        log(1, reduce(detail="float32[4]", place=at(3)), groups=PAIR, state="finished"),
    ]

    (mismatch,) = mismatches(logs, RUN)
    assert mismatch == (
        "ranks 0-1 called all_reduce with different shapes: "
        "float32[3] at line 2 of cell [12] (rank 0), "
        "float32[4] at line 3 of cell [12] (rank 1): the results are wrong"
    )
    assert mismatches(logs, RUN + 1) == ()


def test_different_ops_that_ended_are_told_once() -> None:
    """What follows is out of step as well, and not told."""
    ops = ("reduce", "broadcast", "barrier")
    logs = [
        log(0, *(call(op) for op in ops), groups=PAIR),
        log(1, *(call(op) for op in reversed(ops)), groups=PAIR),
    ]

    (mismatch,) = mismatches(logs, RUN)
    assert mismatch == (
        "ranks 0-1 called different collectives: reduce() at line 7 of cell [12] (rank 0), "
        "barrier() at line 7 of cell [12] (rank 1): the results are wrong"
    )


def test_calls_that_fit_are_no_mismatch() -> None:
    """Equal ones, sizes of objects, calls that did not end, sends against recvs."""
    pairs = [
        (reduce(), reduce()),
        (call("gather_object", "a"), call("gather_object", "b")),
        (reduce(), reduce("raised", detail="float32[4]")),
        (call("send", "float32[3]", peer=1), call("recv", "float32[3], src=0", peer=0)),
    ]

    for calls, other_calls in pairs:
        assert mismatches([log(0, calls, groups=PAIR), log(1, other_calls, groups=PAIR)], RUN) == ()


@pytest.mark.parametrize("state", ["waiting", "raised"])
def test_a_rank_that_gloo_ended_is_told_with_both_shapes(state: str) -> None:
    """Its peer still waits, or has raised, for which its call does not count."""
    logs = [
        log(0, reduce("waiting", place=at(2)), groups=PAIR),
        log(1, reduce(state, detail="float32[900]", place=at(3)), groups=PAIR, state="raised"),
    ]

    assert last_words(logs, 0, is_crash=True) == (
        "ranks 0-1 called all_reduce with different shapes: "
        "float32[3] at line 2 of cell [12] (rank 0), float32[900] at line 3 of cell [12] (rank 1)"
    )
    assert "it was still in it" in last_words(logs, 0, is_crash=False)


def test_last_words_are_of_the_cell_that_ran() -> None:
    """Nothing is told of an idle rank, of an earlier cell's calls, or without a log."""
    old = replace(log(0, reduce(), groups=PAIR), run=RUN + 1)

    assert "which was over" in last_words([log(0, reduce(), groups=PAIR)], 0, is_crash=True)
    assert last_words([old], 0, is_crash=True) == ""
    assert last_words([log(0, reduce(), groups=PAIR, state="finished")], 0, is_crash=True) == ""
    assert last_words([], 0, is_crash=True) == ""


@pytest.mark.parametrize(
    ("calls", "other_calls", "is_different"),
    [
        ((reduce(),), (reduce(),), False),
        ((reduce(),), (), True),
        ((call("send", peer=1),), (call("recv", peer=0),), False),
        ((call("send", peer=1),), (), True),
        ((), (call("recv", peer=0),), True),
    ],
)
def test_counts_that_differ(
    calls: tuple[Call, ...], other_calls: tuple[Call, ...], is_different: bool
) -> None:
    """Collectives per group; sends against the other side's recvs."""
    assert (
        counts_differ([log(0, *calls, groups=PAIR), log(1, *other_calls, groups=PAIR)], {})
        is is_different
    )


def test_a_dead_rank_counts_for_nothing_in_the_counts() -> None:
    """Its sends and calls are not compared: only the living are given."""
    alive = log(0, reduce(), call("send", peer=1), groups=PAIR)

    assert not counts_differ([alive], {0: {("gloo", WORLD): inner("all_reduce", "", 3)}})


def test_counts_of_the_flight_recorder_are_compared() -> None:
    """Where it is there: equal, different, none at all, none in this group."""
    logs: list[CallLog] = [log(rank, groups=PAIR) for rank in (0, 1)]
    three, four = ({("gloo", WORLD): inner("all_reduce", "", number)} for number in (3, 4))

    assert not counts_differ(logs, {0: three, 1: three})
    assert counts_differ(logs, {0: three, 1: four})
    assert not counts_differ(logs, {0: three, 1: {}})
    assert counts_differ(logs, {0: three, 1: {("gloo", "7"): inner("barrier", "", 1)}})


def test_the_last_call_of_a_dead_rank() -> None:
    """In it, or over before, or none."""
    where = "its last call was all_reduce(float32[3]) at line 7 of cell [12]"

    assert last_call(log(0, reduce("waiting"), groups=PAIR)) == f"{where} (it was still in it)"
    assert last_call(log(0, reduce(), groups=PAIR)) == f"{where} (which was over)"
    assert last_call(log(0, groups=PAIR)) == ""


def test_the_state_of_a_rank_that_waits() -> None:
    """In a call from Python or from C++; nothing when it does not wait."""
    waiting, idle = view(0, "running", reduce("waiting")), view(0, "running", reduce())
    inside = view(0, "running", snapshot=snapshot(PLACE, g0=inner("all_reduce", "float32[20]", 4)))

    assert state_of(waiting.log, waiting) == (
        "waiting in all_reduce(float32[3]) at line 7 of cell [12]"
    )
    assert state_of(inside.log, inside) == (
        "waiting in all_reduce(float32[20]) inside line 3 of cell [12]"
    )
    assert state_of(idle.log, idle) == ""
    assert state_of(None, RankView(0, "running")) == ""


def test_a_place_in_words() -> None:
    """In a cell, in a file, unknown."""
    assert place_text(at(7, REDUCE)) == f"line 7 of cell [12]: {REDUCE}"
    assert place_text(replace(at(7), cell=None, file="train.py")) == "line 7 of train.py"
    assert place_text(at(7, "for x in loader:")) == "line 7 of cell [12]: for x in loader"
    assert place_text(None) == ""


def test_a_call_that_only_some_have_made_is_told() -> None:
    """At a cell's end: the first that is missing; not where a member had no part in the cell."""
    calls = reduce(), call("broadcast", "float32[3], src=0", line=9)
    ended = [log(rank, *calls[: 2 - rank], groups=PAIR, state="finished") for rank in (0, 1)]

    assert unmatched(ended, RUN, [0, 1]) == UnmatchedCall(
        "rank 0 called broadcast(float32[3], src=0) at line 9 of cell [12]; "
        "rank 1 finished without calling it",
        WORLD,
        2,
    )
    assert unmatched(ended, RUN, [0]) is None
    assert unmatched(ended, RUN + 1, [0, 1]) is None
    assert unmatched([ended[0], ended[0]], RUN, [0]) is None


def test_a_call_that_nobody_waits_for_is_told_as_well() -> None:
    """The next cell would meet it. One in which a thread is now may still be made by the others."""
    other = log(1, groups=PAIR, state="finished")
    begun, inside = (
        log(0, reduce(state), groups=PAIR, state="finished") for state in ("issued", "waiting")
    )

    told = unmatched([begun, other], RUN, [0, 1])
    assert told is not None
    assert told.text == (
        f"rank 0 called all_reduce(float32[3]) at line 7 of cell [12]: {REDUCE} and has not waited "
        "for it; rank 1 finished without calling it"
    )
    assert unmatched([inside, other], RUN, [0, 1]) is None


def test_a_box_from_before_the_cells_end_misses_no_call() -> None:
    """As the last answer of a rank on another host: of the running cell, or of the one before."""
    ended = log(0, reduce(), groups=PAIR, state="finished")
    assert unmatched([ended, log(1, groups=PAIR, state="finished")], RUN, [0, 1])
    for old in (log(1, groups=PAIR), log(1, groups=PAIR, state="finished", run=RUN - 1)):
        assert unmatched([ended, old], RUN, [0, 1]) is None
