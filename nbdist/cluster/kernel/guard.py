"""The kernel's side of the guardian: started first, given every process, closed last."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from nbdist.cluster.agent.guardian import TAKEN, hold_of, is_held_by_another, start_ticks
from nbdist.cluster.kernel import run_dir as cluster_run_dir
from nbdist.cluster.kernel.launchers.helper_process import HelperProcess

PROGRAM = Path(__file__).resolve().parents[1] / "agent" / "guardian.py"
CLOSE_DEADLINE_S = 5.0
SHORT_LIFE_S = 0.5


class Guardian(HelperProcess):
    """The process of one guardian."""

    keeps_words = False

    def __init__(self, run_dir: Path, on_end: Callable[[int], object]):
        """Start it; `on_end` is called with its exit code."""
        self._on_end = on_end
        words = [sys.executable, "-I", "-S", str(PROGRAM), str(os.getpid()), str(run_dir)]
        super().__init__("guardian", words, os.environ)

    def _take_end(self) -> None:
        self._lose("it has ended")
        self._on_end(self._process.wait())


class Guard:
    """A guardian process for one run; replaced by a new one if it is killed.

    Attributes:
        sessions: The processes that lead the sessions to end: pid -> start time, as a pid alone,
            told to a later guardian, may be a stranger's.
        on_taken: Called, in a thread of its own, when another kernel has taken the run.
    """

    def __init__(self, run_dir: Path):
        """Start the guardian, and give it the notes of a run that is there already."""
        self.on_taken: Callable[[], object] = lambda: None
        self._run_dir = run_dir
        self.sessions = cluster_run_dir.pids(run_dir)
        self._orders: dict[str, Any] = {
            "sessions": self.sessions,
            "command": cluster_run_dir.command(run_dir),
            "keep_s": 0.0,
            "hold": "",
        }
        self._is_closing = False
        self._lock = threading.Lock()
        self._start()

    @property
    def pid(self) -> int:
        """The guardian's process id."""
        return self._guardian.pid

    @property
    def is_taken(self) -> bool:
        """Whether another kernel holds the run; the guardian reports it with a delay."""
        is_kept, hold = bool(self._orders["keep_s"]), self._orders["hold"]
        return is_kept and is_held_by_another(str(self._run_dir), hold)

    def watch(self, pid: int) -> None:
        """End this process's session too when the kernel goes."""
        with self._lock:
            self.sessions[pid] = start_ticks(pid) or ""
            cluster_run_dir.note_pid(self._run_dir, pid, self.sessions[pid])
            self._tell()

    def promise(self, command: Sequence[str]) -> None:
        """Let this command end processes elsewhere when the kernel goes; empty for no command.

        It is noted in the run's folder too, for a process that ends the run from outside.
        """
        with self._lock:
            cluster_run_dir.note_command(self._run_dir, command)
            self._tell(command=list(command))

    def keep(self, seconds: float) -> None:
        """Let the ranks of this kernel's run go on so long without it; 0 for not."""
        with self._lock:
            self._tell(keep_s=seconds, hold=hold_of(str(self._run_dir)))

    def leave(self) -> None:
        """Leave the ranks to the guardian, which keeps them as `keep` has set."""
        with self._lock:
            self._is_closing = True
            self._guardian.hang_up()

    def close(self) -> bool:
        """End everything that is left of the run now; True when the guardian has finished."""
        with self._lock:
            self._is_closing = True
        end_s = time.monotonic() + CLOSE_DEADLINE_S
        try:
            # Not 0: it was killed and not replaced yet, so the work is still to be done.
            while self._guardian.say_stop(end_s - time.monotonic()) not in {0, TAKEN}:
                with self._lock:
                    self._start()
        except subprocess.TimeoutExpired:
            return False
        return True

    def _start(self) -> None:
        self._began_s = time.monotonic()
        self._guardian = Guardian(self._run_dir, self._take_end)
        self._tell()

    def _tell(self, **changed: Any) -> None:
        self._orders.update(changed)
        self._guardian.tell(**self._orders)

    def _take_end(self, code: int) -> None:
        if code == TAKEN and not self._is_closing:
            self._is_closing = True
            self.on_taken()
            return
        if time.monotonic() - self._began_s < SHORT_LIFE_S:
            time.sleep(SHORT_LIFE_S)  # one that cannot start must not be tried without a pause
        with self._lock:
            if not self._is_closing:
                self._start()
