"""Copies of what is saved beside training, in memory that is kept from one save to the next.

Memory that is new costs more time than the copy itself: the system has to clear each page. What
is kept is given back for as long as nothing is in it: the system may take it when memory is short.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from nbdist.core import madvise

# Each copy begins at a multiple of this: processors move whole lines of 64 bytes.
_LINE_BYTES = 64
# A large page, at which the memory itself begins.
_PAGE_BYTES = 1 << 21


@dataclass(slots=True)
class _Buffer:
    """What the last save's copies were in.

    Attributes:
        memory: None before the first; uint8, larger than what was asked for.
        views: The copies, in that memory.
    """

    memory: torch.Tensor | None = None
    views: list[torch.Tensor] = field(default_factory=list)


_buffer = _Buffer()


def copies(boxes: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Contiguous copies on the host, of the boxes' shapes and types, one after another in memory.

    Those of an earlier call are written over: one save at a time.
    """
    with torch.no_grad():
        before = [(view.dtype, view.shape) for view in _buffer.views]
        if before != [(box.dtype, box.shape) for box in boxes]:
            _buffer.views = _views(boxes)  # each takes as long as 25 kB to copy
        return [view.copy_(box) for view, box in zip(_buffer.views, boxes, strict=True)]


def give_back() -> None:
    """Let the system have the memory if it needs it. Nobody may look at copies any more."""
    if _buffer.memory is not None:
        madvise.advise(_buffer.memory.data_ptr(), _buffer.memory.nbytes, madvise.FREE)


def _views(boxes: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    sizes = [-(-box.nbytes // _LINE_BYTES) * _LINE_BYTES for box in boxes]
    size_bytes = sum(sizes)
    _buffer.views.clear()  # they hold the memory
    memory = _buffer.memory
    # The same as last time where that is enough and not far too much.
    if memory is None or not size_bytes <= memory.nbytes <= 2 * size_bytes + _PAGE_BYTES:
        _buffer.memory = None  # before the new one is made: there may not be room for both
        del memory
        whole = torch.empty(size_bytes + _PAGE_BYTES, dtype=torch.uint8)
        memory = _buffer.memory = whole[-whole.data_ptr() % _PAGE_BYTES :]
        madvise.advise(memory.data_ptr(), memory.nbytes, madvise.LARGE)
        madvise.advise(memory.data_ptr(), memory.nbytes, madvise.POPULATE)
    return [
        memory[at : at + box.nbytes].view(box.dtype).view(box.shape)
        for box, at in zip(boxes, itertools.accumulate(sizes, initial=0), strict=False)
    ]
