"""The plan of the last save, which the next one uses again while nothing of it has changed.

Names, layouts, keys and shapes are compared over all ranks, which takes as long as copying a
gigabyte. They hang on what was prepared, on the strategy, and on what optimizers remember: each
rank looks at these by itself, and if all find them as they were, the last save's plan counts.
Values are taken anew each time, and numbers such as the step, where it is one for all parameters.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from nbdist.checkpoint.rank import live_objects
from nbdist.checkpoint.rank.live_objects import CheckpointModel, LiveObjects, PreparedOptimizer
from nbdist.checkpoint.rank.tensors import MODEL, CheckpointTensors, state_path
from nbdist.parallel.accelerator import save_state
from nbdist.parallel.base.consensus import rank, world_size
from nbdist.parallel.dp import fsdp
from nbdist.parallel.live import registry
from nbdist.parallel.live.prepared import Prepared
from nbdist.parallel.reshard.common import OptimizerHandle, prepared_optimizers
from nbdist.parallel.reshard.full_state import local_state
from nbdist.parallel.reshard.optimizer_state import LocalState, MergedState

# (Index of the optimizer, key of its states) -> the number.
Numbers = dict[tuple[int, str], Any]
# The save whose plan still counts on a rank, and its numbers.
PlanKey = tuple[str, Numbers]
# (model, first name), or (optimizer, parameter's unique name, key of its state); models and
# optimizers by their places.
_Key = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class CachedPlan:
    """The content of this save, found with the last save's plan.

    Attributes:
        live, contents: As `find` and `tensors_of` would give them, but for the numbers of
            parameters of which only other ranks remember anything.
        key: What other ranks have to know: the save that agreed on the plan, and what this
            rank's optimizers remember that is one number for all parameters.
    """

    live: LiveObjects
    contents: CheckpointTensors
    key: PlanKey


@dataclass(frozen=True, slots=True)
class _Plan:
    """A save's, on this rank. It holds none of the objects, nor any of their tensors.

    Attributes:
        objects: The result of `_objects`.
        prepared: The objects that each accelerator has prepared, by number.
        models: Name, names of tensors and dtypes of each; as of `CheckpointModel`.
        optimizers: Name, labels and what all ranks remember of each; as of
            `PreparedOptimizer`.
        looks: Type and shape of each of this rank's values.
        names: Names of these values in the checkpoint.
        contents: Without values.
    """

    token: str
    objects: list[weakref.ref[Any]]
    prepared: list[set[int]]
    models: list[tuple[str, dict[str, tuple[str, ...]], dict[str, torch.dtype]]]
    optimizers: list[tuple[str, dict[str, str], MergedState]]
    looks: dict[_Key, tuple[Any, Any]]
    names: dict[_Key, str]
    contents: CheckpointTensors


_plans: list[_Plan] = []


def forget() -> None:
    """Let the next save find and agree on all of it again."""
    _plans.clear()


def store(token: str, live: LiveObjects, contents: CheckpointTensors) -> None:
    """Keep the plan of a save, unless a look cannot say whether it still holds.

    The token is the same on all ranks.
    """
    forget()
    if not _is_all_there_is(live):
        return
    values = _values(live)
    if any(value is None for value in values.values()):
        return
    plan = _Plan(
        token=token,
        objects=[weakref.ref(part) for part in _objects_of(live)],
        prepared=[save_state.numbers(accelerator) for accelerator in live.accelerators],
        models=[(model.name, model.names, model.dtypes) for model in live.models],
        optimizers=[
            (optimizer.name, optimizer.labels, optimizer.agreed) for optimizer in live.optimizers
        ],
        looks=_looks(values),
        names={key: _name(live, key) for key in values},
        contents=replace(contents, local={}),
    )
    _plans.append(plan)


def lookup() -> CachedPlan | None:
    """Find the content if it is as at the last save on this rank. Without communication."""
    if not _plans:
        return None
    plan = _plans[0]
    with torch.no_grad():
        live = _recall(plan)
        if live is None:
            return None
        values = _values(live)
    numbers = _numbers(plan, values) if _looks(values) == plan.looks else None
    if numbers is None or (rank() == 0 and not _has_same_names(live)):
        return None
    tensors = {plan.names[k]: v for k, v in values.items() if isinstance(v, torch.Tensor)}
    return CachedPlan(live, replace(plan.contents, local=tensors), (plan.token, numbers))


def is_agreed(recalled: CachedPlan | None, keys: Iterable[PlanKey | None]) -> bool:
    """Whether the last save's plan counts on all ranks, with the same numbers, which it gets then.

    `recalled` is by this rank, `keys` are by all.
    """
    if recalled is None:
        return False
    token, _ = recalled.key
    everyone = [numbers for other, numbers in filter(None, keys) if other == token]
    common = {place: value for numbers in everyone for place, value in numbers.items()}
    if len(everyone) < world_size() or any(
        _differ(value, common[place]) for numbers in everyone for place, value in numbers.items()
    ):
        return False
    for at, optimizer in enumerate(recalled.live.optimizers):
        before = optimizer.agreed
        entries = {
            (name, key): replace(entry, value=common[at, key]) if entry.kind == "number" else entry
            for (name, key), entry in before.entries.items()
        }
        optimizer.stepper.agreed = replace(before, entries=entries)
    return True


def _is_all_there_is(live: LiveObjects) -> bool:
    """Whether a look at this rank's objects finds the same, and no rank is needed for it."""
    models = [model.prepared for model in live.models]
    optimizers = prepared_optimizers(models)
    here = _objects(registry.prepared(), optimizers or [], live_objects.accelerators_here())
    entries = [entry for step in live.optimizers for entry in step.agreed.entries.values()]
    return (
        optimizers is not None
        and _ids(here) == _ids(_objects_of(live))
        and not any(model.is_flat for model in live.models)
        and all(entry.kind != "other" for entry in entries)
    )


def _objects_of(live: LiveObjects) -> list[object]:
    models = [model.prepared for model in live.models]
    return _objects(models, [step.optimizer for step in live.optimizers], live.accelerators)


def _objects(
    models: Sequence[Prepared], optimizers: Sequence[Optimizer], accelerators: Sequence[Any]
) -> list[object]:
    """All on which a plan hangs: models, what they were built as, optimizers, accelerators."""
    return [*models, *(model.built for model in models), *optimizers, *accelerators]


def _values(live: LiveObjects) -> dict[_Key, Any]:
    """Return this rank's part of all that is saved; None where other ranks are needed."""
    values: dict[_Key, Any] = {
        (at, first): tensor
        for at, model in enumerate(live.models)
        for first, tensor in model.local.items()
    }
    for at, optimizer in enumerate(live.optimizers):
        for name, (_, _, parameter) in optimizer.stepper.names.items():
            for key, value in optimizer.optimizer.state.get(parameter, {}).items():
                values[at, name, key] = _local(value, parameter)
    return values


def _local(value: Any, parameter: torch.Tensor) -> Any:
    if not isinstance(value, DTensor):
        return value
    is_alike = isinstance(parameter, DTensor) and value.placements == parameter.placements
    return value.to_local() if is_alike and value.ndim else None


def _looks(values: Mapping[_Key, Any]) -> dict[_Key, tuple[Any, Any]]:
    return {
        key: (value.dtype, value.shape) if isinstance(value, torch.Tensor) else (type(value), None)
        for key, value in values.items()
    }


def _name(live: LiveObjects, key: _Key) -> str:
    """Return the name of a value in the checkpoint."""
    at, *names = key
    if len(names) == 1:
        return f"{MODEL}.{live.models[at].name}.{names[0]}"
    return ".".join(state_path(live.optimizers[at], *names))


def _recall(plan: _Plan) -> LiveObjects | None:
    """The models, optimizers and accelerators, if they are those that were saved."""
    prepared = registry.prepared()
    optimizers = prepared_optimizers(prepared)
    accelerators = live_objects.accelerators_here()
    if (
        optimizers is None
        or _ids(_objects(prepared, optimizers, accelerators)) != _ids(ref() for ref in plan.objects)
        or [save_state.numbers(accelerator) for accelerator in accelerators] != plan.prepared
    ):
        return None
    models = []
    for model, (name, names, dtypes) in zip(prepared, plan.models, strict=True):
        fsdp.settle(model.built.job.root)
        values = local_state(model)
        tensors = {first: values[first] for first in names if first in values}
        models.append(CheckpointModel(name, model, names, dtypes, tensors))
    live_optimizers = []
    for optimizer, (name, labels, before) in zip(optimizers, plan.optimizers, strict=True):
        here = registry.names_in(optimizer)
        if list(here) != list(labels):
            return None
        local = LocalState(before.optimizer, before.number, before.names, {}, {})
        stepper = OptimizerHandle(optimizer, here, local, before)
        others = sum(len(group["params"]) for group in optimizer.param_groups) - len(here)
        live_optimizers.append(PreparedOptimizer(name, stepper, labels, others))
    return LiveObjects(models, live_optimizers, accelerators)


def _numbers(plan: _Plan, values: Mapping[_Key, Any]) -> Numbers | None:
    """Optimizers' state that is one number for all parameters; None where numbers differ."""
    numbers: Numbers = {}
    for at, (_, _, before) in enumerate(plan.optimizers):
        for (name, key), entry in before.entries.items():
            if entry.kind == "number" and (at, name, key) in values:
                value = values[at, name, key]
                number = value.item() if isinstance(value, torch.Tensor) else value
                if _differ(numbers.setdefault((at, key), number), number):
                    return None
    return numbers


def _differ(number: Any, other: Any) -> bool:
    if type(number) is type(other) and number == other and number:
        return False
    return repr(number) != repr(other)  # not a number is like itself, zero not like minus zero


def _has_same_names(live: LiveObjects) -> bool:
    """Whether the user's variables are called as they were. On rank 0, whose names count."""
    now = live_objects.variable_names(
        [model.prepared for model in live.models], [step.stepper for step in live.optimizers],
        live.accelerators,
    )  # fmt: skip
    return now == ([model.name for model in live.models], [step.name for step in live.optimizers])


def _ids(objects: Iterable[Any]) -> list[int]:
    return [id(item) for item in objects]
