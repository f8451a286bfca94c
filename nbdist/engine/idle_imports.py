"""Imports of modules that cells use sooner or later, while the rank has nothing else to do."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Callable, Sequence
from importlib import import_module

from nbdist.parallel.accelerator.lazy import MODULES

# And for the first model that is prepared.
_WANTED = (*MODULES, "nbdist.planner.rank.shortage")
# Idle time before the imports: a cell that comes at once does not wait.
AFTER_S = 1.0


def begin(has_run: Callable[[], bool], modules: Sequence[str] = _WANTED) -> None:
    """Import modules once the running event loop has been left alone for AFTER_S.

    One by one, since a cell that comes meanwhile waits for the one that is being imported. None
    where NBDIST_PRELOAD is 0.
    """
    if os.environ.get("NBDIST_PRELOAD") == "0":
        return
    loop = asyncio.get_running_loop()
    waiting = list(modules)

    def import_next() -> None:
        if not waiting:
            settle(has_run)
            return
        import_module(waiting.pop(0))
        loop.call_soon(import_next)  # behind whatever has come in meanwhile

    loop.call_later(AFTER_S, import_next)


def settle(has_run: Callable[[], bool]) -> None:
    """Set the objects of all modules aside, as long as none of the user's is among them.

    torch and IPython bring a quarter of a million objects that stay for good. Set aside, they
    make neither the collector slow nor the searches through all objects.
    """
    if not has_run():
        gc.freeze()
