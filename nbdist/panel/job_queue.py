"""Jobs of the panel: queued, under way, done, and a log of all of them.

Any thread may ask; one takes what is due. No clock but the one that is given, no widgets.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass

from nbdist.panel.state import BUTTONS, LogEntry

LOG_LINES = 200


@dataclass(frozen=True, slots=True)
class PanelJob:
    """A button that was pressed, as the magic that does the same.

    Attributes:
        line: What stands behind the magic's name, where that is more than is worth showing.
    """

    name: str
    typed: str
    line: str = ""


class JobQueue:
    """The queue and the log of one panel."""

    def __init__(self, clock_s: Callable[[], float] = time.time):
        self._clock_s = clock_s
        self._lock = threading.RLock()
        self._queue: deque[PanelJob] = deque()
        self._log: deque[LogEntry] = deque(maxlen=LOG_LINES)
        self._acting: PanelJob | None = None
        self._began_s = 0.0
        self._step = ""
        self._armed: list[str] = []

    def note(self, text: str, kind: str = "note") -> None:
        """Write a line into the log."""
        with self._lock:
            self._log.append(LogEntry(self._clock_s(), text, kind))

    @property
    def log(self) -> tuple[LogEntry, ...]:
        """The last LOG_LINES lines, oldest first."""
        with self._lock:
            return tuple(self._log)

    @property
    def queued(self) -> tuple[str, ...]:
        """Queued jobs, as they would be typed."""
        with self._lock:
            return tuple(job.typed for job in self._queue)

    @property
    def acting(self) -> str:
        """Job under way, with its last step and since when; "" for none."""
        with self._lock:
            if self._acting is None:
                return ""
            took_s = self._clock_s() - self._began_s
            step = f": {self._step}" if self._step else ""
            return f"{self._acting.typed}{step} ({took_s:.0f} s)"

    @property
    def armed(self) -> tuple[str, ...]:
        """Buttons armed for the next cell on ranks: their names, in order."""
        with self._lock:
            return tuple(self._armed)

    def ask(self, job: PanelJob, cell: str) -> bool:
        """Queue a job; whether there is something new to do.

        One that waits already, or is under way, is not queued twice; of strategies to apply the
        newest counts. The cell, such as `cell [4]`, has to end first; "" where none runs.
        """
        with self._lock:
            if job == self._acting:
                self.note(f"{job.typed} is already under way")
                return False
            if job in self._queue:
                self.note(f"{job.typed} is already queued")
                return False
            for replaced in [
                queued for queued in self._queue if queued.name == job.name == "apply"
            ]:
                self._queue.remove(replaced)
                self.note(f"{replaced.typed} is removed from the queue: {job.typed} replaces it")
            self._queue.append(job)
            if cell:
                self.note(f"{job.typed} is queued until {cell} ends; Cancel queued removes it")
            elif self._acting is not None:
                self.note(f"{job.typed} is queued behind {self._acting.typed}")
            return True

    def take(self) -> PanelJob | None:
        """The job that is due, under way from now on; None while another one is, or for none."""
        with self._lock:
            if self._acting is not None or not self._queue:
                return None
            self._acting, self._step = self._queue.popleft(), ""
            self._began_s = self._clock_s()
            self.note(f"{self._acting.typed} begins")
            return self._acting

    def progress(self, text: str) -> None:
        """Note what the job under way waits for."""
        with self._lock:
            self._step = text

    def finish(self, text: str, kind: str = "done") -> None:
        """The job under way has come to this."""
        with self._lock:
            if self._acting is None:
                return
            typed, took_s = self._acting.typed, self._clock_s() - self._began_s
            self._acting = None
            self.note(f"{typed} ({took_s:.1f} s): {text}", kind)

    def drop(self, why: str, keep: Collection[str] = ()) -> int:
        """Take back all that is queued but these buttons' jobs; how much it was."""
        with self._lock:
            dropped = [job for job in self._queue if job.name not in keep]
            for job in dropped:
                self._queue.remove(job)
                self.note(f"{job.typed} is removed from the queue: {why}")
            return len(dropped)

    def arm(self, name: str) -> None:
        """Let something happen with the next cell, or no longer."""
        with self._lock:
            if name in self._armed:
                self._armed.remove(name)
                self.note(f"the next cell on ranks will no longer run as {BUTTONS[name].magic}")
                return
            self._armed[:] = [name]  # a cell is recorded in one way at a time
            self.note(f"the next cell on ranks will run as {BUTTONS[name].magic}")

    def disarm(self) -> str:
        """Disarm and return the armed button for the cell that begins now, and it alone; or ""."""
        with self._lock:
            return self._armed.pop() if self._armed else ""
