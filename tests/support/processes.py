"""What runs on this machine: children, processes of an nbdist run, sockets, run directories."""

import contextlib
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import psutil

_RUN_VARIABLE = "NBDIST_RUN"
_ZOMBIE_POLL_S = 0.1  # a zombie that nobody reaps never ends for the system, so look again


class Listener(NamedTuple):
    """A listening TCP socket and the process that owns it."""

    pid: int
    address: str
    port: int


def descendants(pid: int) -> list[psutil.Process]:
    """Every living process below `pid`, at any depth; empty when `pid` is gone.

    A process whose parent has died belongs to somebody else: look it up before.
    """
    try:
        return [p for p in psutil.Process(pid).children(recursive=True) if is_alive(p)]
    except psutil.NoSuchProcess:
        return []


def processes_of_run(marker: str | bytes | None = None) -> list[psutil.Process]:
    """Living processes started with NBDIST_RUN=`marker`, or with any NBDIST_RUN for None."""
    wanted = os.fsdecode(marker) if marker is not None else None
    marked = [(p, environment(p).get(_RUN_VARIABLE)) for p in psutil.process_iter()]
    return [p for p, run in marked if run is not None and wanted in {None, run}]


def environment(process: psutil.Process) -> dict[str, str]:
    """The environment a process was started with; empty for one that ended or is not ours."""
    try:
        return dict(process.environ())
    except (psutil.Error, OSError):  # a process that is being torn down answers with OSError
        return {}


def is_alive(process: psutil.Process) -> bool:
    """Whether the process still runs; a zombie does not."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def wait_gone(
    processes: Iterable[int | psutil.Process], timeout_s: float = 10.0
) -> list[psutil.Process]:
    """Wait until all have ended and return those that still run after `timeout_s`.

    Give `psutil.Process` objects taken while the process ran where a pid may be used again.
    """
    alive = [p for p in _as_processes(processes) if is_alive(p)]
    deadline = time.monotonic() + timeout_s
    while alive and (remaining_s := deadline - time.monotonic()) > 0:
        psutil.wait_procs(alive, timeout=min(_ZOMBIE_POLL_S, remaining_s))
        alive = [p for p in alive if is_alive(p)]
    return alive


def tcp_listeners(processes: Iterable[int | psutil.Process]) -> list[Listener]:
    """The listening TCP sockets of the given processes, in order of pid and port."""
    listeners = []
    for process in _as_processes(processes):
        with contextlib.suppress(psutil.NoSuchProcess):
            connections = process.net_connections(kind="tcp")
            listening = [c.laddr for c in connections if c.status == psutil.CONN_LISTEN]
            listeners += [Listener(process.pid, laddr.ip, laddr.port) for laddr in listening]
    return sorted(set(listeners), key=lambda listener: (listener.pid, listener.port))


def open_run_dirs(base: Path, pattern: str = "*") -> list[Path]:
    """The run directories under `base` that nobody has removed yet; none without `base`."""
    return sorted(path for path in base.glob(pattern) if path.is_dir())


def describe(process: psutil.Process) -> str:
    """One line: pid, parent, state and command line."""
    try:
        line = " ".join(process.cmdline()) or process.name()
        return f"{process.pid} (parent {process.ppid()}, {process.status()}): {line}"
    except psutil.NoSuchProcess:
        return f"{process.pid}: ended meanwhile"


def _as_processes(processes: Iterable[int | psutil.Process]) -> list[psutil.Process]:
    processes_ = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            processes_.append(psutil.Process(process) if isinstance(process, int) else process)
    return processes_
