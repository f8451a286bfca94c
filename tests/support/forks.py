"""Python processes that begin with torch imported: forks of one that has imported it once.

A fork is a process of its own with an own environment, as one that was started; what it does not
show is the import itself. Every name has a server of its own, so strings hash differently in the
forks of each, as they do in any two processes.

Run as a program, this file is such a server.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import subprocess
import sys
import time
import types
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import IO, Any

POLL_S = 0.005
START_S = 120.0


class Forked:
    """A running fork, with the methods of a Popen that ranks need."""

    def __init__(self, pid: int, end: Path) -> None:
        self.pid = pid
        self._end = end

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        return int(self._end.read_text()) if self._end.exists() else None

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, once it has ended. Raises TimeoutExpired as Popen does."""
        until_s = time.monotonic() + (START_S if timeout is None else timeout)
        while (code := self.poll()) is None:
            if time.monotonic() > until_s:
                raise subprocess.TimeoutExpired(f"fork {self.pid}", timeout or START_S)
            time.sleep(POLL_S)
        return code

    def send_signal(self, number: int) -> None:
        """Harmless once it has ended. Its number is its own until `poll` has the exit code."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """A process that has imported modules and forks when it is asked. Ends with this process."""

    def __init__(self, modules: tuple[str, ...], env: Mapping[str, str]) -> None:
        """Start it; the modules are imported meanwhile.

        Args:
            modules: To be imported before the first fork.
            env: The environment in which they are imported; forks have their own.
        """
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", str(Path(__file__).resolve()), *modules],
            env=dict(env),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def fork(self, text: str, env: Mapping[str, str], log: Path) -> Forked:
        """Run a text as the main module of a fork, as `python -W ignore -c` would.

        Args:
            text: Python.
            env: All of the fork's environment.
            log: Where its stdout and stderr go, after what is there. `<log>.PID` will hold its
                exit code.

        Raises:
            AssertionError: If the server has ended or does not answer.
        """
        stdin, stdout = _of(self._process.stdin), _of(self._process.stdout)
        stdin.write(json.dumps({"text": text, "env": dict(env), "log": str(log)}) + "\n")
        stdin.flush()
        assert select.select([stdout], [], [], START_S)[0], "the server of forks does not answer"
        line = stdout.readline()
        assert line, f"the server of forks has ended ({self._process.wait()})"
        pid = int(line)
        return Forked(pid, _end_file(log, pid))

    def stop(self) -> None:
        """End it; forks go on."""
        _of(self._process.stdin).close()
        _of(self._process.stdout).close()
        self._process.wait(START_S)


def _of(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None
    return pipe


def _end_file(log: Path, pid: int) -> Path:
    return log.with_name(f"{log.name}.{pid}")


def serve(modules: list[str]) -> dict[str, Any] | None:
    """Fork for each line of stdin, until it ends. What to run, in a fork; None in the server."""
    for name in modules:
        import_module(name)
    # At its end an interpreter looks at every object; in a fork of torch that copies pages for 1 s.
    gc.freeze()
    asked, ended = 0, os.pipe()
    for end in ended:
        os.set_blocking(end, False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(ended[1])
    ends: dict[int, Path] = {}
    lines = _Lines(asked)
    while not lines.is_over:
        ready = select.select([asked, ended[0]], [], [])[0]
        if ended[0] in ready:
            os.read(ended[0], 4096)
            _reap(ends)
        for line in lines.read() if asked in ready else ():
            request = json.loads(line)
            # No thread is copied: a lock that one holds would be held in the fork for ever.
            assert len([*Path("/proc/self/task").iterdir()]) == 1, "an import has started a thread"
            if not (pid := os.fork()):
                _become(request, ended)
                return dict(request)
            ends[pid] = _end_file(Path(request["log"]), pid)
            print(pid, flush=True)  # noqa: T201  # the answer
    return None


class _Lines:
    """Whole lines of a descriptor that is read when it is ready."""

    def __init__(self, descriptor: int) -> None:
        self.is_over = False
        self._descriptor = descriptor
        self._rest = b""

    def read(self) -> list[bytes]:
        """Those that have come."""
        data = os.read(self._descriptor, 1 << 20)
        self.is_over = not data
        *lines, self._rest = (self._rest + data).split(b"\n")
        return lines


def _reap(ends: dict[int, Path]) -> None:
    """Write exit codes down, each before the process's number can be another's."""
    for pid, path in list(ends.items()):
        state = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if state is None:
            continue
        is_killed = state.si_code != os.CLD_EXITED
        if path.parent.exists():  # else nobody asks for it
            whole = path.with_suffix(".tmp")
            whole.write_text(str(-state.si_status if is_killed else state.si_status))
            whole.rename(path)
        os.waitpid(pid, 0)
        del ends[pid]


def _become(request: Mapping[str, Any], ended: tuple[int, int]) -> None:
    """Make a fork what a new process is."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for end in ended:
        os.close(end)
    log = os.open(request["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    null = os.open(os.devnull, os.O_RDONLY)
    for descriptor, place in ((null, 0), (log, 1), (log, 2)):
        os.dup2(descriptor, place)
    os.close(log)
    os.close(null)
    os.environ.clear()
    os.environ.update(request["env"])
    sys.argv[:] = ["-c"]


if __name__ == "__main__":
    sys.path[0] = ""  # as with -c: this folder's names are no top-level modules
    if (wanted := serve(sys.argv[1:])) is not None:
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(wanted["text"], "<string>", "exec"), vars(main))
