"""The DDP models of a rank, seen as they are made: whether each was called, and what came of it."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from nbdist.lints.rank import reduction, watch
from nbdist.lints.replicas import UnreducedStep
from nbdist.lints.unused_parameters import SHOWN_NAMES
from nbdist.rpc.rank import namespace


class Ddp:
    """One DDP model: whether it was called since its last step, and in this cell. Its hook."""

    def __init__(self, module: DistributedDataParallel, number: int = 0) -> None:
        self.module = weakref.ref(module)
        self.number = number
        self.reduction = reduction.Reduction()
        # Only ever written in a forward: what torch.compile traces must not depend on it.
        self.has_run = self.is_called = False
        self.run_at = 0
        self.is_checked = False

    def __call__(self, _module: torch.nn.Module, _args: object) -> None:
        """Before the model's forward."""
        if torch.is_grad_enabled():
            self.has_run = self.is_called = True

    def __reduce__(self) -> tuple[Any, ...]:
        # A model that is pickled whole must load where there is no nbdist: dict's own `get`, called
        # as a hook, hands its arguments on.
        return getattr, ({}, "get")


@dataclass(slots=True)
class _State:
    """Every DDP model that was made since this was installed, and how many."""

    ddps: list[weakref.ref[Ddp]] = field(default_factory=list)
    count: int = 0


_state = _State()


def install() -> None:
    """Give each DDP model that is made from now on a forward hook, which it keeps."""
    watch.wrap(DistributedDataParallel, "__init__", _noting_ddp)
    reduction.install()


def begin() -> None:
    """Forget which models the cell before has called."""
    for model in _live_ddps():
        model.is_called = model.reduction.is_stepped = False


def end() -> None:
    """Everything is noted when it happens."""


def count() -> int:
    """DDP models that have been made so far."""
    return _state.count


def find(optimizer: Optimizer) -> list[Ddp]:
    """Return the DDP models whose parameters an optimizer has."""
    parameter_ids = watch.parameters_by_id(optimizer).keys()
    return [model for model in _live_ddps() if _has_any(model, parameter_ids)]


def find_used(optimizers: Iterable[Optimizer]) -> list[tuple[int, DistributedDataParallel]]:
    """The models that were called in this cell, or that these optimizers step, with numbers."""
    called = [model for model in _live_ddps() if model.is_called]
    stepped = [model for optimizer in optimizers for model in find(optimizer)]
    modules = [(model.number, model.module()) for model in dict.fromkeys((*called, *stepped))]
    return [(n, module) for n, module in modules if module is not None and not _is_retired(module)]


def ranks_of(parameter_ids: Container[int]) -> tuple[int, ...]:
    """The ranks of the first DDP model that has any of these parameters; empty if none has."""
    for model in _live_ddps():
        module = model.module()
        if module is not None and _has_any(model, parameter_ids):
            return tuple(torch.distributed.get_process_group_ranks(module.process_group))
    return ()


def name_of(module: Any) -> str:
    """The variable that holds a wrapper, or what it is in; or the class of what is in it."""

    def holds(value: Any) -> bool:
        return any(inner is module for inner in namespace.modules_in(value))

    inner = namespace.unwrapped(module)
    return watch.variable(
        lambda value: value is module, watch.variable(holds, type(inner).__name__)
    )


@watch.guarded("beside-wrapper")
def look_beside(optimizer: Optimizer, ddps: Sequence[Ddp]) -> None:
    """An optimizer steps after a backward, and none of its models was called."""
    # A switch may have taken the wrapper off since.
    current = find(optimizer)
    for model in ddps:
        module = model.module()
        if module is None or model not in current:
            continue
        trained = [p for p in module.parameters() if p.requires_grad]
        is_shared = torch.distributed.get_world_size(module.process_group) > 1
        if is_shared and any(p.grad is not None for p in trained):
            watch.note("beside-wrapper", name_of(module))


@watch.guarded("gradients-apart")
def look_unreduced(optimizer: Optimizer, model: Ddp) -> None:
    """An optimizer steps: are the gradients of its model reduced?"""
    module = model.module()
    if module is None or _is_retired(module):
        return
    if idiom := model.reduction.idiom_of_step(module):
        stepped = watch.parameters_by_id(optimizer)
        model.reduction.note(name_of(module), model.number, idiom, module, stepped)


def unreduced_in(module: torch.nn.Module) -> UnreducedStep | None:
    """The first step with gradients that were not reduced, of the DDP models in a module."""
    inside = set(module.modules())
    steps = (model.reduction.step for model in _live_ddps() if model.module() in inside)
    return next((step for step in steps if step is not None), None)


@watch.guarded("unused-parameters")
def look_unused(optimizer: Optimizer, model: Ddp) -> None:
    """A model's first step: has each of its parameters a gradient?"""
    ddp: Any = model.module()
    if ddp is None or ddp.find_unused_parameters or getattr(ddp, "static_graph", False):
        return
    stepped = watch.parameters_by_id(optimizer)
    trained = {
        n: p for n, p in ddp.module.named_parameters() if p.requires_grad and id(p) in stepped
    }
    without_gradient = [name for name, p in trained.items() if p.grad is None]
    if without_gradient and len(without_gradient) < len(trained):
        watch.note(
            "unused-parameters", name_of(ddp), names=without_gradient[:SHOWN_NAMES],
            count=len(without_gradient), total=len(trained),
        )  # fmt: skip


def _noting_ddp(original: Any) -> Any:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        original(self, *args, **kwargs)
        _state.count += 1
        model = Ddp(self, _state.count)
        self.register_forward_pre_hook(model)
        self.register_forward_hook(model.reduction)
        _state.ddps = [weakref.ref(living) for living in (*_live_ddps(), model)]

    return __init__


def _live_ddps() -> list[Ddp]:
    return [model for ref in _state.ddps if (model := ref()) is not None]


def _has_any(model: Ddp, parameter_ids: Container[int]) -> bool:
    module = model.module()
    if module is None or _is_retired(module):
        return False
    return any(id(p) in parameter_ids for p in module.parameters())


def _is_retired(module: torch.nn.Module) -> bool:
    prepared = sys.modules.get("nbdist.parallel.live.prepared")
    return prepared is not None and bool(prepared.is_retired(module))
