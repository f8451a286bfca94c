"""Which of this rank's threads and tasks may still make a call, seen from another thread."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator
from types import FrameType

from nbdist.hang.rank import recorder
from nbdist.hang.rank.source_line import UserFrameFinder


def free(places: UserFrameFinder, *, waits_inside: bool) -> tuple[bool, tuple[str, ...]]:
    """(whether the main thread is free, the names of the other free threads and tasks).

    Free is who is neither inside a recorded call nor joins a thread that is. Of the other
    threads only those count that run the user's code. Tasks of asyncio run in the main thread,
    so they are as free as it is. From any other thread than the main one.

    Args:
        places: Knows the user's code.
        waits_inside: The main thread waits in a call that C++ made.
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
