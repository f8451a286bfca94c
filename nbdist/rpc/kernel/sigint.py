"""Counting interrupts instead of letting them raise anywhere."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator


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
