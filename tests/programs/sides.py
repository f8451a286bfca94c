"""Parts of whole tensors by slicing, and parameters that lie so."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from nbdist.strategy.choice import Degrees
from nbdist.strategy.tensor_layout import Placement, TensorLayout, local_runs
from tests.programs.rank import n, rank

CPU = torch.device("cpu")


@functools.cache
def flat() -> DeviceMesh:
    """All ranks in a row. Collective at the first call, as `square`."""
    return init_device_mesh("cpu", (n,))


@functools.cache
def square() -> DeviceMesh:
    return init_device_mesh("cpu", (2, n // 2), mesh_dim_names=("dp", "tp"))


def part(whole: torch.Tensor, side: Placement) -> torch.Tensor | None:
    """This rank's elements, None if it holds nothing."""
    local = local_runs(side.layout, side.degrees, rank)
    for dim, pieces in enumerate(local or ()):
        rows = [i for start, length in pieces for i in range(start, start + length)]
        whole = whole.index_select(dim, torch.tensor(rows, dtype=torch.long))
    return None if local is None else whole.clone().contiguous()


def placed(local: Any, side: Placement) -> torch.Tensor:
    """A local part as a plain tensor or as a DTensor, as the side says."""
    layout, degrees = side.layout, side.degrees
    splits = ((degrees.dp_shard, layout.shard_dim), (degrees.tp, layout.tp_dim))
    placements: list[Any] = [
        Replicate() if dim is None else Shard(dim) for degree, dim in splits if degree > 1
    ]
    if not placements or not layout.shape:
        return local
    if degrees.dp_replicate > 1:
        placements.insert(0, Replicate())
    mesh = square() if len(placements) > 1 else flat()
    stride = torch.empty(layout.shape, device="meta").stride()
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=torch.Size(layout.shape), stride=stride
    )


def parameter(value: torch.Tensor, side: Placement) -> torch.nn.Parameter:
    """The value laid out, as plain, DTensor or meta Parameter."""
    local = part(value, side)
    if local is None:
        return torch.nn.Parameter(torch.empty(value.shape, device="meta"))
    return torch.nn.Parameter(placed(local, side))


def whole_side(shape: tuple[int, ...], number: int) -> Placement:
    return Placement(TensorLayout(shape), Degrees(dp_replicate=n))


def fsdp_side(shape: tuple[int, ...], number: int) -> Placement:
    return Placement(TensorLayout(shape, shard_dim=0 if shape else None), Degrees(dp_shard=n))


def hsdp_side(shape: tuple[int, ...], number: int) -> Placement:
    degrees = Degrees(dp_replicate=2, dp_shard=n // 2)
    return Placement(TensorLayout(shape, shard_dim=0 if shape else None), degrees)


def tp_side(shape: tuple[int, ...], number: int) -> Placement:
    """Matrices are split, the rest lies on all."""
    return Placement(
        TensorLayout(shape, tp_dim=len(shape) - 1 if len(shape) > 1 else None), Degrees(tp=n)
    )


def both_side(shape: tuple[int, ...], number: int) -> Placement:
    tp = 1 if len(shape) > 1 else None
    degrees = Degrees(dp_shard=2, tp=n // 2)
    return Placement(TensorLayout(shape, tp_dim=tp, shard_dim=0 if shape else None), degrees)


def pp_side(shape: tuple[int, ...], number: int) -> Placement:
    """One stage each, and number 0 on the first and the last."""
    stages = {0, n - 1} if number == 0 else {number % n}
    return Placement(TensorLayout(shape, stages=frozenset(stages)), Degrees(pp=n))


def owned_side(shape: tuple[int, ...], number: int) -> Placement:
    """The state under zero1."""
    owner = frozenset({number % n})
    return Placement(TensorLayout(shape, ranks=owner), Degrees(dp_replicate=n))
