"""How many tokens the experts of this rank got, and whether routers got gradients."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from nbdist.lints.rank import ddp, watch
from nbdist.parallel.ep import tokens

# How many steps of an optimizer were looked at.
_steps: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
# By then an optimizer has changed what was zero: the rate of a warmup is 0 in the first one.
_LAST_STEP = 3


def install() -> None:
    """Nothing of torch is replaced: the exchange counts its tokens itself."""


def begin() -> None:
    """Forget the tokens of the cell before."""
    tokens.forget()


def end() -> None:
    """Note this cell's models."""
    if tokens.load() is not None:
        _note_models()


@watch.guarded("uneven-experts")
def _note_models() -> None:
    for model, counts in tokens.of_models():
        watch.note("uneven-experts", ddp.name_of(model.outer), **counts)


@watch.guarded("untrained-router")
def look_at_routers(optimizer: Optimizer) -> None:
    """An optimizer steps: have routers gradients where their experts have?

    In the first step those that have none at all are noted, in the third one also zeros.
    """
    step = _steps.get(optimizer, 0) + 1
    registry = sys.modules.get("nbdist.parallel.live.registry")
    if step > _LAST_STEP or registry is None:
        return
    _steps[optimizer] = step
    if step not in (1, _LAST_STEP):
        return
    stepped = watch.parameters_by_id(optimizer)
    for model in registry.prepared():
        routers = {
            name: (_has_gradient([router], is_zero_none=step > 1), _has_gradient(experts))
            for name, router, experts in _routers(model.base)
            if id(router) in stepped and any(id(each) in stepped for each in experts)
        }
        if routers:
            watch.note("untrained-router", ddp.name_of(model.outer), routers=routers)


def _has_gradient(parameters: Sequence[torch.Tensor], *, is_zero_none: bool = True) -> bool:
    gradients = (p.grad for p in parameters if p.grad is not None)
    return any(not is_zero_none or bool(watch.local(each).any()) for each in gradients)


def _routers(base: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor, Sequence[torch.Tensor]]]:
    """The matrices beside experts with a dim of their number, and the experts, held here."""
    for path, count in _mixtures(base).items():
        experts = list(base.get_submodule(path).parameters())
        parent = path.rpartition(".")[0]
        beside: dict[str, Any] = dict(base.get_submodule(parent).named_parameters())
        inside = {id(each) for each in experts}
        for name, p in beside.items():
            is_router = p.ndim == 2 and count in p.shape and id(p) not in inside
            if is_router and p.requires_grad and not p.is_meta:
                yield f"{parent}.{name}".lstrip("."), p, experts


def _mixtures(base: torch.nn.Module) -> dict[str, int]:
    """How many experts there are in lists of experts and stacks of them, by name."""
    from nbdist.errors import OptionError
    from nbdist.parallel.ep.experts import find_experts

    lists = {
        path: len(module)
        for path, module in base.named_modules()
        if isinstance(module, torch.nn.ModuleList) and "expert" in path.rpartition(".")[2]
    }
    try:
        return lists | {path: layer.count for path, layer in find_experts(base).items()}
    except OptionError:  # it has no stacks
        return lists
