"""The agent of one host: starts its ranks, tells how they end, and ends them all at the last.

A program of the standard library alone: its text, with the guardian's, is sent over the connection
(ssh, srun) on which it then speaks, so nothing has to be installed for it. A line of its standard
output that begins with MARK is a message; whatever a login script prints is none. A line of its
standard input is a command, and each command is answered. When the input ends or says `stop`, or
nothing has been heard for SILENCE_S, it ends its ranks, with all processes of their sessions, and
itself.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
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
from typing import Any

MARK = "nbdist-agent "
BEAT_S = 1.0
# Far longer than the kernel's own patience: ranks that it has given up on may still end by
# themselves, and a kernel that was stopped for a while finds its ranks again.
SILENCE_S = 120.0
STOP_GRACE_S = 2.0
TAIL_BYTES = 4000
# A rank's call log and what is left of a crash, which the kernel reads when the rank has ended.
LARGEST_FILE_BYTES = 1 << 21
PACKAGES = ("nbdist", "torch", "accelerate", "ipyparallel")
PR_SET_PDEATHSIG = 1

# The module nbdist.cluster.kernel.guardian; `serve` is handed it by whoever has sent both.
guardian: Any = None


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
    """What the kernel has to know of this host before it starts ranks on it."""
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


class Agent:
    """The ranks of one host. Everything happens in the main thread, in order."""

    def __init__(self) -> None:
        self._inbox: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._ranks: dict[int, subprocess.Popen[bytes]] = {}
        self._starts: dict[int, str | None] = {}  # pid -> start time, of every rank ever started
        self._folder = Path()
        self._commands: dict[str, Callable[..., Any]] = {
            "open": self._open,
            "file": self._write_file,
            "start": self._start,
            "signal": self._signal,
            "end": self._end,
            "tail": self._tail,
            "facts": facts,
            "beat": lambda: None,
        }

    def serve(self) -> None:
        """Do what the input says until it ends."""
        for name in (signal.SIGINT, signal.SIGHUP):
            signal.signal(name, lambda *_: None)  # not ignored: its ranks would inherit that
        # A batch system is about to kill everything here: what is left is to tidy up.
        signal.signal(signal.SIGTERM, lambda *_: self._inbox.put(("term", None)))
        threading.Thread(target=self._listen, daemon=True).start()
        heard_s = beat_s = time.monotonic()
        say("hello", **facts())
        while time.monotonic() - heard_s < SILENCE_S:
            try:
                kind, content = self._inbox.get(
                    timeout=max(0.0, beat_s + BEAT_S - time.monotonic())
                )
            except queue.Empty:
                beat_s = time.monotonic()
                say("beat")
                continue
            if kind in {"closed", "term"}:
                break
            if kind == "command":
                heard_s = time.monotonic()
                self._answer(content)
            elif kind == "exit":
                self._tell_exit(*content)

    def _listen(self) -> None:
        for line in sys.stdin.buffer:
            try:
                self._inbox.put(("command", json.loads(line)))
            except ValueError:
                break  # `stop`, or cut off in the middle of a line
        self._inbox.put(("closed", None))

    def _answer(self, command: dict[str, Any]) -> None:
        number, what = command.pop("id"), command.pop("do")
        try:
            say("answer", id=number, value=self._commands[what](**command))
        except Exception as error:  # noqa: BLE001  # any reason at all is the kernel's to judge
            say("answer", id=number, error=f"{type(error).__name__}: {error}")

    def _open(self, run: str) -> str:
        """Make the folder of this run on this host, which only this user can enter."""
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

        A rank imports what lies there. So it must be this user's, or of the `owner` over there: in
        a folder that all can write to, somebody else may have made it.
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

    def _tell_exit(self, rank: int, process: subprocess.Popen[bytes], code: int) -> None:
        self._end_sessions([process.pid])
        files = {}
        for path in self._files(rank):
            with contextlib.suppress(OSError):  # without it: the end itself has to be told
                if path.stat().st_size <= LARGEST_FILE_BYTES:
                    packed = base64.b64encode(zlib.compress(path.read_bytes(), 1))
                    files[str(path.relative_to(self._folder))] = packed.decode()
        say("exit", rank=rank, pid=process.pid, code=code, tail=self._tail(rank), files=files)

    def _files(self, rank: int) -> list[Path]:
        """What this rank has written for the kernel: files whose name ends with its number."""
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
            self._end_sessions([self._ranks[rank].pid])

    def _end_sessions(self, pids: list[int]) -> None:
        guardian.end_all({pid: self._starts[pid] for pid in pids}, b"no marker")

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
        killed = guardian.end_all(self._starts, b"NBDIST_RUN=" + os.fsencode(self._folder))
        guardian.sweep_shm(str(self._folder), killed | set(self._starts))
        shutil.rmtree(self._folder, ignore_errors=True)
        try:
            self._folder.parent.rmdir()
        except OSError:
            return  # other runs are in it


def say(event: str, **content: Any) -> None:
    """Write one message; a kernel that is gone reads none, and then the input ends as well."""
    line = MARK + json.dumps({"event": event, **content}) + "\n"
    try:
        sys.stdout.buffer.write(line.encode())
        sys.stdout.buffer.flush()
    except (BrokenPipeError, OSError):
        return


def serve(the_guardian: Any) -> None:
    """Be the agent of this host, with the guardian's functions, until the input ends."""
    global guardian  # noqa: PLW0603  # sent over as a text of its own
    guardian = the_guardian
    code, agent = 0, Agent()
    try:
        agent.serve()
    except Exception:  # noqa: BLE001  # a fault of its own must not leave ranks behind
        traceback.print_exc()
        code = 1
    agent.end_all()
    # A thread may still wait for input, with a lock that Python needs to end: it would abort.
    os._exit(code)
