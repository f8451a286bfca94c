"""Black boxes of several ranks: read from outside while a rank is blocked, and meetings."""

from __future__ import annotations

import mmap
import textwrap
from pathlib import Path

import pytest

from nbdist.hang import call_log as layout
from nbdist.hang.records import Call, CallLog
from tests.support.ranks import until
from tests.support.torch_ranks import TorchRanks

DEADLINE_S = 30.0


class Peers(TorchRanks):
    """Ranks whose boxes can be read without asking them, until they are told to go on."""

    def __init__(self, folder: Path, size: int, text: str) -> None:
        joined = 'say("joined")\n' + textwrap.dedent(text)
        super().__init__(folder, size, joined, NBDIST_RUN=str(folder))
        for rank in range(size):
            self.wait_for("joined", rank)

    def tell(self, what: str) -> None:
        """Let a rank go on that waits for this."""
        (self.folder / f"{what}.test").touch()

    def box(self, rank: int) -> CallLog:
        """Its box, read without asking it."""
        with (self.folder / "boxes" / str(rank)).open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        return layout.read(mapped)

    def waiting(self, rank: int) -> Call:
        """The call in which the rank is, once it is in one."""
        assert until(lambda: self.box(rank).waiting is not None, DEADLINE_S), self.report()
        call = self.box(rank).waiting
        assert call is not None
        return call


@pytest.mark.parametrize(
    ("program", "op", "detail", "number"),
    [
        ("dist.all_reduce(torch.ones(3), async_op=True).wait()", "all_reduce", "float32[3]", 2),
        ("dist.irecv(torch.ones(2), 1).wait()", "irecv", "float32[2], src=1", 1),
        ("dist.new_group([0, 1])", "new_group", "ranks 0-1", 2),
        *(
            pytest.param(*case, marks=pytest.mark.faults)
            for case in (
                ("dist.all_reduce(torch.ones(3))", "all_reduce", "float32[3]", 2),
                ("dist.all_gather_object([None, None], 1)", "all_gather_object", "", 2),
                ("dist.init_device_mesh('cpu', (2, 1))", "new_group", "", 2),
            )
        ),
    ],
)  # fmt: skip
def test_blocked_rank_is_read_without_asking(
    tmp_path: Path, program: str, op: str, detail: str, number: int
) -> None:
    """Rank 0 is blocked in C++; its box tells in what. Rank 1's tells that it made one call."""
    text = f"""
        dist.barrier()
        say("made")
        {program} if rank == 0 else wait_for("end", ["test"])
    """
    with Peers(tmp_path, 2, text) as peers:
        peers.wait_for("made", 0)
        peers.wait_for("made", 1)
        call, other = peers.waiting(0), peers.box(1)

    assert (call.op, call.number) == (op, number)
    assert not detail or call.detail == detail.replace(", src=1", "")
    assert call.place is not None
    assert call.peer == (1 if op == "irecv" else None)
    assert other.groups["0"].calls == 1
    assert other.waiting is None


def test_transfers_by_global_rank(tmp_path: Path) -> None:
    """In a group of ranks 1 and 2, group ranks become global; each end counts its direction."""
    text = """
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
        say("made")
        wait_for("end", ["test"])
    """
    with Peers(tmp_path, 3, text) as peers:
        for rank in range(3):
            peers.wait_for("made", rank)
        boxes = [peers.box(rank) for rank in range(3)]
    pair = next(name for name in boxes[1].groups if name != "0")

    assert boxes[0].transfers == {}
    assert boxes[1].transfers == {(pair, 1, 2): 2, ("0", 1, 2): 2}  # recv from any: uncounted
    assert boxes[2].transfers == {(pair, 1, 2): 2, (pair, 2, 1): 1, ("0", 1, 2): 2}
    recorded = [(c.op, c.peer, c.number, c.state) for c in boxes[1].calls[1:]]
    assert recorded == [
        ("send", 2, 1, "done"),
        ("send", 2, 2, "done"),
        ("recv", None, 0, "done"),
        ("send_object_list", 2, 1, "done"),
        ("isend", 2, 2, "done"),
    ]
    assert boxes[2].groups[pair].ranks == (1, 2)
    assert [*boxes[0].groups] == ["0"]


def test_meeting_ends_at_an_interrupt_and_at_an_abort(tmp_path: Path) -> None:
    """Alone in new_group: SIGINT raises KeyboardInterrupt, cancel_meetings RuntimeError.

    Neither is counted, and when all come the group is formed and its sum is right.
    """
    text = """
        from datetime import timedelta
        from nbdist.hang.rank import rendezvous
        def cancel():
            wait_for("cancel", ["test"])
            rendezvous.cancel_meetings()
        def refused(call):
            try:
                call()
            except (KeyboardInterrupt, RuntimeError) as error:
                return f"{type(error).__name__}: {error}".encode()
        if rank == 0:
            say("interrupted", refused(lambda: dist.new_group([0, 1])))
            threading.Thread(target=cancel).start()
            say("cancelled", refused(lambda: dist.new_group([0, 1])))
            say("late", refused(lambda: dist.new_group([0, 1], timeout=timedelta(seconds=0.2))))
            say("refused", refused(lambda: dist.all_reduce(torch.ones(1))))
            rendezvous.forget_meetings()  # as a recovery does
        wait_for(f"go{rank}", ["test"])
        group = dist.new_group([0, 1])
        say("total", str(total(group)).encode())
        wait_for("end", ["test"])
    """
    with Peers(tmp_path, 2, text) as peers:
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
        assert [peers.box(rank).groups["0"].calls for rank in (0, 1)] == [1, 1]


def test_only_members_meet_when_they_say_so(tmp_path: Path) -> None:
    """use_local_synchronization=True: rank 2 never calls it, and the others' group works."""
    text = """
        if rank < 2:
            group = dist.new_group([0, 1], use_local_synchronization=True)
            say("total", str(total(group)).encode())
        wait_for("end", ["test"])
    """
    with Peers(tmp_path, 3, text) as peers:
        assert [peers.wait_for("total", rank) for rank in (0, 1)] == [b"3.0", b"3.0"]
        assert [peers.box(rank).groups["0"].calls for rank in range(3)] == [0, 0, 0]
