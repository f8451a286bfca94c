"""Optimizers that step plain tensors and DTensors in one list.

Under tensor parallelism a model has both, and with FSDP2 on top DTensors of two meshes. torch's
foreach implementations, the default on CUDA, and its fused ones take one kind at a time.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer


@functools.cache  # once in a process
def step_by_mesh() -> None:
    """Let torch's foreach and fused optimizers step lists of mixed tensors, mesh by mesh.

    They sort tensors by device and dtype before they step them, in one place; from now on by
    mesh, too. Lists of one kind are stepped as before. This process.
    """
    # Private: nothing public says how tensors are put together, and with foreach=False, the
    # way round, a step on CUDA launches a kernel for every tensor and operation.
    sort = Optimizer._group_tensors_by_device_and_dtype  # noqa: SLF001

    @functools.wraps(sort)
    def sort_by_mesh(lists: Any, with_indices: bool = False) -> Any:
        groups = sort(lists, with_indices)
        if torch.compiler.is_compiling() or not any(
            isinstance(tensor, DTensor) for tensor in lists[0]
        ):
            return groups
        return {
            part: group
            for key, (sorted_lists, indices) in groups.items()
            for part, group in _split(key, sorted_lists, indices).items()
        }

    Optimizer._group_tensors_by_device_and_dtype = staticmethod(sort_by_mesh)  # type: ignore[assignment]  # noqa: SLF001


class _Key(tuple[Any, Any]):
    """(device, dtype), as torch unpacks it, of one mesh: equal to no other."""

    __slots__ = ()
    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other


def _split(key: tuple[Any, Any], lists: list[list[Any]], indices: list[int]) -> dict[Any, Any]:
    """One group of torch's as one for each mesh: key -> (lists, indices)."""
    places: dict[Any, list[int]] = {}
    for place, tensor in enumerate(lists[0]):
        mesh = tensor.device_mesh if isinstance(tensor, DTensor) else None
        places.setdefault(mesh, []).append(place)
    if len(places) == 1:
        return {key: (lists, indices)}
    return {
        _Key(key): (
            [[tensors[place] for place in members] if tensors else tensors for tensors in lists],
            [indices[place] for place in members] if indices else indices,
        )
        for members in places.values()
    }
