"""The saves of this rank's thread: their progress, and how they are stopped.

The control thread looks in here; nothing heavy is imported.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue

from nbdist.checkpoint.results import DONE, FAILED, RUNNING, Saved, Saving
from nbdist.errors import CheckpointError

# Between the last rename and the end of all that runs.
_JOIN_S = 2.0


class Cancelled(CheckpointError):
    """The save was stopped on request."""


class Meter:
    """The progress of a save on this rank, and the request to stop it.

    Attributes:
        done_bytes, total_bytes: Written and compared; each byte counts twice.
    """

    def __init__(self) -> None:
        self.phase = "beginning"
        self.done_bytes = 0
        self.total_bytes = 0
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._is_final = False
        self._why = ""

    @property
    def is_stopped(self) -> bool:
        """Whether a stop was requested."""
        return self._stop.is_set()

    def stop(self, why: str) -> bool:
        """Request a stop; the checkpoint will not be written. From any thread.

        Returns:
            False if it is too late: the checkpoint is being moved into place.
        """
        with self._lock:
            if not self._is_final:
                self._why = self._why or why
                self._stop.set()
            return not self._is_final

    def make_final(self) -> None:
        """After this it cannot be stopped. Raises Cancelled if a stop was requested."""
        with self._lock:
            self.check()
            self._is_final = True

    def check(self) -> None:
        """Raises Cancelled if a stop was requested."""
        if self._stop.is_set():
            raise Cancelled(self._why)

    def wait(self, pause_s: float) -> None:
        """Wait `pause_s`, or until a stop is requested."""
        self._stop.wait(pause_s)
        self.check()


@dataclass(slots=True)
class SaveJob:
    """One save on this rank, as the control thread sees it.

    Attributes:
        token: Names it, the same on all ranks.
        is_over: Set once nothing of it runs any more.
        saved: On rank 0, once it is in its place.
    """

    token: str
    path: str
    meter: Meter = field(default_factory=Meter)
    is_over: threading.Event = field(default_factory=threading.Event)
    failure: str = ""
    saved: Saved | None = None


_jobs: dict[str, SaveJob] = {}
# Work of the thread: one thread for all saves, as a new one begins after milliseconds.
_todo: SimpleQueue[tuple[SaveJob, Callable[[], None]]] = SimpleQueue()


def keep(job: SaveJob, run: Callable[[], None]) -> None:
    """Register a save as the current one, and let a thread run the rest of it.

    From here on that thread wants the interpreter for itself; `run` raises nothing.
    """
    _jobs.clear()
    _jobs[job.token] = job
    _thread()
    _todo.put((job, run))


@functools.cache
def _thread() -> threading.Thread:
    thread = threading.Thread(target=_work, name="nbdist-save", daemon=True)
    thread.start()
    return thread


def _work() -> None:
    while True:
        job, run = _todo.get()
        try:
            run()
        finally:
            job.is_over.set()
            del job, run  # what was saved is not held until the next one comes


def state(token: str) -> Saving:
    """The progress of a save on this rank. From any thread; no rank is met."""
    job = _jobs.get(token)
    if job is None:
        return Saving(FAILED, failure="this rank does not know this save: it was restarted since")
    is_running = not (job.is_over.is_set() or job.failure or job.saved)
    kind = RUNNING if is_running else FAILED if job.failure else DONE
    meter = job.meter
    return Saving(kind, meter.phase, meter.done_bytes, meter.total_bytes, job.failure, job.saved)


def stop(token: str, why: str) -> bool:
    """Stop a save that is still running. From any thread.

    Returns:
        Whether it will stop: on rank 0, that the checkpoint will not be written.
    """
    job = _jobs.get(token)
    return job is None or (job.saved is None and job.meter.stop(why))


def wait(token: str) -> Saving:
    """Wait until a save is over on this rank. No rank is met."""
    _jobs[token].is_over.wait()
    return state(token)


def refuse_if_running() -> None:
    """Raises a CheckpointError while a save is going on."""
    for job in _jobs.values():
        is_ending = state(job.token).state != RUNNING or job.meter.is_stopped
        if not job.is_over.wait(_JOIN_S if is_ending else 0.0):
            raise CheckpointError(
                f"{job.path} is still being saved ({job.meter.phase}). Wait until it is done."
            )
