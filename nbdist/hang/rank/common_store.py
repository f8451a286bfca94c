"""The store in which all ranks meet: a file on one host, else a port of one rank.

If it is a port, every rank has reserved one on its own address: bound, and closed to all others.
Each generation of groups gives all ranks the addresses of the others' ports. When the store's rank
is gone, the first living rank opens its port, and the others go there without asking.

torch's client waits in the system without a limit, so a host that vanishes without a word would
keep a rank in C++ for a quarter of an hour: the connection gets a limit of LOST_S instead.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta

import psutil
import torch.distributed as dist

from nbdist.cluster import peer_filter
from nbdist.core.rank import joined, this_rank
from nbdist.errors import NbdistError

# How long a host may say nothing before a wait for the store that it holds fails.
LOST_S = 10
# Another rank opens its store within this time of this one's connecting to it.
CONNECT_S = 15.0
STORE_TIMEOUT = timedelta(seconds=300)  # torch's own

Address = tuple[str, int]


@dataclass(slots=True)
class _Ports:
    """The ports of this rank and of the others, as this rank knows them.

    Attributes:
        current: Where the store is; None where it is a file.
        reserved: This rank's port, bound; it does not listen until its store is opened.
        server: This rank's own store, once it has been opened.
        by_rank: Where each rank's store is, or would be.
        master_port: The value of torchrun's MASTER_PORT; 0 before rank 0 has chosen one.
    """

    current: Address | None = None
    reserved: socket.socket | None = None
    server: dist.TCPStore | None = None
    by_rank: dict[int, Address] = field(default_factory=dict)
    master_port: int = 0


_ports = _Ports()


def open_store(address: str, world_size: int, peers: tuple[str, ...] = ()) -> int:
    """Open this rank's store for other hosts, and return its port.

    It listens on `address` alone, and to these peers alone where the system can do that: torch's
    own listener takes every interface, and has no authentication.
    """
    _ports.reserved = _ports.server = None
    reserve(address, peers)
    return int(_open(world_size).port)


def reserve(address: str, peers: Collection[str] = ()) -> None:
    """Bind a port for this rank's store, to which no rank can connect yet; once per process."""
    if _ports.reserved is None:
        _ports.reserved = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        _ports.reserved.bind((address, 0))
        admit(peers)


def admit(peers: Collection[str]) -> None:
    """Let only hosts with these IPv4 addresses reach this rank's store, as Gloo's ports."""
    if _ports.reserved is not None:
        peer_filter.restrict(_ports.reserved, peers)


def connect(address: str, port: int, world_size: int) -> dist.TCPStore:
    """The store at an address, which some rank has opened or is about to open.

    Raises:
        NbdistError: If it cannot be reached within CONNECT_S.
    """
    _ports.current = (address, port)
    if _ports.server is not None and _own_address() == (address, port):
        return _ports.server
    try:
        store = dist.TCPStore(
            address, port, world_size, is_master=False, timeout=timedelta(seconds=CONNECT_S)
        )
    except RuntimeError as error:
        raise NbdistError(
            f"the store of the ranks at {address}:{port} could not be reached within "
            f"{CONNECT_S:.0f} s: {str(error).splitlines()[0]}"
        ) from error
    store.set_timeout(STORE_TIMEOUT)
    _limit_waits(address, port)
    return store


def where() -> Address:
    """Address and port of the store that this rank uses; ("", 0) for a file."""
    return _ports.current or ("", 0)


def leave(gone: Collection[int]) -> None:
    """Take the first living rank's store where the one that all use is held by a rank that is gone.

    Every living rank, with the same ranks; those that use a file, or a living rank's, do nothing.

    Raises:
        NbdistError: If it cannot be reached.
    """
    holders = [rank for rank, at in _ports.by_rank.items() if at == _ports.current]
    if _ports.current is None or not set(holders) & set(gone):
        return
    state = this_rank()
    first = min(set(_ports.by_rank) - set(gone))
    if first == state.place.rank and _ports.server is None:
        _open(state.topology.world_size)
    address, port = _ports.by_rank[first]
    store = connect(address, port, state.topology.world_size)
    joined(replace(state, store=store))


def announce(store: dist.Store, rank: int) -> None:
    """Say where this rank's store would be, in a generation's store; before the ranks meet there.

    Rank 0 names the port of MASTER_PORT, which was free when rank 0 came.
    """
    if (address := _own_address()) is not None:
        store.set(f"port/{rank}", f"{address[0]} {address[1]}")
    if rank == 0:
        if not _ports.master_port:
            with socket.socket() as free:  # bound, but it never listens
                free.bind(("", 0))
                _ports.master_port = int(free.getsockname()[1])
        store.set("master_port", str(_ports.master_port))


def note_others(store: dist.Store, ranks: Sequence[int]) -> None:
    """Take in what the ranks have announced, MASTER_ADDR and MASTER_PORT too; once all have met."""
    if _ports.current is not None:
        keys = [f"port/{rank}" for rank in ranks]
        for rank, text in zip(ranks, store.multi_get(keys), strict=True):
            address, _, port = text.decode().partition(" ")
            _ports.by_rank[rank] = address, int(port)
    if 0 in ranks:
        # No name: it is 127.0.1.1 to Debian's host of that name.
        is_alone = this_rank().topology.n_hosts == 1
        os.environ["MASTER_ADDR"] = "127.0.0.1" if is_alone else _ports.by_rank[0][0]
        os.environ["MASTER_PORT"] = store.get("master_port").decode()


def _own_address() -> Address | None:
    """Address reserved for this rank's store; None where none is."""
    return None if _ports.reserved is None else _ports.reserved.getsockname()


def _open(world_size: int) -> dist.TCPStore:
    """Open this rank's store on its own port; open as long as the process."""
    assert _ports.reserved is not None
    address, port = _ports.reserved.getsockname()
    _ports.reserved.listen()
    _ports.server = dist.TCPStore(
        address,
        port,
        world_size,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=os.dup(_ports.reserved.fileno()),
    )
    return _ports.server


def _limit_waits(address: str, port: int) -> None:
    """Let the system give up this process's connections to the store's host after LOST_S.

    torch does not give a store's socket; it is found by its peer's address.
    """
    options = {"TCP_USER_TIMEOUT": 1000 * LOST_S, "TCP_KEEPIDLE": LOST_S // 2, "TCP_KEEPINTVL": 1}
    for connection in psutil.Process().net_connections("tcp"):
        peer = connection.raddr
        if not peer or (peer.ip.removeprefix("::ffff:"), peer.port) != (address, port):
            continue
        with contextlib.suppress(OSError):  # closed meanwhile
            family = socket.AddressFamily(connection.family)
            with socket.socket(family, fileno=os.dup(connection.fd)) as copy:
                copy.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                for name, value in options.items():
                    if hasattr(socket, name):  # not all systems have all
                        copy.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
