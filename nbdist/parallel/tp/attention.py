"""torch.nn.MultiheadAttention split by heads: its forward on a rank's own heads.

The weights of query, key and value are one parameter; a rank has its parts of the three side by
side. torch's own forward takes the whole, and so do the paths in C++ that it and torch's encoder
take in evaluation: none of them is called.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import ParallelStyle, RowwiseParallel, parallelize_module
from torch.nn import functional

from nbdist.errors import OptionError
from nbdist.parallel.tp.rng import Streams


@dataclass(frozen=True, slots=True)
class TpContext:
    """The split of one layer.

    Attributes:
        sequence_dim: The dim along which what goes out of a rowwise layer is split, and the query
            of an attention, in a block with sequence parallelism; None where they are whole.
    """

    mesh: DeviceMesh
    streams: Streams
    sequence_dim: int | None

    @property
    def output(self) -> Placement:
        """How what goes out of a rowwise layer lies."""
        return Replicate() if self.sequence_dim is None else Shard(self.sequence_dim)

    def __deepcopy__(self, _memo: object) -> Self:
        """Itself: a copy of the model is split along the same mesh."""
        return self


class SplitAttention(ParallelStyle):
    """Splits a torch.nn.MultiheadAttention by its heads."""

    DIMS: ClassVar = {
        "in_proj_weight": 0, "in_proj_bias": 0,
        "q_proj_weight": 0, "k_proj_weight": 0, "v_proj_weight": 0,
    }  # fmt: skip
    PARTS: ClassVar = {"in_proj_weight": 3, "in_proj_bias": 3}

    def __init__(self, context: TpContext) -> None:
        super().__init__()
        self._context = context

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        assert isinstance(module, torch.nn.MultiheadAttention)
        for name, parameter in list(module.named_parameters(recurse=False)):
            module.register_parameter(name, split_parameter(parameter, device_mesh, Shard(0)))
        style = RowwiseParallel(output_layouts=self._context.output)
        parallelize_module(module.out_proj, device_mesh, style, src_data_rank=None)
        forward: Any = functools.partial(_forward, module, self._context)
        module.forward = functools.update_wrapper(forward, module.forward)  # type: ignore[method-assign]
        return module


def split_parameter(
    parameter: torch.Tensor, mesh: DeviceMesh, placement: Placement
) -> torch.nn.Parameter:
    """A meta parameter as a DTensor on meta. No rank is met."""
    split = distribute_tensor(parameter, mesh, [placement], src_data_rank=None)
    return torch.nn.Parameter(split, requires_grad=parameter.requires_grad)


def spread(part: torch.Tensor, mesh: DeviceMesh, placement: Placement) -> DTensor:
    """A part as a whole DTensor. Collective along tp, except where it is whole."""
    split = DTensor.from_local(part, mesh, [placement], run_check=False)
    return split.redistribute(placements=[Replicate()])


def close_fast_paths(base: torch.nn.Module) -> None:
    """Let torch's encoders run layer by layer in evaluation, too; by attributes of theirs.

    Their path in C++ asks for all weights at once and knows nothing of ranks. They look whether
    these are plain tensors in a way that lets DTensors pass.
    """
    for module in base.modules():
        if isinstance(module, torch.nn.TransformerEncoder):
            vars(module)["use_nested_tensor"] = False
        elif isinstance(module, torch.nn.TransformerEncoderLayer):
            vars(module)["activation_relu_or_gelu"] = 0


def check_attention(module: torch.nn.Module, name: str) -> None:
    """Refuse what its forward on own heads does not do.

    Raises:
        OptionError: It has a bias or zeros among its keys and values.
    """
    assert isinstance(module, torch.nn.MultiheadAttention)
    if module.bias_k is not None or module.add_zero_attn:
        raise OptionError(
            f"{name} was made with add_bias_kv or add_zero_attn, which tensor parallelism does not "
            "split. Leave these out, or give a plan that leaves it whole: model.tp_plan = {...}"
        )


def _forward(  # noqa: PLR0913, PLR0917  # torch's own arguments
    module: torch.nn.MultiheadAttention,
    context: TpContext,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_padding_mask: torch.Tensor | None = None,
    need_weights: bool = True,
    attn_mask: torch.Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run torch's forward with this rank's heads. Collective along tp: sums over all heads."""
    if is_causal and attn_mask is None:
        raise RuntimeError("Need attn_mask if specifying the is_causal hint.")
    is_batched = query.dim() == 3
    query, key, value = _inputs(context, query, key, value)
    q, k, v = _projections(module, context, query, key, value)
    if context.sequence_dim is None:  # else the whole block draws this rank's own numbers
        context.streams.enter(id(module))
    # As torch does: kernels that know what causal is are faster than with a mask.
    is_causal = is_causal and key_padding_mask is None and not need_weights
    mask = None if is_causal else _mask(attn_mask, key_padding_mask, context, q)
    dropout = module.dropout if module.training else 0.0
    weights = None
    if need_weights:
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        weights = torch.softmax(scores if mask is None else scores + mask, dim=-1)
        mixed = functional.dropout(weights, dropout) @ v
    else:
        mixed = functional.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal)
    if context.sequence_dim is None:
        context.streams.leave()
    joined = mixed.transpose(1, 2).flatten(2)  # the own heads side by side, as the input lay
    if not is_batched:
        joined = joined.squeeze(0)
    elif not module.batch_first:
        joined = joined.transpose(0, 1)
    result = module.out_proj(joined)
    if weights is None:
        return result, None
    all_weights = _gather_weights(weights, module, context, average_attn_weights)
    return result, all_weights if is_batched else all_weights.squeeze(0)


def _inputs(
    context: TpContext, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The inputs, whole; their gradients are summed over the ranks, once for each tensor."""
    whole = {id(query): _whole(context, query, context.sequence_dim)}
    for tensor in (key, value):
        if id(tensor) not in whole:
            whole[id(tensor)] = _whole(context, tensor, None)
    return whole[id(query)], whole[id(key)], whole[id(value)]


def _whole(context: TpContext, tensor: torch.Tensor, sequence_dim: int | None) -> torch.Tensor:
    before = Replicate() if sequence_dim is None else Shard(sequence_dim)
    return spread(tensor, context.mesh, before).to_local(grad_placements=[Partial()])


def _projections(
    module: torch.nn.MultiheadAttention, context: TpContext, *inputs: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Query, key and value of the own heads, (batch, heads, length, width of a head)."""
    n_heads = module.num_heads // context.mesh.size()
    packed: torch.Tensor | None = module.in_proj_weight
    if packed is not None:
        weights = _local(packed).chunk(3)
    else:
        names = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
        weights = tuple(_local(getattr(module, name)) for name in names)
    biases: tuple[torch.Tensor | None, ...] = (None, None, None)
    if module.in_proj_bias is not None:
        biases = _local(module.in_proj_bias).chunk(3)
    heads = []
    for tensor, weight, bias in zip(inputs, weights, biases, strict=True):
        projected = functional.linear(tensor, weight, bias)
        if projected.dim() == 2:
            projected = projected.unsqueeze(0)
        elif not module.batch_first:
            projected = projected.transpose(0, 1)
        heads.append(projected.view(*projected.shape[:2], n_heads, -1).transpose(1, 2))
    return tuple(heads)


def _local(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _mask(
    attn_mask: torch.Tensor | None,
    key_padding_mask: torch.Tensor | None,
    context: TpContext,
    query: torch.Tensor,
) -> torch.Tensor | None:
    """Both masks as one that is added to the scores, for the own heads; None for none."""
    n_batch, n_heads = query.shape[:2]
    masks = []
    if attn_mask is not None:
        if attn_mask.dim() == 3:  # one for each head of each sample
            attn_mask = attn_mask.view(n_batch, -1, *attn_mask.shape[1:])
            attn_mask = attn_mask.narrow(1, context.mesh.get_local_rank() * n_heads, n_heads)
        masks.append(_additive_mask(attn_mask, query.dtype))
    if key_padding_mask is not None:
        masks.append(_additive_mask(key_padding_mask.reshape(n_batch, 1, 1, -1), query.dtype))
    return sum(masks[1:], masks[0]) if masks else None


def _additive_mask(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if mask.dtype is not torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, -math.inf)


def _gather_weights(
    weights: torch.Tensor,
    module: torch.nn.MultiheadAttention,
    context: TpContext,
    is_averaged: bool,
) -> torch.Tensor:
    if not is_averaged:
        return spread(weights, context.mesh, Shard(1)).to_local()
    mean = weights.sum(dim=1) / module.num_heads
    return spread(mean, context.mesh, Partial()).to_local()
