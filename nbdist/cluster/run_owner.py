"""A run of ranks as its folder describes it: whose it is, and whether that notebook still lives."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from nbdist.core.host import Machine

# The files of a run's folder that say whose it is, for how long its ranks are kept without a
# notebook, and since when they have none.
FILE, KEEP, DETACHED = "owner.json", "keep.json", "detached.json"
# A copy, read where the first is damaged: a run that seems not to be kept is removed.
KEEP_COPY = "keep.copy.json"

# A guardian ends ranks this long after their time at the latest, but while it saves.
LATE_S = 1800.0

RUNNING = "running"
STOPPED = "stopped"
KEPT = "kept"
DEAD = "dead"
ELSEWHERE = "elsewhere"
UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class RunOwner:
    """The kernel that has started a run.

    Attributes:
        start: When it started, in clock ticks: a pid that was used again differs in it. Empty
            where the system does not say.
        since_s: When it made the run, in Unix time.
        where: The kernel's notebook, or the folder that it worked in.
        hold: A new mark for each time that a kernel takes the run.
    """

    pid: int
    start: str
    machine: Machine
    since_s: float
    where: str
    hold: str = ""


def read(path: Path) -> RunOwner:
    """The owner that a file names.

    Raises:
        OSError: It cannot be read.
        ValueError, TypeError, KeyError: It is no owner's, or is still being written.
    """
    written = json.loads(path.read_text(encoding="utf-8"))
    return RunOwner(**{**written, "machine": Machine(**written["machine"])})


@dataclass(frozen=True, slots=True)
class Keep:
    """How long ranks go on without their notebook, and who can attach to them.

    Attributes:
        keep_s: How long they are kept.
        save: Path of the checkpoint that is written at the end of that time; empty for none.
        at_end: The command that writes it.
        version: nbdist's version: another one may not understand the rest of the folder.
        python: Path of the interpreter that the ranks run.
        since_s: When the ranks were started, in Unix time.
        gpus: The name of each GPU that they use; empty on the CPU.
    """

    keep_s: float
    save: str
    at_end: tuple[str, ...]
    version: str
    python: str
    since_s: float = 0.0
    gpus: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Detachment:
    """Since when a run has no notebook, and until when its ranks go on, in Unix time.

    Attributes:
        pid: The guardian that ends them then.
    """

    since_s: float
    until_s: float
    pid: int


@dataclass(frozen=True, slots=True)
class Process:
    """A process of a run, by its id and when it started, in clock ticks."""

    pid: int
    start: str


@dataclass(frozen=True, slots=True)
class Run:
    """The state and the remains of one run.

    Attributes:
        state: RUNNING; STOPPED (by `nbdist stop`, and its notebook lives); KEPT (without its
            notebook); DEAD; ELSEWHERE (another host's or container's); UNKNOWN (nobody is written
            down as its owner).
        hosts: The host of each rank; empty before they are up.
        processes: Processes of this machine, by pid; a living kernel and its guardian
            are not among them.
        shm_files: Files in /dev/shm of this run alone; only looked for where it is dead.
        has_folder: The folder is there; processes alone may be left of a run.
        keep: How ranks are kept that outlive their notebook.
        detachment: Since when they are without it.
    """

    folder: str
    state: str
    owner: RunOwner | None = None
    hosts: tuple[str, ...] = ()
    processes: tuple[Process, ...] = ()
    shm_files: tuple[str, ...] = ()
    has_folder: bool = True
    keep: Keep | None = None
    detachment: Detachment | None = None

    @property
    def name(self) -> str:
        """The folder's own name."""
        return self.folder.rstrip("/").rsplit("/", 1)[-1]


def state(owner: RunOwner | None, here: Machine, start_now: str | None) -> str:
    """Whether a run's kernel lives: RUNNING, DEAD, ELSEWHERE or UNKNOWN.

    A run whose state is not certain is never DEAD: dead runs are removed. `start_now` is when the
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


def is_kept(
    state_of_owner: str, keep: Keep | None, detachment: Detachment | None, now_s: float
) -> bool:
    """Whether a run's ranks go on though its kernel has gone; `now_s` in Unix time.

    For a kernel on another machine this is known once the guardian there has written it down.
    """
    if keep is None or not keep.keep_s:
        return False
    if detachment is None:
        return state_of_owner == DEAD
    # A guardian that still saves, or was killed, is given some time.
    return state_of_owner != STOPPED and now_s < detachment.until_s + LATE_S
