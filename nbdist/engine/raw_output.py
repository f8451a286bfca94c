"""Output past Python (C code, child processes): whole characters, and all of it within its cell."""

# ruff: noqa: SLF001 - ipykernel has no public way to its pipes
from __future__ import annotations

import codecs
import contextlib
import fcntl
import os
import re
import select
import sys
import termios
import threading
import time
from typing import Any

BUFFER_BYTES = 1 << 16
DRAIN_DEADLINE_S = 1.0
TAKE_OVER_DEADLINE_S = 1.0
# Attributes of ipykernel's OutStream used here. Without one of these its own thread goes on: then
# characters may break, and what a child prints at the very end of a cell may be lost.
PRIVATE = (
    "_should_watch",
    "_fid",
    "_original_stdstream_fd",
    "_original_stdstream_copy",
    "watch_fd_thread",
)
# Without these every flush waits for the thread that sends, and every write takes several times
# as long.
BUFFERS = ("_buffers", "_buffer_lock", "_flush", "_flush_pending")
# What says nothing of the cell. For memory that is freed and is older than a profiler torch writes
# a line once in a thousand times; nbdist's recordings of memory learn of those frees elsewhere.
# libkineto writes one where a profiler starts or stops, at a level above that of its errors. It
# writes another in a fork of a process that has imported torch in another thread: there it does
# not listen for the daemon of on-demand profiling, and nothing else is amiss. That of torch 2.15
# asks for GPUs where a CPU was profiled too, and writes that there is no driver (35) or none (100).
_NOISE = re.compile(
    r"^((\[rank\d+\]:)?\[W[^\]\n]* CPUAllocator\.cpp:\d+\] Memory block of unknown size"
    r"|ERROR: External init callback must run in same thread as registerClient"
    r"|ERROR:\d{4}-[^\]\n]* DeviceProperties\.cpp:\d+\] gpuGetDeviceCount [^\n]* (35|100)$"
    r"|(USDT|STAGE):\d{4}-)[^\n]*\n",
    re.MULTILINE,
)
# libkineto writes the end of its line by itself.
_HALF_NOISE = re.compile(r"USDT:|STAGE:|ERROR:\d{4}-[^\]]* DeviceProperties\.cpp:")
# Words first: they take a hundredth of the pattern's time, in which a cell's print would overtake.
_NOISY_WORDS = ("USDT:", "STAGE:", "CPUAllocator.cpp:", "registerClient", "DeviceProperties.cpp:")


class RawReader:
    """Reads the pipe behind a stream of ipykernel, in the place of ipykernel's own thread.

    ipykernel's thread decodes each 1000 bytes by themselves, which breaks characters in two,
    and no caller can wait for it: output that it reads after the cell's reply belongs to no
    cell and is lost (ipykernel 7.4).
    """

    def __init__(self, stream: Any):
        """Take the pipe over from the stream's own thread.

        Raises:
            TimeoutError: If that thread does not end; it then goes on as before.
        """
        self._stream = stream
        self._lock = threading.Lock()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""
        stream._should_watch = False
        os.write(stream._original_stdstream_fd, b"\0")  # wakes the thread, which drops it
        stream.watch_fd_thread.join(TAKE_OVER_DEADLINE_S)
        stream._should_watch = True
        if stream.watch_fd_thread.is_alive():
            raise TimeoutError("ipykernel's thread has not given its pipe up")
        stream.watch_fd_thread = threading.Thread(target=self._run, daemon=True)
        stream.watch_fd_thread.start()

    def drain(self) -> None:
        """Wait until all that was written so far has been passed on."""
        end_s = time.monotonic() + DRAIN_DEADLINE_S
        while time.monotonic() < end_s:
            with self._lock:
                if not any(fcntl.ioctl(self._stream._fid, termios.FIONREAD, bytes(4))):
                    return  # no bytes wait
            time.sleep(0.001)

    def _run(self) -> None:
        stream = self._stream
        while stream._should_watch:
            select.select([stream._fid], [], [])
            # Under the lock, so that an empty pipe means that all has been passed on.
            with self._lock:
                raw = os.read(stream._fid, BUFFER_BYTES)
                if not raw:
                    return  # a cell has closed the last writing end
                if stream._should_watch:
                    stream.write(self._without_noise(self._decoder.decode(raw)))
                    # A copy for the engine's log. Where that is on a full disk this thread has
                    # to go on: writers would block for ever on a pipe without a reader.
                    with contextlib.suppress(OSError):
                        os.write(stream._original_stdstream_copy, raw)

    def _without_noise(self, text: str) -> str:
        text = self._held + text
        if any(word in text for word in _NOISY_WORDS):
            text = _NOISE.sub("", text)
        last = text.rfind("\n") + 1
        self._held = text[last:] if _HALF_NOISE.match(text, last) else ""
        return text.removesuffix(self._held)


def flush_written(stream: Any) -> None:
    """Let a stream of ipykernel's with no text left to send return from `flush` at once.

    It would wait for a turn of the thread that sends, two or three times in every cell. Text that
    this thread has taken from the buffers and not sent yet is waited for: the cell's last message
    would overtake it, and what comes after that is dropped.
    """
    flush, send = stream.flush, stream._flush
    is_sending = False

    def send_buffers() -> None:
        nonlocal is_sending
        is_sending = True  # before the buffers are empty
        try:
            send()
        finally:
            is_sending = False

    def flush_if_written() -> None:
        if stream._buffers or is_sending:  # in this order
            flush()

    stream._flush, stream.flush = send_buffers, flush_if_written


def write_quickly(stream: Any) -> None:
    """Let a stream of ipykernel's look up the cell of a text once, not for each word of a print.

    It makes a key of the cell's message each time, and asks for its own process: half of what a
    cell of many lines costs. A forked child, which has no thread that flushes, writes as before.
    """
    write = stream.write
    newest: tuple[Any, Any] = (None, None)

    def write_of_cell(text: str) -> int | None:
        nonlocal newest
        cell, key = newest
        if stream.parent_header is not cell or type(text) is not str:
            cell = stream.parent_header
            newest = cell, frozenset(cell.items())
            length: int | None = write(text)
            return length
        with stream._buffer_lock:
            stream._buffers[key].write(text)
        if not stream._flush_pending:  # asked last: what is written after a flush began needs one
            write("")
        return len(text)

    stream.write = write_of_cell
    os.register_at_fork(after_in_child=lambda: vars(stream).pop("write", None))


def install(shell: Any) -> None:
    """Let each cell end only when its output past Python has been taken in. Once per engine."""
    readers = []
    streams: tuple[Any, ...] = (sys.stdout, sys.stderr)
    for stream in streams:
        if all(hasattr(stream, name) for name in PRIVATE) and stream._should_watch:
            with contextlib.suppress(TimeoutError):
                readers.append(RawReader(stream))
        if getattr(stream, "echo", stream) is None and all(hasattr(stream, b) for b in BUFFERS):
            flush_written(stream)
            write_quickly(stream)

    def drain(*_: Any) -> None:
        for reader in readers:
            reader.drain()

    shell.events.register("post_run_cell", drain)
