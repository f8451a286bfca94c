"""Why a rank's process has ended, from its exit code and what it left behind."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass

from nbdist.core import units
from nbdist.core.stacks import ThreadStack, frame_text, parse_dump, place_name, user_part

# The files of a rank in the run folder.
CRASH_FILE = "crash.{rank}"
STACKS_FILE = "stacks.{rank}"
CELLS_FILE = "cells.{rank}"

# Asks a rank's faulthandler for its stacks. Jobs' own code uses SIGUSR1 and SIGUSR2 (Slurm,
# submitit); nobody uses this one. macOS has no such signals.
DUMP_SIGNAL: int = int(signal.SIGRTMIN) + 9 if hasattr(signal, "SIGRTMIN") else int(signal.SIGUSR2)

# Sent by the process's own code: faulthandler writes where it was.
CRASHES = frozenset({"SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL"})
_SOMEBODY = "sent by somebody else"
_HINTS = {"SIGBUS": "; usually shared memory (/dev/shm) was full"}


@dataclass(frozen=True, slots=True)
class OomCounts:
    """How many processes the system has killed for memory; None where it cannot be read."""

    cgroup: int | None = None  # in the rank's own control group
    machine: int | None = None
    limit_bytes: int | None = None  # the control group's; None where there is none


@dataclass(frozen=True, slots=True)
class Remains:
    """Files and counts that an ended rank left behind."""

    crash_text: str = ""  # by its faulthandler
    cells: Mapping[str, int] | None = None  # file name of a cell's code -> the cell's number
    before: OomCounts = OomCounts()  # when the rank was started
    after: OomCounts = OomCounts()  # when it had ended
    is_ours: bool = False  # nbdist itself killed it


def cause(code: int | None, remains: Remains) -> str:
    """One phrase: `signal SIGSEGV in f (lib.py, line 9), called at line 3 of cell [12]`.

    The exit code is negative for a signal, None where it is not known.
    """
    if code is None:
        return "unknown exit code"
    if code >= 0:
        return f"exit code {code}: the process ended itself, by os._exit or in a library"
    name = signal_name(-code)
    if remains.is_ours:
        return f"signal {name}: sent by nbdist"
    if name in CRASHES:
        return f"signal {name}{_place_of_crash(remains)}{_HINTS.get(name, '')}"
    killer = _killer(remains.before, remains.after) if name == "SIGKILL" else _SOMEBODY
    return f"signal {name}: {killer}"


def exit_words(code: int) -> str:
    """`exit code 1`, `signal SIGKILL`, of an exit code that is negative for a signal."""
    return f"exit code {code}" if code >= 0 else f"signal {signal_name(-code)}"


def signal_name(number: int) -> str:
    """`SIGKILL`; the number itself where it has no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)


def _killer(before: OomCounts, after: OomCounts) -> str:
    if _rose(before.cgroup, after.cgroup):
        limit_bytes = after.limit_bytes
        limit = "" if limit_bytes is None else f"cgroup limit {units.size(limit_bytes)}; "
        counts = f"oom_kill rose from {before.cgroup} to {after.cgroup}"
        return f"the system killed it for memory ({limit}{counts})"
    if _rose(before.machine, after.machine):
        # Another process of the machine may have been the one.
        return (
            "the system probably killed it for memory (oom_kill of the machine rose from "
            f"{before.machine} to {after.machine})"
        )
    is_uncounted = after.cgroup is None and after.machine is None
    return _SOMEBODY + (", or by the system for memory" if is_uncounted else "")


def _rose(before: int | None, after: int | None) -> bool:
    return before is not None and after is not None and after > before


def _place_of_crash(remains: Remains) -> str:
    cells = remains.cells or {}
    threads = parse_dump(remains.crash_text)
    crashed = next((thread for thread in threads if thread.is_current), None)
    if crashed is not None and crashed.frames:
        return _where(crashed, cells)
    # A thread without Python, such as Gloo's: then what the cell was doing is what counts.
    main = next((t for t in threads if any(frame.file in cells for frame in t.frames)), None)
    if main is None:
        return " in C code" if threads else ""
    return f" in a thread of C code, while Python was{_where(main, cells)}"


def _where(thread: ThreadStack, cells: Mapping[str, int]) -> str:
    frames = user_part(thread.frames) or thread.frames
    innermost = frames[-1]
    called = next((frame for frame in reversed(frames) if frame.file in cells), None)
    if called is None:
        return f" in {frame_text(innermost, cells)}"
    line = f"at line {called.line} of {place_name(called.file, cells)}"
    if called is innermost:
        return f" {line}"
    place = f"{place_name(innermost.file, cells)}, line {innermost.line}"
    return f" in {innermost.function} ({place}), called {line}"
