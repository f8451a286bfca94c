"""End every Gloo collective of this process, however deep in C++ its threads wait.

No call of torch ends a Gloo collective that waits for a rank that never comes. Shutting its
connections down does: the waiting thread then raises within milliseconds, and so do the
ranks at the other ends. A Gloo device keeps all its connections in one epoll descriptor, so
the epolls are enough to find the connections. They are noted while devices are made, which
is why `install` comes before the first group.

A message of which a part has gone over is a trap: Gloo (tcp/pair.cc, `signalException`) tells
everybody who waits on a connection that it has ended, but not those who wait for just that message,
on either side. So no connection is shut down in the middle of one as long as it moves: from an
abort on the recorder lets no new call begin, and what is under way is given time to arrive. Where a
peer has died in the middle of a message nothing helps (docs/limits.md).

Without /proc (macOS) nothing can be ended: `abort` returns 0.
"""

from __future__ import annotations

import fcntl
import functools
import os
import re
import socket
import stat
import struct
import sys
import termios
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from nbdist.cluster import peer_filter
from nbdist.hang.rank import rendezvous

_FDINFO = Path("/proc/self/fdinfo")
# A line of it reads: tfd: 12 events: 19 data: 5649a39ed670 pos:0 ino:eb451 sdev:9
_MEMBER = re.compile(r"^tfd:\s*(\d+) .*\bino:([0-9a-f]+)", re.MULTILINE)
_EPOLL = "anon_inode:[eventpoll]"
# Time for messages under way to arrive: a gigabyte by way of the loopback.
DRAIN_S = 1.5
_DRAIN_PAUSE_S = 0.005
# A connection with empty queues is at rest once nothing came or went for this long.
_QUIET_MS = 30
# With something in them as well: its peer is stopped or gone.
_STALLED_MS = 400
# struct tcp_info (linux/tcp.h): milliseconds since data was sent, and since some came.
_LAST_DATA_SENT, _LAST_DATA_RECEIVED, _TCP_INFO_BYTES = 44, 52, 104


@dataclass(frozen=True, slots=True)
class _Loop:
    """A Gloo device's epoll descriptor.

    The number alone says nothing once the device is gone and the number is used again. So the
    device's listening socket stands beside it: epolls have no inode of their own, sockets have.
    """

    epoll: int
    listener: tuple[int, int]


@dataclass(slots=True)
class _GlooDevices:
    """The Gloo devices of this process."""

    loops: list[_Loop] = field(default_factory=list)
    shared: list[Any] = field(default_factory=list)
    inherited: list[Any] = field(default_factory=list)
    lock: threading.RLock = field(default_factory=threading.RLock)
    peers: Collection[str] = ()
    generation: int = 0
    ending: threading.Lock = field(default_factory=threading.Lock)
    is_installed: bool = False


_state = _GlooDevices()


def install() -> None:
    """Give every Gloo group made from now on this process's one device, and note all others.

    Once per process, before its first group; later calls change nothing. One device for all
    groups also keeps the count of descriptors and threads constant over recoveries.
    """
    if _state.is_installed or not dist.is_gloo_available():
        return
    _state.is_installed = True
    # torch builds groups in several places (its own helper, the wrapper of debug mode, the user
    # by hand), all through this class; wrapping its constructor keeps its type as it is.
    gloo: Any = dist.ProcessGroupGloo
    for name in ("create_device", "create_default_device"):
        if make := getattr(gloo, name, None):  # one that this torch lacks is left out
            setattr(gloo, name, staticmethod(_note_devices(make)))
    gloo.__init__ = _with_shared_device(gloo.__init__)
    os.register_at_fork(after_in_child=_forget)


def admit(addresses: Collection[str]) -> None:
    """Let only hosts with these IPv4 addresses reach this process's Gloo devices, later ones too.

    Where the system can do it (cluster/peer_filter.py), and without addresses, all stays as it is.
    """
    with _state.lock:
        _state.peers = addresses
        for loop in _state.loops:
            _restrict(loop)


def abort(generation: int | None = None) -> int | None:
    """Shut every connection of this process's Gloo groups down and return how many there were.

    Works from any thread, also while the main thread is blocked in C++. All groups of this process
    are unusable afterwards, until all ranks have been in `process_groups.recover`. Only connections
    that a Gloo device holds are touched: no other socket of this process.

    Args:
        generation: The generation of the groups to abort: where newer groups have taken their
            place, nothing happens and None is returned. None: whichever groups are there.
    """
    with _state.ending:
        if generation is not None and is_outdated(generation):
            return None
        # A new group's members meet through the store, where there is no connection to shut down.
        rendezvous.cancel_meetings()
        # Until no message is under way. At once where all ranks wait: Gloo sends a message only
        # when its receiver is ready for it, so a call in which a rank is missing has none.
        end_s = time.monotonic() + DRAIN_S
        while not all(_is_at_rest(*c) for c in _connections()) and time.monotonic() < end_s:
            time.sleep(_DRAIN_PAUSE_S)
        return sum(_shut(number, inode) for number, inode in _connections())


def is_outdated(generation: int) -> bool:
    """Whether groups of a newer generation have taken the place of these."""
    return generation < _state.generation


def _connections() -> set[tuple[int, int]]:
    return {member for loop in tuple(_state.loops) for member in _members(loop)}


def _is_at_rest(number: int, inode: int) -> bool:
    """Whether nothing moves on a connection; also where it is none, or that cannot be known."""
    with _open_socket(number, inode) as connection:
        if connection is None or not hasattr(socket, "TCP_INFO"):
            return True
        try:
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
            queued = [
                int.from_bytes(fcntl.ioctl(number, request, bytes(4)), sys.byteorder)
                for request in (termios.TIOCOUTQ, termios.FIONREAD)
            ]
        except OSError:  # the listener, and what has been shut down or closed
            return True
        if len(info) < _TCP_INFO_BYTES:
            return True
        still_ms = min(
            struct.unpack_from("=I", info, at)[0] for at in (_LAST_DATA_SENT, _LAST_DATA_RECEIVED)
        )
        return bool(still_ms >= (_STALLED_MS if any(queued) else _QUIET_MS))


def outdate(generation: int) -> None:
    """Ignore requests to abort older groups than these from now on, and end what they wait in."""
    with _state.ending:
        _state.generation = generation
    abort()


def shared_devices() -> list[Any]:
    """Return the process's Gloo device, or devices where GLOO_SOCKET_IFNAME names several.

    The first call makes them, by torch's own rules.
    """
    with _state.lock:
        if not _state.shared:
            gloo: Any = dist.ProcessGroupGloo
            names = [n for n in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if n]
            _state.shared += [gloo.create_device(interface=name) for name in names] or [
                gloo.create_default_device()
            ]
        return list(_state.shared)


def _note_devices(make: Callable[..., Any]) -> Callable[..., Any]:
    """Remember the epolls of the Gloo devices that are made."""

    @functools.wraps(make)
    def create(*args: Any, **kwargs: Any) -> Any:
        with _state.lock:
            before = _epolls()
            device = make(*args, **kwargs)
            fresh = [loop for n in _epolls() - before if (loop := _loop_of(n)) is not None]
            alive = [loop for loop in _state.loops if _members(loop)]
            _state.loops[:] = [*alive, *fresh]
            for loop in fresh:
                _restrict(loop)
            return device

    return create


def _with_shared_device(construct: Callable[..., None]) -> Callable[..., None]:
    """ProcessGroupGloo's constructor, with our device where the caller names none."""

    @functools.wraps(construct)
    def init(self: Any, store: Any, rank: int, size: int, *args: Any, **kwargs: Any) -> None:
        first = args[0] if args else kwargs.get("options", kwargs.get("timeout"))
        options: Any = first
        if first is None or isinstance(first, timedelta):
            gloo: Any = dist.ProcessGroupGloo
            options = gloo._Options()  # noqa: SLF001  # the public name, Options, is the base class
        if isinstance(first, timedelta):
            options._timeout = first  # noqa: SLF001
        if not options._devices:  # noqa: SLF001  # the only name it has
            options._devices = shared_devices()  # noqa: SLF001
        construct(self, store, rank, size, options)

    return init


def _loop_of(epoll: int) -> _Loop | None:
    """The device whose epoll this is; None for one that another thread made meanwhile.

    A new device holds one socket, and that one listens.
    """
    listens_by_socket = {}
    for member in _read(epoll):
        with _open_socket(*member) as connection:
            if connection is not None:
                listens_by_socket[member] = _listens(connection)
    if list(listens_by_socket.values()) == [True]:
        return _Loop(epoll, *listens_by_socket)
    return None


def _restrict(loop: _Loop) -> None:
    with _open_socket(*loop.listener) as listener:
        if listener is not None:
            peer_filter.restrict(listener, _state.peers)


def _epolls() -> set[int]:
    if not _FDINFO.is_dir():
        return set()
    descriptors = set()
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208  # only names are wanted
        try:
            if os.readlink(f"/proc/self/fd/{name}") == _EPOLL:  # noqa: PTH115
                descriptors.add(int(name))
        except OSError:  # closed meanwhile; the listing itself is one of them
            continue
    return descriptors


def _members(loop: _Loop) -> list[tuple[int, int]]:
    """Descriptor and inode of what the device holds; empty when the device is gone."""
    members = _read(loop.epoll)
    return members if loop.listener in members else []


def _read(epoll: int) -> list[tuple[int, int]]:
    try:
        text = (_FDINFO / str(epoll)).read_text()
    except OSError:
        return []
    return [(int(number), int(inode, 16)) for number, inode in _MEMBER.findall(text)]


def _shut(number: int, inode: int) -> bool:
    """Shut one connection down; False where there is none any more.

    A copy of the descriptor is held meanwhile and compared: after a fork the epoll still lists
    sockets that this process has closed, under numbers that others may use by now.
    """
    with _open_socket(number, inode) as connection:
        if connection is None or _listens(connection):
            return False
        try:
            connection.shutdown(socket.SHUT_RDWR)
        except OSError:  # its peer was faster
            return False
        return True


def _listens(connection: socket.socket) -> bool:
    return bool(connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


@contextmanager
def _open_socket(number: int, inode: int) -> Iterator[socket.socket | None]:
    """A copy of the descriptor as a socket, while it is the one meant; None otherwise."""
    try:
        copy = os.dup(number)
    except OSError:
        yield None
        return
    try:
        status = os.fstat(copy)
        if not stat.S_ISSOCK(status.st_mode) or status.st_ino != inode:
            yield None
            return
        # Given its family and type the constructor asks nothing that could fail and leak.
        connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fileno=copy)
        try:
            yield connection
        finally:
            connection.detach()
    finally:
        os.close(copy)


def _forget() -> None:
    """In a forked child the devices have no threads: one that it needs is made anew."""
    # Not dropped: a device's end waits for its thread.
    _state.inherited += _state.shared
    _state.shared.clear()
    _state.loops.clear()
    _state.lock, _state.ending = threading.RLock(), threading.Lock()
