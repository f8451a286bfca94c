"""Keeps looks at the flight recorder out of the user's CUDA graph captures.

To dump its entries the recorder asks CUDA whether their events have passed. While a graph is being
captured, in torch's mode "global", such a question from any thread breaks the capture off.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.cuda import CUDAGraph

_lock = threading.Lock()
# Graphs that are being captured. One whose capture was broken off may never end it, but goes.
_capturing: weakref.WeakSet[CUDAGraph] = weakref.WeakSet()


def install() -> None:
    """Note from now on when a capture begins and ends. On a rank with a GPU, before its cells.

    torch.cuda.graph, make_graphed_callables and torch.compile all call these two methods;
    nothing else shows a capture to another thread.
    """
    begin, end = CUDAGraph.capture_begin, CUDAGraph.capture_end

    @functools.wraps(begin)
    def capture_begin(graph: CUDAGraph, *args: Any, **options: Any) -> None:
        with _lock:  # a look that is under way ends first
            _capturing.add(graph)
        try:
            begin(graph, *args, **options)
        except BaseException:
            _capturing.discard(graph)
            raise

    @functools.wraps(end)
    def capture_end(graph: CUDAGraph) -> None:
        try:
            end(graph)
        finally:
            _capturing.discard(graph)

    CUDAGraph.capture_begin = capture_begin  # type: ignore[method-assign, assignment]
    CUDAGraph.capture_end = capture_end  # type: ignore[method-assign, assignment]


@contextmanager
def held_off() -> Iterator[bool]:
    """Whether no graph is being captured; none begins to be inside of this."""
    with _lock:
        yield not _capturing
