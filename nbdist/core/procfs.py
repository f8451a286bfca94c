"""Reads Linux's files on processes and control groups; empty or None where there are none."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")
# cgroup v1 says "no limit" with the largest number of whole pages.
_NO_LIMIT_BYTES = 1 << 60
# Version of control groups -> where it is mounted, and its files: the limit, what is used, what
# counts kills, and the line of memory.stat that says what can be dropped.
_VERSIONS = {
    "v2": (
        ("", "unified"), "memory.max", "memory.current", "memory.events", "inactive_file",
    ),
    "v1": (
        ("memory",), "memory.limit_in_bytes", "memory.usage_in_bytes", "memory.oom_control",
        "total_inactive_file",
    ),
}  # fmt: skip


def text(path: Path, start: int = 0) -> str:
    """A file's text; empty where it cannot be read (it is gone, or there never was one)."""
    try:
        return path.read_bytes()[start:].decode(errors="replace")
    except OSError:
        return ""


def link(path: Path) -> str:
    """Target of a link; empty where there is none."""
    try:
        return str(path.readlink())
    except OSError:
        return ""


def boot_id() -> str:
    """Another one after each start of the system."""
    return text(PROC / "sys/kernel/random/boot_id").strip()


def parse_stat(stat: str) -> list[str]:
    """The fields of /proc/PID/stat after the process's name: its state, its parent, ..."""
    # The name may contain spaces and parentheses.
    return stat.rpartition(")")[2].split()


def stat_fields(pid: int) -> list[str]:
    """The same of a process; none where there is no such process."""
    return parse_stat(text(PROC / str(pid) / "stat"))


def state(pid: int) -> str:
    """A letter, such as "R", "S", "T" (stopped) or "Z" (ended); empty where it is gone."""
    return next(iter(stat_fields(pid)), "")


def catches(status: str, number: int) -> bool:
    """Whether /proc/PID/status says that the process has a handler for a signal."""
    match = re.search(r"^SigCgt:\s*([0-9a-fA-F]+)$", status, re.MULTILINE)
    return match is not None and bool(int(match[1], 16) >> (number - 1) & 1)


def oom_kills(counts: str) -> int | None:
    """The count in memory.events (cgroup v2), memory.oom_control (v1) or /proc/vmstat."""
    match = re.search(r"^oom_kill (\d+)$", counts, re.MULTILINE)
    return None if match is None else int(match[1])


@dataclass(frozen=True, slots=True)
class MemoryGroup:
    """A control group ("v2" or "v1") that can count memory, and the folder of its files."""

    folder: Path
    version: str

    def limit_bytes(self) -> int | None:
        """None without a limit."""
        limit = self._number(_VERSIONS[self.version][1])
        return None if limit is None or limit >= _NO_LIMIT_BYTES else limit

    def used_bytes(self) -> int | None:
        """By all processes in it and in the groups below it."""
        return self._number(_VERSIONS[self.version][2])

    def oom_kills(self) -> int | None:
        """How many of its processes the system has killed for memory."""
        return oom_kills(text(self.folder / _VERSIONS[self.version][3]))

    def droppable_bytes(self) -> int:
        """Files that were read once: they are given back before anything is killed."""
        stat = text(self.folder / "memory.stat")
        match = re.search(rf"^{_VERSIONS[self.version][4]} (\d+)$", stat, re.MULTILINE)
        return 0 if match is None else int(match[1])

    def _number(self, name: str) -> int | None:
        typed = text(self.folder / name).strip()
        return int(typed) if typed.isdigit() else None  # "max"


def memory_groups(pid: int | str) -> tuple[MemoryGroup, ...]:
    """The control groups of a process (or "self") that may count memory, v2 and innermost first."""
    paths = parse_cgroups(text(PROC / str(pid) / "cgroup"))
    return tuple(
        MemoryGroup(CGROUPS / mount / name, version)
        for version, (mounts, *_) in _VERSIONS.items()
        if version in paths
        for mount in mounts
        for name in lineage(paths[version])
    )


def below_limits(pid: int | str) -> list[int]:
    """How far the control groups of a process are below their limits; none where there are none.

    Files that can be dropped do not count as used.
    """
    room = []
    for group in memory_groups(pid):
        limit, used = group.limit_bytes(), group.used_bytes()
        if limit is not None and used is not None:
            room.append(max(0, limit - used + group.droppable_bytes()))
    return room


def parse_cgroups(listed: str) -> dict[str, str]:
    """The paths in /proc/PID/cgroup that can count memory: "v1" or "v2" -> path."""
    paths = {}
    for line in listed.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if "memory" in controllers.split(","):
            paths["v1"] = path
        elif number == "0" and not controllers:
            paths["v2"] = path
    return paths


def lineage(path: str) -> list[str]:
    """A control group and those above it, innermost first, the root as an empty name.

    In a container the path may be the host's, of which only the end, or nothing, can be seen.
    """
    pure = PurePosixPath(path.lstrip("/"))
    names = [str(folder) for folder in (pure, *pure.parents)]
    return ["" if name == "." else name for name in names]
