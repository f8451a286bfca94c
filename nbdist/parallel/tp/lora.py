"""LoRA's matrices beside a layer that tp splits: B(A(x)) is split as the layer's output is.

colwise   A is whole, B is split by its outputs: no rank is met in forward
rowwise   A is split by its inputs, and its results are summed; B is whole
other     both are whole, as the layer's input and output are
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

from nbdist.errors import OptionError
from nbdist.parallel.libraries import peft_layers
from nbdist.parallel.tp.attention import TpContext, split_parameter
from nbdist.strategy.tp_plan import Style

_A, _B = "lora_A", "lora_B"
# Style -> the matrix that is split, and along which dim.
_SPLIT = {"colwise": (_B, 0), "rowwise": (_A, 1)}


def check_adapters(module: torch.nn.Module, name: str, style: Style) -> None:
    """Refuse adapters that compute something else than B(A(x)) beside a split layer.

    Raises:
        OptionError: As DoRA does, and IA3.
    """
    if style.kind in _SPLIT and peft_layers.is_adapted(module) and not peft_layers.is_lora(module):
        kinds = {type(module).__module__.split(".")[2], *_variants(module)}
        raise OptionError(
            f"tp cannot split {name}: of PEFT's adapters it splits LoRA's alone, and this one is "
            f"{', '.join(sorted(kinds))}. Use fsdp, ddp or pp."
        )


def split_dims(module: torch.nn.Module, style: Style) -> dict[str, int]:
    """Parameter -> the dim that tp splits, of a layer's adapters."""
    if style.kind not in _SPLIT or not peft_layers.is_lora(module):
        return {}
    matrix, dim = _SPLIT[style.kind]
    return {
        f"{matrix}.{name}": 0 if parameter.dim() == 1 else dim
        for name, parameter in module.get_submodule(matrix).named_parameters()
    }


def split_adapters(module: torch.nn.Module, style: Style, context: TpContext) -> None:
    """Split a layer's adapters, on meta. A colwise layer's input comes in as a whole DTensor."""
    split = {"colwise": _split_colwise, "rowwise": _split_rowwise}.get(style.kind)
    if split is not None and peft_layers.is_lora(module):
        split(module, context)


def _split_colwise(module: torch.nn.Module, context: TpContext) -> None:
    for dropout in _parts(module, "lora_dropout"):
        dropout.register_forward_pre_hook(_as_local)
    for down in _parts(module, _A):
        _split_locally(down, context, Replicate())
    for up in _parts(module, _B):
        _split_locally(up, context, Shard(0))


def _split_rowwise(module: torch.nn.Module, context: TpContext) -> None:
    for down in _parts(module, _A):
        style = RowwiseParallel(output_layouts=context.output)
        parallelize_module(down, context.mesh, style, src_data_rank=None)
    if context.sequence_dim is not None:  # each rank has a part of the sequence
        for up in _parts(module, _B):
            _split_locally(up, context, Replicate())


def _parts(module: torch.nn.Module, name: str) -> Iterator[torch.nn.Module]:
    """Yield the parts of each adapter."""
    return module.get_submodule(name).children()


def _variants(module: torch.nn.Module) -> Iterator[str]:
    variants: dict[str, object] = getattr(module, "lora_variant", {})
    return (type(variant).__name__.removesuffix("LinearVariant") for variant in variants.values())


def _split_locally(layer: torch.nn.Module, context: TpContext, placement: Any) -> None:
    """Let a linear layer compute with this rank's part of it, from this rank's input."""
    for name, parameter in list(layer.named_parameters(recurse=False)):
        split = split_parameter(parameter, context.mesh, placement)
        layer.register_parameter(name, split)
    forward: Any = functools.partial(_forward, layer)
    layer.forward = functools.update_wrapper(forward, layer.forward)


def _forward(layer: Any, tensor: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.linear(tensor, _part(layer.weight), _part(layer.bias))


def _part(parameter: Any) -> Any:
    """A rank's part. Of a parameter that is whole each rank makes a part of the gradient."""
    if not isinstance(parameter, DTensor):
        return parameter
    is_whole = parameter.placements == (Replicate(),)
    return parameter.to_local(grad_placements=[Partial()] if is_whole else None)


def _as_local(_module: torch.nn.Module, args: tuple[Any, ...]) -> Any:
    """The whole input as a plain tensor, of whose gradient each rank makes a part."""
    tensor = args[0]
    if not isinstance(tensor, DTensor):
        return None
    return (tensor.to_local(grad_placements=[Partial()]), *args[1:])
