"""Memory for what a rank is about to receive, all of it there before the first byte comes."""

from __future__ import annotations

import torch

from nbdist.core import madvise

# Below, malloc mostly has pages at hand that were there before.
_LEAST_BYTES = 1 << 20


def room_for(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """An uninitialised tensor whose memory has its pages, where the system can give them at once.

    Otherwise each page of 4 KiB comes with an interruption of its own while the tensor is filled.
    A switch of 100 million parameters with AdamW on two CPU ranks took a sixth longer so.
    """
    tensor = torch.empty(shape, dtype=dtype, device=device)
    if device.type == "cpu" and tensor.nbytes >= _LEAST_BYTES:
        madvise.advise(tensor.data_ptr(), tensor.nbytes, madvise.POPULATE)
    return tensor
