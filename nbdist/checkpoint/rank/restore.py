"""What was read is put into live objects: what each gets, then all of it at once."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from nbdist.checkpoint.manifest import Checkpoint
from nbdist.checkpoint.rank import plain_state
from nbdist.checkpoint.rank.live_objects import LiveObjects, Model, PreparedOptimizer, dtype_of
from nbdist.checkpoint.rank.tensors import MODEL, OPTIMIZER, is_whole, state_side
from nbdist.errors import CheckpointError
from nbdist.parallel.consensus import rank, world_size
from nbdist.parallel.dp import fsdp1_state
from nbdist.parallel.reshard.full_state import load_full_optimizer_state
from nbdist.parallel.reshard.optimizer_state import MergedState, Place, StateEntry, write
from nbdist.parallel.tensors import local_of
from nbdist.strategy.choice import Degrees
from nbdist.strategy.tensor_layout import Placement, TensorLayout

# How an optimizer computes: the strategy decides that, and the values are the same.
_OWN_SETTINGS = frozenset({"params", "foreach", "fused", "capturable", "differentiable"})


@dataclass(frozen=True, slots=True)
class Matched:
    """Which live object takes over which saved one.

    Attributes:
        found: All live ones.
        models, optimizers: (name in the checkpoint, live one).
        notes: What is taken over otherwise than as it was saved.
    """

    found: LiveObjects
    models: Sequence[tuple[str, Model]]
    optimizers: Sequence[tuple[str, PreparedOptimizer]]
    notes: tuple[str, ...] = ()

    def keys(self, one: PreparedOptimizer) -> dict[str, str]:
        """A parameter's label in the checkpoint -> its unique name in a live optimizer."""
        there = {model.name: old for old, model in self.models}
        return {label: key for key, label in one.labels_as(there).items()}


@dataclass(slots=True)
class _Steps:
    """What one optimizer gets.

    Attributes:
        one: It.
        agreed: What it will remember.
        parts: This rank's tensors of it, by label: those that it has, or new ones.
        copies: (tensor that it has, what is copied into it).
        others: Tensors of another form than their parameters'.
        groups: Settings of each group.
        whole: All of it by unique names, under FSDP1.
    """

    one: PreparedOptimizer
    agreed: MergedState
    parts: dict[str, torch.Tensor] = field(default_factory=dict)
    copies: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    others: dict[Place, torch.Tensor] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)
    whole: dict[str, Any] | None = None


@dataclass(slots=True)
class Plan:
    """All that changes.

    Attributes:
        models: (model, values by first name).
        steps: Of optimizers.
        schedulers, loaders, objects: (live one, its state).
        scalers: Likewise.
        counts: (accelerator, its step).
        before: (own object, its state of before), once they have changed.
        notes: For a person.
    """

    models: list[tuple[Model, dict[str, torch.Tensor]]]
    steps: list[_Steps]
    schedulers: list[tuple[Any, Any]] = field(default_factory=list)
    loaders: list[tuple[Any, Any]] = field(default_factory=list)
    objects: list[tuple[Any, Any]] = field(default_factory=list)
    scalers: list[tuple[Any, Any]] = field(default_factory=list)
    counts: list[tuple[Any, int]] = field(default_factory=list)
    before: list[tuple[Any, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def wanted(
    states: Mapping[str, Any], matched: Matched, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Placement]:
    """The tensors that are read, by their names in the checkpoint, and how each lies here.

    Args:
        states: The plain ones.
        matched: What is loaded into what.
        shapes: Of the saved tensors.

    Raises:
        CheckpointError: A state has a form of its own that does not go with the strategy.
    """
    found = {}
    for old, model in matched.models:
        for first in model.names:
            found[f"{MODEL}.{old}.{first}"] = model.side(first)
    for old, one in matched.optimizers:
        keys = matched.keys(one)
        for entry in _entries(states, old):
            side, name = state_side(one, keys[entry["parameter"]]), _name(old, entry)
            if entry["kind"] == "tensor":
                found[name] = side
            elif entry["kind"] == "other":
                found[name] = _own_form(one, entry, side, shapes[name])
    return found


def plan(states: Mapping[str, Any], values: Mapping[str, torch.Tensor], matched: Matched) -> Plan:
    """What each live object gets. This rank alone; nothing is changed.

    Raises:
        CheckpointError: Schedulers or own objects are others than those that were saved.
    """
    made = Plan(
        [
            (model, {n: values[k] for n in model.names if (k := f"{MODEL}.{old}.{n}") in values})
            for old, model in matched.models
        ],
        [_steps(states, values, matched, old, one) for old, one in matched.optimizers],
        notes=list(matched.notes),
    )
    if matched.found.accelerators:
        _plan_accelerators(made, states["accelerators"], matched.found.accelerators)
    return made


def objects(one: Plan) -> None:
    """Let the user's own objects take over their states: their code may fail. This rank alone."""
    one.before = [(own, copy.deepcopy(own.state_dict())) for own, _ in one.objects]
    try:
        for own, state in one.objects:
            own.load_state_dict(state)
    except BaseException:
        objects_back(one)
        raise


def objects_back(one: Plan) -> None:
    """Put the user's own objects back. This rank alone."""
    for own, state in one.before:
        own.load_state_dict(state)


def commit(one: Plan) -> None:
    """Put all values in place. Meets no rank, except under FSDP1."""
    with torch.no_grad():
        for model, values in one.models:
            _commit_model(model, values)
        for steps in one.steps:
            _commit_steps(steps)
    for own, state in (*one.schedulers, *one.scalers):
        own.load_state_dict(state)
    for loader, state in one.loaders:
        loader.resume(state)
    for accelerator, step in one.counts:
        accelerator.step = step


def _commit_model(model: Model, values: Mapping[str, torch.Tensor]) -> None:
    if model.is_flat:
        fsdp1_state.load(model.one, values)
    else:
        for first, value in values.items():
            model.held[first].copy_(value)
    for parameter in model.one.parameters.values():
        parameter.grad = None


def generators(states: Mapping[str, Any], saved: Checkpoint) -> list[str]:
    """Put this rank's random generators back, where as many ranks have saved; else say so."""
    if saved.world_size != world_size():
        there = f"{saved.world_size} ranks have saved theirs"
        return [f"random generators are as they were: {there}, and {world_size()} are here"]
    plain_state.set_random(states["random"][rank()])
    return []


def _entries(states: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = states["optimizers"][name]["entries"]
    return found


def _own_form(
    one: PreparedOptimizer, entry: Mapping[str, Any], side: Placement, shape: tuple[int, ...]
) -> Placement:
    if not is_whole(side):
        raise CheckpointError(
            f"{type(one.optimizer).__name__} keeps {entry['key']!r} of {entry['parameter']} in its "
            "own form, which cannot be split as the strategy asks. Load it under ddp or single, or "
            "the models alone: %dist_load PATH --models-only. Nothing was changed."
        )
    return Placement(TensorLayout(shape), Degrees())


def _name(old: str, entry: Mapping[str, Any]) -> str:
    return f"{OPTIMIZER}.{old}.{entry['parameter']}.{entry['key']}"


def _steps(
    states: Mapping[str, Any],
    values: Mapping[str, torch.Tensor],
    matched: Matched,
    old: str,
    one: PreparedOptimizer,
) -> _Steps:
    keys = matched.keys(one)
    stepper = one.stepper
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
    agreed = MergedState(type(one.optimizer).__name__, stepper.local.number, names, entries)
    found = _Steps(one, agreed, groups=states["optimizers"][old]["groups"])
    read = {
        (keys[entry["parameter"]], entry["key"]): values[name]
        for entry in _entries(states, old)
        if (name := _name(old, entry)) in values
    }
    if one.whole is not None:
        found.whole = _whole(found, read)
        return found
    for place, value in read.items():
        device = local_of(stepper.names[place[0]][2]).device
        if entries[place].kind == "other":
            found.others[place] = value.to(device)
            continue
        label = agreed.label(place)
        live = stepper.local.tensors.get(label)
        if live is not None and live.shape == value.shape and live.dtype == value.dtype:
            found.parts[label] = live
            found.copies.append((live, value))
        else:
            found.parts[label] = value.to(device)
    return found


def _whole(found: _Steps, read: Mapping[Place, torch.Tensor]) -> dict[str, Any]:
    """As `wholes.full_optimizer_state` gives it: unique names, whole tensors."""
    keys = list(found.one.stepper.names)
    labels = found.one.labels
    state: dict[str, dict[str, Any]] = {}
    for (key, name), entry in found.agreed.entries.items():
        value: Any = read.get((key, name))
        if entry.kind == "number":
            value = entry.value
            if entry.dtype is not None:
                value = torch.tensor(value, dtype=entry.dtype)
        state.setdefault(key, {})[name] = value
    here = {label: key for key, label in labels.items()}
    own = found.one.groups()
    assert len(keys) == len(here)
    return {
        "state": state,
        "param_groups": [
            {**live, **_settings(saved), "params": [here[label] for label in live["params"]]}
            for live, saved in zip(own, found.groups, strict=True)
        ],
    }


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in _OWN_SETTINGS}


def _commit_steps(steps: _Steps) -> None:
    optimizer = steps.one.optimizer
    if steps.whole is not None:
        load_full_optimizer_state(optimizer, steps.whole)
        return
    for live, value in steps.copies:
        live.copy_(value)
    held = {key: parameter for key, (_, _, parameter) in steps.one.stepper.names.items()}
    for (key, state), value in steps.others.items():
        optimizer.state[held[key]][state] = value
    sides = {key: state_side(steps.one, key) for key in held}
    write(optimizer, steps.agreed, steps.parts, held, held, sides)
    for group, settings in zip(optimizer.param_groups, steps.groups, strict=True):
        for key, value in _settings(settings).items():
            own = group.get(key)
            if isinstance(own, torch.Tensor) and isinstance(value, torch.Tensor):
                own.copy_(value)
            else:
                group[key] = value


def _plan_accelerators(made: Plan, saved: Sequence[Mapping[str, Any]], live: Sequence[Any]) -> None:
    """What schedulers, loaders, scalers and own objects get, in the order of their preparing."""
    made.schedulers = _alike(
        "schedulers",
        [pair for one in saved for pair in one["schedulers"]],
        [(type(s.scheduler).__name__, s) for one in live for s in one._schedulers],  # noqa: SLF001
    )
    made.objects = _alike(
        "objects of register_for_checkpointing",
        [pair for one in saved for pair in one["objects"]],
        [(type(o).__name__, o) for one in live for o in one._custom_objects],  # noqa: SLF001
    )
    there = [state for one in saved for state in one["loaders"]]
    here = [loader for one in live for loader in one._dataloaders]  # noqa: SLF001
    if len(there) == len(here):
        made.loaders = [
            (loader, state)
            for loader, state in zip(here, there, strict=True)
            if state is not None and hasattr(loader, "resume")
        ]
    else:
        made.notes.append(
            f"data loaders stay where they are: {len(there)} were saved, and {len(here)} are here"
        )
    scale = next((one["scaler"] for one in saved if one["scaler"] is not None), None)
    scalers = [one.scaler for one in live if one.scaler is not None]
    if scale is not None:
        made.scalers = [(scaler, scale) for scaler in scalers]
    if (scale is None) != (not scalers):
        is_lost = "is not used: nothing computes in fp16 here" if scalers == [] else ""
        made.notes.append(
            f"the saved scale of fp16 {is_lost}" if is_lost
            else "the scale of fp16 begins as it is: none was saved"
        )  # fmt: skip
    made.counts = [(one, state["step"]) for one, state in zip(live, saved, strict=False)]


def _alike(
    what: str, saved: Sequence[tuple[str, Any]], live: Sequence[tuple[str, Any]]
) -> list[tuple[Any, Any]]:
    there, here = [kind for kind, _ in saved], [kind for kind, _ in live]
    if there != here:
        raise CheckpointError(
            f"The {what} do not fit: {', '.join(there) or 'none'} in the checkpoint and "
            f"{', '.join(here) or 'none'} here. Prepare the same, in the same order, or load the "
            "models alone: %dist_load PATH --models-only. Nothing was changed."
        )
    return [(own, state) for (_, own), (_, state) in zip(live, saved, strict=True)]
