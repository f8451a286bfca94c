"""Facts of a model for tensor parallelism: its layers, widths and heads.

Depends on shapes and attributes alone: equal on all ranks, also for parameters on meta.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from nbdist.errors import OptionError
from nbdist.parallel.base.blocks import candidates
from nbdist.parallel.libraries.peft_layers import base_layer, is_adapted
from nbdist.strategy.tp_names import HEAD_COUNTS, HEAD_SIZES, KV_COUNTS, WIDTHS
from nbdist.strategy.tp_plan import Layer, Plan

# Modules without parameters that compute each element by itself.
_POINTWISE = tuple(
    getattr(torch.nn, name)
    for name in (
        "CELU", "Dropout", "ELU", "GELU", "Hardsigmoid", "Hardswish", "Hardtanh", "Identity",
        "LeakyReLU", "LogSigmoid", "Mish", "ReLU", "ReLU6", "SELU", "SiLU", "Sigmoid", "Softplus",
        "Softsign", "Tanh",
    )
)  # fmt: skip


def layers_of(base: torch.nn.Module) -> dict[str, Layer]:
    """Every module of a model by name, but what is in a torch.nn.MultiheadAttention.

    A layer with adapters of PEFT is what the layer inside it is, by the outer one's name.
    """
    modules = dict(base.named_modules())
    members = [module for blocks in candidates(base) for module in blocks.modules]
    blocks = {id(module) for module in members}
    inside = {id(inner) for module in members for inner in module.modules()}
    weights = {id(parameter): name for name, parameter in base.named_parameters()}
    hidden = {
        id(m)
        for attention in modules.values()
        if is_attention(attention)
        for m in attention.children()
    } | {id(m) for layer in modules.values() if is_adapted(layer) for m in _inside(layer)}
    return {
        name: _layer(base_layer(module), weights, id(module) in blocks, id(module) in inside)
        for name, module in modules.items()
        if id(module) not in hidden
    }


def is_conv1d(module: torch.nn.Module) -> bool:
    """Whether it is Hugging Face's Conv1D: a linear layer whose weight is (inputs, outputs)."""
    module = base_layer(module)
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def is_attention(module: torch.nn.Module) -> bool:
    """Whether it is torch's own attention, with its own forward."""
    return isinstance(module, torch.nn.MultiheadAttention)


def divide_attributes(
    module: torch.nn.Module, name: str, plan: Plan, columns: Sequence[str], degree: int
) -> dict[str, int]:
    """A module's attributes for heads and widths on one rank: name -> value.

    The plan may say which ones are divided; `columns` are the module's colwise layers, by name.

    Raises:
        OptionError: There is no such attribute, or it cannot be divided.
    """
    attributes = vars(module)
    style = plan.get(name)
    if style is not None and style.kind == "divide":
        return {
            key: _share(attributes.get(key), f"{name}.{key}", degree) for key in style.attributes
        }
    widths = {
        _sizes(module.get_submodule(column.removeprefix(f"{name}.")))[1] // plan[column].parts
        for column in columns
    }
    counts = {
        key: attributes[key] for key in (*HEAD_COUNTS, *KV_COUNTS) if _is_count(attributes.get(key))
    }
    sizes = {
        key: attributes[key]
        for key in WIDTHS
        if attributes.get(key) in widths and key not in counts
    }
    return {
        key: _share(value, f"{name}.{key}", degree) for key, value in {**counts, **sizes}.items()
    }


def _layer(
    module: torch.nn.Module, weights: Mapping[int, str], is_block: bool, is_in_block: bool
) -> Layer:
    attributes = vars(module)
    n_in, n_out = _sizes(module)
    weight = getattr(module, "weight", None)
    heads, kv_heads, head_size = (
        next((attributes[key] for key in names if _is_count(attributes.get(key))), None)
        for names in (HEAD_COUNTS, KV_COUNTS, HEAD_SIZES)
    )
    return Layer(
        kind=next((kind for kind, matches in _KINDS if matches(module)), "other"),
        n_in=n_in,
        n_out=n_out,
        weight=weights.get(id(weight), ""),
        n_own=sum(parameter.numel() for parameter in module.parameters(recurse=False)),
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        is_block=is_block,
        is_in_block=is_in_block,
    )


def is_norm(module: torch.nn.Module) -> bool:
    """Whether it is a norm over the last dim: its name says so, and its parameters are vectors."""
    parameters = list(module.parameters(recurse=False))
    return (
        "Norm" in type(module).__name__
        and not isinstance(module, torch.nn.modules.batchnorm._NormBase)  # noqa: SLF001  # no other name
        and not isinstance(module, torch.nn.GroupNorm)
        and not any(True for _ in module.children())
        and all(parameter.dim() == 1 for parameter in parameters)
    )


def _inside(layer: torch.nn.Module) -> Iterator[torch.nn.Module]:
    return (module for module in layer.modules() if module is not layer)


def _sizes(module: torch.nn.Module) -> tuple[int, int]:
    module = base_layer(module)
    if isinstance(module, torch.nn.Linear):
        return module.in_features, module.out_features
    if isinstance(module, torch.nn.Embedding):
        return module.num_embeddings, module.embedding_dim
    parameters = list(module.parameters(recurse=False))
    if is_conv1d(module):
        return tuple(parameters[0].shape)  # type: ignore[return-value]
    return (0, parameters[0].shape[-1]) if parameters and parameters[0].dim() else (0, 0)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_table(module: torch.nn.Module) -> bool:
    # The others look at the whole table, or at all words of a batch.
    return isinstance(module, torch.nn.Embedding) and not (
        module.max_norm is not None or module.sparse or module.scale_grad_by_freq
    )


_KINDS: tuple[tuple[str, Callable[[torch.nn.Module], bool]], ...] = (
    ("linear", lambda module: isinstance(module, torch.nn.Linear) or is_conv1d(module)),
    ("embedding", _is_table),
    ("attention", is_attention),
    ("sequential", lambda module: isinstance(module, torch.nn.Sequential)),
    ("pointwise", lambda module: isinstance(module, _POINTWISE)),
    ("norm", is_norm),
)


def _share(value: Any, place: str, degree: int) -> int:
    if not _is_count(value):
        raise OptionError(f"tp_plan: {place} is to be divided, but it is {value!r}, not a number.")
    if value % degree:
        raise OptionError(f"tp={degree} does not divide {place} = {value}. Use a divisor of it.")
    return int(value // degree)
