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
class _Kept:
    """What the last save's copies were in.

    Attributes:
        memory: None before the first; uint8, larger than what was asked for.
        rooms: The copies, as views of it.
    """

    memory: torch.Tensor | None = None
    rooms: list[torch.Tensor] = field(default_factory=list)


_kept = _Kept()


def copies(boxes: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Contiguous copies on the host, of the boxes' shapes and types, one after another in memory.

    Those of an earlier call are written over: one save at a time.
    """
    with torch.no_grad():
        if [_look(room) for room in _kept.rooms] != [_look(box) for box in boxes]:
            _kept.rooms = _rooms(boxes)  # each takes as long as 25 kB to copy
        return [room.copy_(box) for room, box in zip(_kept.rooms, boxes, strict=True)]


def give_back() -> None:
    """Let the system have the memory if it needs it. Nobody may look at copies any more."""
    if _kept.memory is not None:
        madvise.advise(_kept.memory.data_ptr(), _kept.memory.nbytes, madvise.FREE)


def _look(tensor: torch.Tensor) -> tuple[torch.dtype, torch.Size]:
    return tensor.dtype, tensor.shape


def _rooms(boxes: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Where the copies go."""
    sizes = [-(-box.nbytes // _LINE_BYTES) * _LINE_BYTES for box in boxes]
    _kept.rooms.clear()  # they hold the memory
    memory = _memory(sum(sizes))
    return [
        memory[at : at + box.nbytes].view(box.dtype).view(box.shape)
        for box, at in zip(boxes, itertools.accumulate(sizes, initial=0), strict=False)
    ]


def _memory(size_bytes: int) -> torch.Tensor:
    """That much memory, the same as last time where that is enough and not far too much."""
    memory = _kept.memory
    if memory is None or not size_bytes <= memory.nbytes <= 2 * size_bytes + _PAGE_BYTES:
        _kept.memory = None  # before the new one is made: both may not find room
        del memory
        whole = torch.empty(size_bytes + _PAGE_BYTES, dtype=torch.uint8)
        memory = _kept.memory = whole[-whole.data_ptr() % _PAGE_BYTES :]
        madvise.advise(memory.data_ptr(), memory.nbytes, madvise.LARGE)
        madvise.advise(memory.data_ptr(), memory.nbytes, madvise.POPULATE)
    return memory
