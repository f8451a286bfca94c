"""The kernel's view of a rank's process, alive or ended; of another host's, the files it sent."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from nbdist.core import exit_cause, procfs, stacks
from nbdist.core.exit_cause import OomCounts, Remains
from nbdist.core.procfs import MemoryGroup, memory_groups

POLL_S = 0.005
# faulthandler writes thread by thread, without an end mark: a dump is whole when it has not
# grown for this long.
QUIET_S = 0.03


def _oom_counts(groups: Sequence[MemoryGroup]) -> OomCounts:
    """The counts as they are now."""
    limits = [limit for group in groups if (limit := group.limit_bytes()) is not None]
    return OomCounts(
        cgroup=groups[0].oom_kills() if groups else None,
        machine=procfs.oom_kills(procfs.text(procfs.PROC / "vmstat")),
        limit_bytes=min(limits, default=None),
    )


class Postmortem:
    """Counts read while a rank lives, which later show how it ended."""

    def __init__(self, run_dir: Path, rank: int, pid: int | None):
        """Read the system's counts, once the rank is started; `pid` is None on another host.

        An agent puts the files of such a rank into the run's folder before it reports the end.
        """
        self._run_dir = run_dir
        self._rank = rank
        self._is_here = pid is not None
        # Where the system counts what it kills for memory: the process's group and those above
        # it. Read while it lives: its control group is gone with it.
        groups = [] if pid is None else memory_groups(pid)
        groups = [group for group in groups if group.oom_kills() is not None]
        self._groups = tuple(group for group in groups if group.version == groups[0].version)
        self._before = self._counts()

    def _counts(self) -> OomCounts:
        return _oom_counts(self._groups) if self._is_here else OomCounts()

    def cause(self, code: int | None, *, is_ours: bool = False) -> str:
        """Why the rank ended. At once: another process may take its place and its files.

        The exit code is negative for a signal, None where it is not known. Ours: nbdist killed it.
        """
        return exit_cause.cause(
            code,
            Remains(
                crash_text=procfs.text(
                    self._run_dir / exit_cause.CRASH_FILE.format(rank=self._rank)
                ),
                cells=cells_of(self._run_dir, self._rank),
                before=self._before,
                after=self._counts(),
                is_ours=is_ours,
            ),
        )


def cells_of(run_dir: Path, rank: int) -> dict[str, int]:
    """File name of a cell's code -> the cell's number, as the rank noted them."""
    return stacks.parse_cells(procfs.text(run_dir / exit_cause.CELLS_FILE.format(rank=rank)))


def dump_stack(run_dir: Path, rank: int, pid: int, deadline_s: float) -> str:
    """A rank's stacks by a signal, for one that does not answer: its C code holds the GIL.

    The form is that of `stacks`, without source lines and thread names. Empty where the rank is not
    prepared for the signal, was stopped, or wrote nothing by the deadline.
    """
    path = run_dir / exit_cause.STACKS_FILE.format(rank=rank)
    before = _size(path)
    if not _send_dump(pid, path):
        return ""
    _wait_quiet(path, before, deadline_s)
    threads = stacks.parse_dump(procfs.text(path, before))
    return stacks.stacks_text(threads, cells_of(run_dir, rank))


def _send_dump(pid: int, path: Path) -> bool:
    # A process without a handler would end of the signal.
    status = procfs.text(procfs.PROC / str(pid) / "status")
    if not path.exists() or not procfs.catches(status, exit_cause.DUMP_SIGNAL):
        return False
    try:
        os.kill(pid, exit_cause.DUMP_SIGNAL)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _wait_quiet(path: Path, before: int, deadline_s: float) -> None:
    """Return once the file has grown and grows no more, or at the deadline."""
    since_s = time.monotonic()
    end_s, size = since_s + deadline_s, before
    while (now_s := time.monotonic()) < end_s:
        now = _size(path)
        if now != size:
            size, since_s = now, now_s
        elif now_s > since_s + QUIET_S and now > before:
            return
        time.sleep(POLL_S)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
