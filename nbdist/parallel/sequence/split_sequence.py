"""The arguments and the output of a forward whose sequence is split: cut, and put together."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import pad

from nbdist.parallel.libraries import router_logits
from nbdist.parallel.libraries.peft_layers import inner_model

# As in torch.nn.functional.cross_entropy.
_IGNORED = -100
# transformers' names of limits to how far attention looks back.
_LIMITS = ("sliding_window", "attention_chunk_size")

_ROUTER_LOGITS = (
    "output_router_logits: each rank has the router logits of its piece of the sequence, and the "
    "auxiliary loss of pieces is not that of the whole. "
    f"{router_logits.WITHOUT}"
)


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in a value: in mappings, lists, tuples; in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from tensors(item)


def bind(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A call of a model's forward, by the names of its arguments.

    PEFT's models pass on what they get: a call of one has the arguments of the model inside, all
    by name, for they are in another order outside.
    """
    outer = inspect.signature(model.forward).bind(*args, **kwargs)
    inner = inner_model(model)
    if inner is model:
        return outer
    signature = inspect.signature(inner.forward)
    kinds = {name: parameter.kind for name, parameter in outer.signature.parameters.items()}
    positional: tuple[Any, ...] = ()
    named: dict[str, Any] = {}
    for name, value in outer.arguments.items():
        if kinds[name] is inspect.Parameter.VAR_POSITIONAL:
            positional = value
        elif kinds[name] is inspect.Parameter.VAR_KEYWORD:
            named |= value
        elif value is not None:
            named[name] = value
    call = signature.bind(*positional, **named)
    by_name = [
        p if p.kind is p.VAR_KEYWORD else p.replace(kind=p.KEYWORD_ONLY)
        for p in signature.parameters.values()
        if p.kind is not p.VAR_POSITIONAL
    ]
    return inspect.BoundArguments(signature.replace(parameters=by_name), call.arguments)


def map_tensors(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """The same with each tensor in mappings, lists and tuples replaced; other objects stay.

    An entry of a Hugging Face output that becomes None is left out, as these do themselves.
    """
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, Mapping):
        items = {key: map_tensors(function, item) for key, item in value.items()}
        is_record = dataclasses.is_dataclass(value)
        return type(value)(**items) if is_record else type(value)(items)  # type: ignore[call-arg]
    if isinstance(value, list | tuple):
        changed = [map_tensors(function, item) for item in value]
        return type(value)(*changed) if hasattr(value, "_fields") else type(value)(changed)
    return value


def length(call: inspect.BoundArguments) -> int:
    """The sequence's: dim 1 of the first tensor that has two or more; 0 without one."""
    return next((t.shape[1] for t in tensors(call.arguments) if t.ndim > 1), 0)


def why_whole(call: inspect.BoundArguments, config: Any, size: int) -> str:
    """Why a call's sequence cannot be split over `size` ranks, and what to do; "" if it can.

    The config is the model's, as transformers has it, or None.
    """
    n_positions = length(call)
    if not n_positions:
        return (
            "no argument of forward is a tensor of two dims or more, (batch, sequence, ...), so "
            "there is no sequence to split. Pass the batch to the model itself"
        )
    if n_positions % size:
        below = n_positions // size * size
        fitting = f"{below} or {below + size}" if below else f"{size}"
        return (
            f"a sequence of {n_positions} cannot be split over cp={size} ranks "
            f"({n_positions} % {size} = {n_positions % size}). Cut or pad it to {fitting}"
        )
    mask = call.arguments.get("attention_mask")
    if isinstance(mask, torch.Tensor) and not (mask.ndim == 2 and bool((mask == 1).all())):
        return (
            "attention_mask hides positions, and attention over a split sequence takes no mask. "
            "Leave it out where padding is at the end: a causal model does not see it, and its "
            "labels are -100"
        )
    for name in _LIMITS:
        limit = getattr(config, name, None)
        if isinstance(limit, int) and limit < n_positions:
            return (
                f"the model's {name} is {limit}, less than the sequence of {n_positions}: that "
                "attention cannot be split"
            )
    is_asked = router_logits.are_asked(config, {**call.kwargs, **call.arguments})
    return _ROUTER_LOGITS if is_asked else ""


def cut(call: inspect.BoundArguments, start: int, stop: int, n_batch: int = 0) -> Any:
    """The same call with positions `start` to `stop`, of the first `n_batch` samples (0: all).

    What is split is each tensor whose dim 1 is as long as the sequence.
    """
    n_positions = length(call)
    samples = next(t.shape[0] for t in tensors(call.arguments) if t.ndim > 1)

    def part(tensor: torch.Tensor) -> torch.Tensor:
        if n_batch and tensor.ndim and tensor.shape[0] == samples:
            tensor = tensor[:n_batch]
        is_sequence = tensor.ndim > 1 and tensor.shape[1] == n_positions
        return tensor[:, start:stop].contiguous() if is_sequence else tensor

    return _with(call, {name: map_tensors(part, value) for name, value in call.arguments.items()})


def piece(call: inspect.BoundArguments, base: torch.nn.Module, rank: int, size: int) -> Any:
    """Return this rank's part of a call.

    Positions, where forward takes `position_ids` and got none, and the labels of transformers'
    causal models, which these shift by one, are made for the whole sequence first.
    """
    changed = dict(call.arguments)
    parameters = call.signature.parameters
    n_positions = length(call)
    device = next(tensors(call.arguments)).device
    if "attention_mask" in changed:
        changed["attention_mask"] = None
    if "position_ids" in parameters and changed.get("position_ids") is None:
        changed["position_ids"] = torch.arange(n_positions, device=device).unsqueeze(0)
    if "use_cache" in parameters:
        changed["use_cache"] = False
    more = next((p.name for p in parameters.values() if p.kind is p.VAR_KEYWORD), None)
    labels = changed.get("labels")
    loss_name = getattr(getattr(base, "loss_function", None), "__name__", "")
    if labels is not None and more and loss_name == "ForCausalLMLoss":  # it takes shift_labels
        shifted = pad(labels, (0, 1), value=_IGNORED)[:, 1:]
        changed[more] = {"shift_labels": shifted, **changed.get(more, {})}
    per_rank = n_positions // size
    return cut(_with(call, changed), rank * per_rank, (rank + 1) * per_rank)


def all_gather(part: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    """The parts of all ranks of a group, joined along a dim. Collective.

    Ranks compute the same loss from it. Each gets the gradient of its part times the number of
    ranks: DDP's mean over them then is their sum.
    """
    whole: torch.Tensor = _AllGather.apply(part, dim, group)  # type: ignore[no-untyped-call]
    return whole


def all_reduce_mean(value: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The mean over the ranks of a group. Collective.

    The gradient goes on as it is: DDP's mean over the ranks divides it.
    """
    mean: torch.Tensor = _AllReduceMean.apply(value, group)  # type: ignore[no-untyped-call]
    return mean


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.dim, ctx.group = dim, group
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, part, group=group)
        return torch.cat(parts, dim)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        size, place = dist.get_world_size(ctx.group), dist.get_rank(ctx.group)
        return grad.chunk(size, ctx.dim)[place] * size, None, None


class _AllReduceMean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        exact = torch.promote_types(value.dtype, torch.float32)
        mean = value.detach().to(exact, copy=True)
        dist.all_reduce(mean, group=group)
        return (mean / dist.get_world_size(group)).to(value.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return grad, None


def _with(call: inspect.BoundArguments, arguments: dict[str, Any]) -> inspect.BoundArguments:
    # In the order of the signature: the positional ones are taken until one is missing.
    names = [name for name in call.signature.parameters if name in arguments]
    ordered: Any = {name: arguments[name] for name in names}
    return inspect.BoundArguments(call.signature, ordered)
