"""The runs of this user that this machine knows of, and the processes of each.

A run is found by its folder in TMPDIR, and by the mark that its processes carry (NBDIST_RUN), which
finds those whose folder is gone. A process is taken for a run's own by that mark, or by the session
of a living process that the run's kernel has started.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from nbdist.cluster import run_owner
from nbdist.cluster.agent import guardian
from nbdist.cluster.kernel import run_dir
from nbdist.cluster.run_owner import Process, Run
from nbdist.core import host

# The second is that of a run which an earlier version of nbdist has started and keeps.
_GUARDIANS = (b"/agent/guardian.py", b"/kernel/guardian.py")
MARK = b"NBDIST_RUN="
SHM = Path("/dev/shm")  # noqa: S108  # what is removed there is known to be a dead run's


@dataclass(frozen=True, slots=True)
class UserProcess:
    """A living process of this user.

    Attributes:
        start: When it started, in clock ticks.
        mark: The run that it carries the mark of; empty without.
        guards: The run that it is the guardian of; empty if it is none.
    """

    pid: int
    start: str
    parent: int
    session: int
    mark: str
    guards: str


def find_runs() -> tuple[Run, ...]:
    """All runs of this user, in order of their folders."""
    processes = _processes()
    guarded = {process.guards for process in processes.values() if process.guards}
    marks = {process.mark for process in processes.values() if process.mark}
    here = host.this_machine()
    all_runs = [
        _run(Path(folder), here, is_guarded=folder in guarded)
        for folder in sorted({*folders(), *marks, *guarded})
    ]
    spared = _spared_pids(all_runs, processes)
    return tuple(_with_processes(run, processes, spared) for run in all_runs)


def processes_of(run: Run) -> tuple[Process, ...]:
    """The run's processes now; see `find_runs`."""
    # With all other runs: what belongs to a living one is spared whatever mark it carries.
    return next((other.processes for other in find_runs() if other.folder == run.folder), ())


def folders_of(kernel: Process) -> list[str]:
    """The folders of the runs that a kernel has started and that are not removed yet."""
    owners = {folder: run_dir.owner(Path(folder)) for folder in folders()}
    its = {f: Process(owner.pid, owner.start) for f, owner in owners.items() if owner}
    return [folder for folder, process in its.items() if process == kernel]


def read(folder: Path) -> Run:
    """A run as its folder describes it, without its processes."""
    return _run(folder, host.this_machine(), is_guarded=False)


def kept() -> tuple[Run, ...]:
    """Runs whose ranks outlive their notebook, with one and without; no process is looked at."""
    all_runs = [read(Path(folder)) for folder in sorted(folders())]
    living = {run_owner.KEPT, run_owner.RUNNING, run_owner.ELSEWHERE}
    return tuple(run for run in all_runs if run.keep and run.keep.keep_s and run.state in living)


def folders() -> list[str]:
    """The folders of all runs of this user that this machine knows of."""
    place = run_dir.place()
    try:
        status = place.lstat()
    except FileNotFoundError:
        return []
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        return []  # somebody else's: `%dist_init` says so
    run_folders = (path for path in place.iterdir() if path.is_dir() and not path.is_symlink())
    # An agent's is no run: it has ranks of a run of this machine, or of another one.
    return [str(path) for path in run_folders if not path.name.startswith(guardian.RANKS)]


def _run(folder: Path, here: host.Machine, *, is_guarded: bool) -> Run:
    owner, keep = run_dir.owner(folder), run_dir.read_keep(folder)
    detachment = run_dir.read_detachment(folder)
    state = run_owner.state(owner, here, None if owner is None else host.started(owner.pid))
    if state == run_owner.UNKNOWN and is_guarded:
        # The run's folder was damaged, but a guardian does not outlive its kernel.
        state = run_owner.RUNNING
    if state == run_owner.DEAD and run_dir.has_damaged_keep(folder):
        state = run_owner.UNKNOWN  # its ranks may be kept, and a dead run would be removed
    if state == run_owner.RUNNING and run_dir.ended_from_outside(folder):
        state = run_owner.STOPPED
    is_this_boot = (
        owner is None or here.boot == owner.machine.boot or here.host != owner.machine.host
    )
    if is_this_boot and run_owner.is_kept(state, keep, detachment, time.time()):
        state = run_owner.KEPT
    return Run(
        str(folder),
        state,
        owner,
        run_dir.hosts(folder),
        has_folder=folder.is_dir(),
        keep=keep,
        detachment=detachment,
    )


def _with_processes(run: Run, all_processes: dict[int, UserProcess], spared: frozenset[int]) -> Run:
    folder = Path(run.folder)
    noted = run_dir.pids(folder)
    # The number of a leader that has gone may long be a stranger's session.
    leaders = {pid for pid, start in noted.items() if guardian.start_ticks(pid) == start}
    processes = tuple(
        Process(process.pid, process.start)
        for process in sorted(all_processes.values(), key=lambda process: process.pid)
        if process.pid not in spared
        and (
            run.folder in (process.mark, process.guards)
            or (not process.mark and process.session in leaders)
        )
    )
    files = _shm_files(processes, noted, all_processes) if run.state == run_owner.DEAD else ()
    return replace(run, processes=processes, shm_files=files)


def _spared_pids(all_runs: Iterable[Run], processes: dict[int, UserProcess]) -> frozenset[int]:
    """Processes that are not left over from a run, whatever mark they have inherited.

    This one, the kernels that live, their starters and their guardians are spared: a notebook
    server that was started in a cell carries the mark of that cell's run.
    """
    living = {
        run.folder: run for run in all_runs if run.state in {run_owner.RUNNING, run_owner.STOPPED}
    }
    spared = {os.getpid(), *(run.owner.pid for run in living.values() if run.owner)}
    for pid in tuple(spared):  # it grows
        process = processes.get(pid)
        while process is not None and (process := processes.get(process.parent)) is not None:
            spared.add(process.pid)
    return frozenset(
        spared | {process.pid for process in processes.values() if process.guards in living}
    )


def _processes() -> dict[int, UserProcess]:
    if not Path("/proc/self").is_dir():
        return {}
    return {process.pid: process for pid in psutil.pids() if (process := _process(pid)) is not None}


def _process(pid: int) -> UserProcess | None:
    folder = Path(f"/proc/{pid}")
    try:
        if folder.stat().st_uid != os.getuid():
            return None
        words = (folder / "cmdline").read_bytes().split(b"\0")
        variables = (folder / "environ").read_bytes().split(b"\0")
    except OSError:  # it has ended, or may not be looked at
        return None
    fields = guardian.stat_fields(pid)
    if fields is None or fields[0] in "ZX":
        return None
    marks = [value.removeprefix(MARK) for value in variables if value.startswith(MARK)]
    is_guardian = any(word.endswith(_GUARDIANS) for word in words[:5])
    guards = [word for word in words if word][-1] if is_guardian else b""
    return UserProcess(
        pid, fields[19], int(fields[1]), int(fields[3]), _folder_of(marks), _folder_of([guards])
    )


def _folder_of(named: list[bytes]) -> str:
    """The run's folder that is named; "" where it is none in TMPDIR, such as another job's."""
    folder = os.fsdecode(named[0]) if named else ""
    path = Path(folder)
    return folder if path.name.startswith("run-") and path.parent == run_dir.place() else ""


def _shm_files(
    processes: Iterable[Process], noted: dict[int, str], all_processes: dict[int, UserProcess]
) -> tuple[str, ...]:
    """Files that processes of a dead run use alone, or that its ranks have left.

    torch names its own after the process, torch_PID_...; the maker of another file is only
    known while a process uses it.
    """
    pids = {process.pid for process in processes}
    used = {path for pid in pids for path in _shm_paths(pid)}
    makers = pids | {pid for pid in noted if guardian.start_ticks(pid) is None}
    with contextlib.suppress(OSError):
        for path in SHM.iterdir():
            words = path.name.split("_")
            if words[0] == "torch" and len(words) > 2 and words[1].isdigit():
                used |= {str(path)} if int(words[1]) in makers else set()
    candidates = {path for path in used if _is_own_file(Path(path))}
    if candidates:
        for pid in all_processes.keys() - pids:
            candidates -= _shm_paths(pid)
    return tuple(sorted(candidates))


def _is_own_file(path: Path) -> bool:
    try:
        status = path.lstat()
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid()


def _shm_paths(pid: int) -> set[str]:
    """The paths in /dev/shm that a process has mapped or open."""
    folder, prefix = Path(f"/proc/{pid}"), f"{SHM}/"
    paths: set[str] = set()
    with contextlib.suppress(OSError):
        lines = (folder / "maps").read_text(errors="surrogateescape").splitlines()
        paths |= {line[line.index(prefix) :] for line in lines if prefix in line}
    with contextlib.suppress(OSError):
        for link in (folder / "fd").iterdir():
            with contextlib.suppress(OSError):
                paths.add(os.readlink(link))  # noqa: PTH115  # may be no path: socket:[1]
    return {path for path in paths if path.startswith(prefix) and not path.endswith(" (deleted)")}
