"""Puts values that were read into live objects: plans each object's first, then sets all."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from nbdist.checkpoint.manifest import Checkpoint
from nbdist.checkpoint.rank import plain_state
from nbdist.checkpoint.rank.live_objects import (
    CheckpointModel,
    LiveObjects,
    PreparedOptimizer,
    dtype_of,
)
from nbdist.checkpoint.rank.tensors import MODEL, OPTIMIZER, is_whole, state_side
from nbdist.errors import CheckpointError
from nbdist.parallel.base.consensus import rank, world_size
from nbdist.parallel.base.tensors import local_of
from nbdist.parallel.live import fsdp1_state
from nbdist.parallel.reshard.full_state import load_full_optimizer_state
from nbdist.parallel.reshard.optimizer_state import MergedState, Place, StateEntry, write
from nbdist.strategy.choice import Degrees
from nbdist.strategy.tensor_layout import Placement, TensorLayout

# How an optimizer computes: the strategy decides that, and the values are the same.
_OWN_SETTINGS = frozenset({"params", "foreach", "fused", "capturable", "differentiable"})


@dataclass(frozen=True, slots=True)
class RestoreMatch:
    """Pairs of a saved object and the live object that takes it over.

    Attributes:
        models, optimizers: (name in the checkpoint, live one).
        notes: Lines on parts that are taken over differently from how they were saved.
    """

    live: LiveObjects
    models: Sequence[tuple[str, CheckpointModel]]
    optimizers: Sequence[tuple[str, PreparedOptimizer]]
    notes: tuple[str, ...] = ()

    def keys(self, optimizer: PreparedOptimizer) -> dict[str, str]:
        """A parameter's label in the checkpoint -> its unique name in a live optimizer."""
        saved_names = {model.name: old for old, model in self.models}
        return {label: key for key, label in optimizer.labels_as(saved_names).items()}


@dataclass(slots=True)
class _OptimizerPlan:
    """The state that one live optimizer takes over from a checkpoint.

    Attributes:
        agreed: The optimizer's state afterwards, on all ranks.
        parts: This rank's tensors of it, by label: those that it has, or new ones.
        copies: (tensor that it has, what is copied into it).
        others: Tensors of another shape than their parameters'.
        whole: All of it by unique names, under FSDP1.
    """

    prepared: PreparedOptimizer
    agreed: MergedState
    parts: dict[str, torch.Tensor] = field(default_factory=dict)
    copies: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    others: dict[Place, torch.Tensor] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)
    whole: dict[str, Any] | None = None


@dataclass(slots=True)
class RestorePlan:
    """The changes of a load in the live objects of this rank.

    Attributes:
        models: (model, values by first name).
        schedulers: (live one, its state); gradient scalers likewise.
        loaders, objects: (live one, its state).
        counts: (accelerator, its step).
        before: (the user's object, its state of before), once they have changed.
    """

    models: list[tuple[CheckpointModel, dict[str, torch.Tensor]]]
    optimizers: list[_OptimizerPlan]
    schedulers: list[tuple[Any, Any]] = field(default_factory=list)
    loaders: list[tuple[Any, Any]] = field(default_factory=list)
    objects: list[tuple[Any, Any]] = field(default_factory=list)
    counts: list[tuple[Any, int]] = field(default_factory=list)
    before: list[tuple[Any, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def wanted_placements(
    states: Mapping[str, Any], match: RestoreMatch, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Placement]:
    """The tensors that are read, by their names in the checkpoint, and how each lies here.

    `states` are the plain ones, `shapes` those of the saved tensors.

    Raises:
        CheckpointError: A state has its own format, which does not go with the strategy.
    """
    placements = {}
    for old, model in match.models:
        for first in model.names:
            placements[f"{MODEL}.{old}.{first}"] = model.side(first)
    for old, optimizer in match.optimizers:
        keys = match.keys(optimizer)
        for entry in _entries(states, old):
            side, name = state_side(optimizer, keys[entry["parameter"]]), _name(old, entry)
            if entry["kind"] == "tensor":
                placements[name] = side
            elif entry["kind"] == "other":
                if not is_whole(side):
                    kind = type(optimizer.optimizer).__name__
                    raise CheckpointError(
                        f"{kind} keeps {entry['key']!r} of {entry['parameter']} in its own format, "
                        "which cannot be sharded as the strategy requires. Load it under ddp or "
                        "single, or load only the models: %dist_load PATH --models-only. Nothing "
                        "was changed."
                    )
                placements[name] = Placement(TensorLayout(shapes[name]), Degrees())
    return placements


def plan(
    states: Mapping[str, Any], values: Mapping[str, torch.Tensor], match: RestoreMatch
) -> RestorePlan:
    """Plan the state that each live object gets. This rank alone; nothing is changed.

    Raises:
        CheckpointError: Schedulers or the user's objects differ from those that were saved.
    """
    result = RestorePlan(
        [
            (model, {n: values[k] for n in model.names if (k := f"{MODEL}.{old}.{n}") in values})
            for old, model in match.models
        ],
        [
            _plan_optimizer(states, values, match, old, optimizer)
            for old, optimizer in match.optimizers
        ],
        notes=list(match.notes),
    )
    if match.live.accelerators:
        _plan_accelerators(result, states["accelerators"], match.live.accelerators)
    return result


def restore_objects(plan: RestorePlan) -> None:
    """Let the user's own objects take over their states. This rank alone.

    Their code may fail: then `put_objects_back`.
    """
    plan.before = [(stateful, copy.deepcopy(stateful.state_dict())) for stateful, _ in plan.objects]
    for stateful, state in plan.objects:
        stateful.load_state_dict(state)


def put_objects_back(plan: RestorePlan) -> None:
    """Put the user's own objects back. This rank alone."""
    for stateful, state in plan.before:
        stateful.load_state_dict(state)


def commit(plan: RestorePlan) -> None:
    """Put all values in place. Meets no rank, except under FSDP1."""
    with torch.no_grad():
        for model, values in plan.models:
            _commit_model(model, values)
        for optimizer_plan in plan.optimizers:
            _commit_optimizer(optimizer_plan)
    for stateful, state in plan.schedulers:
        stateful.load_state_dict(state)
    for loader, state in plan.loaders:
        loader.resume(state)
    for accelerator, step in plan.counts:
        accelerator.step = step


def _commit_model(model: CheckpointModel, values: Mapping[str, torch.Tensor]) -> None:
    if model.is_flat:
        fsdp1_state.load(model.prepared, values)
    else:
        for first, value in values.items():
            model.local[first].copy_(value)
    for parameter in model.prepared.parameters.values():
        parameter.grad = None


def restore_generators(states: Mapping[str, Any], saved: Checkpoint) -> list[str]:
    """Put this rank's random generators back if as many ranks saved them; else return a note."""
    if saved.world_size != world_size():
        there = f"saved on {saved.world_size} ranks"
        return [f"random generators are unchanged: {there}, loaded on {world_size()}"]
    plain_state.set_random(states["random"][rank()])
    return []


def _entries(states: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = states["optimizers"][name]["entries"]
    return entries


def _name(old: str, entry: Mapping[str, Any]) -> str:
    return f"{OPTIMIZER}.{old}.{entry['parameter']}.{entry['key']}"


def _plan_optimizer(
    states: Mapping[str, Any],
    values: Mapping[str, torch.Tensor],
    match: RestoreMatch,
    old: str,
    optimizer: PreparedOptimizer,
) -> _OptimizerPlan:
    keys = match.keys(optimizer)
    stepper = optimizer.stepper
    entries = {
        (keys[entry["parameter"]], entry["key"]): StateEntry(
            entry["kind"],
            None if entry["dtype"] is None else dtype_of(entry["dtype"]),
            entry["value"],
            entry["is_on_device"],
            frozenset(range(world_size())),
        )
        for entry in _entries(states, old)
    }
    names = tuple(stepper.names)
    agreed = MergedState(type(optimizer.optimizer).__name__, stepper.local.number, names, entries)
    result = _OptimizerPlan(optimizer, agreed, groups=states["optimizers"][old]["groups"])
    read = {
        (keys[entry["parameter"]], entry["key"]): values[name]
        for entry in _entries(states, old)
        if (name := _name(old, entry)) in values
    }
    if optimizer.whole is not None:
        result.whole = _whole(result, read)
        return result
    for place, value in read.items():
        device = local_of(stepper.names[place[0]][2]).device
        if entries[place].kind == "other":
            result.others[place] = value.to(device)
            continue
        label = agreed.label(place)
        live = stepper.local.tensors.get(label)
        if live is not None and live.shape == value.shape and live.dtype == value.dtype:
            result.parts[label] = live
            result.copies.append((live, value))
        else:
            result.parts[label] = value.to(device)
    return result


def _whole(plan: _OptimizerPlan, read: Mapping[Place, torch.Tensor]) -> dict[str, Any]:
    """Make the state that `full_state.full_optimizer_state` gives: unique names, whole tensors."""
    state: dict[str, dict[str, Any]] = {}
    for (key, name), entry in plan.agreed.entries.items():
        value: Any = read.get((key, name))
        if entry.kind == "number":
            value = entry.value
            if entry.dtype is not None:
                value = torch.tensor(value, dtype=entry.dtype)
        state.setdefault(key, {})[name] = value
    here = {label: key for key, label in plan.prepared.labels.items()}
    return {
        "state": state,
        "param_groups": [
            {**live, **_settings(saved), "params": [here[label] for label in live["params"]]}
            for live, saved in zip(plan.prepared.groups(), plan.groups, strict=True)
        ],
    }


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in _OWN_SETTINGS}


def _commit_optimizer(plan: _OptimizerPlan) -> None:
    optimizer = plan.prepared.optimizer
    if plan.whole is not None:
        load_full_optimizer_state(optimizer, plan.whole)
        return
    for live, value in plan.copies:
        live.copy_(value)
    parameters = {key: parameter for key, (_, _, parameter) in plan.prepared.stepper.names.items()}
    for (key, state), value in plan.others.items():
        optimizer.state[parameters[key]][state] = value
    sides = {key: state_side(plan.prepared, key) for key in parameters}
    write(optimizer, plan.agreed, plan.parts, parameters, parameters, sides)
    for group, settings in zip(optimizer.param_groups, plan.groups, strict=True):
        for key, value in _settings(settings).items():
            current = group.get(key)
            if isinstance(current, torch.Tensor) and isinstance(value, torch.Tensor):
                current.copy_(value)
            else:
                group[key] = value


def _plan_accelerators(
    plan: RestorePlan, saved: Sequence[Mapping[str, Any]], live: Sequence[Any]
) -> None:
    """The states of schedulers, loaders, scalers and custom objects, in order of preparation."""
    plan.schedulers = _alike(
        "schedulers",
        [pair for accelerator in saved for pair in accelerator["schedulers"]],
        [(type(s.scheduler).__name__, s) for accelerator in live for s in accelerator._schedulers],  # noqa: SLF001
    )
    plan.objects = _alike(
        "objects of register_for_checkpointing",
        [pair for accelerator in saved for pair in accelerator["objects"]],
        [(type(o).__name__, o) for accelerator in live for o in accelerator._custom_objects],  # noqa: SLF001
    )
    there = [state for accelerator in saved for state in accelerator["loaders"]]
    here = [loader for accelerator in live for loader in accelerator._dataloaders]  # noqa: SLF001
    if len(there) == len(here):
        plan.loaders = [
            (loader, state)
            for loader, state in zip(here, there, strict=True)
            if state is not None and hasattr(loader, "resume")
        ]
    else:
        plan.notes.append(
            f"data loaders keep their position: {len(there)} were saved, "
            f"{len(here)} are prepared here"
        )
    scale = next(
        (accelerator["scaler"] for accelerator in saved if accelerator["scaler"] is not None), None
    )
    scalers = [accelerator.scaler for accelerator in live if accelerator.scaler is not None]
    if scale is not None:
        plan.schedulers += [(scaler, scale) for scaler in scalers]
    if (scale is None) != (not scalers):
        plan.notes.append(
            "the fp16 loss scale is unchanged: none was saved" if scale is None
            else "the saved fp16 loss scale is not used: nothing runs in fp16 here"
        )  # fmt: skip
    plan.counts = [
        (accelerator, state["step"]) for accelerator, state in zip(live, saved, strict=False)
    ]


def _alike(
    what: str, saved: Sequence[tuple[str, Any]], live: Sequence[tuple[str, Any]]
) -> list[tuple[Any, Any]]:
    there, here = [kind for kind, _ in saved], [kind for kind, _ in live]
    if there != here:
        raise CheckpointError(
            f"The {what} do not fit: {', '.join(there) or 'none'} in the checkpoint and "
            f"{', '.join(here) or 'none'} here. Prepare the same, in the same order, or load "
            "only the models: %dist_load PATH --models-only. Nothing was changed."
        )
    return [(stateful, state) for (_, stateful), (_, state) in zip(live, saved, strict=True)]
