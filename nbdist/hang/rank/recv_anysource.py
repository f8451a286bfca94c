"""Lets an abort end a wait for a message from whichever rank sends one.

Such a wait in Gloo hangs on no connection, so shutting the connections down does not end it, and
nothing in Python can: is_completed() stays False until wait() returns, and wait() with a timeout
closes the group. So a thread of its own waits in C++, and the caller beside it, in Python.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future
from typing import Any

from nbdist.hang.rank import rendezvous

Function = Callable[..., Any]
# How often a caller looks whether its wait was aborted. A message wakes it at once.
LOOK_S = 0.02

# Awaited work -> the age of the groups in which it was issued.
_issued: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def remember_issued(original: Function) -> Function:
    """Wrap ProcessGroup.recv_anysource: remember what it returns."""

    @functools.wraps(original)
    def recv_anysource(*args: Any, **kwargs: Any) -> Any:
        work = original(*args, **kwargs)
        _issued[work] = rendezvous.age()
        return work

    return recv_anysource


def abortable(original: Function) -> Function:
    """Wrap Work.wait: an abort ends it where it waits for any source.

    It then raises a RuntimeError. The thread that waits in C++ stays, at most for the group's
    timeout, and keeps the tensor alive, into which a late message would be written. An interrupt
    is raised at the wait's end, as it is where the caller waits in C++: before, a message that
    comes later would be lost to the next receive.
    """

    @functools.wraps(original)
    def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
        age = _issued.get(work)
        if age is None:
            return original(work, *args, **kwargs)
        return _wait_beside(functools.partial(original, work, *args, **kwargs), age)

    return wait


def _wait_beside(call: Callable[[], Any], age: int) -> Any:
    """Run the call in a thread of its own; return or raise what it does."""
    answer: Future[Any] = Future()

    def run() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:  # noqa: BLE001  # raised where it is waited for
            answer.set_exception(error)

    thread = threading.Thread(target=run, name="nbdist recv", daemon=True)
    interrupt: KeyboardInterrupt | None = None
    try:
        thread.start()
    except KeyboardInterrupt as pressed:
        interrupt = pressed
    while not answer.done():
        try:
            futures.wait([answer], LOOK_S)
        except KeyboardInterrupt as pressed:
            interrupt = pressed
        if rendezvous.is_over(age) and not answer.done():
            raise interrupt or RuntimeError(
                "This rank waited for a message from any rank until the wait was aborted. "
                "Another rank has to send one."
            )
    if interrupt is not None and answer.exception() is None:
        raise interrupt
    return answer.result()
