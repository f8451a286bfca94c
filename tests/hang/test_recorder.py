"""Call logs of several ranks: read from outside while a rank is blocked, and meetings."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nbdist.hang import call_log as layout
from nbdist.hang.rank import rendezvous
from nbdist.hang.records import Call, CallLog
from tests.programs.rank import rank, say, total, wait_for
from tests.support.torch_ranks import Program, TorchRanks

DEADLINE_S = 30.0


class Peers(TorchRanks):
    """Ranks that say `ready`; their logs can be read without asking them, until they go on."""

    def __init__(self, folder: Path, size: int, program: Program, **arguments: Any) -> None:
        super().__init__(folder, size, program, arguments=arguments, NBDIST_RUN=str(folder))
        for number in range(size):
            self.wait_for("ready", number)

    def log(self, rank: int) -> CallLog:
        """Its log, read without asking it."""
        with (self.folder / "boxes" / str(rank)).open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        return layout.read(mapped)

    def waiting(self, rank: int) -> Call:
        """The call in which the rank is, once it is in one."""
        from tests.support.ranks import until  # a third of a second in each rank of this file

        assert until(lambda: self.log(rank).waiting is not None, DEADLINE_S), self.report()
        call = self.log(rank).waiting
        assert call is not None
        return call


# Calls, and what a log has of each: operation, detail, number.
BLOCKING: dict[str, tuple[Callable[[], object], str, str, int]] = {
    "async": (
        lambda: dist.all_reduce(torch.ones(3), async_op=True).wait(), "all_reduce", "float32[3]", 2
    ),
    "irecv": (lambda: dist.irecv(torch.ones(2), 1).wait(), "irecv", "float32[2]", 1),
    "group": (lambda: dist.new_group([0, 1]), "new_group", "ranks 0-1", 2),
    "all_reduce": (lambda: dist.all_reduce(torch.ones(3)), "all_reduce", "float32[3]", 2),
    "object": (lambda: dist.all_gather_object([None, None], 1), "all_gather_object", "", 2),
    "mesh": (lambda: dist.init_device_mesh("cpu", (2, 1)), "new_group", "", 2),
}  # fmt: skip
MORE = [pytest.param(name, marks=pytest.mark.faults) for name in ("all_reduce", "object", "mesh")]


def blocks(name: str) -> None:
    """Rank 0 in one call, after a barrier."""
    dist.barrier()
    say("ready")
    if rank == 0:
        BLOCKING[name][0]()
    wait_for("end", ["test"])


@pytest.mark.parametrize("name", ["async", "irecv", "group", *MORE])
def test_blocked_rank_is_read_without_asking(tmp_path: Path, name: str) -> None:
    """Rank 0 is blocked in C++; its log tells in what. Rank 1's tells that it made one call."""
    with Peers(tmp_path, 2, blocks, name=name) as peers:
        call, other = peers.waiting(0), peers.log(1)

    _, op, detail, number = BLOCKING[name]
    assert (call.op, call.number) == (op, number)
    assert detail in {call.detail, ""}
    assert call.place is not None
    assert call.peer == (1 if op == "irecv" else None)
    assert other.groups["0"].calls == 1
    assert other.waiting is None


def transfers() -> None:
    """Ranks 1 and 2 send to each other, in a group and by global rank."""
    pair = dist.new_group([1, 2])
    x = torch.ones(2)
    if rank == 1:
        dist.send(x, group=pair, group_dst=1)
        dist.send(x, 2, pair)
        dist.recv(x, group=pair)
        dist.send_object_list(["x"], 2)
        dist.batch_isend_irecv([dist.P2POp(dist.isend, x, 2)])[0].wait()
    if rank == 2:
        dist.recv(x, group=pair, group_src=0)
        dist.irecv(x, 1, pair).wait()
        dist.send(x, 1, pair)
        dist.recv_object_list([None], 1)
        dist.batch_isend_irecv([dist.P2POp(dist.irecv, x, 1)])[0].wait()
    say("ready")
    wait_for("end", ["test"])


def test_transfers_by_global_rank(tmp_path: Path) -> None:
    """In a group of ranks 1 and 2, group ranks become global; each end counts its direction."""
    with Peers(tmp_path, 3, transfers) as peers:
        logs = [peers.log(rank) for rank in range(3)]
    pair = next(name for name in logs[1].groups if name != "0")

    assert logs[0].transfers == {}
    assert logs[1].transfers == {(pair, 1, 2): 2, ("0", 1, 2): 2}  # recv from any: uncounted
    assert logs[2].transfers == {(pair, 1, 2): 2, (pair, 2, 1): 1, ("0", 1, 2): 2}
    recorded = [(c.op, c.peer, c.number, c.state) for c in logs[1].calls[1:]]
    assert recorded == [
        ("send", 2, 1, "done"),
        ("send", 2, 2, "done"),
        ("recv", None, 0, "done"),
        ("send_object_list", 2, 1, "done"),
        ("isend", 2, 2, "done"),
    ]
    assert logs[2].groups[pair].ranks == (1, 2)
    assert [*logs[0].groups] == ["0"]


def cancel() -> None:
    wait_for("cancel", ["test"])
    rendezvous.cancel_meetings()


def say_refusal(name: str, call: Callable[[], object]) -> None:
    try:
        call()
    except (KeyboardInterrupt, RuntimeError) as error:
        say(name, f"{type(error).__name__}: {error}".encode())


def meets() -> None:
    """Rank 0 in vain, in each way, and then with rank 1."""
    say("ready")
    if rank == 0:
        say_refusal("interrupted", lambda: dist.new_group([0, 1]))
        threading.Thread(target=cancel).start()
        say_refusal("cancelled", lambda: dist.new_group([0, 1]))
        short = timedelta(seconds=0.2)
        say_refusal("late", lambda: dist.new_group([0, 1], timeout=short))
        say_refusal("refused", lambda: dist.all_reduce(torch.ones(1)))
        rendezvous.forget_meetings()  # as a recovery does
    wait_for(f"go{rank}", ["test"])
    group = dist.new_group([0, 1])
    say("total", str(total(group)).encode())
    wait_for("end", ["test"])


def test_meeting_ends_at_an_interrupt_and_at_an_abort(tmp_path: Path) -> None:
    """Alone in new_group: SIGINT raises KeyboardInterrupt, cancel_meetings RuntimeError.

    Neither is counted, and when all come the group is formed and its sum is right.
    """
    with Peers(tmp_path, 2, meets) as peers:
        assert peers.waiting(0).op == "new_group"
        peers.interrupt(0)
        assert peers.wait_for("interrupted", 0).startswith(b"KeyboardInterrupt")
        assert peers.waiting(0).number == 1
        peers.tell("cancel")
        assert b"RuntimeError: rank 0 waited in new_group" in peers.wait_for("cancelled", 0)
        assert b"until the wait was aborted" in peers.wait_for("cancelled", 0)
        assert b"for 0.2 s; rank(s) 1 did not come" in peers.wait_for("late", 0)
        refused = peers.wait_for("refused", 0)
        assert refused.startswith(b"RuntimeError: all_reduce was not called: the collectives")
        peers.tell("go0")
        assert peers.waiting(0).number == 1
        peers.tell("go1")
        assert [peers.wait_for("total", rank) for rank in (0, 1)] == [b"3.0", b"3.0"]
        assert [peers.log(rank).groups["0"].calls for rank in (0, 1)] == [1, 1]


def meet_alone() -> None:
    say("ready")
    if rank < 2:
        group = dist.new_group([0, 1], use_local_synchronization=True)
        say("total", str(total(group)).encode())
    wait_for("end", ["test"])


def test_only_members_meet_when_they_say_so(tmp_path: Path) -> None:
    """use_local_synchronization=True: rank 2 never calls it, and the others' group works."""
    with Peers(tmp_path, 3, meet_alone) as peers:
        assert [peers.wait_for("total", rank) for rank in (0, 1)] == [b"3.0", b"3.0"]
        assert [peers.log(rank).groups["0"].calls for rank in range(3)] == [0, 0, 0]
