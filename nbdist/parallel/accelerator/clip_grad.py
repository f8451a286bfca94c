"""The norm of gradients of which each rank has a part, and clipping by it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch.nn.utils import clip_grads_with_norm_

from nbdist.errors import OptionError
from nbdist.parallel.base.tensors import local_as, local_parts
from nbdist.strategy.choice import Degrees
from nbdist.strategy.tensor_layout import TensorLayout, is_first


def clip_grad_norm(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float,
    layout_of: Callable[[torch.Tensor], TensorLayout | None],
    *,
    degrees: Degrees,
    is_strict: bool = False,
) -> torch.Tensor:
    """Scale gradients in place so that their norm over the whole model is at most max_norm.

    Collective under fsdp, tp and pp (one all_reduce over all ranks): every rank, also one that
    has no gradient. Each element counts once, however many ranks hold it. A gradient that tp
    left as partial sums is summed for it.

    Args:
        parameters: As for torch.nn.utils.clip_grad_norm_: plain, DTensors, both, or on meta.
        max_norm: The limit; math.inf only measures.
        norm_type: Positive, or math.inf.
        layout_of: How a parameter lies; None for one that nbdist has not prepared: its
            gradient counts as it is on this rank.
        degrees: The mesh that the layouts are of.
        is_strict: A norm that is not finite is an error, and nothing is scaled.

    Returns:
        The norm before clipping: 0-dim, float32, on the gradients' device. Equal on all ranks if
        every parameter is prepared.

    Raises:
        OptionError: norm_type is not positive.
        RuntimeError: With is_strict, as torch's own: the norm is nan or inf. On all ranks.
    """
    if not norm_type > 0:
        raise OptionError(
            f"Gradients have no norm of type {norm_type:g}. Use a positive number (2 is usual) "
            "or inf."
        )
    tensors = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    with torch.no_grad():
        total = _norm(tensors, float(norm_type), layout_of, degrees)
        if is_strict and not total.isfinite():
            raise RuntimeError(
                f"The total norm of order {norm_type:g} of the gradients is {total.item()}, so "
                "they were not clipped. To clip all the same: error_if_nonfinite=False."
            )
        if max_norm != math.inf:
            clip_grads_with_norm_(local_parts(tensors), max_norm, total)
    return total


def _norm(
    parameters: Sequence[torch.Tensor],
    norm_type: float,
    layout_of: Callable[[torch.Tensor], TensorLayout | None],
    degrees: Degrees,
) -> torch.Tensor:
    is_split = degrees.is_split
    rank = dist.get_rank() if is_split else 0
    counted, others = [], []
    for parameter in parameters:
        if parameter.grad is None:
            continue
        gradient = local_as(parameter.grad, parameter)
        layout = layout_of(parameter)
        if layout is None or not is_split:
            others.append(gradient)
        elif is_first(layout, degrees, rank):
            counted.append(gradient)
    home = next((tensor.device for tensor in (*counted, *others)), _meeting_device())
    total = _total_power(others, norm_type, home)
    if is_split:
        shared = _total_power(counted, norm_type, _meeting_device())
        dist.all_reduce(shared, dist.ReduceOp.MAX if norm_type == math.inf else dist.ReduceOp.SUM)
        shared = shared.to(home)
        total = torch.maximum(total, shared) if norm_type == math.inf else total + shared
    return (total if norm_type == math.inf else total ** (1.0 / norm_type)).float()


def _total_power(
    gradients: Sequence[torch.Tensor], norm_type: float, device: torch.device
) -> torch.Tensor:
    """The sum of all elements' powers, or their maximum: 0-dim, float64."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for gradient in gradients:
        if gradient.numel():  # an empty one has no largest element
            groups.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    for (_, dtype), tensors in groups.items():
        wide = torch.float32 if dtype.itemsize < torch.float32.itemsize else None
        # torch.nn.utils.get_total_norm is public, but rounds to bfloat16 what is bfloat16.
        norms = torch.stack(torch._foreach_norm(tensors, norm_type, dtype=wide))  # noqa: SLF001
        norms = norms.to(device, torch.float64)
        if norm_type == math.inf:
            total = torch.maximum(total, norms.max())
        else:
            total = total + (norms**norm_type).sum()
    return total


def _meeting_device() -> torch.device:
    """Choose the device of a reduced number: one kind on all ranks, whatever the gradients' is."""
    if dist.is_initialized() and "cuda:nccl" in dist.get_backend_config():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
