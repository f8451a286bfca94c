"""Sees a running cell through: blocking, or without blocking the notebook's event loop."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable

from nbdist.cells.kernel.cell_run import CellRun
from nbdist.cells.outputs import CellResult
from nbdist.rpc.kernel import sigint


def wait(begin: Callable[[], CellRun]) -> CellResult:
    """Begin a cell and run it to the end in this thread; interrupts are counted by it."""
    with sigint.deferred_sigint() as pressed, contextlib.closing(begin()) as run:
        pressed.send_to(run.press)
        while (pause_s := run.step(time.monotonic())) is not None:
            run.block(pause_s)
        return run.finish()


async def wait_async(begin: Callable[[], CellRun]) -> CellResult:
    """Begin a cell and run it to the end without blocking the event loop.

    Messages wake the loop, an interrupt too, so there is no polling.
    """
    loop = asyncio.get_running_loop()
    has_item = asyncio.Event()
    with sigint.deferred_sigint() as pressed, contextlib.closing(begin()) as run:
        # When the loop is to be woken, by its clock; each change of that is a message to it.
        woken_s = math.inf

        def wake(within_s: float) -> None:
            nonlocal woken_s
            due_s = loop.time() + within_s
            if due_s < woken_s:
                woken_s = due_s
                loop.call_soon_threadsafe(loop.call_at, due_s, has_item.set)

        run.on_item = wake
        pressed.send_to(run.press)
        while True:
            has_item.clear()
            woken_s = math.inf  # what is in the inbox by now this step takes out
            pause_s = run.step(time.monotonic())
            if pause_s is None:
                return run.finish()
            timer = loop.call_later(pause_s, has_item.set)
            try:
                await has_item.wait()
            except asyncio.CancelledError:
                run.press()  # a frontend that cancels the cell's task means an interrupt
            finally:
                timer.cancel()
