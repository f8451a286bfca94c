"""Gloo's own connections are shut down, however the group was made, and no other socket is."""

import asyncio
import os
import random
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Coroutine
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import zmq

from nbdist.core.failures import is_follower
from nbdist.core.rank import this_rank
from nbdist.engine import responder
from nbdist.hang.rank import gloo_abort, process_groups, rendezvous
from tests.programs.rank import (
    broken_off_on_0,
    counts,
    everyone,
    n,
    rank,
    refusal,
    say,
    total,
    wait_for,
)
from tests.support.torch_ranks import on_ranks

pytestmark = [
    pytest.mark.skipif(not Path("/proc/self/fdinfo").is_dir(), reason="needs /proc"),
]

more = pytest.mark.faults


class Strangers:
    """A user's sockets of every other kind, all connected."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.near = socket.create_connection(self.listener.getsockname())
        self.far, _ = self.listener.accept()
        context = zmq.Context()
        self.sender, self.receiver = (context.socket(zmq.PAIR) for _ in range(2))
        port = self.sender.bind_to_random_port("tcp://127.0.0.1")
        self.receiver.connect(f"tcp://127.0.0.1:{port}")
        self.receiver.setsockopt(zmq.RCVTIMEO, 5000)
        self.store = dist.TCPStore("127.0.0.1", 0, 1, True)
        self.client = dist.TCPStore("127.0.0.1", self.store.port, 1, False)
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.server = self.in_loop(asyncio.start_server(self.echo, "127.0.0.1", 0))
        address = self.server.sockets[0].getsockname()
        self.reader, self.writer = self.in_loop(asyncio.open_connection(*address))

    def in_loop(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(10)

    async def echo(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            writer.write(line)

    def assert_alive(self) -> None:
        self.near.sendall(b"x")
        self.sender.send(b"y")
        self.client.set("key", "value")
        self.writer.write(b"line\n")
        assert self.far.recv(1) == b"x"
        assert self.receiver.recv() == b"y"
        assert self.store.get("key") == b"value"
        assert self.in_loop(self.reader.readline()) == b"line\n"


def reduction_in(group: dist.ProcessGroupGloo) -> Callable[[], Any]:
    return lambda: group.allreduce([torch.ones(3)]).wait()


@pytest.mark.parametrize(
    "kind", ["own", "send", *(pytest.param(k, marks=more) for k in ("world", "plain", "sub"))]
)
@on_ranks(2)
def test_every_gloo_call_ends_and_no_other_socket_is_touched(kind: str) -> None:
    """A user's pair, ZMQ, a TCPStore and asyncio still carry data in the same process."""
    strangers, store = Strangers(), this_rank().store
    # A group on a device of the user's own, made in two ways.
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(interface="lo")]
    own = dist.ProcessGroupGloo(dist.PrefixStore("mine", store), rank, n, options)
    plain = dist.ProcessGroupGloo(
        dist.PrefixStore("plain", store), rank, n, timeout=timedelta(minutes=3)
    )
    sub = dist.new_group([0, 1])
    strangers.assert_alive()
    calls = {
        "world": lambda: dist.all_reduce(torch.ones(3)),
        "own": reduction_in(own),
        "plain": reduction_in(plain),
        "sub": lambda: dist.all_reduce(torch.ones(3), group=sub),
        "send": lambda: dist.recv(torch.ones(3), 1),
    }
    name, count = broken_off_on_0(calls[kind])
    # One connection for each of the four groups.
    assert rank or (name == "RuntimeError" and 1 <= count <= 8)
    fds, _ = counts()
    assert [gloo_abort.abort() for _ in range(50)][-1] == 0
    strangers.assert_alive()
    assert plain.options._devices == sub._get_backend(torch.device("cpu")).options._devices
    assert plain.options._timeout == timedelta(seconds=180)
    assert counts()[0] <= fds
    assert len(gloo_abort._state.loops) == 2


def descriptors_of_gloo() -> set[int]:
    return {fd for loop in gloo_abort._state.loops for fd, _ in gloo_abort._members(loop)}


@on_ranks(2)
def test_numbers_that_gloo_has_given_up_are_left_alone() -> None:
    """After a fork the system still lists them, under numbers that now are the user's sockets."""
    # A child holds copies of Gloo's connections, so the epoll goes on naming their numbers.
    pid = os.fork()
    if pid == 0:
        signal.pause()
        os._exit(0)
    before = descriptors_of_gloo()
    gloo_abort.abort()
    # Nothing of ours refuses this call.
    refusal(lambda: dist.group.WORLD.allreduce([torch.ones(3)]).wait(), RuntimeError)
    # The numbers that Gloo has closed now become the user's.
    pairs = [socket.socketpair() for _ in range(40)]
    reused = before & {end.fileno() for pair in pairs for end in pair}
    gloo_abort.abort()
    for left, right in pairs:
        left.sendall(b"z")
        assert right.recv(1) == b"z"
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    say("reused", str(len(reused)).encode())
    assert any(map(int, wait_for("reused"))), "the case was not made"


@on_ranks(2)
def test_a_forked_child_makes_a_device_of_its_own() -> None:
    """Its copy of ours has no thread: a group on it would wait for good."""
    total()
    device = gloo_abort.shared_devices()[0]
    pid = os.fork()
    if pid == 0:
        is_new = not gloo_abort._state.loops and device not in gloo_abort.shared_devices()
        os._exit(0 if is_new else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert total() == 3.0


def test_an_epoll_number_that_is_used_again_is_not_trusted() -> None:
    """The listening socket noted beside the number is not in the new epoll."""
    with socket.create_server(("127.0.0.1", 0)) as listener, select.epoll() as epoll:
        inode = os.fstat(listener.fileno()).st_ino
        epoll.register(listener)
        loop = gloo_abort._loop_of(epoll.fileno())
        assert loop == gloo_abort._Loop(epoll.fileno(), (listener.fileno(), inode))
        assert gloo_abort._members(loop)

        stale = gloo_abort._Loop(epoll.fileno(), (listener.fileno(), inode + 1))
        assert gloo_abort._members(stale) == []


def test_an_epoll_of_asyncio_is_none_of_ours() -> None:
    """It holds a pair of connected sockets from its begin."""
    near, far = socket.socketpair()
    with near, far, select.epoll() as epoll:
        epoll.register(far)
        assert gloo_abort._loop_of(epoll.fileno()) is None


def test_without_proc_nothing_is_done(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As on macOS: abort ends nothing and says so."""
    monkeypatch.setattr(gloo_abort, "_FDINFO", tmp_path / "none")

    assert gloo_abort.abort() == 0
    assert gloo_abort._epolls() == set()


@on_ranks(2)
def test_a_request_that_comes_late_ends_nothing() -> None:
    """Groups that took the place of those that were meant go on; these can be ended too."""
    say("here")
    wait_for("here")
    process_groups.recover(1)
    assert responder.abort(0) == 0
    assert total() == 3.0
    say("asked")
    wait_for("asked")
    count = responder.abort(1)
    process_groups.recover(2)
    assert total() == 3.0
    assert sum(everyone(count)) >= 1


@on_ranks(2)
def test_an_abort_in_the_middle_of_large_messages_frees_everybody() -> None:
    """Gloo never wakes who waits for a message that was cut: none is, and no call begins again."""
    large, draw = torch.zeros(4 * 2**20), random.Random(rank)

    def reduce_for_ever() -> None:
        while True:
            dist.all_reduce(large)

    for generation in range(1, 9):
        timer = threading.Timer(draw.uniform(0.02, 0.2), gloo_abort.abort)
        timer.start()
        assert is_follower(refusal(reduce_for_ever, RuntimeError))
        timer.join()
        process_groups.recover(generation)
    assert total() == 3.0
    assert not rendezvous.is_broken_off()


def test_a_connection_is_at_rest_when_nothing_moves() -> None:
    """Not while bytes lie in it; one that has been shut down or never was one counts as at rest."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
        with near, far:
            both = [(end.fileno(), os.fstat(end.fileno()).st_ino) for end in (near, far)]
            near.sendall(b"x")
            full = [gloo_abort._is_at_rest(*end) for end in both]
            far.recv(1)
            began_s = time.monotonic()
            while not all(gloo_abort._is_at_rest(*end) for end in both):
                assert time.monotonic() < began_s + 20
            far.shutdown(socket.SHUT_RDWR)
            near.recv(1)
            shut = [gloo_abort._is_at_rest(*end) for end in both]

        assert not any(full)
        assert gloo_abort._is_at_rest(server.fileno(), os.fstat(server.fileno()).st_ino)
    assert gloo_abort._is_at_rest(*both[0])
    assert len(shut) == 2
