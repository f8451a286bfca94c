"""Copies of what is saved beside training, in memory that is kept from one save to the next.

Memory that is new costs more time than the copy itself: the system has to clear each page. What
is kept is given back for as long as nothing is in it: the system may take it when memory is short.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from nbdist.core import pages

# Each copy begins at a multiple of this: processors move whole lines of 64 bytes.
_LINE_BYTES = 64
# A large page, at which the memory itself begins.
_PAGE_BYTES = 1 << 21


@dataclass(slots=True)
class _Kept:
    """The memory of the last save, None before the first; uint8, larger than what was asked for."""

    memory: torch.Tensor | None = None


_kept = _Kept()


def copies(boxes: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Contiguous copies on the host, of the boxes' shapes and types, one after another in memory.

    Those of an earlier call are written over: one save at a time.
    """
    sizes = [-(-box.nbytes // _LINE_BYTES) * _LINE_BYTES for box in boxes]
    memory = _room(sum(sizes))
    found = []
    with torch.no_grad():
        for box, at in zip(boxes, itertools.accumulate(sizes, initial=0), strict=False):
            room = memory[at : at + box.nbytes].view(box.dtype).view(box.shape)
            found.append(room.copy_(box))
    return found


def give_back() -> None:
    """Let the system have the memory if it needs it. Nobody may look at copies any more."""
    if _kept.memory is not None:
        pages.advise(_kept.memory.data_ptr(), _kept.memory.nbytes, pages.FREE)


def _room(size_bytes: int) -> torch.Tensor:
    """That much memory, the same as last time where that is enough and not far too much."""
    memory = _kept.memory
    if memory is None or not size_bytes <= memory.nbytes <= 2 * size_bytes + _PAGE_BYTES:
        _kept.memory = None  # before the new one is made: both may not find room
        del memory
        whole = torch.empty(size_bytes + _PAGE_BYTES, dtype=torch.uint8)
        memory = _kept.memory = whole[-whole.data_ptr() % _PAGE_BYTES :]
        pages.advise(memory.data_ptr(), memory.nbytes, pages.LARGE)
        pages.advise(memory.data_ptr(), memory.nbytes, pages.POPULATE)
    return memory
