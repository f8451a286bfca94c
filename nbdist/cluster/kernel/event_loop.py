"""The event loop in which all clusters of this process start, watch and end their processes."""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import wait
from typing import Any, TypeVar

from nbdist.cluster.kernel.registration import POLL_S

T = TypeVar("T")


@functools.cache
def current() -> asyncio.AbstractEventLoop:
    """The one loop of this process that all clusters use, in a thread of its own.

    ipyparallel notices the end of a process in the loop that started it. In a loop that is closed
    after each call that notice is lost (seconds instead of 0.03 s), so it lives as long as the
    kernel.
    """
    loop = asyncio.new_event_loop()

    def run() -> None:
        asyncio.set_event_loop(loop)
        loop.run_forever()

    threading.Thread(target=run, name="nbdist-cluster", daemon=True).start()
    return loop


def run_in_loop(
    coroutine: Coroutine[Any, Any, T], deadline_s: float, check: Callable[[], None] | None = None
) -> T:
    """The coroutine's result; `check` is called often meanwhile, and may raise to break off.

    Raises:
        TimeoutError: After the deadline; the coroutine is cancelled.
    """
    future = asyncio.run_coroutine_threadsafe(coroutine, current())
    end_s = time.monotonic() + deadline_s
    try:
        while check is not None and not future.done() and time.monotonic() < end_s:
            check()
            wait([future], POLL_S)
        return future.result(max(0.0, end_s - time.monotonic()))
    except BaseException:
        future.cancel()
        raise
