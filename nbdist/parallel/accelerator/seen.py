"""The shape of the batches that this rank trains with, as prepared DataLoaders hand them out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

# What models of tokens call them: a batch may have other tensors before.
_TOKENS = "input_ids"
_last: tuple[tuple[int, ...], str] = ((), "")


def note(batch: Any) -> None:
    """The first batch of a loop; the last one of an epoch may be smaller."""
    global _last  # noqa: PLW0603  # one process is one rank
    found = _first(batch)
    if found is not None and found.dim():
        _last = tuple(found.shape), str(found.dtype).removeprefix("torch.")


def last() -> tuple[tuple[int, ...], str]:
    """Shape and type of the last loop's first batch; empty before one."""
    return _last


def _first(batch: Any) -> torch.Tensor | None:
    if isinstance(batch, torch.Tensor):
        return batch
    if isinstance(batch, Mapping):
        if isinstance(batch.get(_TOKENS), torch.Tensor):
            tokens: torch.Tensor = batch[_TOKENS]
            return tokens
        batch = batch.values()
    if isinstance(batch, str | bytes) or not isinstance(batch, Iterable):
        return None
    return next((found for one in list(batch) if (found := _first(one)) is not None), None)
