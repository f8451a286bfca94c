"""The machine: what the process may use of it, what tells it from others, and who lives on it."""

from __future__ import annotations

import ipaddress
import os
import socket
from dataclasses import dataclass

from nbdist.core import procfs


@dataclass(frozen=True, slots=True)
class Machine:
    """Host, boot and process space that a process id belongs to.

    Attributes:
        boot: Another one after each start of the system; empty where there is none (macOS).
        pid_space: Which processes see each other: two containers differ in it.
    """

    host: str
    boot: str
    pid_space: str


def usable_cpus() -> tuple[int, ...]:
    """The numbers of the CPUs that this process may use: its affinity, not all of the machine."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def usable_cores() -> int:
    """How many CPUs this process may use."""
    return len(usable_cpus())


def this_machine() -> Machine:
    """Identify this machine, this boot of it and this container among others."""
    pid_space = procfs.link(procfs.PROC / "self/ns/pid")
    return Machine(socket.gethostname(), procfs.boot_id(), pid_space)


def started(pid: int) -> str | None:
    """When a process of this machine started, in clock ticks; None without one that lives.

    A pid that was used again differs in it. Empty where the system does not tell (macOS).
    """
    if procfs.PROC.is_dir():
        fields = procfs.stat_fields(pid)
        return None if not fields or fields[0] in "ZX" else fields[19]
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:  # another user's
        pass
    return ""


def is_loopback(address: str) -> bool:
    """Whether only this machine reaches what listens at an IP address or name; no for other names.

    Empty stands for the loopback, as ipyparallel has it.
    """
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address in {"", "localhost"}


# Reserved for documentation, so it is nobody's: the way there is the default route.
ELSEWHERE = "192.0.2.1"


def address_toward(*peers: str) -> str:
    """The own IPv4 address from which the first of these peers that is another host is reached.

    A peer without an address or a way is left out, and one to which the way is the loopback unless
    all are (Debian gives a host's own name 127.0.1.1). Empty without any. To connect a UDP socket
    sends nothing; it makes the kernel choose a route.
    """
    loopback = ""
    for peer in filter(None, peers):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((peer, 9))
            except OSError:
                continue
            address = str(probe.getsockname()[0])
        if not is_loopback(address):
            return address
        loopback = loopback or address
    return loopback
