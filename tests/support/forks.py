"""Python processes that begin with torch imported: forks of one that has imported it once.

A fork is a process of its own with an own environment, as one that was started; what it does not
show is the import itself. Every name has a server of its own, so strings hash differently in the
forks of each, as they do in any two processes.

Run as a program, this file is such a server: `forks.py LISTENING_DESCRIPTOR MODULE...`.
"""

from __future__ import annotations

import errno
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import types
import uuid
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

POLL_S = 0.005
START_S = 120.0
GREETING = b"\n"


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
    """A process that has imported modules and forks when it is asked.

    It ends with the last process that is connected to it.
    """

    def __init__(self, modules: tuple[str, ...], env: Mapping[str, str], name: str = "") -> None:
        """Connect to it, once the modules are imported.

        Args:
            modules: To be imported before the first fork.
            env: The environment in which they are imported; forks have their own.
            name: Whoever gives the same name, in another process too, has the same server.
        """
        self._process: subprocess.Popen[bytes] | None = None
        self._is_shared = bool(name)
        address = f"\0nbdist-forks-{name or uuid.uuid4().hex}"  # no file: it ends with the socket
        while (connection := _connected(address)) is None:
            with socket.socket(socket.AF_UNIX) as listener:
                if _is_ours(listener, address):
                    self._process = _start(listener, modules, env)
        self._connection = connection
        self._answers = connection.makefile()

    def fork(self, text: str, env: Mapping[str, str], log: Path) -> Forked:
        """Run a text as the main module of a fork, as `python -W ignore -c` would.

        Args:
            text: Python.
            env: All of the fork's environment.
            log: Where its stdout and stderr go, after what is there. `<log>.PID` will hold its
                exit code.

        Raises:
            AssertionError: If the server has ended.
            TimeoutError: If it does not answer.
        """
        request = {"text": text, "env": dict(env), "log": str(log)}
        self._connection.sendall(json.dumps(request).encode() + b"\n")
        line = self._answers.readline()
        assert line, "the server of forks has ended"
        pid = int(line)
        return Forked(pid, _end_file(log, pid))

    def stop(self) -> None:
        """Leave it, and end it unless others are connected; forks go on."""
        self._answers.close()
        self._connection.close()
        if self._process is not None and not self._is_shared:
            self._process.wait(START_S)


def _connected(address: str) -> socket.socket | None:
    """A connection to a server that has greeted; None where there is none, or it just ends."""
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(START_S)
    try:
        connection.connect(address)
        if connection.recv(len(GREETING)):
            return connection
    except (ConnectionRefusedError, ConnectionResetError):
        pass
    connection.close()
    return None


def _is_ours(listener: socket.socket, address: str) -> bool:
    """Whether nobody has the address before us."""
    try:
        listener.bind(address)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        return False
    listener.listen()
    return True


def _start(
    listener: socket.socket, modules: tuple[str, ...], env: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", str(Path(__file__).resolve()), str(listener.fileno()),
         *modules],
        env=dict(env), pass_fds=[listener.fileno()],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
    )  # fmt: skip


def _end_file(log: Path, pid: int) -> Path:
    return log.with_name(f"{log.name}.{pid}")


def serve(listener: socket.socket, modules: list[str]) -> dict[str, Any] | None:
    """Fork for each line of a connection, until all are closed.

    Returns:
        In a fork, what it was asked for; None in the server.
    """
    for name in modules:
        import_module(name)
    # At its end an interpreter looks at every object; in a fork of torch that copies pages for 1 s.
    gc.freeze()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return _Service(listener).run()


class _Service:
    """The server's connections and forks, once all is imported."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._connections: dict[socket.socket, _Lines] = {}
        self._ends: dict[int, Path] = {}
        self._ended = socket.socketpair()
        for end in self._ended:
            end.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._ended[1].fileno())

    def run(self) -> dict[str, Any] | None:
        """As `serve`."""
        self._accept()
        while self._connections:
            waiting = [self._listener, self._ended[0], *self._connections]
            for ready in select.select(waiting, [], [])[0]:
                if ready is self._listener:
                    self._accept()
                elif ready is self._ended[0]:
                    ready.recv(4096)
                    _reap(self._ends)
                elif (request := self._answer(ready)) is not None:
                    return request
        return None

    def _accept(self) -> None:
        connection = self._listener.accept()[0]
        self._connections[connection] = _Lines(connection)
        connection.sendall(GREETING)

    def _answer(self, connection: socket.socket) -> dict[str, Any] | None:
        """Fork for each line that has come; in a fork what it was asked for."""
        lines = self._connections[connection]
        for line in lines.read():
            request = json.loads(line)
            # No thread is copied: a lock that one holds would be held in the fork for ever.
            assert len([*Path("/proc/self/task").iterdir()]) == 1, "an import has started a thread"
            if not (pid := os.fork()):
                _become(request, [self._listener, *self._ended, *self._connections])
                return dict(request)
            self._ends[pid] = _end_file(Path(request["log"]), pid)
            connection.sendall(b"%d\n" % pid)
        if lines.is_over:
            del self._connections[connection]
            connection.close()
        return None


class _Lines:
    """Whole lines of a connection that is read when it is ready."""

    def __init__(self, connection: socket.socket) -> None:
        self.is_over = False
        self._connection = connection
        self._rest = b""

    def read(self) -> list[bytes]:
        """Those that have come."""
        data = self._connection.recv(1 << 20)
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


def _become(request: Mapping[str, Any], sockets: list[socket.socket]) -> None:
    """Make a fork what a new process is."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for end in sockets:
        end.close()
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
    opened = socket.socket(fileno=int(sys.argv[1]))
    if (wanted := serve(opened, sys.argv[2:])) is not None:
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(wanted["text"], "<string>", "exec"), vars(main))
