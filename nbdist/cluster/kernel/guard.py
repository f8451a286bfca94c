"""The kernel's side of the guardian: started first, given every process, closed last."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from nbdist.cluster.agent.guardian import TAKEN, is_held_by_another, start_ticks
from nbdist.cluster.kernel import run_dir as cluster_run_dir

PROGRAM = Path(__file__).resolve().parents[1] / "agent" / "guardian.py"
CLOSE_DEADLINE_S = 5.0
SHORT_LIFE_S = 0.5


class Guard:
    """A guardian process for one run; replaced by a new one if it is killed.

    Attributes:
        on_taken: Called, in a thread of its own, when another kernel has taken the run.
    """

    def __init__(self, run_dir: Path):
        """Start the guardian, and give it the notes of a run that is there already."""
        self.on_taken: Callable[[], object] = lambda: None
        self._run_dir = run_dir
        # With start times: by then a pid alone, given to a later guardian, may be a stranger's.
        self._pids = list(cluster_run_dir.pids(run_dir).items())
        self._command = tuple(cluster_run_dir.command(run_dir))
        self._keep: tuple[float, str] = 0.0, ""
        self._is_closing = False
        self._lock = threading.Lock()
        self._process = self._start()
        self._tell_all()

    @property
    def pid(self) -> int:
        """The guardian's process id."""
        return self._process.pid

    @property
    def is_taken(self) -> bool:
        """Whether another kernel holds the run; the guardian reports it with a delay."""
        seconds, hold = self._keep
        return bool(seconds) and is_held_by_another(str(self._run_dir), hold)

    def watch(self, pid: int) -> None:
        """End this process's session too when the kernel goes."""
        with self._lock:
            self._pids.append((pid, start_ticks(pid) or ""))
            cluster_run_dir.note_pid(self._run_dir, *self._pids[-1])
            self._tell(*self._pids[-1])

    def promise(self, command: Sequence[str]) -> None:
        """Let this command end processes elsewhere when the kernel goes; empty for no command.

        It is noted in the run's folder too, for a process that ends the run from outside.
        """
        with self._lock:
            self._command = tuple(command)
            cluster_run_dir.note_command(self._run_dir, self._command)
            self._tell_command()

    def keep(self, seconds: float, hold: str) -> None:
        """Let the ranks go on this many seconds without a kernel; 0 for not. `hold` is our mark."""
        with self._lock:
            self._keep = seconds, hold
            self._tell_keep()

    def leave(self) -> None:
        """Leave the ranks to the guardian, which keeps them as `keep` has set."""
        with self._lock:
            self._is_closing = True
            assert self._process.stdin is not None
            self._process.stdin.close()

    def close(self) -> bool:
        """End everything that is left of the run now; True when the guardian has finished."""
        with self._lock:
            self._is_closing = True
        end_s = time.monotonic() + CLOSE_DEADLINE_S
        try:
            # Not 0: it was killed and not replaced yet, so the work is still to be done.
            while self._close_one(end_s) not in {0, TAKEN}:
                with self._lock:
                    self._restart()
        except subprocess.TimeoutExpired:
            return False
        return True

    def _close_one(self, end_s: float) -> int:
        # Said in words: a child that the user's code has forked may hold the pipe open.
        self._write("stop\n")
        assert self._process.stdin is not None
        self._process.stdin.close()
        return self._process.wait(max(0.0, end_s - time.monotonic()))

    def _start(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(  # noqa: S603  # our own program
            [sys.executable, "-I", "-S", str(PROGRAM), str(os.getpid()), str(self._run_dir)],
            stdin=subprocess.PIPE,
            bufsize=0,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            # Out of the kernel's process group: an interrupt is not for the guardian, and
            # whatever kills that group must not kill it.
            start_new_session=True,
        )
        threading.Thread(target=self._replace_when_killed, args=(process,), daemon=True).start()
        return process

    def _replace_when_killed(self, process: subprocess.Popen[bytes]) -> None:
        began_s = time.monotonic()
        if process.wait() == TAKEN and not self._is_closing:
            self._is_closing = True
            self.on_taken()
            return
        if time.monotonic() - began_s < SHORT_LIFE_S:
            time.sleep(SHORT_LIFE_S)  # one that cannot start must not be tried without a pause
        with self._lock:
            if self._is_closing:
                return
            self._restart()

    def _restart(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process = self._start()
        self._tell_all()

    def _tell_all(self) -> None:
        for process in self._pids:
            self._tell(*process)
        self._tell_command()
        self._tell_keep()

    def _tell(self, pid: int, start: str) -> None:
        self._write(f"+{pid} {start}\n")

    def _tell_command(self) -> None:
        self._write("!" + "\0".join(self._command) + "\n")

    def _tell_keep(self) -> None:
        self._write("={:g} {}\n".format(*self._keep))

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line.encode())
        except BrokenPipeError:
            return  # killed just now: the next guardian is told of everything
