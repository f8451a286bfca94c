"""Use of the host by a process and its children: processor time and memory."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from nbdist.core import procfs
from nbdist.core.procfs import MemoryGroup, memory_groups

# Children, control groups and proportional sets cost milliseconds, and change seldom.
SLOWLY_S = 10.0


@dataclass(frozen=True, slots=True)
class Usage:
    """A process with its children at one moment.

    Attributes:
        cpu_s: Processor time of all of them so far, ended children too.
        rss_bytes: Resident memory, the sum: pages that they share are counted in each.
        pss_bytes: The same with shared pages divided among those that share them; up to SLOWLY_S
            old; None where the system does not tell.
        host_used_bytes: What counts against `host_limit_bytes`, by all processes there.
        host_limit_bytes: Of the control group with the least room left, or of the machine: where
            it is reached the system kills a process.
    """

    cpu_s: float
    rss_bytes: int
    pss_bytes: int | None
    host_used_bytes: int
    host_limit_bytes: int
    is_group: bool = False


@dataclass(frozen=True, slots=True)
class _Slow:
    """Numbers read of a process once in SLOWLY_S; `groups` are those with a memory limit."""

    read_s: float
    processes: tuple[Any, ...]
    pss_bytes: int | None
    groups: tuple[MemoryGroup, ...]


class Usages:
    """Reads processes of this host by the module psutil, of whoever has imported it."""

    def __init__(self, psutil: Any, clock: Callable[[], float] = time.monotonic):
        self._psutil = psutil
        self._clock = clock
        self._slow: dict[int, _Slow] = {}

    def read(self, pids: Iterable[int]) -> dict[int, Usage]:
        """The processes with these numbers, those that have ended left out."""
        wanted = tuple(pids)
        now_s = self._clock()
        old = [
            pid
            for pid in wanted
            if pid not in self._slow or not 0 <= now_s - self._slow[pid].read_s < SLOWLY_S
        ]
        if old:
            children: dict[int, list[int]] = {}  # one walk for all who ask
            for child, parent in self._parents():
                children.setdefault(parent, []).append(child)
            for pid in old:
                self._slow[pid] = self._read_slowly(pid, children, now_s)
        for pid in set(self._slow) - set(wanted):
            del self._slow[pid]
        machine = self._psutil.virtual_memory()
        usages = {pid: self._usage(pid, self._slow[pid], machine) for pid in wanted}
        return {pid: usage for pid, usage in usages.items() if usage is not None}

    def _parents(self) -> list[tuple[int, int]]:
        if not (procfs.PROC / "self/stat").exists():  # macOS
            return [(process.pid, process.ppid()) for process in self._psutil.process_iter()]
        pids = [int(path.name) for path in procfs.PROC.iterdir() if path.name.isdigit()]
        return [(pid, int(fields[1])) for pid in pids if (fields := procfs.stat_fields(pid))]

    def _read_slowly(self, pid: int, children: dict[int, list[int]], now_s: float) -> _Slow:
        processes = []
        unvisited = [pid]
        while unvisited:
            visited = unvisited.pop()
            unvisited += children.get(visited, [])
            try:
                processes.append(self._psutil.Process(visited))
            except self._psutil.Error:
                continue  # it has ended just now
        rollups = [procfs.text(procfs.PROC / str(p.pid) / "smaps_rollup") for p in processes]
        kilobytes = [re.search(r"^Pss:\s*(\d+)", rollup, re.MULTILINE) for rollup in rollups]
        pss = None if None in kilobytes else sum(1024 * int(k[1]) for k in kilobytes if k)
        limited = tuple(group for group in memory_groups(pid) if group.limit_bytes() is not None)
        return _Slow(now_s, tuple(processes), pss, limited)

    def _usage(self, pid: int, slow: _Slow, machine: Any) -> Usage | None:
        cpu_s, rss_bytes, is_alive = 0.0, 0, False
        for process in slow.processes:
            try:
                times, memory = process.cpu_times(), process.memory_info()
            except self._psutil.Error:
                continue  # its time has become its parent's
            is_alive = is_alive or process.pid == pid
            cpu_s += sum(times[:4])  # user, system, and both of children that have ended
            rss_bytes += memory.rss
        if not is_alive:
            return None
        rooms = [(machine.total - machine.available, machine.total, False)]
        for group in slow.groups:
            limit, used = group.limit_bytes(), group.used_bytes()
            if limit is not None and used is not None:
                rooms.append((max(0, used - group.droppable_bytes()), limit, True))
        least = min(rooms, key=lambda room: room[1] - room[0])
        return Usage(cpu_s, rss_bytes, slow.pss_bytes, *least)
