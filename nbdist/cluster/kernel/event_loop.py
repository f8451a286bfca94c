"""An event loop in a thread of its own, for the cluster's coroutines.

ipyparallel notices the end of a process in the loop that started it. In a loop that is
closed after each call that notice is lost (seconds instead of 0.03 s), so one loop lives as
long as the kernel.
"""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    """The one loop of this process that all clusters use, running."""
    loop = asyncio.new_event_loop()

    def run() -> None:
        asyncio.set_event_loop(loop)
        loop.run_forever()

    threading.Thread(target=run, name="nbdist-cluster", daemon=True).start()
    return loop


def run(coroutine: Coroutine[Any, Any, T], deadline_s: float) -> T:
    """The coroutine's result.

    Raises:
        TimeoutError: After the deadline; the coroutine is cancelled.
    """
    future = asyncio.run_coroutine_threadsafe(coroutine, _loop())
    try:
        return future.result(deadline_s)
    except BaseException:
        future.cancel()
        raise
