"""Gloo's own connections are shut down, however the group was made, and no other socket is."""

import os
import socket
import time
from pathlib import Path

import pytest

from nbdist.core.failures import is_follower
from nbdist.hang.rank import gloo_abort
from tests.support.torch_ranks import run_ranks

pytestmark = [
    pytest.mark.skipif(not Path("/proc/self/fdinfo").is_dir(), reason="needs /proc"),
]

more = pytest.mark.faults
# Rank 0 has sockets of every other kind, all connected and all in use before and after.
STRANGERS = """
    import asyncio, zmq
    from datetime import timedelta
    pairs = {}
    listener = socket.create_server(("127.0.0.1", 0))
    a = socket.create_connection(listener.getsockname())
    b, _ = listener.accept()
    pairs["user"] = (a, b)
    context = zmq.Context()
    near, far = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    port = near.bind_to_random_port("tcp://127.0.0.1")
    far.connect(f"tcp://127.0.0.1:{port}")
    far.setsockopt(zmq.RCVTIMEO, 5000)
    tcp = dist.TCPStore("127.0.0.1", 0, 1, True)
    client = dist.TCPStore("127.0.0.1", tcp.port, 1, False)

    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    async def echo(reader, writer):
        while line := await reader.readline():
            writer.write(line)
    def in_loop(coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result(10)
    server = in_loop(asyncio.start_server(echo, "127.0.0.1", 0))
    reader, writer = in_loop(asyncio.open_connection(*server.sockets[0].getsockname()))

    def alive():
        a.sendall(b"x")
        near.send(b"y")
        client.set("key", "value")
        writer.write(b"line\\n")
        return [b.recv(1).decode(), far.recv().decode(), tcp.get("key").decode(),
                in_loop(reader.readline()).decode().strip()]

    # A group on a device of the user's own, made in two ways.
    device = dist.ProcessGroupGloo.create_device(interface="lo")
    options = dist.ProcessGroupGloo._Options()
    options._devices = [device]
    own = dist.ProcessGroupGloo(dist.PrefixStore("mine", this_rank().store), rank, n, options)
    plain = dist.ProcessGroupGloo(dist.PrefixStore("plain", this_rank().store), rank, n,
                                  timeout=timedelta(minutes=3))
    sub = dist.new_group([0, 1])
    before, first, errors = alive(), counts(), {}
    def reduce_of(group):
        return lambda: group.allreduce([torch.ones(3)]).wait()
    calls = {"world": lambda: dist.all_reduce(torch.ones(3)), "own": reduce_of(own),
             "plain": reduce_of(plain), "sub": lambda: dist.all_reduce(torch.ones(3), group=sub),
             "send": lambda: dist.recv(torch.ones(3), 1)}
    kind = os.environ["KIND"]
    if rank == 0:
        errors = broken_off(calls[kind])
        say("out")
    else:
        wait_for("out", [0])
    between = counts()
    again = [gloo_abort.abort() for _ in range(50)]
    done(before=before, after=alive(), errors=errors, again=again,
         shared=plain.options._devices == sub._get_backend(torch.device("cpu")).options._devices,
         timeout=plain.options._timeout.total_seconds(),
         leak=counts()[0] - between[0], loops=len(gloo_abort._state.loops))
"""


@pytest.mark.parametrize(
    "kind", ["own", "send", *(pytest.param(k, marks=more) for k in ("world", "plain", "sub"))]
)
def test_every_gloo_call_ends_and_no_other_socket_is_touched(tmp_path: Path, kind: str) -> None:
    """A user's pair, ZMQ, a TCPStore and asyncio still carry data in the same process."""
    results = run_ranks(tmp_path, 2, STRANGERS, KIND=kind)

    assert results[0]["errors"][0] == "RuntimeError"
    # One connection for each of the four groups.
    assert 1 <= results[0]["errors"][1] <= 8
    for result in results:
        assert result["before"] == result["after"] == ["x", "y", "value", "line"]
        assert result["leak"] <= 0
        assert result["again"][-1] == 0
        assert result["shared"]
        assert result["timeout"] == 180.0
        assert result["loops"] == 2


FORKED = """
    # A child holds copies of Gloo's connections, so the epoll goes on naming their numbers.
    pid = os.fork()
    if pid == 0:
        signal.pause()
        os._exit(0)
    def gone():
        return {fd for loop in gloo_abort._state.loops for fd, _ in gloo_abort._members(loop)}
    before = gone()
    gloo_abort.abort()
    # Nothing of ours refuses this call.
    refusal(lambda: dist.group.WORLD.allreduce([torch.ones(3)]).wait(), RuntimeError)
    # The numbers that Gloo has closed now become the user's.
    pairs = [socket.socketpair() for _ in range(40)]
    reused = before & {end.fileno() for pair in pairs for end in pair}
    gloo_abort.abort()
    for left, right in pairs:
        left.sendall(b"z")
    got = {right.recv(1).decode() for _, right in pairs}
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    done(reused=len(reused), got=sorted(got))
"""


def test_numbers_that_gloo_has_given_up_are_left_alone(tmp_path: Path) -> None:
    """After a fork the system still lists them, under numbers that now are the user's sockets."""
    results = run_ranks(tmp_path, 2, FORKED)

    assert any(result["reused"] for result in results), "the case was not made"
    assert [result["got"] for result in results] == [["z"]] * 2


CHILD = """
    total()
    device = gloo_abort.shared_devices()[0]
    pid = os.fork()
    if pid == 0:
        is_new = not gloo_abort._state.loops and device not in gloo_abort.shared_devices()
        os._exit(0 if is_new else 1)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    done(code=code, sum=total())
"""


def test_a_forked_child_makes_a_device_of_its_own(tmp_path: Path) -> None:
    """Its copy of ours has no thread: a group on it would wait for good."""
    results = run_ranks(tmp_path, 2, CHILD)

    assert [(result["code"], result["sum"]) for result in results] == [(0, 3.0)] * 2


def test_an_epoll_number_that_is_used_again_is_not_trusted() -> None:
    """The listening socket noted beside the number is not in the new epoll."""
    import select

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
    import select

    near, far = socket.socketpair()
    with near, far, select.epoll() as epoll:
        epoll.register(far)
        assert gloo_abort._loop_of(epoll.fileno()) is None


def test_without_proc_nothing_is_done(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As on macOS: abort ends nothing and says so."""
    monkeypatch.setattr(gloo_abort, "_FDINFO", tmp_path / "none")

    assert gloo_abort.abort() == 0
    assert gloo_abort._epolls() == set()


LATE = """
    from nbdist.engine import responder
    say("here")
    wait_for("here")
    process_groups.recover(1)
    late = [responder.abort(0), total()]
    say("asked")
    wait_for("asked")
    count = responder.abort(1)
    process_groups.recover(2)
    done(late=late, count=count, total=total())
"""


def test_a_request_that_comes_late_ends_nothing(tmp_path: Path) -> None:
    """Groups that took the place of those that were meant go on; these can be ended too."""
    results = run_ranks(tmp_path, 2, LATE)

    for result in results:
        assert result["late"] == [0, 3.0]
        assert result["total"] == 3.0
    assert sum(result["count"] for result in results) >= 1


MOVING = """
    import random, threading
    from nbdist.hang.rank import rendezvous
    large, errors, draw = torch.zeros(4 * 2**20), [], random.Random(rank)
    for generation in range(1, 9):
        timer = threading.Timer(draw.uniform(0.02, 0.2), gloo_abort.abort)
        timer.start()
        try:
            while True:
                dist.all_reduce(large)
        except RuntimeError as error:
            errors.append(str(error))
        timer.join()
        process_groups.recover(generation)
    done(errors=errors, total=total(), is_broken_off=rendezvous.is_broken_off())
"""


def test_an_abort_in_the_middle_of_large_messages_frees_everybody(tmp_path: Path) -> None:
    """Gloo never wakes who waits for a message that was cut: none is, and no call begins again."""
    results = run_ranks(tmp_path, 2, MOVING)

    for result in results:
        assert len(result["errors"]) == 8
        assert all(is_follower(text) for text in result["errors"])
        assert result["total"] == 3.0
        assert not result["is_broken_off"]


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
