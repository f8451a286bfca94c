"""A process that helps this kernel, such as a host's agent: asked, heard and ended in one way."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import queue
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from pathlib import Path
from typing import Any

from nbdist.cluster.agent import agent
from nbdist.errors import NbdistError

MARK = agent.MARK.encode()
# A longer line is no message: it fills no memory.
LONGEST_LINE = 1 << 25
# How much of its standard error is read: the last of it.
WORDS_BYTES = 4000


class HelperProcess:
    """A process in a session of its own, with requests and messages as lines of JSON.

    A line of its standard input is a request, {"id": 7, "do": "fork", ...}, or a message without an
    answer (`tell`). A line of its standard output that begins with MARK is a message: {"event":
    "answer", "id": 7, "value": ...}, with "error" in place of "value", or another event. All other
    lines are passed over. A subclass takes events (`_take`) and the end of the output
    (`_take_end`), both in the thread that reads.

    Attributes:
        name: In the names of its threads, and in front of errors that it answers.
        lost: Why it answers no more; empty as long as it does.
    """

    # Requests to a lost process raise this.
    lost_error: type[Exception] = NbdistError
    keeps_words = True

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str]):
        """Start it.

        Raises:
            OSError: If there is no such program, or the system refuses another process.
        """
        self.name, self.lost = name, ""
        self._answers: dict[int, Future[Any]] = {}
        self._numbers = itertools.count(1)
        self._lock, self._writing = threading.Lock(), threading.Lock()
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._heard_s = time.monotonic()
        self._last_words = ""
        # Closed by the thread that reads.
        self._words = tempfile.TemporaryFile() if self.keeps_words else Path(os.devnull).open("r+b")  # noqa: SIM115
        try:
            self._process = subprocess.Popen(  # noqa: S603  # a program of ours, ssh or srun
                list(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._words,
                env=dict(environment),
                start_new_session=True,  # an interrupt in a terminal is the kernel's alone
                bufsize=0,
            )
        except BaseException:
            self._words.close()
            raise
        for work in (self._read, self._write):
            threading.Thread(target=work, name=f"nbdist-{name}", daemon=True).start()

    @property
    def pid(self) -> int:
        """Process id of the helper."""
        return self._process.pid

    def ask(self, do: str, **arguments: Any) -> Future[Any]:
        """The answer to a request."""
        future: Future[Any] = Future()
        with self._lock:
            if self.lost:
                future.set_exception(self.lost_error(self.lost))
                return future
            number = next(self._numbers)
            self._answers[number] = future
        self._outbox.put(json.dumps({"id": number, "do": do, **arguments}).encode() + b"\n")
        return future

    def tell(self, **content: Any) -> None:
        """Send a message without an answer; it is in the pipe when this returns."""
        line = json.dumps(content).encode() + b"\n"
        with contextlib.suppress(BrokenPipeError, ValueError):  # ended, and its input closed
            self._send(line)

    def hang_up(self) -> None:
        """Close its standard input, in a moment."""
        self._outbox.put(None)

    def say_stop(self, deadline_s: float) -> int:
        """Ask it to end, and wait for that; its exit code.

        Raises:
            subprocess.TimeoutExpired: If it has not ended by then.
        """
        # In words: a child that the user's code has forked may hold the pipe open.
        self._outbox.put(b"stop\n")
        self.hang_up()
        return self._process.wait(max(0.0, deadline_s))

    def words(self) -> str:
        """The last of what it has written to its standard error so far."""
        with contextlib.suppress(ValueError):  # closed: what it was then
            size = os.fstat(self._words.fileno()).st_size
            words = os.pread(self._words.fileno(), WORDS_BYTES, max(0, size - WORDS_BYTES))
            self._last_words = words.decode("utf-8", "replace").strip()
        return self._last_words

    def kill(self) -> None:
        """End it at once, and wait for that. Twice is harmless."""
        self._process.kill()
        self._process.wait()

    def _write(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended
            while not self.lost and (content := self._next()) is not None:
                self._send(content)
        with self._writing:
            self._process.stdin.close()

    def _send(self, content: bytes) -> None:
        assert self._process.stdin is not None
        with self._writing:
            while content:
                content = content[self._process.stdin.write(content) :]

    def _next(self) -> bytes | None:
        """Wait for the next line to send; None closes the process's standard input."""
        return self._outbox.get()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as pipe, os.fdopen(os.dup(pipe.fileno()), "rb") as reader:
            for line in iter(lambda: reader.readline(LONGEST_LINE), b""):
                self._heard_s = time.monotonic()
                if line.startswith(MARK):
                    self._take_line(line.removeprefix(MARK))
        self._take_end()
        self._words.close()

    def _take_line(self, line: bytes) -> None:
        message = dict(json.loads(line))
        event = message.pop("event")
        if event == "answer":
            self._take_answer(**message)
        else:
            self._take(event, message)

    def _take_answer(self, id: int, value: Any = None, error: str = "") -> None:  # noqa: A002
        future = self._answers.pop(id, Future[Any]())
        with contextlib.suppress(InvalidStateError):  # cancelled, or lost just now
            if error:
                future.set_exception(NbdistError(f"{self.name}: {error}"))
            else:
                future.set_result(value)

    def _take(self, event: str, content: dict[str, Any]) -> None:
        """An event that is no answer."""

    def _take_end(self) -> None:
        """It has closed its standard output: wait for its end, and `_lose` it."""
        raise NotImplementedError

    def _lose(self, reason: str) -> bool:
        """Note why the process answers no more; False if a reason was noted before."""
        with self._lock:
            if self.lost:
                return False
            self.lost = reason
            waiting = [*self._answers.values()]
            self._answers.clear()
        self._outbox.put(None)
        for future in waiting:
            with contextlib.suppress(InvalidStateError):  # cancelled just now
                future.set_exception(self.lost_error(reason))
        return True
