"""Waits in collectives that C++ issued, known by the flight recorder alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nbdist.hang.diagnose import diagnose
from nbdist.hang.records import RankView, ThreadSnapshot, WaitFinding
from tests.support.boxes import NOW_S, at, call, inner, look, only_finding, reduce, view


def step(number: int, *, is_pending: bool = True, is_asleep: bool = True) -> ThreadSnapshot:
    """A rank in the backward of DDP."""
    call = inner("all_reduce", "float32[20]", number, is_pending=is_pending)
    return look(at(3, "loss.backward()"), is_asleep=is_asleep, g0=call)


INNER = "rank 0 waits in all_reduce(float32[20]) inside line 3 of cell [12]: loss.backward(); "


def backward(state: str, number: int | None, **fields: bool) -> tuple[RankView, RankView]:
    """Rank 0 sleeps in its fourth call, rank 1 has made so many."""
    other = None if number is None else step(number, **fields)
    return view(0, "running", look=step(4)), view(1, state, look=other)


@pytest.mark.parametrize("number", [3, None])
def test_a_collective_from_cxx_is_named(number: int | None) -> None:
    """By the flight recorder; a rank that has finished and not answered has not come."""
    finding = only_finding(*backward("finished", number))

    assert finding.text == INNER + "rank 1 finished without calling it"
    assert (finding.is_certain, finding.waiting, finding.blamed) == (True, (0,), (1,))


def test_a_pending_call_alone_proves_nothing() -> None:
    """The recorder never sees some end: the thread has to sleep, and a peer to be behind."""
    assert diagnose(backward("finished", 4), NOW_S) == ()
    awake = view(0, "running", look=step(4, is_asleep=False))
    assert diagnose([awake, view(1, "finished")], 1e9) == ()
    done = view(0, "running", look=step(4, is_pending=False))
    assert diagnose([done, view(1, "finished", look=step(3))], NOW_S) == ()


def test_a_peer_that_computes_is_late_in_a_collective_from_cxx() -> None:
    """Known to be behind or not known at all: not certain."""
    for number in (3, None):
        finding = only_finding(*backward("running", number, is_asleep=False))
        assert not finding.is_certain
        assert finding.text.startswith(INNER + "rank 1 has not come to it yet (still running")


def test_backward_against_barrier_is_certain() -> None:
    """Uneven batches: one rank is through with its loop, the other still in a step."""
    barrier = call("barrier", line=5, source="dist.barrier()", state="waiting")
    at_barrier = look(at(5), g0=inner("barrier", "", 4))
    waits = view(0, "running", look=step(4))
    finding = only_finding(waits, view(1, "running", barrier, look=at_barrier))

    assert finding.is_certain
    assert finding.text.startswith(INNER + "rank 1 called barrier() at line 5 instead; ")
    assert not only_finding(waits, view(1, "running", barrier)).is_certain


def test_a_sleep_in_torch_without_a_recorder_is_a_guess() -> None:
    """Worded so, and only once all others are done."""
    asleep = view(0, "running", look=look(at(3, "loss.backward()")))

    assert only_finding(asleep, view(1, "finished")) == WaitFinding(
        "rank 0 sleeps inside torch at line 3 of cell [12]: loss.backward(); "
        "rank 1 has finished, and may be waited for there",
        is_certain=False,
        waiting=(0,),
        blamed=(),
    )
    assert diagnose([asleep, view(1, "running")], NOW_S) == ()


def test_a_wait_for_work_of_cxx_is_looked_up_in_the_recorder() -> None:
    """The box says "wait" and no number."""
    wait = call("wait", line=4, state="waiting")
    waiting_box = view(0, "running", wait, look=step(4)).box
    assert waiting_box is not None
    unnumbered = replace(waiting_box, calls=(replace(waiting_box.calls[0], group="", number=0),))
    waits = replace(view(0, "running", look=step(4)), box=unnumbered)

    assert only_finding(waits, view(1, "finished", look=step(3))).text == (
        INNER + "rank 1 finished without calling it"
    )


def test_work_that_python_has_issued_may_not_be_what_is_waited_for() -> None:
    """It sleeps in torch, perhaps elsewhere: not certain."""
    waits = view(0, "running", reduce("issued"), look=step(4))

    assert not only_finding(waits, view(1, "finished", look=step(3))).is_certain
