"""The call log of this rank: its file, what is written into it, and when."""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nbdist.hang.call_log import SIZE_BYTES, CallLogWriter, consistent_copy
from nbdist.hang.rank import dataloader_workers, rendezvous
from nbdist.hang.rank.recorder import CallRecorder
from nbdist.hang.rank.source_line import UserFrameFinder
from nbdist.rpc.rank.cell_hooks import CellContext
from nbdist.rpc.wire import CELL_RUN

FOLDER = "boxes"

_recorder: CallRecorder | None = None
_problem = ""


def open_log(folder: Path | None, rank: int) -> CallLogWriter:
    """A new, empty log: `folder`/boxes/RANK, or one in memory alone where it is on another host.

    A process of that rank before this one keeps its own, which readers must open anew. All its
    space is taken now: a disk that is full later would end the process at its first collective.
    If there is none now, the log is in memory alone, and `problem` says so.
    """
    global _problem  # noqa: PLW0603  # one log per process
    _problem = ""
    if folder is not None:
        try:
            return CallLogWriter(_map_file(folder / FOLDER, rank), rank, os.getpid())
        except OSError as error:
            _problem = (
                f"rank {rank} could not make its black box of {SIZE_BYTES // 1024} KiB in "
                f"{folder / FOLDER} ({error.strerror}): its hangs cannot be explained. Free "
                "some space there, or point TMPDIR elsewhere, and restart the ranks."
            )
    return CallLogWriter(mmap.mmap(-1, SIZE_BYTES), rank, os.getpid())


def problem() -> str:
    """Why the notebook cannot read this rank's log, as a sentence; empty if it can."""
    return _problem


def install(log: CallLogWriter) -> None:
    """Record this process's calls in the log from now on; a log before it gets no more."""
    global _recorder  # noqa: PLW0603  # one per process
    if _recorder is not None and _recorder.log is log:
        return
    shell = uninstall()
    _recorder = CallRecorder(log, UserFrameFinder(shell))
    _recorder.install()


def uninstall() -> Any:
    """Leave torch as it was before `install`, and return the shell that was watched."""
    global _recorder
    recorder, _recorder = _recorder, None
    if recorder is None:
        return None
    recorder.uninstall()
    return recorder.places.shell


def snapshot() -> tuple[float, bytes | None]:
    """(now by this host's monotonic clock, the log; None without one). From any thread."""
    now_s = time.monotonic()
    return now_s, None if _recorder is None else consistent_copy(_recorder.log.memory)


def newest() -> tuple[int, int]:
    """(generation of the groups, number of the newest cell); zeros before there is a log."""
    return (0, 0) if _recorder is None else (_recorder.log.generation, _recorder.log.run)


def reset(generation: int) -> None:
    """Count calls from 0 again, and read those of before as ended. After a recovery.

    On every living rank, with the same generation, before its next call.
    """
    rendezvous.forget_meetings()
    if _recorder is not None:
        _recorder.reset()
        _recorder.log.reset(generation)


def name_cells(shell: Any) -> None:
    """Tell calls by the cells of this shell, which knows which file is which cell."""
    if _recorder is not None:
        _recorder.places.shell = shell


@contextlib.contextmanager
def around_cell(cell: CellContext) -> Iterator[None]:
    """Tell in the log when a cell begins and how it ended, and end what it has left behind."""
    run = cell.metadata.get(CELL_RUN)
    if not isinstance(run, int):
        yield
        return
    _set_cell(run, "running")
    state = "raised"
    try:
        yield
        if cell.reply.get("status") == "ok":
            state = "finished"
    finally:
        _set_cell(run, state)
    if state == "raised":
        try:
            dataloader_workers.end_abandoned(getattr(sys, "last_value", None))
        except KeyboardInterrupt:
            return  # one press more: the cell has ended already
        except Exception as error:  # noqa: BLE001  # else the cell would get no reply at all
            warnings.warn(f"DataLoader workers of this cell may be left: {error!r}", stacklevel=1)


def _set_cell(run: int, state: str) -> None:
    if _recorder is None:
        return
    if state == "running":
        _recorder.begin_cell()
    _recorder.log.set_cell(run, state)


def _map_file(folder: Path, rank: int) -> mmap.mmap:
    folder.mkdir(mode=0o700, exist_ok=True)
    path = folder / f".{rank}.{os.getpid()}"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, 0, SIZE_BYTES)
        else:
            os.write(descriptor, bytes(SIZE_BYTES))
        mapped = mmap.mmap(descriptor, SIZE_BYTES)
        path.replace(folder / str(rank))
    except OSError:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        raise
    finally:
        os.close(descriptor)
    return mapped
