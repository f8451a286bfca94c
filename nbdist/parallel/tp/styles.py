"""How one layer is split: torch's parallel styles, and own ones where torch has none that fits.

Each makes a module's parameters DTensors on the tp mesh, on meta, without meeting a rank, and
says by hooks what comes in and what goes out. Activations are plain tensors outside of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_module,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
)

from nbdist.parallel.libraries.peft_layers import base_layer
from nbdist.parallel.tp import lora
from nbdist.parallel.tp.attention import SplitAttention, TpContext, split_parameter, spread
from nbdist.parallel.tp.model import is_conv1d
from nbdist.strategy.tensor_layout import TensorLayout
from nbdist.strategy.tp_plan import Style


def split_dims(module: torch.nn.Module, style: Style) -> dict[str, int]:
    """Parameter -> the dim that tp splits, of a module's; without those that stay whole."""
    by_outputs = {"weight": 1, "bias": 0} if is_conv1d(module) else {"weight": 0, "bias": 0}
    by_inputs = {"weight": 0} if is_conv1d(module) else {"weight": 1}
    dims = {
        "colwise": by_outputs,
        "head": by_outputs,
        "rowwise": by_inputs,
        "embedding": {"weight": 0},
        "attention": {**SplitAttention.DIMS, "out_proj.weight": 1},
    }.get(style.kind, {})
    inside = "" if base_layer(module) is module else "base_layer."
    names = {name for name, _ in module.named_parameters()}
    split = {f"{inside}{name}": dim for name, dim in dims.items() if f"{inside}{name}" in names}
    return split | lora.split_dims(module, style)


def split_layout(layout: TensorLayout, name: str, dim: int, style: Style) -> TensorLayout:
    """The layout of a parameter, by its name in its module, after a style has split a dim of it."""
    parts = SplitAttention.PARTS.get(name, 1) if style.kind == "attention" else style.parts
    return replace(layout, tp_dim=dim, tp_parts=parts)


def torch_style(module: torch.nn.Module, style: Style, context: TpContext) -> ParallelStyle:
    """Translate a plan's word to torch's style for a module."""
    make = _CONV1D if is_conv1d(module) else _STYLES
    return make[style.kind](module, context)


def norm_style(sequence_dim: int) -> ParallelStyle:
    """Return the style of a norm with sequence parallelism: each rank has a part."""
    return SequenceParallel(sequence_dim=sequence_dim, use_local_output=True)


class Conv1DParallel(ParallelStyle):
    """A module that torch's styles do not know, whose forward works on DTensors."""

    def __init__(
        self, dims: Mapping[str, int], input_layout: Placement, output_layout: Placement
    ) -> None:
        super().__init__()
        self._dims = dims
        self._input = input_layout
        self._output = output_layout

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        # Underscored, and what torch's documentation says a style has to implement.
        return distribute_module(module, device_mesh, self._partition, self._prepare, self._finish)

    def _partition(self, _name: str, module: torch.nn.Module, mesh: DeviceMesh) -> None:
        for name, parameter in list(module.named_parameters(recurse=False)):
            placement = Shard(self._dims[name]) if name in self._dims else Replicate()
            module.register_parameter(name, split_parameter(parameter, mesh, placement))

    def _prepare(self, _module: torch.nn.Module, args: Any, mesh: DeviceMesh) -> Any:
        (tensor,) = args
        if isinstance(tensor, DTensor):
            return tensor
        return DTensor.from_local(tensor, mesh, [self._input], run_check=False)

    def _finish(self, _module: torch.nn.Module, result: Any, _mesh: DeviceMesh) -> Any:
        return result.redistribute(placements=[self._output]).to_local()


class SplitEmbedding(ParallelStyle):
    """An embedding split by its rows. Each rank looks up what it has; the sum is whole.

    Unlike torch's RowwiseParallel, whose gradient is of the whole vocabulary on every rank.
    """

    def __init__(self, context: TpContext) -> None:
        super().__init__()
        self._context = context

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        assert isinstance(module, torch.nn.Embedding)
        weight = split_parameter(module.weight, device_mesh, Shard(0))
        module.register_parameter("weight", weight)
        lookup: Any = functools.partial(_look_up, module, self._context)
        module.forward = functools.update_wrapper(lookup, module.forward)  # type: ignore[method-assign]
        return module


def _look_up(module: torch.nn.Embedding, context: TpContext, words: torch.Tensor) -> torch.Tensor:
    table = module.weight
    if not isinstance(table, DTensor):  # a pipeline stage that has no embedding
        return torch.nn.functional.embedding(words, table)
    first = context.mesh.get_local_rank() * -(-module.num_embeddings // context.mesh.size())
    rows = table.to_local()
    n_own = rows.shape[0]
    is_own = (words >= first) & (words < first + n_own)
    is_known = (words >= 0) & (words < module.num_embeddings)
    # -1 where a word is out of the vocabulary: torch's own error on every rank.
    row = torch.where(is_own, words - first, torch.where(is_known, 0, -1))
    padding = module.padding_idx
    if padding is not None:
        padding = padding - first if first <= padding < first + n_own else None
    embedded = torch.nn.functional.embedding(row, rows, padding)
    embedded = embedded.masked_fill(~is_own.unsqueeze(-1), 0.0)
    return spread(embedded, context.mesh, Partial()).to_local()


def _embedding_style(module: torch.nn.Module, context: TpContext) -> ParallelStyle:
    # A subclass's forward does more than look up; torch's style leaves it as it is.
    is_plain = type(module).forward is torch.nn.Embedding.forward
    return SplitEmbedding(context) if is_plain else RowwiseParallel(input_layouts=Replicate())


_Maker = Callable[[torch.nn.Module, TpContext], ParallelStyle]

_STYLES: dict[str, _Maker] = {
    "colwise": lambda _module, _context: ColwiseParallel(),
    "rowwise": lambda _module, context: RowwiseParallel(output_layouts=context.output),
    "head": lambda _module, _context: ColwiseParallel(output_layouts=Replicate()),
    "embedding": _embedding_style,
    # What comes in is split by heads, which are in another dim than that of the norm. It is
    # the same to it which one: a part of the batch's gradients, too, adds up to the whole.
    "shared": lambda _module, _context: SequenceParallel(sequence_dim=0, use_local_output=True),
    "attention": lambda _module, context: SplitAttention(context),
}
_CONV1D: dict[str, _Maker] = {
    "colwise": lambda _module, _context: Conv1DParallel(
        {"weight": 1, "bias": 0}, Replicate(), Shard(-1)
    ),
    "rowwise": lambda _module, context: Conv1DParallel({"weight": 0}, Shard(-1), context.output),
    "head": lambda _module, _context: Conv1DParallel(
        {"weight": 1, "bias": 0}, Replicate(), Replicate()
    ),
}
