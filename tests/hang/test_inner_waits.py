"""Waits in collectives that C++ issued, known by the flight recorder alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nbdist.hang.diagnose import diagnose
from nbdist.hang.records import FlightRecorderEntry, RankView, ThreadSnapshot, WaitFinding
from nbdist.hang.text import state_of
from tests.support.call_logs import (
    NOW_S,
    WORLD,
    at,
    call,
    inner,
    only_finding,
    reduce,
    snapshot,
    view,
    with_calls,
)


def step(number: int, *, is_pending: bool = True, is_asleep: bool = True) -> ThreadSnapshot:
    """A rank in the backward of DDP."""
    call = inner("all_reduce", "float32[20]", number, is_pending=is_pending)
    return snapshot(at(3, "loss.backward()"), is_asleep=is_asleep, g0=call)


INNER = "rank 0 waits in all_reduce(float32[20]) inside line 3 of cell [12]: loss.backward(); "


def backward(state: str, number: int | None, **fields: bool) -> tuple[RankView, RankView]:
    """Rank 0 sleeps in its fourth call, rank 1 has made so many."""
    other = None if number is None else step(number, **fields)
    return view(0, "running", snapshot=step(4)), view(1, state, snapshot=other)


@pytest.mark.parametrize("number", [3, None])
def test_a_collective_from_cxx_is_named(number: int | None) -> None:
    """By the flight recorder; a rank that has finished and not answered has not come."""
    finding = only_finding(*backward("finished", number))

    assert finding.text == INNER + "rank 1 finished without calling it"
    assert (finding.is_certain, finding.waiting, finding.blamed) == (True, (0,), (1,))


def test_a_pending_call_alone_proves_nothing() -> None:
    """The recorder never sees some end: the thread has to sleep, and a peer to be behind."""
    assert diagnose(backward("finished", 4), NOW_S) == ()
    awake = view(0, "running", snapshot=step(4, is_asleep=False))
    assert diagnose([awake, view(1, "finished")], 1e9) == ()
    done = view(0, "running", snapshot=step(4, is_pending=False))
    assert diagnose([done, view(1, "finished", snapshot=step(3))], NOW_S) == ()


def test_a_peer_that_computes_is_late_in_a_collective_from_cxx() -> None:
    """Known to be behind or not known at all: not certain."""
    for number in (3, None):
        finding = only_finding(*backward("running", number, is_asleep=False))
        assert not finding.is_certain
        assert finding.text.startswith(INNER + "rank 1 has not come to it yet (still running")


def test_backward_against_barrier_is_certain() -> None:
    """Uneven batches: one rank is through with its loop, the other still in a step."""
    barrier = call("barrier", line=5, source="dist.barrier()", state="waiting")
    at_barrier = snapshot(at(5), g0=inner("barrier", "", 4))
    waits = view(0, "running", snapshot=step(4))
    finding = only_finding(waits, view(1, "running", barrier, snapshot=at_barrier))

    assert finding.is_certain
    assert finding.text.startswith(INNER + "rank 1 called barrier() at line 5 instead; ")
    assert not only_finding(waits, view(1, "running", barrier)).is_certain


def test_a_sleep_in_torch_without_a_recorder_is_a_guess() -> None:
    """Worded so, and only once all others are done."""
    asleep = view(0, "running", snapshot=snapshot(at(3, "loss.backward()")))

    assert only_finding(asleep, view(1, "finished")) == WaitFinding(
        "rank 0 sleeps inside torch at line 3 of cell [12]: loss.backward(); "
        "rank 1 has finished, and may be waited for there",
        is_certain=False,
        waiting=(0,),
        blamed=(),
    )
    assert diagnose([asleep, view(1, "running")], NOW_S) == ()


def test_a_wait_for_work_of_cxx_is_looked_up_in_the_recorder() -> None:
    """The log says "wait" and no number."""
    wait = call("wait", line=4, state="waiting")
    waiting_log = view(0, "running", wait, snapshot=step(4)).log
    assert waiting_log is not None
    unnumbered = with_calls(waiting_log, replace(waiting_log.calls[0], group="", number=0))
    waits = replace(view(0, "running", snapshot=step(4)), log=unnumbered)

    assert only_finding(waits, view(1, "finished", snapshot=step(3))).text == (
        INNER + "rank 1 finished without calling it"
    )


def test_work_that_python_has_issued_may_not_be_what_is_waited_for() -> None:
    """It sleeps in torch, perhaps elsewhere: not certain."""
    waits = view(0, "running", reduce("issued"), snapshot=step(4))

    assert not only_finding(waits, view(1, "finished", snapshot=step(3))).is_certain


def queued(
    *calls: FlightRecorderEntry, is_held: bool = True, is_free: bool = False
) -> ThreadSnapshot:
    """A rank in a wait for its GPU, by NCCL's recorder: awake, and in the cell's own line."""
    on_world = tuple(replace(call, group=WORLD) for call in calls)
    place = at(8, "x.sum().item()")
    return ThreadSnapshot(
        place, (), False, False, device_calls=on_world, is_held=is_held, is_free=is_free
    )


def on_gpu(number: int, op: str = "all_reduce", *, is_pending: bool = True) -> FlightRecorderEntry:
    return inner(op, "float32[20]", number, is_pending=is_pending)


HELD = "rank 0 waits in all_reduce(float32[20]) inside line 8 of cell [12]: x.sum().item(); "


def test_the_oldest_call_of_a_gpu_that_misses_a_part_is_told() -> None:
    """Those behind it are innocent; those before it are done or complete."""
    calls = on_gpu(3, is_pending=False), on_gpu(4), on_gpu(5, "broadcast"), on_gpu(6)
    waits = view(0, "running", snapshot=queued(*calls))
    finding = only_finding(waits, view(1, "finished", snapshot=queued(on_gpu(3), is_held=False)))

    assert finding.text == HELD + "rank 1 finished without calling it"
    assert finding.is_certain


def test_another_call_in_a_gpus_queue_is_told() -> None:
    """By its number, however many calls the other rank has queued behind it."""
    mine = view(0, "running", snapshot=queued(on_gpu(4), on_gpu(5)))
    theirs = view(1, "running", snapshot=queued(on_gpu(4, "broadcast"), on_gpu(5), on_gpu(6)))
    finding = only_finding(mine, theirs)

    assert finding.is_certain
    assert HELD.removeprefix("rank 0 waits in ") in finding.text
    assert "broadcast(float32[20])" in finding.text


def test_a_rank_that_computes_does_not_wait_for_its_gpu() -> None:
    """Nor does one whose calls all ranks have made, however long the GPU takes."""
    behind = view(1, "finished", snapshot=queued(on_gpu(3), is_held=False))
    computes = view(0, "running", snapshot=queued(on_gpu(4), is_held=False, is_free=True))
    assert diagnose([computes, behind], 1e9) == ()
    complete = view(1, "finished", snapshot=queued(on_gpu(4, is_pending=False), is_held=False))
    assert diagnose([view(0, "running", snapshot=queued(on_gpu(4))), complete], 1e9) == ()


def test_a_rank_that_may_still_queue_the_call_is_late() -> None:
    """It computes on the host: not certain."""
    comes = view(1, "running", snapshot=queued(on_gpu(3), is_held=False, is_free=True))
    finding = only_finding(view(0, "running", snapshot=queued(on_gpu(4))), comes)

    assert not finding.is_certain
    assert "rank 1 has not come to it yet" in finding.text


def test_a_call_from_python_is_told_at_its_own_line() -> None:
    """It was over for Python once it was queued: the log knows its line and its number."""
    waits = view(0, "running", reduce(), reduce(place=at(9)), snapshot=queued(on_gpu(1), on_gpu(2)))
    finding = only_finding(waits, view(1, "finished", reduce()))

    assert finding.text.startswith("rank 0 waits in all_reduce(float32[3]) at line 9 of cell [12]")
    assert finding.is_certain


def test_a_wait_for_work_of_cxx_is_one_for_the_gpu() -> None:
    """Such a wait has no number: it is no further thread that lacks nothing."""
    wait = call("wait", line=8, state="waiting")
    waits = view(0, "running", reduce(), wait, snapshot=queued(on_gpu(1)))
    assert waits.log is not None
    made, unnumbered = waits.log.calls
    waiting_log = with_calls(waits.log, made, replace(unnumbered, group="", number=0))
    waiting_log = replace(waiting_log, groups={WORLD: replace(waits.log.groups[WORLD], calls=1)})
    finding = only_finding(replace(waits, log=waiting_log), view(1, "finished"))

    assert finding.text.startswith("rank 0 waits in all_reduce(float32[3])")
    assert finding.is_certain


def test_a_transfer_in_a_gpus_queue_is_told() -> None:
    """By the counts of both ends, as on Gloo."""
    entry = replace(inner("send 0->1", "float32[3]", 0), group=WORLD, is_transfer=True)
    send = call("send", "float32[3], dst=1", peer=1)
    waits = view(0, "running", send, snapshot=queued(entry))
    finding = only_finding(waits, view(1, "finished"))

    assert finding.text.startswith("rank 0 waits in send(float32[3], dst=1) at line 7")
    assert "rank 1 finished without a recv from rank 0" in finding.text


def test_work_that_nobody_waits_for_is_not_certain() -> None:
    """The GPU may be at something else; an interrupt aborts it even so."""
    waits = view(0, "running", reduce("issued"), snapshot=queued(on_gpu(1)))

    assert not only_finding(waits, view(1, "finished")).is_certain
    assert state_of(waits.log, waits).startswith("waiting in all_reduce(float32[20])")
