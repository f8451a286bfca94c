"""Sees this rank's main thread, and which threads are free, from another thread."""

from __future__ import annotations

import asyncio
import functools
import linecache
import math
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from IPython import get_ipython
from torch._C import _distributed_c10d

from nbdist.core import procfs, stacks
from nbdist.core.rank import this_rank
from nbdist.core.stacks import Frame
from nbdist.hang.rank import graph_capture, nccl_abort, recorder
from nbdist.hang.rank.source_line import UserFrameFinder
from nbdist.hang.records import FlightRecorderEntry, ThreadSnapshot
from nbdist.hang.torch_messages import DTYPES, python_name
from nbdist.rpc.rank import crash_files

# A main thread that uses no processor time for this long, and is asleep before and after, is
# taken to sleep.
ASLEEP_S = 0.05
# One that stands at the same instruction for this long while a GPU has calls to do waits for it.
HELD_S = 0.1
# How often it is looked whether the GPU has done the calls of a cell.
FINISH_PAUSE_S = 0.02
# Two looks with a longer pause between them are not compared.
LOOKS_APART_S = 2.0
TORCH = str(Path(torch.__file__).parent) + os.sep
# How long it is believed that a call has not ended.
PENDING_S = 1.0

SOURCE_CHARACTERS = 80

# A frame, and the instruction in it.
Position = tuple[int, int]

# The call log has its own, for the main thread.
_places = UserFrameFinder()

# torch's recorders: Gloo's, NCCL's own, and those of torch 2.15's newer backends for NCCL, which
# have to be named. Each numbers its calls for itself.
RECORDERS = ("_dump_fr_trace", "_dump_nccl_trace")
NAMED = ("nccl2", "nccl-lazy")
# The number of NCCL's newest calls that are reported, beside those that are not done.
MOST_DEVICE_CALLS = 64


def snapshot() -> ThreadSnapshot:
    """The main thread's place, stack and newest collectives. From any other thread.

    In 60 ms, or in 100 where a GPU has calls to do.
    """
    asleep = _Sleep.begin()
    began_at = position()
    frame = sys._current_frames().get(threading.main_thread().ident or 0)  # noqa: SLF001
    frames = frames_of(frame)
    _places.shell = get_ipython()  # None before the engine runs
    place = _places.find(frame)
    # A held frame keeps its variables, and this thread would free them.
    del frame
    shown = with_sources(stacks.user_part(frames))
    is_asleep = asleep.end()
    is_in_torch = place is not None and is_torch(frames[-1].file)
    # Without NCCL it is not worth a reading, which can take 20 ms in which the rank stands still.
    calls = device_calls() if nccl_abort.backends() else ()
    is_held = any(call.is_pending for call in calls) and _stillness.lasts(began_at, asleep.began_s)
    waits_inside = (is_in_torch and is_asleep) or is_held
    is_free, others = free_threads(_places, waits_inside=waits_inside)
    # Last: a backend notes a call in a thread of its own, a moment after it was made.
    newest = newest_collectives()
    return ThreadSnapshot(
        place=place,
        stack=tuple(stacks.frame_text(entry, crash_files.cells) for entry in shown),
        is_in_torch=is_in_torch,
        is_asleep=is_asleep,
        newest={group: call for (kind, group), call in newest.items() if not _is_nccl(kind)},
        device_calls=calls,
        is_held=is_held,
        is_free=is_free,
        free_threads=others,
    )


def is_torch(file: str) -> bool:
    """Whether a file is torch's, or one of nbdist's that stand around torch's functions."""
    return file.startswith(TORCH) or stacks.is_ours(file)


def with_sources(frames: Sequence[Frame]) -> tuple[Frame, ...]:
    """The frames with the text of the lines that are the user's."""
    return tuple(
        replace(entry, source=linecache.getline(entry.file, entry.line).strip()[:SOURCE_CHARACTERS])
        if not (stacks.is_library(entry.file) or entry.file.startswith((TORCH, "<")))
        else entry
        for entry in frames
    )


def frames_of(frame: FrameType | None) -> tuple[Frame, ...]:
    """A thread's frames, innermost last."""
    frames = []
    while frame is not None:
        code = frame.f_code
        frames.append(Frame(code.co_filename, frame.f_lineno or 0, code.co_name))
        frame = frame.f_back
    return tuple(reversed(frames))


@dataclass(frozen=True, slots=True)
class _Sleep:
    """Watches whether the main thread sleeps all the time between `begin` and `end`."""

    cpu_s: float | None
    state: str
    began_s: float

    @classmethod
    def begin(cls) -> _Sleep:
        return cls(_main_cpu_s(), _main_state(), time.monotonic())

    def end(self) -> bool:
        if self.cpu_s is None or self.state != "S":
            return False
        time.sleep(max(0.0, self.began_s + ASLEEP_S - time.monotonic()))
        return _main_state() == "S" and _main_cpu_s() == self.cpu_s


def position() -> Position | None:
    """Position of the main thread now; two equal ones are a thread that does not get on."""
    # Documented as for debugging: there is no other way to another thread's frames.
    frame = sys._current_frames().get(threading.main_thread().ident or 0)  # noqa: SLF001
    return None if frame is None else (id(frame), frame.f_lasti)


@dataclass(slots=True)
class _Stillness:
    """Whether the main thread stays at one instruction, in one look and from look to look.

    A wait for CUDA is not seen in the process's state: it uses a core for as long as it lasts.
    """

    position: Position | None = None
    looked_s: float = -math.inf

    def lasts(self, began_at: Position | None, since_s: float) -> bool:
        """Whether it has been there since then, and in the look before if that was just now."""
        time.sleep(max(0.0, since_s + HELD_S - time.monotonic()))
        now_at, now_s = position(), time.monotonic()
        is_known = now_s < self.looked_s + LOOKS_APART_S
        is_same = now_at == began_at and (not is_known or began_at == self.position)
        self.position, self.looked_s = now_at, now_s
        return is_same or _finishing.is_set()


_stillness = _Stillness()
_finishing = threading.Event()


def finish_device_calls() -> None:
    """Wait until the GPU has done the collective calls of a cell, at the cell's end.

    A call that a GPU has to do is over for Python once it is queued: without this a cell whose
    ranks call differently would end well, and the next one would meet its calls. Work that
    no code waits for (`async_op=True`) is not on the stream that is looked at. It waits in steps of
    Python, so that an interrupt and the abort of the calls end it.
    """
    if not nccl_abort.backends():
        return
    stream = torch.cuda.current_stream(this_rank().place.device)
    _finishing.set()
    try:
        while not stream.query() and any(call.is_pending for call in device_calls()):
            time.sleep(FINISH_PAUSE_S)
    finally:
        _finishing.clear()


def _main_cpu_s() -> float | None:
    """Processor time of the main thread; None where the system does not report it (macOS)."""
    clock_of = getattr(time, "pthread_getcpuclockid", None)
    ident = threading.main_thread().ident
    return None if clock_of is None or ident is None else time.clock_gettime(clock_of(ident))


def _main_state() -> str:
    # The main thread's number is the process's.
    stat = procfs.text(procfs.PROC / f"self/task/{os.getpid()}/stat")
    return next(iter(procfs.parse_stat(stat)), "")


def free_threads(places: UserFrameFinder, *, waits_inside: bool) -> tuple[bool, tuple[str, ...]]:
    """(whether the main thread is free, the names of the other free threads and tasks).

    A free thread is neither inside a recorded call nor joins a thread that is. Other threads
    count only if they run the user's code. Tasks of asyncio run in the main thread,
    so they are as free as it is. From any other thread than the main one; `waits_inside`: that
    one waits in a call that C++ made.
    """
    main = threading.main_thread().ident
    current = sys._current_frames()  # noqa: SLF001  # there is no other way
    # This function's own frame would hold itself, and with it every thread's variables, until
    # Python next looks for such circles.
    del current[threading.get_ident()]
    calling = {ident for ident, frame in current.items() if _is_in_call(frame)}
    idle = {
        ident: frame
        for ident, frame in current.items()
        if ident not in calling and _awaited_thread(frame) not in calling
    }
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    others = sorted(
        names.get(ident, f"thread {ident}")
        for ident, frame in idle.items()
        if ident != main and places.is_users(frame)
    )
    is_free = main in idle and not waits_inside
    return is_free, (*others, *(_tasks(places) if is_free else ()))


def _tasks(places: UserFrameFinder) -> Iterator[str]:
    """The user's tasks that go on when the cell that made them has ended."""
    # The loop in which cells run; a kernel without one has no tasks.
    kernel = getattr(places.shell, "kernel", None)
    loop = getattr(getattr(kernel, "io_loop", None), "asyncio_loop", None)
    for task in asyncio.all_tasks(loop) if loop is not None else ():
        work = task.get_coro()
        if places.is_users(getattr(work, "cr_frame", None)):
            yield f"task {getattr(work, '__name__', task.get_name())}"


def _is_in_call(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename == recorder.__file__:
            return True
        frame = frame.f_back
    return False


def _awaited_thread(frame: FrameType | None) -> int | None:
    """The thread that this one waits for in join(), however long it takes; None otherwise."""
    for _ in range(2):  # before Python 3.13 join calls another function
        if frame is None or frame.f_code.co_filename != threading.__file__:
            return None
        if frame.f_code.co_name == "join":
            arguments = frame.f_locals
            thread = arguments.get("self")
            is_endless = arguments.get("timeout") is None
            return thread.ident if is_endless and isinstance(thread, threading.Thread) else None
        frame = frame.f_back
    return None


@dataclass(slots=True)
class _FlightRecorder:
    """One of torch's flight recorders, read whole only when there is something new in it."""

    dump: Callable[[bool, bool, bool], bytes]
    mark: int = -1
    base: dict[int, int] = field(default_factory=dict)
    status: Any = None
    read_s: float = 0.0
    calls: dict[CallKey, FlightRecorderEntry] = field(default_factory=dict)
    device_calls: tuple[FlightRecorderEntry, ...] = ()
    # A recovery in the main thread, a look in the control thread.
    lock: threading.Lock = field(default_factory=threading.Lock)

    def entries(self) -> list[dict[str, Any]]:
        # A pickle that torch made in this process.
        dump: dict[str, Any] = pickle.loads(self.dump(True, False, False))  # noqa: S301
        entries: list[dict[str, Any]] = dump.get("entries", [])
        return entries

    def read(self) -> dict[CallKey, FlightRecorderEntry]:
        """The newest calls; `device_calls` is as new afterwards."""
        with self.lock, graph_capture.held_off() as may_ask:
            if not may_ask:
                return self.calls
            # 0.1 ms; with its 2000 entries it is 20.
            status = pickle.loads(self.dump(False, False, False)).get("pg_status")  # noqa: S301
            noted = (*self.calls.values(), *self.device_calls)
            is_pending = any(entry.is_pending for entry in noted)
            # An end can be noted after the status.
            is_old = is_pending and time.monotonic() > self.read_s + PENDING_S
            if status is None or status != self.status or is_old:
                entries = self.entries()
                calls = list(calls_of(entries, self.mark, self.base))
                self.calls = {key: call for key, call in calls if not call.is_transfer}
                self.device_calls = tuple(call for (kind, _), call in calls if _is_nccl(kind))
                self.status = status if is_complete(status, entries) else None
                self.read_s = time.monotonic()
            return self.calls

    def mark_recovered(self) -> None:
        with self.lock:
            entries = self.entries()
            self.mark = max((entry.get("record_id", -1) for entry in entries), default=-1)
            self.base = {
                entry["pg_id"]: entry["collective_seq_id"]
                for entry in entries
                if not entry["is_p2p"]
            }
            self.status = None


def is_complete(status: Any, entries: Iterable[Mapping[str, Any]]) -> bool:
    """Whether the entries hold every call that the status counts; in doubt not.

    Sends are counted and leave no entry, so it can be that this is never so.
    """
    noted: dict[str, int] = {}
    for entry in entries:
        noted[str(entry["pg_id"])] = entry.get("op_id", -1)
    return all(
        noted.get(str(backend), 0) >= counts.get("last_enqueued_collective", 0)
        for backend, counts in (status or {}).items()
    )


def calls_of(
    entries: Iterable[Mapping[str, Any]], mark: int, base: Mapping[int, int]
) -> Iterator[tuple[CallKey, FlightRecorderEntry]]:
    """((backend, group), call) of a flight recorder's entries, oldest first.

    Entries up to the mark are from before the last recovery. The base is torch's number of a
    backend -> the calls that it had made by then: a recovery makes new backends, which begin
    again at 1, but one that was left keeps counting.
    """
    for entry in entries:
        name = entry["process_group"][0]
        # A backend that was put in by hand has no name until it is given one.
        if not name or entry.get("record_id", mark + 1) <= mark:
            continue
        kind = (entry["input_dtypes"] or [""])[0]
        sizes = entry["input_sizes"]
        backend, _, op = entry["profiling_name"].rpartition(":")
        yield (
            (backend, name),
            FlightRecorderEntry(
                op=python_name(op),
                detail=f"{_DTYPES.get(kind, kind.lower())}{sizes[0]}" if sizes else "",
                number=entry["collective_seq_id"] - base.get(entry["pg_id"], 0),
                is_pending=not entry["retired"],
                group=name,
                is_transfer=entry["is_p2p"],
            ),
        )


_DTYPES = DTYPES | {"ComplexFloat": "complex64", "ComplexDouble": "complex128"}


# The backend's name as the recorder has it, and the group's.
CallKey = tuple[str, str]


def _is_nccl(kind: str) -> bool:
    return kind.startswith("nccl")


def _dumps() -> Iterator[Callable[[bool, bool, bool], bytes]]:
    """The functions that read this torch's recorders, one for each.

    Private: torch has no public way to read its flight recorder from inside the process. Without
    these functions nothing is known of calls made by C++.
    """
    for recorder_name in RECORDERS:
        dump = getattr(_distributed_c10d, recorder_name, None)
        if dump is not None:
            yield dump
            names = NAMED if "backend:" in (dump.__doc__ or "") else ()
            yield from (functools.partial(dump, backend=name) for name in names)


_recorders = [_FlightRecorder(dump) for dump in _dumps()]


def newest_collectives() -> dict[tuple[str, str], FlightRecorderEntry]:
    """(backend, group) -> newest collective, C++ callers included; empty without a recorder."""
    by_recorder = [flight_recorder.read() for flight_recorder in _recorders]
    return {key: call for newest in by_recorder for key, call in newest.items()}


def device_calls() -> tuple[FlightRecorderEntry, ...]:
    """NCCL's newest calls, and those that the GPU has not done, as they were made."""
    calls: list[FlightRecorderEntry] = []
    for flight_recorder in _recorders:
        flight_recorder.read()
        calls.extend(flight_recorder.device_calls)
    older, newest = calls[:-MOST_DEVICE_CALLS], calls[-MOST_DEVICE_CALLS:]
    return (*[call for call in older if call.is_pending][:MOST_DEVICE_CALLS], *newest)


def flight_record() -> list[tuple[str, int, str, list[list[int]]]]:
    """(name, when in ns since 1970, group, sizes) of what the flight recorders hold, oldest first.

    Empty without a recorder. The recorder keeps the newest of thousands of calls.
    """
    return [
        (
            entry["profiling_name"],
            entry["time_created_ns"],
            entry["process_group"][0],
            [list(sizes) for sizes in entry["input_sizes"]],
        )
        for flight_recorder in _recorders
        for entry in flight_recorder.entries()
    ]


def mark_recovered() -> None:
    """Count collectives from here on: every rank has new backends in its groups."""
    for flight_recorder in _recorders:
        flight_recorder.mark_recovered()
