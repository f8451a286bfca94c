"""Puts off Python's collector where a finalizer of the user's would come at the wrong time."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_paused() -> Iterator[None]:
    """Collect no cycles meanwhile, in any thread; afterwards as before.

    A finalizer may take long: a DataLoader's that was interrupted waits 5 s for each worker,
    and the collector runs it wherever it happens to start.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
