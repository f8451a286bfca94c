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


class LoopThread:
    """A running asyncio loop that other threads can use."""

    def __init__(self, name: str):
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def run(self, coroutine: Coroutine[Any, Any, T], deadline_s: float) -> T:
        """The coroutine's result.

        Raises:
            TimeoutError: After the deadline; the coroutine is cancelled.
        """
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result(deadline_s)
        except BaseException:
            future.cancel()
            raise


@functools.cache
def cluster_loop() -> LoopThread:
    """The one loop of this process that all clusters use."""
    return LoopThread("nbdist-cluster")
