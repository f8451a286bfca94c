"""The memory of this rank: the strategy, its mesh, prepared models, bound optimizers."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

from nbdist.core.rank import this_rank
from nbdist.errors import NbdistError
from nbdist.parallel.base import guard, weak_list
from nbdist.parallel.base.consensus import all_or_none, world_size
from nbdist.parallel.base.mesh import ParallelMesh, build_mesh
from nbdist.parallel.base.training_state import same_random
from nbdist.parallel.live import fsdp1_state
from nbdist.parallel.live.build import Built, tensors_of
from nbdist.parallel.live.prepared import Prepared, attach, find_prepared
from nbdist.strategy import tensor_layout
from nbdist.strategy.choice import Degrees, Strategy, steps_of
from nbdist.strategy.choose import default_choice
from nbdist.strategy.tensor_layout import Placement, TensorLayout


class Watcher(Protocol):
    """A part of nbdist that is notified of a switch."""

    def before_switch(self, old: Strategy, new: Strategy) -> None:
        """Called before anything changes; raises OptionError if it cannot follow. No rank met."""

    def after_switch(self, old: Strategy, new: Strategy) -> None:
        """Called on every rank after a switch. Meets no rank."""


@dataclass(slots=True)
class _Live:
    """The strategy of this rank, and all that was made under one.

    Attributes:
        choice: The strategy; None until one is chosen: the default counts.
        meshes: ParallelMeshes that were made, by (is single, degrees).
        bound: Optimizers, in order; with what ends that which a strategy has added to its step.
        numbers: How many were given to models.
        data_choice: The strategy whose ranks share the data out; None for `choice`.
    """

    choice: Strategy | None = None
    data_choice: Strategy | None = None
    meshes: dict[tuple[bool, Degrees], ParallelMesh] = field(default_factory=dict)
    prepared: list[weakref.ref[Prepared]] = field(default_factory=list)
    bound: weakref.WeakKeyDictionary[Optimizer, Callable[[], object] | None] = field(
        default_factory=weakref.WeakKeyDictionary
    )
    watchers: list[weakref.ref[Any]] = field(default_factory=list)
    numbers: int = 0


_live = _Live()


def current() -> Strategy:
    """The strategy under which models are prepared, and are now."""
    return _live.choice or default_choice(world_size())


def data_choice() -> Strategy:
    """The strategy by whose degrees batches are shared out: the current one, mostly."""
    return _live.data_choice or current()


@contextlib.contextmanager
def data_shared_as(choice: Strategy) -> Iterator[None]:
    """Loaders, schedulers and `gather` go by another strategy in here. This rank alone."""
    _live.data_choice = choice
    try:
        yield
    finally:
        _live.data_choice = None


def _current_name() -> str:
    return current().name


def set_choice(choice: Strategy) -> None:
    """Let models be prepared under a strategy from now on; those that there are stay."""
    guard.watch(_current_name)
    _live.choice = choice


def cached_mesh(choice: Strategy | None = None) -> ParallelMesh:
    """The mesh of a strategy; of the current one by itself. Collective at its first use."""
    choice = choice or current()
    return _live.meshes.get(_key(choice)) or mesh_for(choice)


def mesh_for(choice: Strategy) -> ParallelMesh:
    """The mesh of a strategy. Collective: every rank, with the same one.

    Made anew on all ranks where one of them has not got it: it has replaced another.
    """
    cached = _live.meshes.get(_key(choice))
    if all(all_or_none("Making the mesh", lambda: cached is not None)):
        assert cached is not None
        return cached
    with same_random():
        mesh = build_mesh(choice, device().type)
    _live.meshes[_key(choice)] = mesh
    return mesh


def device() -> torch.device:
    """The device of this rank's models."""
    return torch.device(this_rank().place.device)


def watch(watcher: Watcher) -> None:
    """Let an object know of each switch, for as long as it lives."""
    _live.watchers.append(weakref.ref(watcher))


def ask(old: Strategy, new: Strategy) -> None:
    """Ask the watchers whether they can follow a switch; one that cannot raises OptionError."""
    for watcher in watchers():
        watcher.before_switch(old, new)


def watchers() -> list[Watcher]:
    """The watchers that still live, in the order of `watch`."""
    return [watcher for ref in _live.watchers if (watcher := ref()) is not None]


def prepared() -> list[Prepared]:
    """The prepared models that live on this rank, in order."""
    return [model for reference in _live.prepared if (model := reference()) is not None]


def keep(numbers: set[int]) -> None:
    """Forget prepared models but these: others are left of a cell that failed on some ranks."""
    _live.prepared = [weakref.ref(model) for model in prepared() if model.number in numbers]


def prepared_of(module: torch.nn.Module) -> Prepared | None:
    """Look a model up: the user's module, the object returned for it, or one around it."""
    attachment = find_prepared(module)
    return attachment or next((model for model in prepared() if model.outer is module), None)


def register(built: Built, replaced: dict[str, torch.Tensor]) -> None:
    """Remember a model for as long as it lives; `replaced` are its former parameters, by name.

    Its number is the same on all ranks, as preparing is.
    """
    model = Prepared(_live.numbers, built)
    _live.numbers += 1
    model.remember(replaced)
    attach(model)
    _live.prepared.append(weakref.ref(model))


def last_number() -> int:
    """How many numbers this rank has given, to models and to what else was prepared."""
    return max(_live.numbers, weak_list.last_number())


def agree_on_numbers(last_numbers: Iterable[int]) -> None:
    """Go on after the largest of all ranks' `last_number`.

    A rank that has replaced another would begin with 0, and its models, optimizers and loaders
    would be taken for older ones that somebody on another rank still holds.
    """
    _live.numbers = max(last_numbers)
    weak_list.count_on(_live.numbers)


def layout_of(parameter: torch.Tensor) -> TensorLayout | None:
    """How a parameter of a prepared model lies; None for any other tensor."""
    for model in prepared():
        name = model.current_name_of(parameter)
        if name is not None:
            return (
                fsdp1_state.layout_of_piece(model)
                if fsdp1_state.is_flat(model)
                else model.layouts[name]
            )
    return None


def refuse_replaced(parameters: Iterable[torch.Tensor], function: str) -> None:
    """Raise for a parameter in whose place a strategy has put another: nothing trains it any more.

    Raises:
        NbdistError: There is one; it names the parameter, and what to give the function instead.
    """
    models = prepared()
    for parameter in parameters:
        for model in models:
            name = model.name_of(parameter)
            if name is not None and model.current_name_of(parameter) is None:
                raise NbdistError(
                    f"{function} got {name} as it was before prepare() or a switch. "
                    f"{current().name} has put another parameter in its place, and that one has "
                    f"the gradient. Call {function} with model.parameters() of the model that "
                    "prepare() returned."
                )


def bound_optimizers() -> weakref.WeakKeyDictionary[Optimizer, Callable[[], object] | None]:
    """Optimizers of prepared models that still live, in order, with what detaches their steps."""
    return _live.bound


def names_in(optimizer: Optimizer) -> dict[str, tuple[Prepared, str, torch.Tensor]]:
    """The parameters of prepared models in an optimizer's groups, in their order.

    Returns:
        A name that no other parameter has -> (model, first name in it, what is in the group).
    """
    parameters = {}
    models = prepared()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            for place, model in enumerate(models):
                name = model.name_of(parameter)
                if name is not None:
                    parameters[unique_name(place, name)] = (model, name, parameter)
                    break
    return parameters


def unique_name(place: int, name: str) -> str:
    """A parameter's name among those of all models; in the first one its own."""
    return f"model {place + 1}: {name}" if place else name


def state_side(built: Built, name: str) -> Placement:
    """How an optimizer's state of a parameter lies."""
    side = built.side(name)
    if "zero1" not in steps_of(built.job.choice):
        return side
    owner = owner_names(built)[name]
    return Placement(replace(side.layout, ranks=frozenset({owner})), side.degrees)


def owner_names(built: Built) -> dict[str, int]:
    """Who steps each parameter under zero1, by first name."""
    if "zero1" not in built.job.step_data:
        layouts = {name: built.layouts[name] for name in built.parameter_names}
        tensors = tensors_of(built.job.base)  # it may only be planned yet
        frozen = {name for name in layouts if not tensors[name].requires_grad}
        built.job.step_data["zero1"] = tensor_layout.owners(layouts, world_size(), frozen)
    owners: dict[str, int] = built.job.step_data["zero1"]
    return owners


def _key(choice: Strategy) -> tuple[bool, Degrees]:
    return choice.name == "single", choice.degrees
