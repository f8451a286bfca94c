"""A run of ranks as its folder tells of it: whose it is, and whether that notebook still lives."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from nbdist.core.host import Machine

# The file of a run's folder that says whose it is.
FILE = "owner.json"

RUNNING = "running"
STOPPED = "stopped"
DEAD = "dead"
ELSEWHERE = "elsewhere"
UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class RunOwner:
    """The kernel that has started a run.

    Attributes:
        start: When it started, in clock ticks: a pid that was used again differs in it. Empty
            where the system does not tell.
        since_s: When it made the run, in Unix time.
        where: Its notebook, or the folder that it worked in.
    """

    pid: int
    start: str
    machine: Machine
    since_s: float
    where: str


def read(path: Path) -> RunOwner:
    """The owner that a file names.

    Raises:
        OSError: It cannot be read.
        ValueError, TypeError, KeyError: It is no owner's, or is still being written.
    """
    written = json.loads(path.read_text(encoding="utf-8"))
    return RunOwner(**{**written, "machine": Machine(**written["machine"])})


@dataclass(frozen=True, slots=True)
class Process:
    """A process of a run, by its id and when it started, in clock ticks."""

    pid: int
    start: str


@dataclass(frozen=True, slots=True)
class Run:
    """What was found of one run.

    Attributes:
        state: RUNNING; STOPPED (by `nbdist stop`, and its notebook lives); DEAD; ELSEWHERE
            (another host's or container's); UNKNOWN (nobody is written down as its owner).
        hosts: Of each rank; empty before they are up.
        processes: Those of this machine, in order of their pids; a living kernel and its guardian
            are not among them.
        shm_files: In /dev/shm, of this run and nobody else; only looked for where it is dead.
        has_folder: The folder is there; processes alone may be left of a run.
    """

    folder: str
    state: str
    owner: RunOwner | None = None
    hosts: tuple[str, ...] = ()
    processes: tuple[Process, ...] = ()
    shm_files: tuple[str, ...] = ()
    has_folder: bool = True

    @property
    def name(self) -> str:
        """The folder's own name."""
        return self.folder.rstrip("/").rsplit("/", 1)[-1]


def state(owner: RunOwner | None, here: Machine, start_now: str | None) -> str:
    """Whether a run's kernel lives: RUNNING, DEAD, ELSEWHERE or UNKNOWN.

    What cannot be told for certain is never DEAD: dead runs are removed. `start_now` is when the
    process that has the owner's pid here started, None without one, empty where the system does not
    tell.
    """
    if owner is None:
        return UNKNOWN
    if owner.machine == here:
        is_it = start_now is not None and start_now == owner.start
        return RUNNING if is_it else DEAD
    # The same machine, started again; a container has a name and a pid space of its own.
    has_boot_ids = bool(here.boot and owner.machine.boot)
    is_rebooted = (owner.machine.host, owner.machine.pid_space) == (here.host, here.pid_space)
    return DEAD if has_boot_ids and is_rebooted else ELSEWHERE
