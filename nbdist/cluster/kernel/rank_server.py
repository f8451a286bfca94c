"""The kernel's side of the process that forks this notebook's ranks (engine/fork_server.py).

One per kernel. It begins with `%load_ext nbdist`, or with the first ranks, and goes on until the
kernel ends or it has had no request for ten minutes. Ranks do not need it any more once they run.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import psutil

from nbdist.cluster import nccl_env
from nbdist.cluster.kernel.launchers.helper_process import HelperProcess
from nbdist.core import host
from nbdist.core.exit_cause import exit_words
from nbdist.errors import StartError

PROGRAM = Path(__file__).resolve().parents[2] / "engine" / "fork_server.py"
FORK, PRELOAD, MARK = "NBDIST_FORK", "NBDIST_PRELOAD", "NBDIST_RUN"
# A fork's text in /proc has to fit into the arguments and environment of the server.
ROOM = "NBDIST_ROOM"
ROOM_IN_ARGS, ROOM_IN_ENVIRON = 2048, 16384
# All imports, on a busy machine or a slow file system.
IMPORT_DEADLINE_S = 90.0
FORK_DEADLINE_S = 30.0
ORPHAN_POLL_S = 0.1
NO_ROOM = {errno.EAGAIN, errno.ENOMEM}


class ServerError(Exception):
    """The server does not fork; the message says why, as a sentence without its full stop."""


class ForkedProcess:
    """A rank's process, which is the server's child; as much of psutil.Process as launchers use."""

    def __init__(self, pid: int):
        self.pid = pid
        self._start = host.started(pid)
        self._code: int | None = None
        self._ended = threading.Event()

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait for the exit code, negative for a signal; None where it is not known.

        Raises:
            psutil.TimeoutExpired: If it still runs.
        """
        if not self._ended.wait(timeout):
            raise psutil.TimeoutExpired(timeout, self.pid)
        return self._code

    def is_running(self) -> bool:
        """Whether it has not ended, as far as was reported."""
        return not self._ended.is_set()

    def send_signal(self, number: int) -> None:
        """Harmless once it has ended."""
        if self.is_running():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def note_end(self, code: int | None) -> None:
        """It has ended."""
        self._code = code
        self._ended.set()

    def note_orphan_end(self) -> None:
        """Note its end if it has ended, where its parent can report no more."""
        if self._start is None or host.started(self.pid) != self._start:
            self.note_end(None)


class RankServer(HelperProcess):
    """A running server; of this process alone, not of its forks."""

    lost_error = ServerError
    keeps_words = False

    def __init__(self, env: Mapping[str, str]):
        """Start the server; it imports at low priority until a start waits for it.

        Raises:
            OSError: If the system refuses another process.
        """
        self._forks: dict[int, ForkedProcess] = {}
        self.owner = os.getpid()
        self._code: int | None = None  # its exit code, once it has ended
        # Whether nothing is left to be imported: it forks at once.
        self.is_ready = False
        env = {**env, **nccl_env.at_import(env)}
        command = [sys.executable, "-P", str(PROGRAM), str(os.getpid()), " " * ROOM_IN_ARGS]
        super().__init__("rank-server", command, {**env, ROOM: " " * ROOM_IN_ENVIRON})
        self.ask("begin", env=env, sys_path=text_path())

    @property
    def end(self) -> str:
        """How the server ended if not on purpose; "" while it runs."""
        return exit_words(self._code) if self._code else ""

    @property
    def has_forks(self) -> bool:
        """Whether a fork of it still runs, as far as was reported."""
        return any(fork.is_running() for fork in list(self._forks.values()))

    async def check(self, env: Mapping[str, str], sys_path: Sequence[str]) -> dict[str, str]:
        """Whether forks would be what started ranks are, once the imports are done.

        Empty where they would; else why not: `outdated` for what another server would do right,
        `cannot` for the rest.

        Raises:
            ServerError: If it has ended, or does not answer in time.
        """
        env = {**env, **nccl_env.at_import(env)}
        asked = self.ask("check", env=env, sys_path=list(sys_path), cwd=_folder())
        try:
            return await asyncio.wait_for(asyncio.wrap_future(asked), IMPORT_DEADLINE_S)
        except TimeoutError as error:
            raise ServerError(self._late("had not imported torch", IMPORT_DEADLINE_S)) from error

    def fork(
        self, argv: Sequence[str], env: Mapping[str, str], cwd: str, output_file: str
    ) -> ForkedProcess:
        """A fork that goes on as this command would, in a session of its own.

        Raises:
            StartError: If the system refuses another process, or the server ends meanwhile.
            ServerError: If it must not fork, which it has looked at.
        """
        asked = self.ask(
            "fork",
            argv=list(argv),
            env=dict(env),
            cwd=os.path.abspath(cwd),  # noqa: PTH100  # of a folder that is gone too
            output_file=output_file,
            sys_path=text_path(),
            inherited=_inherited(),
        )
        try:
            answer = asked.result(FORK_DEADLINE_S)
        except TimeoutError as error:
            asked.add_done_callback(self._end_late_fork)
            raise ServerError(self._late("has not forked", FORK_DEADLINE_S)) from error
        if answer.get("errno") in NO_ROOM:
            raise StartError(f"no process could be forked ({answer['cannot']}{_limit(self.pid)})")
        if "pid" not in answer:
            raise ServerError(answer["cannot"])
        return self._forks[answer["pid"]]

    def close(self) -> None:
        """Let it end as soon as all of its forks have."""
        self.ask("end")

    def _late(self, what: str, deadline_s: float) -> str:
        return f"the server process {self.pid} {what} after {deadline_s:.0f} s"

    def _end_late_fork(self, asked: Future[dict[str, Any]]) -> None:
        """End a fork that no start waits for any more."""
        if asked.exception() is None and "pid" in asked.result():
            self._forks[asked.result()["pid"]].send_signal(signal.SIGKILL)

    def _take(self, event: str, content: dict[str, Any]) -> None:
        if event == "fork":  # before the answer: no end is told of one that is not known yet
            self._forks[content["pid"]] = ForkedProcess(content["pid"])
        elif event == "exit":
            self._forks[content["pid"]].note_end(content["code"])
        elif event == "ready":
            self.is_ready = content["is_ready"]

    def _take_end(self) -> None:
        self._code = self._process.wait()
        self._lose(f"the server process {self.pid} ended ({exit_words(self._code)})")
        while orphans := [fork for fork in list(self._forks.values()) if fork.is_running()]:
            for fork in orphans:
                fork.note_orphan_end()
            time.sleep(ORPHAN_POLL_S)


_server: RankServer | None = None
_lock = threading.Lock()
# Why the last start took another way; "" where ranks were forked.
_refusal = ""


def preload() -> None:
    """Start the server in the background, unless it runs or something speaks against it."""
    if os.environ.get(PRELOAD) == "0" or obstacle():
        return
    with contextlib.suppress(OSError):  # the start that needs it says so
        _current(dict(os.environ))


def obstacle() -> str:
    """Why no kernel forks ranks on this machine; "" where nothing is known."""
    if os.environ.get(FORK) == "0":
        return f"{FORK} is 0"
    if sys.platform != "linux":
        return f"only Linux forks a process that has torch safely, and this is {sys.platform}"
    return ""


async def obtain(env: Mapping[str, str], sys_path: Sequence[str]) -> RankServer | None:
    """The server, ready to fork ranks with this environment and path; None for the other way.

    Waits for its imports; `why_not` says why.
    """
    global _refusal  # noqa: PLW0603  # one per kernel, as the server
    _refusal = obstacle()
    for _ in range(2):
        if _refusal:
            return None
        server = None
        try:
            server = _current(_unmarked(env))
            verdict = await server.check(env, sys_path)
        except (ServerError, OSError) as error:
            _discard(server)
            _refusal = str(error)
            return None
        if not verdict:
            return server
        _refusal = verdict.get("cannot", "")
        if "failed" in verdict or "outdated" in verdict:
            _discard(server)  # not the next one, which whoever asks beside this may have made
    return None


def is_ready() -> bool:
    """Whether a fork would wait for no import."""
    return _server is not None and _server.is_ready and not _server.lost


def why_not() -> str:
    """Why ranks are not forked, as far as it is known; "" where they are or would be."""
    return obstacle() or _refusal or ""


def release(server: RankServer) -> None:
    """End this server unless forks of it run; then it stays for their launcher."""
    if not server.has_forks:
        _discard(server)


def text_path() -> list[str]:
    """The notebook's sys.path as ranks have it: Python skips entries that are not text."""
    entries: list[object] = [*sys.path]
    return [entry for entry in entries if isinstance(entry, str)]


def _unmarked(env: Mapping[str, str]) -> dict[str, str]:
    """Remove the run's mark, for a process that outlives the run."""
    mine = {name: value for name, value in os.environ.items() if name == MARK}
    return {name: value for name, value in env.items() if name != MARK} | mine


def _current(env: Mapping[str, str]) -> RankServer:
    global _server  # noqa: PLW0603
    with _lock:
        # That of a process which has forked this one is not to be shared.
        if _server is None or _server.lost or _server.owner != os.getpid():
            _server = RankServer(env)
        return _server


def _discard(server: RankServer | None) -> None:
    """End this server; another one that has taken its place stays."""
    global _server  # noqa: PLW0603
    with _lock:
        if server is not None:
            server.close()
        if _server is server:
            _server = None


def _folder() -> str:
    """The notebook's; where it has been removed, none that could hold a module."""
    try:
        return os.getcwd()  # noqa: PTH109  # a string
    except FileNotFoundError:
        return os.devnull


def _inherited() -> dict[str, Any]:
    """The state that a child process inherits from this one beside the environment."""
    import resource

    limits = {name: getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")}
    status = Path("/proc/self/status").read_text().splitlines()
    umask = next((line.split()[1] for line in status if line.startswith("Umask:")), "22")
    return {
        "umask": int(umask, 8),
        "cores": sorted(os.sched_getaffinity(0)),
        "limits": {str(number): resource.getrlimit(number) for number in set(limits.values())},
        "niceness": os.getpriority(os.PRIO_PROCESS, 0),
    }


def _limit(pid: int) -> str:
    """The limit on processes that holds for one, after a fork that was refused."""
    import resource

    uid, count = os.getuid(), 0
    try:
        soft = psutil.Process(pid).rlimit(resource.RLIMIT_NPROC)[0]
    except psutil.Error:
        return ""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            count += process.num_threads() if process.uids().real == uid else 0
    threads = f"this user has {count} processes and threads"
    limit = "none" if soft == resource.RLIM_INFINITY else str(soft)
    return f"; {threads}, `ulimit -u` is {limit}, and a control group may have less (pids.max)"
