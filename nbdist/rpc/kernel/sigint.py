"""Counting interrupts instead of letting them raise anywhere."""

from __future__ import annotations

import contextlib
import functools
import inspect
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

# Marks the function that stands in the place of a kernel's do_execute.
_IGNORES = "_nbdist_ignores_presses_before_replies"


class PendingInterrupts:
    """The interrupts that have come, kept until somebody takes them."""

    def __init__(self) -> None:
        self._waiting = 0
        self._take: Callable[[], None] | None = None

    def check(self) -> None:
        """Raise KeyboardInterrupt if one waits."""
        if self._waiting:
            raise KeyboardInterrupt

    def press(self) -> None:
        """Count one more interrupt, or hand it to whoever takes them."""
        if self._take is None:
            self._waiting += 1
        else:
            self._take()

    def send_to(self, take: Callable[[], None]) -> None:
        """Call `take` for every interrupt, those that came before included."""
        self._take = take
        for _ in range(self._waiting):
            take()


def ignore_before_replies(kernel: Any) -> None:
    """Let a press of stop that comes between a cell's end and its reply do nothing.

    A KeyboardInterrupt there drops ipykernel's reply, and the notebook shows the cell as running
    for ever. ipykernel sets the signal's handler anew before each message and after it. Without
    ipykernel, and in its subshells, nothing changes.
    """
    execute = getattr(kernel, "do_execute", None)
    if not hasattr(kernel, "post_handler_hook") or hasattr(execute, _IGNORES):
        return

    @functools.wraps(execute)  # type: ignore[arg-type]
    async def do_execute(*args: Any, **options: Any) -> Any:
        try:
            content = execute(*args, **options)  # type: ignore[misc]
            return await content if inspect.isawaitable(content) else content
        finally:
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGINT, signal.SIG_IGN)

    setattr(do_execute, _IGNORES, True)
    kernel.do_execute = do_execute


@contextlib.contextmanager
def deferred_sigint() -> Iterator[PendingInterrupts]:
    """Count every SIGINT while inside, in the main thread.

    A KeyboardInterrupt out of nowhere would break off whatever brings the ranks back; with
    this a second press is only counted. Elsewhere than in the main thread (a subshell)
    signals cannot be taken over, and are not.
    """
    presses = PendingInterrupts()
    if threading.current_thread() is not threading.main_thread():
        yield presses
        return
    before = signal.signal(signal.SIGINT, lambda _signal, _frame: presses.press())
    try:
        yield presses
    finally:
        # None stands for a handler that was not set from Python and cannot be set again.
        signal.signal(signal.SIGINT, signal.SIG_DFL if before is None else before)
