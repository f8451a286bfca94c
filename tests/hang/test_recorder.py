"""Black boxes of several ranks: read from outside while a rank is blocked, and meetings."""

from __future__ import annotations

import json
import mmap
import os
import select
import signal
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nbdist.hang import call_log as layout
from nbdist.hang.records import Call, CallLog
from tests.support.torch_ranks import forked_rank

pytestmark = pytest.mark.engine

DEADLINE_S = 30.0

PEER = """
    import json, os, sys, threading, time
    from datetime import timedelta
    from pathlib import Path
    import torch, torch.distributed as dist
    from nbdist.hang.rank import call_log as blackbox
    folder, rank, size = (kind(os.environ[name]) for kind, name in
                          ((Path, "FOLDER"), (int, "RANK"), (int, "WORLD_SIZE")))
    sys.stdin, sys.stdout = open(folder / f"in{rank}"), open(folder / f"out{rank}", "w")
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(folder / "store"), size), rank=rank, world_size=size
    )
    box = blackbox.open_box(folder, rank)
    blackbox.install(box)
    def say(**facts):
        print(json.dumps(facts), flush=True)
    say(pid=os.getpid())
"""


class Peers:
    """Processes of a group that run one program each."""

    def __init__(self, folder: Path, *programs: str) -> None:
        self.folder = folder
        self.processes = []
        self._pipes = []
        for rank, program in enumerate(programs):
            pipes = [folder / f"{name}{rank}" for name in ("in", "out")]
            for path in pipes:
                os.mkfifo(path)
            # Unbuffered, and for both ways: neither side waits for the other to open its end.
            self._pipes.append([path.open("r+b", buffering=0) for path in pipes])
            env = {"FOLDER": str(folder), "RANK": str(rank), "WORLD_SIZE": str(len(programs))}
            text = textwrap.dedent(PEER) + textwrap.dedent(program)
            self.processes.append(forked_rank(rank, text, env, folder / f"log{rank}"))
        for rank in range(len(programs)):
            assert self.hear(rank)["pid"] == self.processes[rank].pid

    def hear(self, rank: int) -> dict[str, Any]:
        """The next that a rank says."""
        stdout = self._pipes[rank][1]
        if not select.select([stdout], [], [], DEADLINE_S)[0]:
            raise AssertionError((self.folder / f"log{rank}").read_text())
        heard: dict[str, Any] = json.loads(stdout.readline())
        return heard

    def tell(self, rank: int) -> None:
        """Let it go on."""
        self._pipes[rank][0].write(b"\n")

    def box(self, rank: int) -> CallLog:
        """Its box, read without asking it."""
        with (self.folder / "boxes" / str(rank)).open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        return layout.read(mapped)

    def waiting(self, rank: int) -> Call:
        """The call in which the rank is, once it is in one."""
        end_s = time.monotonic() + DEADLINE_S
        while (call := self.box(rank).waiting) is None:
            assert time.monotonic() < end_s, self.box(rank)
            time.sleep(0.01)
        return call

    def end(self) -> None:
        """End every process of these ranks."""
        for process in self.processes:
            process.kill()
            process.wait()
        for pipe in (pipe for pipes in self._pipes for pipe in pipes):
            pipe.close()


@pytest.fixture(name="start")
def _start(tmp_path: Path) -> Iterator[Any]:
    started: list[Peers] = []

    def start(*programs: str) -> Peers:
        started.append(Peers(tmp_path, *programs))
        return started[-1]

    yield start
    for peers in started:
        peers.end()


ASLEEP = "sys.stdin.readline()"


@pytest.mark.parametrize(
    ("program", "op", "detail", "number"),
    [
        ("dist.all_reduce(torch.ones(3))", "all_reduce", "float32[3]", 2),
        ("dist.all_reduce(torch.ones(3), async_op=True).wait()", "all_reduce", "float32[3]", 2),
        ("dist.all_gather_object([None, None], 1)", "all_gather_object", "", 2),
        ("dist.irecv(torch.ones(2), 1).wait()", "irecv", "float32[2], src=1", 1),
        ("dist.new_group([0, 1])", "new_group", "ranks 0-1", 2),
        ("dist.init_device_mesh('cpu', (2, 1), mesh_dim_names=('a', 'b'))", "new_group", "", 2),
    ],
)  # fmt: skip
def test_blocked_rank_is_read_without_asking(
    start: Any, program: str, op: str, detail: str, number: int
) -> None:
    """Rank 0 is blocked in C++; its box tells in what. Rank 1's tells that it made one call."""
    peers = start("dist.barrier()\n" + program, "dist.barrier()\nsay(done=1)\n" + ASLEEP)
    call = peers.waiting(0)
    while call.number != number or (op != "barrier" and call.op == "barrier"):
        call = peers.waiting(0)
    peers.hear(1)

    assert call.op == op
    assert not detail or call.detail == detail.replace(", src=1", "")
    assert call.place is not None
    assert call.peer == (1 if op == "irecv" else None)
    assert peers.box(1).groups["0"].calls == 1
    assert peers.box(1).waiting is None


def test_transfers_by_global_rank(start: Any) -> None:
    """In a group of ranks 1 and 2, group ranks become global; each end counts its direction."""
    program = """
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
        say(done=1)
        sys.stdin.readline()
    """
    peers = start(program, program, program)
    for rank in range(3):
        peers.hear(rank)
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


def test_meeting_ends_at_an_interrupt_and_at_an_abort(start: Any) -> None:
    """Alone in new_group: SIGINT raises KeyboardInterrupt, cancel_meetings RuntimeError.

    Neither is counted, and when all come the group is formed and its sum is right.
    """
    alone = """
        try:
            dist.new_group([0, 1])
        except KeyboardInterrupt:
            say(raised="KeyboardInterrupt", calls=1)
        from nbdist.hang.rank import rendezvous
        threading.Thread(
            target=lambda: (sys.stdin.readline(), rendezvous.cancel_meetings())
        ).start()
        try:
            dist.new_group([0, 1])
        except RuntimeError as error:
            say(raised=str(error))
        try:
            dist.new_group([0, 1], timeout=timedelta(seconds=0.2))
        except RuntimeError as error:
            say(raised=str(error))
        try:
            dist.all_reduce(torch.ones(1))
        except RuntimeError as error:
            say(refused=str(error))
        rendezvous.forget_meetings()  # as a recovery does
    """
    both = """
        sys.stdin.readline()
        group = dist.new_group([0, 1])
        total = torch.tensor([rank + 1.0])
        dist.all_reduce(total, group=group)
        say(total=total.item())
        sys.stdin.readline()
    """
    peers = start(textwrap.dedent(alone) + textwrap.dedent(both), both)
    assert peers.waiting(0).op == "new_group"
    peers.processes[0].send_signal(signal.SIGINT)
    assert peers.hear(0)["raised"] == "KeyboardInterrupt"
    assert peers.waiting(0).number == 1
    peers.tell(0)
    assert "until the wait was aborted" in peers.hear(0)["raised"]
    assert "for 0.2 s; rank(s) 1 did not come" in peers.hear(0)["raised"]
    assert peers.hear(0)["refused"].startswith("all_reduce was not called: the collectives")
    peers.tell(0)
    assert peers.waiting(0).number == 1
    peers.tell(1)
    assert [peers.hear(rank)["total"] for rank in (0, 1)] == [3.0, 3.0]
    assert peers.box(0).groups["0"].calls == peers.box(1).groups["0"].calls == 1


def test_only_members_meet_when_they_say_so(start: Any) -> None:
    """use_local_synchronization=True: rank 2 never calls it, and the others' group works."""
    members = """
        group = dist.new_group([0, 1], use_local_synchronization=True)
        total = torch.tensor([rank + 1.0])
        dist.all_reduce(total, group=group)
        say(total=total.item())
        sys.stdin.readline()
    """
    peers = start(members, members, ASLEEP)

    assert [peers.hear(rank)["total"] for rank in (0, 1)] == [3.0, 3.0]
    assert [peers.box(rank).groups["0"].calls for rank in range(3)] == [0, 0, 0]
