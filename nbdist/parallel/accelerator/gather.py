"""Values of ranks that see different data, each copy of the model counted once."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import recursively_apply
from torch.distributed.tensor import DTensor

from nbdist.errors import OptionError
from nbdist.parallel.accelerator.batch_sampler import current_share
from nbdist.parallel.live import registry

_REDUCTIONS = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "none": None,
}


def gather(data: Any) -> Any:
    """Tensors (in lists, tuples and dicts) of all parts of the data, along their first dim.

    Collective: every rank, with tensors of equal shapes. Scalars become vectors. Ranks that
    share a copy of the model (tp, pp, cp) count once: the result has `num_processes` times the
    length, on every rank. A DTensor's whole value counts as this rank's.

    Raises:
        TypeError: There is something else in it.
    """
    group = _group()

    def gather_tensor(tensor: torch.Tensor) -> torch.Tensor:
        tensor = _plain(tensor)
        tensor = (tensor[None] if tensor.ndim == 0 else tensor).contiguous()
        if group is None:
            return tensor
        parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, tensor, group=group)
        return torch.cat(parts)

    return recursively_apply(gather_tensor, data, error_on_other_type=True)


def gather_objects(data: Any) -> Any:
    """Lists of all parts of the data as one list. Collective: every rank. As `gather`."""
    group = _group()
    if group is None:
        return data
    parts: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(parts, data, group=group)
    return [item for part in parts for item in part]


def reduce(data: Any, reduction: str = "sum") -> Any:
    """Tensors combined over all parts of the data. Collective: every rank. As `gather`.

    Raises:
        OptionError: A reduction that is neither sum, mean, max nor none.
    """
    if reduction not in _REDUCTIONS:
        raise OptionError(f"There is no reduction {reduction!r}. Use {', '.join(_REDUCTIONS)}.")
    group, operation = _group(), _REDUCTIONS[reduction]

    def reduce_tensor(tensor: torch.Tensor) -> torch.Tensor:
        total = _plain(tensor).clone()
        if group is None or operation is None:
            return total
        dist.all_reduce(total, operation, group=group)
        return total.div_(dist.get_world_size(group)) if reduction == "mean" else total

    return recursively_apply(reduce_tensor, data, error_on_other_type=True)


def first_of(data: Any, count: int) -> Any:
    """The first so many of each tensor along its first dim, or of a list of other things."""
    if not is_tensors(data):
        return data[:count]
    return recursively_apply(lambda tensor: tensor[:count], data)


def part_of(inputs: Any, state: Any, *, is_padded: bool) -> AbstractContextManager[Any]:
    """Give each rank its part of whole inputs, as Accelerate's split_between_processes.

    If padded, the last parts are filled up with the last element.
    """
    share = current_share()
    # Accelerate's method on an object that has our numbers in place of the world's.
    state_of_shares = SimpleNamespace(
        num_processes=share.count,
        process_index=share.index,
        device=state.device,
        distributed_type=state.distributed_type,
    )
    part: AbstractContextManager[Any] = PartialState.split_between_processes(
        state_of_shares,
        dict(inputs) if isinstance(inputs, dict) else inputs,  # Accelerate changes a dict itself
        apply_padding=is_padded,
    )
    return part


def is_tensors(data: Any) -> bool:
    """Whether there are tensors alone, in lists, tuples and dicts."""
    try:
        recursively_apply(lambda tensor: tensor, data, error_on_other_type=True)
    except TypeError:
        return False
    return True


def _group() -> dist.ProcessGroup | None:
    degrees = registry.data_choice().degrees
    if degrees.dp == 1:
        return None
    if degrees.dp == degrees.product:
        # No mesh is made for it: a rank that has replaced another would make one by itself.
        return dist.group.WORLD
    return registry.cached_mesh(registry.data_choice()).group("dp_replicate", "dp_shard")


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
