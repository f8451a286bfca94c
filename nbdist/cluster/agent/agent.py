"""The agent of one host: starts its ranks, reports how they end, and at last ends them all.

A program of the standard library alone: its text, with the guardian's, is sent over the connection
(ssh, srun) on which it then speaks, so nothing has to be installed for it. A line of its standard
output that begins with MARK is a message; whatever a login script prints is none. A line of its
standard input is a command, and each command is answered. When the input ends or says `stop`, or
nothing has been heard for SILENCE_S, it ends its ranks, with all processes of their sessions, and
itself.

After the command `keep` only `stop` does that at once. Otherwise the agent waits for the given
time for another kernel, which comes by `relay` to a socket in the agent's folder.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import functools
import importlib.util
import json
import os
import queue
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import zlib
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any, BinaryIO

MARK = "nbdist-agent "
BEAT_S = 1.0
# Far longer than the kernel's own patience: ranks that it has given up on may still end by
# themselves, and a kernel that was stopped for a while finds its ranks again.
SILENCE_S = 120.0
STOP_GRACE_S = 2.0
# Time for the agent of a lost folder to end, less than the kernel waits.
FORMER_S = 6.0
TAIL_BYTES = 4000
# A rank's call log and the remains of a crash, which the kernel reads when the rank has ended.
LARGEST_FILE_BYTES = 1 << 21
PACKAGES = ("nbdist", "torch", "accelerate", "ipyparallel")
PR_SET_PDEATHSIG = 1
# In the agent's folder; where another kernel finds it.
SOCKET = "agent.sock"
GONE = "its agent has ended, and its ranks with it: their time was over, or the host was restarted"

# The module nbdist.cluster.agent.guardian, whose text is sent in front of this one.
guardian: Any = sys.modules.get("nbdist_guardian")


def versions() -> dict[str, str]:
    """The installed version of each package; empty where it is there without one, else absent."""
    installed = {}
    for package in PACKAGES:
        try:
            installed[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            if importlib.util.find_spec(package) is not None:
                installed[package] = ""
    return installed


@functools.cache
def count_gpus() -> int:
    """How many GPUs the driver shows to this process, as nvidia-smi lists them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([entry for entry in visible.split(",") if entry.strip() not in {"", "-1"}])
    program = shutil.which("nvidia-smi")
    if program is None:
        return 0
    try:
        listed = subprocess.run(  # noqa: S603  # found on PATH
            [program, "-L"], capture_output=True, text=True, timeout=10, check=False
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return 0
    # A GPU that is cut up stands for its slices.
    slices = re.findall(r"^\s+MIG ", listed, re.MULTILINE)
    return len(slices) or len(re.findall(r"^GPU \d+:", listed, re.MULTILINE))


def facts() -> dict[str, Any]:
    """Facts on this host that the kernel needs before it starts ranks on it."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    try:
        free = shutil.disk_usage(tempfile.gettempdir()).free
    except OSError:
        free = 0
    return {
        "hostname": os.environ.get("NBDIST_HOST") or socket.gethostname(),
        "pid": os.getpid(),
        "python": ".".join(map(str, sys.version_info[:3])),
        "executable": sys.executable,
        "versions": versions(),
        "gpus": count_gpus(),
        "cores": cores or 1,
        "clock_s": time.time(),
        "temporary": tempfile.gettempdir(),
        "free_bytes": free,
    }


def die_with_parent() -> None:
    """Let this process end when the one that has forked it does (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


class KernelLink:
    """A connection to a kernel, by lines both ways; lines without a reader are dropped."""

    def __init__(
        self,
        inbox: queue.SimpleQueue[tuple[str, Any]],
        reader: BinaryIO,
        writer: BinaryIO,
        close: Callable[[], object],
    ):
        """Put each line read into the inbox, as (kind, (this, content)), and at last the end."""
        self._inbox, self._reader, self._writer, self._close = inbox, reader, writer, close
        # A kernel that reads no more, or a network that is cut, must not hold the agent up.
        self._outbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        for work in (self._read, self._write):
            threading.Thread(target=work, daemon=True).start()

    def say(self, event: str, **content: Any) -> None:
        """Send one message."""
        self._outbox.put((MARK + json.dumps({"event": event, **content}) + "\n").encode())

    def close(self) -> None:
        """Hang up."""
        self._outbox.put(b"")
        with contextlib.suppress(OSError):  # the other side was first
            self._close()

    def _read(self) -> None:
        end = "closed"
        with contextlib.suppress(OSError, ValueError):  # ValueError: cut off in mid line
            for line in self._reader:
                if line == b"stop\n":
                    end = "stop"
                    break
                self._inbox.put(("command", (self, json.loads(line))))
        self._inbox.put((end, (self, None)))

    def _write(self) -> None:
        with contextlib.suppress(OSError):
            while line := self._outbox.get():
                self._writer.write(line)
                self._writer.flush()


def hang_up_standard() -> None:
    """Let go of standard input, output and error: ssh's and srun's, which may be gone already."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(nowhere, descriptor)
    os.close(nowhere)


def connect(folder: str) -> socket.socket:
    """A connection to the agent whose folder this is.

    Raises:
        OSError: If there is none.
    """
    line = socket.socket(socket.AF_UNIX)
    try:
        with contextlib.chdir(folder):  # a socket's address has 108 bytes, a path may have more
            line.connect(SOCKET)
    except OSError:
        line.close()
        raise
    return line


class Agent:
    """The ranks of one host. Everything happens in the main thread, in order."""

    def __init__(self) -> None:
        self._inbox: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._link: KernelLink | None = None  # None: no kernel is there, and another one may come
        self._keep_s = 0.0
        self._until_s = 0.0  # when the kernel, or the time without one, is given up
        self._listener: socket.socket | None = None
        self._ranks: dict[int, subprocess.Popen[bytes]] = {}
        self._codes: dict[int, int] = {}  # of ranks whose newest process has ended
        self._starts: dict[int, str | None] = {}  # pid -> start time, of every rank ever started
        self._folder = Path()
        self._commands: dict[str, Callable[..., Any]] = {
            "open": self._open,
            "file": self._write_file,
            "start": self._start,
            "signal": self._signal,
            "end": self._end,
            "tail": self._tail,
            "keep": self._keep,
            "ranks": self._tell_ranks,
            "facts": facts,
            "beat": lambda: None,
        }

    def serve(self) -> None:
        """Do what the kernel says until it ends, or the time of the ranks that are kept."""
        for name in (signal.SIGINT, signal.SIGHUP):
            signal.signal(name, lambda *_: None)  # not ignored: its ranks would inherit that
        # A batch system is about to kill everything here: only tidying up is left.
        signal.signal(signal.SIGTERM, lambda *_: self._inbox.put(("term", (None, None))))
        self._take_link(
            KernelLink(self._inbox, sys.stdin.buffer, sys.stdout.buffer, hang_up_standard)
        )
        beat_s = time.monotonic()
        while self._goes_on():
            try:
                kind, content = self._inbox.get(
                    timeout=max(0.0, beat_s + BEAT_S - time.monotonic())
                )
            except queue.Empty:
                beat_s = time.monotonic()
                self._say("beat")
                continue
            if kind == "exit":
                self._take_exit(*content)
            elif kind == "link":
                self._take_link(
                    KernelLink(
                        self._inbox,
                        content.makefile("rb"),
                        content.makefile("wb"),
                        functools.partial(content.shutdown, socket.SHUT_RDWR),
                    )
                )
            else:
                self._hear(kind, *content)

    def _goes_on(self) -> bool:
        if time.monotonic() >= self._until_s and not self._detach():
            return False
        # Without the folder, which a person has removed, no kernel can find the ranks again.
        return self._link is not None or not guardian.is_removed(str(self._folder))

    def _detach(self) -> bool:
        """Wait for another kernel; False if ranks are not kept, or their time is over."""
        if self._link is None or not self._keep_s:
            return False
        self._link.close()
        self._link = None
        self._until_s = time.monotonic() + self._keep_s
        return True

    def _take_link(self, link: KernelLink) -> None:
        """Speak with a kernel; the one before is left."""
        if self._link is not None:
            self._link.close()
        self._link, self._until_s = link, time.monotonic() + SILENCE_S
        link.say("hello", **facts())

    def _hear(self, kind: str, link: KernelLink | None, content: Any) -> None:
        if link is not self._link and kind != "term":
            return  # of a kernel whose place another one has taken
        if kind == "command":
            self._until_s = time.monotonic() + SILENCE_S
            self._answer(content)
            return
        self._until_s = 0.0
        if kind != "closed":
            self._keep_s = 0.0

    def _say(self, event: str, **content: Any) -> None:
        if self._link is not None:
            self._link.say(event, **content)

    def _keep(self, seconds: float) -> None:
        """From now on let ranks live this many seconds without a kernel; 0: not at all."""
        if seconds and self._listener is None:
            listener = socket.socket(socket.AF_UNIX)
            with contextlib.chdir(self._folder):  # as in `connect`
                listener.bind(SOCKET)
            listener.listen()
            self._listener = listener
            threading.Thread(target=self._accept, args=(listener,), daemon=True).start()
        self._keep_s = seconds

    def _accept(self, listener: socket.socket) -> None:
        while True:
            self._inbox.put(("link", listener.accept()[0]))

    def _tell_ranks(self) -> dict[int, int]:
        """Each rank's newest process; the ends of those that have ended are reported once more."""
        for rank, code in self._codes.items():
            self._tell_exit(rank, code)
        return {rank: process.pid for rank, process in self._ranks.items()}

    def _answer(self, command: dict[str, Any]) -> None:
        number, what = command.pop("id"), command.pop("do")
        try:
            self._say("answer", id=number, value=self._commands[what](**command))
        except Exception as error:  # noqa: BLE001  # any reason at all is the kernel's to judge
            self._say("answer", id=number, error=f"{type(error).__name__}: {error}")

    def _open(self, run: str, former: str = "") -> str:
        """Make the folder of this run on this host, which only this user can enter.

        The agent of a `former` folder, which the kernel has lost, ends its ranks before.
        """
        if former:
            end_former(former)
        base = Path(tempfile.gettempdir(), f"nbdist-{os.getuid()}")
        base.mkdir(mode=0o700, exist_ok=True)
        status = base.lstat()
        if status.st_uid != os.getuid() or status.st_mode & 0o077 or base.is_symlink():
            raise PermissionError(f"{base} is not a folder that only this user can enter")
        self._folder = Path(tempfile.mkdtemp(prefix=f"{guardian.RANKS}{run}-", dir=base))
        (self._folder / "profile").mkdir(mode=0o700)  # ipyparallel's engine needs one
        return str(self._folder)

    def _write_file(self, name: str, text: str) -> None:
        path = self._folder / Path(name).name
        new = path.with_suffix(".new")
        new.touch(mode=0o600)  # before the key is in it
        new.write_text(text)
        new.replace(path)

    def _start(
        self,
        rank: int,
        argv: list[str],
        env: dict[str, str],
        folder: str = "",
        owner: int = -1,
    ) -> int:
        """Start a rank's process, in a session of its own, in `folder` where this host has it too.

        A rank imports files from there. So it must be this user's, or of the `owner` over there: in
        a folder that all can write to, another user may have made it.
        """
        is_ours = Path(folder).is_dir() and Path(folder).stat().st_uid in {owner, os.getuid()}
        self._forget(rank)
        variables = dict(os.environ, **{k: self._place(v) for k, v in env.items()})
        command = [sys.executable, *(self._place(word) for word in argv)]
        with self._log(rank).open("wb") as log:
            process = subprocess.Popen(  # noqa: S603  # nbdist's own engine
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=variables,
                cwd=folder if folder and is_ours else None,
                start_new_session=True,
                preexec_fn=die_with_parent,  # noqa: PLW1509  # it takes no lock
            )
        self._ranks[rank] = process
        self._codes.pop(rank, None)
        self._starts[process.pid] = guardian.start_ticks(process.pid)
        threading.Thread(target=self._wait, args=(rank, process), daemon=True).start()
        return process.pid

    def _place(self, text: str) -> str:
        return text.replace("{folder}", str(self._folder))

    def _forget(self, rank: int) -> None:
        """Remove what an earlier process of the rank has left."""
        for path in self._files(rank):
            path.unlink()
        shutil.rmtree(self._folder / f"mp.{rank}", ignore_errors=True)

    def _wait(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        self._inbox.put(("exit", (rank, process, process.wait())))

    def _take_exit(self, rank: int, process: subprocess.Popen[bytes], code: int) -> None:
        self._end_session(process.pid)
        if process is self._ranks[rank]:
            self._codes[rank] = code
            self._tell_exit(rank, code)

    def _tell_exit(self, rank: int, code: int) -> None:
        files = {}
        for path in self._files(rank):
            with contextlib.suppress(OSError):  # without it: the end itself has to be told
                if path.stat().st_size <= LARGEST_FILE_BYTES:
                    packed = base64.b64encode(zlib.compress(path.read_bytes(), 1))
                    files[str(path.relative_to(self._folder))] = packed.decode()
        pid = self._ranks[rank].pid
        self._say("exit", rank=rank, pid=pid, code=code, tail=self._tail(rank), files=files)

    def _files(self, rank: int) -> list[Path]:
        """Files that this rank has written for the kernel: their names end with its number."""
        return [
            path
            for folder in (self._folder, self._folder / "boxes")
            if folder.is_dir()
            for path in folder.iterdir()
            if re.fullmatch(rf"([a-z]+\.)?{rank}", path.name) and path.is_file()
        ]

    def _log(self, rank: int) -> Path:
        return self._folder / f"rank{rank}.log"

    def _signal(self, rank: int, number: int) -> None:
        process = self._ranks[rank]
        if process.poll() is None:
            process.send_signal(number)

    def _end(self, rank: int) -> None:
        """Kill a rank, with all processes of its session."""
        if rank in self._ranks:
            self._end_session(self._ranks[rank].pid)

    def _end_session(self, pid: int) -> None:
        guardian.end_all({pid: self._starts[pid]})

    def _tail(self, rank: int) -> str:
        try:
            with self._log(rank).open("rb") as log:  # it may be larger than the memory
                log.seek(max(0, os.fstat(log.fileno()).st_size - TAIL_BYTES))
                return log.read(TAIL_BYTES).decode("utf-8", "replace")
        except OSError:
            return ""

    def end_all(self) -> None:
        """Ask, wait a moment, then kill whatever is left, and remove the run's folder."""
        living = [process for process in self._ranks.values() if process.poll() is None]
        for process in living:
            process.terminate()
        end_s = time.monotonic() + STOP_GRACE_S
        while time.monotonic() < end_s and any(process.poll() is None for process in living):
            time.sleep(0.01)
        if self._folder == Path():
            return
        guardian.sweep(str(self._folder), self._starts)
        try:
            self._folder.parent.rmdir()
        except OSError:
            return  # other runs are in it


def end_former(folder: str) -> None:
    """Let the agent of this folder end its ranks; if it was killed, end the ranks that are left."""
    with contextlib.suppress(OSError), connect(folder) as line:
        line.settimeout(FORMER_S)
        line.sendall(b"stop\n")
        while line.recv(1 << 16):
            continue
    guardian.sweep(folder, {})


def relay(folder: str) -> None:
    """Join standard input and output with the agent of this folder, until it hangs up."""
    try:
        line = connect(folder)
    except OSError as error:
        is_gone = isinstance(error, (FileNotFoundError, ConnectionRefusedError))
        reason = GONE if is_gone else f"the agent of {folder} cannot be asked: {error}"
        sys.stdout.write(MARK + json.dumps({"event": "lost", "reason": reason}) + "\n")
        sys.stdout.flush()
        os._exit(1)

    # Not from the descriptor: this program was read through the same buffer.
    reader: Any = sys.stdin.buffer

    def forward() -> None:
        with contextlib.suppress(OSError):
            while said := reader.read1(1 << 16):
                line.sendall(said)
            line.shutdown(socket.SHUT_WR)

    threading.Thread(target=forward, daemon=True).start()
    with contextlib.suppress(OSError):  # the kernel is gone
        while said := line.recv(1 << 16):
            sys.stdout.buffer.write(said)
            sys.stdout.buffer.flush()
    os._exit(0)


def serve() -> None:
    """Be the agent of this host until the input ends."""
    code, agent = 0, Agent()
    try:
        agent.serve()
    except Exception:  # noqa: BLE001  # a fault of its own must not leave ranks behind
        with contextlib.suppress(OSError):  # ssh may be gone
            traceback.print_exc()
        code = 1
    agent.end_all()
    # A thread may still wait for input, with a lock that Python needs to end: it would abort.
    os._exit(code)
