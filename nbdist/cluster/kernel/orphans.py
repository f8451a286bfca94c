"""Ending runs from outside their notebook: what a dead one has left, and a living one's ranks.

Only processes of that run are signalled, and each by a descriptor of the process (pidfd) that was
opened before its start time was compared, so that a pid that is used again is never hit.
"""

from __future__ import annotations

import contextlib
import shlex
import shutil
import signal
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from nbdist.cluster.agent import guardian
from nbdist.cluster.kernel import run_dir, runs
from nbdist.cluster.run_owner import DEAD, Process, Run
from nbdist.core import host
from nbdist.errors import NbdistError

END_DEADLINE_S = 10.0
STOP_GRACE_S = 2.0
POLL_S = 0.01


def clean() -> tuple[str, ...]:
    """End and remove what dead runs of this user have left; return a line for each act.

    Runs whose notebook lives, or whose owner is not known for certain, are left alone.
    """
    lines: list[str] = []
    for run in runs.find_runs():
        if run.state == DEAD:
            lines += remove(run)
    return tuple(lines)


def clean_after(kernel: Process, deadline_s: float) -> tuple[str, ...]:
    """End and remove what one kernel that has ended has left; return a line for each act.

    The kernel's guardian has `deadline_s` to do the same, and usually leaves nothing to do.
    """
    end_s = time.monotonic() + deadline_s
    while (folders := runs.folders_of(kernel)) and time.monotonic() < end_s:
        time.sleep(POLL_S)
    left = [run for run in runs.find_runs() if run.folder in folders] if folders else []
    return tuple(line for run in left if run.state == DEAD for line in remove(run))


def remove(run: Run) -> list[str]:
    """End and remove what a run without a notebook has here; return a line for each act."""
    ended, remaining = _end(run, END_DEADLINE_S)
    lines = []
    if ended:
        lines.append(f"ended {_processes(ended)} of {run.folder}")
    if remaining:
        # The run's folder says whose they are: it has to stay as long as they do.
        return [*lines, f"could not end {_processes(remaining)} of {run.folder} (uninterruptible?)"]
    folder = Path(run.folder)
    if command := run_dir.command(folder):
        words = shlex.join(command)
        if not guardian.run_command(command):
            return [*lines, f"could not end what {folder} has elsewhere: {words} failed"]
        lines.append(f"ended what it had elsewhere: {words}")
    for path in run.shm_files:
        with contextlib.suppress(FileNotFoundError):
            Path(path).unlink()
            lines.append(f"removed {path}")
    if folder.is_dir():
        shutil.rmtree(folder, ignore_errors=True)
        is_gone = not folder.exists()
        lines.append(f"removed {folder}" if is_gone else f"could not remove all of {folder}")
        with contextlib.suppress(OSError):  # others are in it
            run_dir.place().rmdir()
    return lines


def stop(run: Run) -> None:
    """End the ranks and the controller of a run whose notebook lives.

    They get SIGTERM first and STOP_GRACE_S. The notebook says in its next cell that they are
    gone, and lets its guardian remove the folder.

    Raises:
        NbdistError: If the notebook cannot be notified, or something could not be ended.
    """
    run_dir.leave_note(Path(run.folder))
    terminate(run_dir.pids(Path(run.folder)), STOP_GRACE_S)
    _, remaining = _end(run, END_DEADLINE_S)
    if remaining:
        raise NbdistError(
            f"{_processes(remaining)} of {run.name} could not be ended in {END_DEADLINE_S:.0f} s "
            "(uninterruptible in the kernel?). Inspect them with ps."
        )
    command = run_dir.command(Path(run.folder))
    if command and not guardian.run_command(command):
        raise NbdistError(
            f"What {run.name} has elsewhere could not be ended: this failed: {shlex.join(command)}"
        )


def terminate(processes: Mapping[int, str], grace_s: float) -> None:
    """Ask processes, pid -> start time, to end, and wait for that until `grace_s` is over."""
    asked = [pid for pid, start in processes.items() if guardian.send(pid, start, signal.SIGTERM)]
    end_s = time.monotonic() + grace_s
    # One that has ended counts so at once, and not only when its parent takes note of it: that of
    # kept ranks is the system's first process, which in a container may take seconds.
    while any(host.started(pid) == processes[pid] for pid in asked) and time.monotonic() < end_s:
        time.sleep(POLL_S)


def _end(run: Run, deadline_s: float) -> tuple[list[Process], list[Process]]:
    """(ended, left): kill until nothing is found twice, as a dying process may just be forking.

    A process found once is recognised later by pid and start time, though its session's leader
    has ended and nothing else says whose it was.
    """
    end_s = time.monotonic() + deadline_s
    processes = dict.fromkeys(run.processes)
    was_empty = False
    while True:
        processes.update(dict.fromkeys(runs.processes_of(run)))
        living = [p for p in processes if host.started(p.pid) == p.start]
        if (not living and was_empty) or time.monotonic() > end_s:
            return [process for process in processes if process not in living], living
        was_empty = not living
        for process in living:
            guardian.send(process.pid, process.start, signal.SIGKILL)
        time.sleep(POLL_S)


def _processes(those: Iterable[Process]) -> str:
    pids = sorted({process.pid for process in those})
    noun = "process" if len(pids) == 1 else "processes"
    return f"{len(pids)} {noun} ({', '.join(map(str, pids))})"
