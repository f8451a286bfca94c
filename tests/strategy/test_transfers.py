"""A send waits for its recv and a recv for its send, counted from rank to rank."""

from __future__ import annotations

from dataclasses import replace

from nbdist.hang.diagnose import diagnose
from nbdist.hang.records import WaitFinding
from tests.support.call_logs import NOW_S, WORLD, call, only_finding, view


def test_a_recv_waits_for_its_send() -> None:
    """A send on another channel is none; nor is an earlier one that was received."""
    groups = {WORLD: (0, 1, 2)}
    recv = call("recv", "float32[3], src=1", peer=1)
    waiting = replace(recv, state="waiting", ended_s=None)
    sends = [call("send", "float32[3]", peer=0), call("send", "float32[3]", peer=2)]
    views = [
        view(0, "running", recv, waiting, world=3, groups=groups),
        view(1, "finished", *sends, world=3),
        view(2, "running", world=3),
    ]

    assert only_finding(*views) == WaitFinding(
        "rank 0 waits in recv(float32[3], src=1) at line 7 of cell [12]; "
        "rank 1 finished without a send to rank 0",
        is_certain=True,
        waiting=(0,),
        blamed=(1,),
    )
    enough = view(1, "finished", *sends, sends[0], world=3)
    assert diagnose([views[0], enough, views[2]], NOW_S) == ()


def test_a_send_waits_for_its_recv() -> None:
    """A large one blocks until the other rank receives."""
    send = call("send", "float32[9999999], dst=1", peer=1, state="waiting")
    finding = only_finding(view(0, "running", send), view(1, "raised", how="KeyError"))

    assert finding.text.endswith("rank 1 raised KeyError before a recv from rank 0")
    assert finding.is_certain


def test_a_recv_from_any_waits_for_all_who_could_send() -> None:
    """Certain when none can; nothing is found once one has sent."""
    recv = call("recv", "float32[3]", state="waiting")
    gone = view(1, "finished", world=3)
    finding = only_finding(view(0, "running", recv, world=3), gone, view(2, "finished", world=3))
    late = only_finding(view(0, "running", recv, world=3), gone, view(2, "running", world=3))
    sent = view(2, "running", call("send", peer=0), world=3)

    assert finding.text.endswith("; ranks 1-2 finished without a send to rank 0")
    assert (finding.is_certain, finding.blamed) == (True, (1, 2))
    assert not late.is_certain
    assert diagnose([view(0, "running", recv, world=3), gone, sent], NOW_S) == ()


def test_ranks_that_receive_from_the_same_rank_are_one_finding() -> None:
    """One cause."""
    recv = call("recv", "float32[3], src=2", peer=2, state="waiting")
    finding = only_finding(
        *(view(r, "running", recv, world=3) for r in (0, 1)), view(2, "finished", world=3)
    )

    assert finding.text == (
        "ranks 0-1 wait in recv(float32[3], src=2) at line 7 of cell [12]; "
        "rank 2 finished without a send to ranks 0-1"
    )
