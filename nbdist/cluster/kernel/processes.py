"""The processes of one run: which are this kernel's own, how they end, and are ended."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from ipyparallel.cluster.launcher import LocalProcessLauncher, SSHLauncher

from nbdist.cluster.kernel import guardian

POLL_S = 0.01
# No process has this in its environment: variables have an equals sign.
NO_MARKER = b"NBDIST_RUN"


# What becomes of ranks whose controller has ended.
WITHOUT_CONTROLLER = (
    "The ranks go on and keep their variables, but what they print and reply now is lost. The "
    "next cell starts another controller."
)


@dataclass(frozen=True, slots=True)
class Exit:
    """The end of one of the cluster's processes.

    Attributes:
        engine: The engine, or None for the controller.
        code: Its exit code, negative for a signal; None where it cannot be known.
        unreachable: That its host cannot be reached, and why: it may live on there, but is lost.
        starter: "mpiexec", which had started all engines as one and has ended with them; the code
            is its own then. Empty otherwise.
        words: What it said of that.
    """

    engine: int | None
    code: int | None
    unreachable: str = ""
    starter: str = ""
    words: str = ""

    @property
    def how(self) -> str:
        """`exit code 1`, `signal SIGKILL`."""
        if self.unreachable:
            return self.unreachable
        if self.starter:
            return f"{self.starter} ended all ranks, {self._code}" + (
                f': "{self.words}"' if self.words else ""
            )
        return self._code

    @property
    def _code(self) -> str:
        if self.code is None:
            return "unknown exit code"
        if self.code >= 0:
            return f"exit code {self.code}"
        try:
            return f"signal {signal.Signals(-self.code).name}"
        except ValueError:
            return f"signal {-self.code}"


def is_own(candidate: Any) -> bool:
    """Whether this launcher's process is a child of this kernel (SSH's pids are elsewhere)."""
    return (
        isinstance(candidate, LocalProcessLauncher)
        and not isinstance(candidate, SSHLauncher)
        and candidate.pid > 0
    )


def terminate(pids: list[int], grace_s: float) -> None:
    """Ask processes to end, and wait for that until `grace_s` is over."""
    processes = []
    for pid in pids:
        try:
            process = psutil.Process(pid)
            process.terminate()
        except psutil.NoSuchProcess:
            continue
        processes.append(process)
    psutil.wait_procs(processes, timeout=grace_s)


def end_session(pid: int, start: str, deadline_s: float) -> bool:
    """Kill a process that leads its session, and whatever else is in that session.

    The leader may have ended already: a stranger with its pid that did not start then
    (`guardian.start_ticks`) is spared. False where something was still there at the deadline.
    """
    if not Path("/proc/self").is_dir():  # macOS: no list of sessions
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
        return True
    end_s = time.monotonic() + deadline_s
    while members := guardian.members({pid: start}, NO_MARKER):
        if time.monotonic() > end_s:
            return False
        for member in members:
            with contextlib.suppress(ProcessLookupError):
                os.kill(member, signal.SIGKILL)
        time.sleep(POLL_S)
    return True
