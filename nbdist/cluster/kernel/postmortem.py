"""What the kernel can see of a rank's process on its own host, alive or ended."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from nbdist.core import exit_cause, stacks
from nbdist.core.exit_cause import OomCounts, Remains

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")
POLL_S = 0.005
# faulthandler writes thread by thread, without an end mark: a dump is whole when it has not
# grown for this long.
QUIET_S = 0.03

# Kind of cgroup -> where it is mounted, the file with the count, the file with the limit.
_FILES = {
    "v2": (("", "unified"), "memory.events", "memory.max"),
    "v1": (("memory",), "memory.oom_control", "memory.limit_in_bytes"),
}


@dataclass(frozen=True, slots=True)
class Memory:
    """Where the system counts what it kills for memory, for one process.

    Attributes:
        events: The file of its control group; None where there is none.
        limits: The files with the limits of the control group and those above it.
    """

    events: Path | None
    limits: tuple[Path, ...]

    def counts(self) -> OomCounts:
        """The counts as they are now."""
        limits = [exit_cause.limit_bytes(_text(path)) for path in self.limits]
        return OomCounts(
            cgroup=None if self.events is None else exit_cause.oom_kills(_text(self.events)),
            machine=exit_cause.oom_kills(_text(PROC / "vmstat")),
            limit_bytes=min((one for one in limits if one is not None), default=None),
        )


def memory_of(pid: int) -> Memory:
    """Where a living process's memory is counted: its control group is gone with it."""
    paths = exit_cause.cgroups(_text(PROC / str(pid) / "cgroup"))
    for kind, (mounts, events, limit) in _FILES.items():
        if kind not in paths:
            continue
        for mount in mounts:
            folders = [CGROUPS / mount / name for name in exit_cause.lineage(paths[kind])]
            counting = [
                folder
                for folder in folders
                if exit_cause.oom_kills(_text(folder / events)) is not None
            ]
            if counting:
                return Memory(counting[0] / events, tuple(folder / limit for folder in counting))
    return Memory(None, ())


class Postmortem:
    """What has to be read while a rank lives to be able to tell how it ended."""

    def __init__(self, run_dir: Path, rank: int, pid: int):
        """Read the system's counts. Once the rank is started."""
        self._run_dir = run_dir
        self._rank = rank
        self._memory = memory_of(pid)
        self._before = self._memory.counts()

    def cause(self, code: int | None, *, is_ours: bool = False) -> str:
        """Why the rank ended. At once: another process may take its place and its files.

        Args:
            code: Its exit code, negative for a signal; None where it is not known.
            is_ours: nbdist itself killed it.
        """
        return exit_cause.cause(
            code,
            Remains(
                crash_text=_text(self._run_dir / exit_cause.CRASH_FILE.format(rank=self._rank)),
                cells=cells_of(self._run_dir, self._rank),
                before=self._before,
                after=self._memory.counts(),
                is_ours=is_ours,
            ),
        )


def cells_of(run_dir: Path, rank: int) -> dict[str, int]:
    """File name of a cell's code -> the cell's number, as the rank noted them."""
    return stacks.parse_cells(_text(run_dir / exit_cause.CELLS_FILE.format(rank=rank)))


def process_state(pid: int) -> str:
    """The letter of a process's state: "T" for stopped; empty where it is gone or no /proc is."""
    return exit_cause.process_state(_text(PROC / str(pid) / "stat"))


def dump_stack(run_dir: Path, rank: int, pid: int, deadline_s: float) -> str:
    """A rank's stacks by a signal, for one that does not answer: its C code holds the GIL.

    As `stacks` gives them, without source lines and thread names. Empty where the rank is not
    prepared for the signal, was stopped, or wrote nothing by the deadline.
    """
    return dump_stacks(run_dir, {rank: pid}, deadline_s)[rank]


def dump_stacks(run_dir: Path, pids: dict[int, int], deadline_s: float) -> dict[int, str]:
    """The same of several ranks at once: rank -> text.

    Args:
        run_dir: The run's folder.
        pids: Rank -> its process, on this host.
        deadline_s: For all together.
    """
    files = {rank: run_dir / exit_cause.STACKS_FILE.format(rank=rank) for rank in pids}
    before = {rank: _size(path) for rank, path in files.items()}
    asked = [rank for rank, pid in pids.items() if _send_dump(pid, files[rank])]
    _wait_quiet([files[rank] for rank in asked], [before[rank] for rank in asked], deadline_s)
    texts = dict.fromkeys(pids, "")
    for rank in asked:
        threads = stacks.parse_dump(_text(files[rank], before[rank]))
        texts[rank] = stacks.stacks_text(threads, cells_of(run_dir, rank))
    return texts


def _send_dump(pid: int, path: Path) -> bool:
    # A process without a handler would end of the signal.
    if not path.exists() or not exit_cause.catches(
        _text(PROC / str(pid) / "status"), exit_cause.DUMP_SIGNAL
    ):
        return False
    try:
        os.kill(pid, exit_cause.DUMP_SIGNAL)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _wait_quiet(
    files: Sequence[Path],
    before: Sequence[int],
    deadline_s: float,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    end_s = clock() + deadline_s
    sizes, since_s = list(before), clock()
    while files and clock() < end_s:
        now = [_size(path) for path in files]
        if now != sizes:
            sizes, since_s = now, clock()
        elif clock() > since_s + QUIET_S and all(a > b for a, b in zip(now, before, strict=True)):
            return
        time.sleep(POLL_S)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _text(path: Path, start: int = 0) -> str:
    """The file's text; empty where it cannot be read (it is gone, or there never was one)."""
    try:
        return path.read_bytes()[start:].decode(errors="replace")
    except OSError:
        return ""
