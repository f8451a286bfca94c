"""Copies of tensors for saves beside training, in memory that is kept from save to save.

Memory that is new costs more time than the copy itself: the system has to clear each page. What
is kept is given back for as long as nothing is in it: the system may take it when memory is short.

A GPU copies into memory that is pinned at the speed of its link, five to ten times as fast as into
any other, and while the host asks for the next copy. Pinned memory stays the rank's.
"""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from nbdist.core import madvise
from nbdist.core.units import size

# Each copy begins at a multiple of this: processors move whole lines of 64 bytes.
_LINE_BYTES = 64
# A large page, at which the memory itself begins.
_PAGE_BYTES = 1 << 21


@dataclass(slots=True)
class _Buffer:
    """The memory of the last save's copies.

    Attributes:
        memory: None before the first; uint8, larger than what was asked for.
        views: The copies, in that memory.
        is_pinned: Whether a GPU can write there by itself.
    """

    memory: torch.Tensor | None = None
    views: list[torch.Tensor] = field(default_factory=list)
    is_pinned: bool = False


_buffer = _Buffer()


def copies(boxes: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Contiguous copies on the host, of the boxes' shapes and types, one after another in memory.

    Copies of an earlier call are written over: one save at a time.
    """
    devices = _gpus(boxes)
    with torch.no_grad():
        before = [(view.dtype, view.shape) for view in _buffer.views]
        if before != [(box.dtype, box.shape) for box in boxes]:
            _buffer.views = _views(boxes)  # each takes as long as 25 kB to copy
        if devices:
            _pin()
        # On the stream on which the optimizer has stepped: what it still has to write comes first.
        copied = [
            view.copy_(box, non_blocking=True)
            for view, box in zip(_buffer.views, boxes, strict=True)
        ]
        for device in devices:
            _wait(device)
        return copied


def give_back() -> None:
    """Let the system have the memory if it needs it. The copies may not be read any more."""
    if _buffer.memory is not None and not _buffer.is_pinned:
        madvise.advise(_buffer.memory.data_ptr(), _buffer.memory.nbytes, madvise.FREE)


def _gpus(boxes: Sequence[torch.Tensor]) -> set[torch.device]:
    return {box.device for box in boxes if box.is_cuda}


def _wait(device: torch.device) -> None:
    torch.cuda.current_stream(device).synchronize()


def _pin() -> None:
    """Pin the memory. Where the system does not allow it, copies are slower, and a warning says so.

    Not by `pin_memory=True`: torch rounds sizes up to the next power of two, and keeps the memory
    when it is not needed any more.
    """
    memory = _buffer.memory
    if memory is None or _buffer.is_pinned:
        return
    answer = _register(memory.data_ptr(), memory.nbytes)
    _buffer.is_pinned = answer == 0
    if answer:
        warnings.warn(
            f"{size(memory.nbytes)} of the host's memory for the copies could not be pinned "
            f"(cudaHostRegister answered {answer}), so copying from the GPU takes several times as "
            "long. Free memory on the host, or raise the container's limit of memory.",
            stacklevel=2,
        )


def _unpin() -> None:
    if _buffer.memory is not None and _buffer.is_pinned:
        _unregister(_buffer.memory.data_ptr())
        _buffer.is_pinned = False


def _register(address: int, size_bytes: int) -> int:
    portable = 1  # as torch pins: for whichever of several GPUs copies
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    answer = int(cudart.cudaHostRegister(address, size_bytes, portable))
    if answer:
        # CUDA keeps the error, and torch raises it at the next kernel, whose it is not: at this.
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device="cuda")
    return answer


def _unregister(address: int) -> None:
    # An error here comes from an earlier GPU kernel, and is reported there.
    torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]


def _views(boxes: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    sizes = [-(-box.nbytes // _LINE_BYTES) * _LINE_BYTES for box in boxes]
    size_bytes = sum(sizes)
    _buffer.views.clear()  # they hold the memory
    memory = _buffer.memory
    # The same as last time where that is enough and not far too much.
    if memory is None or not size_bytes <= memory.nbytes <= 2 * size_bytes + _PAGE_BYTES:
        _unpin()
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
