"""A port without a password is reached by the hosts of the group alone."""

import socket
import sys

import pytest

from nbdist.cluster import peer_filter

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux's socket filter")

MEMBER, STRANGER = "127.0.0.2", "127.0.0.3"


def came_through(listener: socket.socket, *addresses: str) -> list[str]:
    """The addresses, in their order, whose attempt to connect was answered.

    The kernel handles a packet on the loopback before the call that sends it returns.
    """
    listener.setblocking(False)
    answered = []
    for address in addresses:
        with socket.socket() as client:
            client.bind((address, 0))
            client.setblocking(False)
            client.connect_ex(listener.getsockname())
            try:
                connection, peer = listener.accept()
            except BlockingIOError:
                continue
            connection.close()
            answered.append(peer[0])
    return answered


def test_strangers_get_no_answer() -> None:
    """Before: all. Then those that are named, and after another call the others."""
    many = [f"10.{i // 250}.{i % 250}.1" for i in range(1000)]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        before = came_through(listener, MEMBER, STRANGER)
        marked = [peer_filter.is_restricted(listener.fileno())]
        is_restricted = peer_filter.restrict(listener, {MEMBER, "127.0.0.1"})
        members = came_through(listener, "127.0.0.1", MEMBER, STRANGER, "127.0.0.20")
        peer_filter.restrict(listener, [*many, STRANGER])
        others = came_through(listener, MEMBER, STRANGER)
        marked.append(peer_filter.is_restricted(listener.fileno()))

    assert before == [MEMBER, STRANGER]
    assert is_restricted
    assert members == ["127.0.0.1", MEMBER]
    assert others == [STRANGER]
    assert marked == [False, True]


def test_a_connection_goes_on_as_before() -> None:
    """What was connected is not cut off, and gets large messages through the filter."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        early = socket.create_connection(listener.getsockname(), 5, (STRANGER, 0))
        accepted_early, _ = listener.accept()
        peer_filter.restrict(listener, [MEMBER])
        late = socket.create_connection(listener.getsockname(), 5, (MEMBER, 0))
        accepted_late, _ = listener.accept()
        for client, server in ((early, accepted_early), (late, accepted_late)):
            with client, server:
                client.sendall(b"x" * 50_000)
                client.shutdown(socket.SHUT_WR)
                assert len(server.makefile("rb").read()) == 50_000


def test_what_cannot_be_restricted_stays_open() -> None:
    """Without addresses, or with another family than IPv4, the answer is no and nothing changes."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert not peer_filter.restrict(listener, [])
        assert not peer_filter.restrict(
            listener, [f"10.0.{i // 250}.{i % 250}" for i in range(3000)]
        )
        assert came_through(listener, STRANGER) == [STRANGER]
    with socket.socket(socket.AF_INET6) as listener:
        assert not peer_filter.restrict(listener, [MEMBER])
