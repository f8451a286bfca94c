"""Full state of models and optimizers under any strategy: for saving, loading, looking."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.optim import Optimizer

from nbdist.errors import NbdistError
from nbdist.parallel.base import consensus
from nbdist.parallel.base.tensors import local_of
from nbdist.parallel.dp import fsdp
from nbdist.parallel.live import build, fsdp1_state
from nbdist.parallel.live.prepared import Prepared
from nbdist.parallel.live.registry import device, names_in, state_side
from nbdist.parallel.reshard.optimizer_state import (
    MergedState,
    merge_across_ranks,
    plan,
    read,
    write,
)
from nbdist.parallel.reshard.redistribute import Reshard, redistribute
from nbdist.strategy.tensor_layout import Placement

_MAX_NAMED = 3


def full_state(model: Prepared) -> dict[str, torch.Tensor]:
    """Whole parameters and buffers, by first name, on every rank. Collective: every rank.

    Some may be the model's own tensors: do not change them.
    """
    if fsdp1_state.is_flat(model):
        return fsdp1_state.values(model)
    fsdp.settle(model.built.job.root)
    local = local_state(model)
    reshards = [
        Reshard(name, dtype, model.side(name), model.whole(name))
        for name, dtype in dtypes_of(model).items()
    ]
    return redistribute(reshards, local, model.built.job.device)


def load_full(model: Prepared, values: Mapping[str, torch.Tensor]) -> None:
    """Put whole tensors, by first name, into a model, in place. What is not among them stays.

    Every rank, with equal ones; collective under fsdp1.

    Raises:
        NbdistError: A name or a shape is not the model's; nothing was changed.
    """
    wrong = [
        f"{name} {tuple(value.shape)}"
        for name, value in values.items()
        if name not in model.layouts or model.layouts[name].shape != tuple(value.shape)
    ]
    if wrong:
        raise NbdistError(
            f"{type(model.base).__name__} has no {', '.join(wrong[:_MAX_NAMED])}"
            + (f" and {len(wrong) - _MAX_NAMED} more" if len(wrong) > _MAX_NAMED else "")
        )
    if fsdp1_state.is_flat(model):
        fsdp1_state.load(model, values)
        return
    fsdp.settle(model.built.job.root)
    rank = model.built.job.mesh.rank
    local = local_state(model)
    with torch.no_grad():
        for name, value in values.items():
            part = build.part_of(value, model.layouts[name], model.degrees, rank)
            if part is not None:
                local[name].copy_(part)


def full_optimizer_state(optimizer: Optimizer) -> dict[str, Any]:
    """An optimizer's whole state, by parameters' names, on every rank. Collective: every rank.

    Returns:
        `state`: name -> key -> value; `param_groups`: each with names as its `params`; both as in
        torch's Optimizer.state_dict, but for the names. Some may be the optimizer's own tensors.
    """
    names, others = names_in(optimizer), _others(optimizer)
    if (pieces := fsdp1_state.only_model(names, others)) is not None:
        return fsdp1_state.optimizer_state(pieces[0], optimizer, pieces[1])
    before = {key: parameter for key, (_, _, parameter) in names.items()}
    local = read(optimizer, before)
    (merged,) = merge_across_ranks([local])
    old = {key: state_side(model.built, name) for key, (model, name, _) in names.items()}
    new = {key: model.whole(name) for key, (model, name, _) in names.items()}
    tensors = redistribute(plan(merged, old, new), local.tensors, _home(names))
    shells = {key: _shell(new[key]) for key in names}
    shadow = _shadow(optimizer)
    shadow.state.update({p: optimizer.state[p] for p in before.values() if p in optimizer.state})
    write(shadow, merged, tensors, before, shells, new)
    states = {key: shadow.state[shell] for key, shell in shells.items() if shell in shadow.state}
    states |= {key: optimizer.state[p] for key, p in others.items() if p in optimizer.state}
    by_id = {id(p): key for key, p in (before | others).items()}
    return {
        "state": states,
        "param_groups": [
            {**group, "params": [by_id[id(p)] for p in group["params"]]}
            for group in optimizer.param_groups
        ],
    }


def load_full_optimizer_state(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Take over what `full_optimizer_state` gave. Every rank, alike; collective under fsdp1.

    The optimizer, its groups and its lists stay the same objects.

    Raises:
        NbdistError: Groups or parameters are not those of the state; nothing was changed.
        OptionError: There is state that cannot be laid out as the strategy needs it.
    """
    names, others = names_in(optimizer), _others(optimizer)
    after = {key: parameter for key, (_, _, parameter) in names.items()}
    _check_groups(optimizer, after | others, state)
    if (pieces := fsdp1_state.only_model(names, others)) is not None:
        fsdp1_state.load_optimizer_state(pieces[0], optimizer, pieces[1], state)
        return
    new = {key: state_side(model.built, name) for key, (model, name, _) in names.items()}
    old = {key: model.whole(name) for key, (model, name, _) in names.items()}
    shells = {key: _shell(old[key]) for key in names}
    shadow = _shadow(optimizer)
    copied = copy.deepcopy({key: entry for key, entry in state["state"].items() if key in others})
    shadow.state.update(
        {shells[k]: dict(entry) for k, entry in state["state"].items() if k in shells}
    )
    shard_into(shadow, shells, after, old, new)
    for parameter in (after | others).values():
        optimizer.state.pop(parameter, None)
    optimizer.state.update(shadow.state)
    optimizer.state.update({others[key]: entry for key, entry in copied.items()})
    for group, settings in zip(optimizer.param_groups, state["param_groups"], strict=True):
        group.update({key: value for key, value in settings.items() if key != "params"})


def shard_into(
    optimizer: Optimizer,
    before: Mapping[str, torch.Tensor],
    after: Mapping[str, torch.Tensor],
    old: Mapping[str, Placement],
    new: Mapping[str, Placement],
) -> None:
    """Cut whole state, which every rank has, to this rank's part. This rank alone.

    Args:
        optimizer: Has state under `before`; afterwards under `after`.
        before: Parameters by name, whole.
        after: This rank's, by name.
        old: All of each parameter, on every rank.
        new: How its state lies then.
    """
    local = read(optimizer, before)
    if not local.entries:
        return
    everywhere = frozenset(range(consensus.world_size()))
    entries = {place: replace(entry, ranks=everywhere) for place, entry in local.entries.items()}
    merged = MergedState(local.optimizer, local.number, local.names, entries)
    plan(merged, old, new)  # refuses what cannot be cut
    parts = {}
    for place in local.entries:
        label, side = merged.label(place), new[place[0]]
        if label not in local.tensors:
            continue
        part = build.part_of(local.tensors[label], side.layout, side.degrees, consensus.rank())
        if part is not None:
            parts[label] = part.to(local_of(after[place[0]]).device, copy=True)
    write(optimizer, merged, parts, before, after, new)


def local_state(model: Prepared) -> dict[str, torch.Tensor]:
    """Return this rank's part of each parameter and buffer that it holds, by first name."""
    tensors = {**build.buffers_of(model.base), **model.parameters}
    local = {name: local_of(tensors[name]) for name in model.layouts}
    return {name: tensor for name, tensor in local.items() if not tensor.is_meta}


def dtypes_of(model: Prepared) -> dict[str, torch.dtype]:
    """The dtype of each parameter and buffer, by first name."""
    tensors = {**build.buffers_of(model.base), **model.parameters}
    return {name: tensors[name].dtype for name in model.layouts}


def _others(optimizer: Optimizer) -> dict[str, torch.Tensor]:
    """Parameters of no prepared model, by their place in the groups."""
    prepared_ids = {id(parameter) for _, _, parameter in names_in(optimizer).values()}
    return {
        f"group {number}, parameter {position}": parameter
        for number, group in enumerate(optimizer.param_groups)
        for position, parameter in enumerate(group["params"])
        if id(parameter) not in prepared_ids
    }


def _check_groups(
    optimizer: Optimizer, parameters: Mapping[str, torch.Tensor], state: Mapping[str, Any]
) -> None:
    by_id = {id(parameter): key for key, parameter in parameters.items()}
    here = [[by_id[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    there = [list(group["params"]) for group in state["param_groups"]]
    if here != there:
        name = type(optimizer).__name__
        odd = sorted({n for g in here for n in g} ^ {n for g in there for n in g})
        detail = f"{', '.join(odd[:_MAX_NAMED])} differ" if odd else "their order differs"
        raise NbdistError(
            f"The saved state has {sum(map(len, there))} parameters in {len(there)} groups, this "
            f"{name} has {sum(map(len, here))} in {len(here)}: {detail}. Create the optimizer as "
            "it was when the state was saved."
        )


def _shadow(optimizer: Optimizer) -> Optimizer:
    """The same groups with a state of their own: what is written there changes nothing else."""
    shadow = object.__new__(type(optimizer))
    vars(shadow).update(state=defaultdict(dict), param_groups=optimizer.param_groups)
    return shadow


def _shell(side: Placement) -> torch.Tensor:
    """A tensor of a parameter's full shape on the host that needs no memory."""
    return torch.zeros(()).expand(side.layout.shape)


def _home(names: Mapping[str, Any]) -> torch.device:
    """Choose the device of an optimizer's state."""
    for model, _, _ in names.values():
        job = model.built.job
        return fsdp.parameter_device(job.choice, job.device)
    return device()
