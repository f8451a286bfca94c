"""Whole values of a model under FSDP1, of which each rank has pieces of flat parameters.

A piece is some elements in a row, whatever the shape, so no layout says where it lies. FSDP1
itself gathers and scatters, in memory for the whole model on every rank.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sized
from typing import Any

import torch
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullyShardedDataParallel,
    StateDictType,
)
from torch.optim import Optimizer

from nbdist.errors import OptionError
from nbdist.parallel.live import build
from nbdist.parallel.live.prepared import Prepared
from nbdist.strategy.choice import steps_of
from nbdist.strategy.tensor_layout import TensorLayout


def is_flat(model: Prepared) -> bool:
    """Whether a model is under FSDP1."""
    return "fsdp1" in steps_of(model.built.job.choice)


def layout_of_piece(model: Prepared) -> TensorLayout:
    """Return a layout as if each rank of a copy had one element that no other rank has."""
    return TensorLayout((model.degrees.dp_shard,), shard_dim=0)


def values(model: Prepared) -> dict[str, torch.Tensor]:
    """Whole parameters and buffers, by first name, on every rank. Collective: every rank."""
    with FullyShardedDataParallel.summon_full_params(model.outer, writeback=False):
        tensors = {**build.tensors_of(model.base), **model.parameters}
        return {name: tensors[name].detach().clone() for name in model.layouts}


def load(model: Prepared, values: Mapping[str, torch.Tensor]) -> None:
    """Put whole values into a model, in place. Collective: every rank, with equal ones."""
    with FullyShardedDataParallel.summon_full_params(model.outer), torch.no_grad():
        tensors = {**build.tensors_of(model.base), **model.parameters}
        for name, value in values.items():
            tensors[name].copy_(value)


def local_state_dict(base: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Read a module's state_dict by the user's names. This rank alone.

    FSDP1 hooks into `state_dict` itself, which gathers.
    """
    tensors = build.tensors_of(base)
    passing = {
        build.own_name(f"{path}.{name}" if path else name)
        for path, module in base.named_modules(remove_duplicate=False)
        for name in module._non_persistent_buffers_set  # noqa: SLF001  # as torch's own tools
    }
    return {name: tensor for name, tensor in tensors.items() if name not in passing}


def only_model(
    names: Mapping[str, tuple[Prepared, str, torch.Tensor]], others: Sized
) -> tuple[Prepared, dict[str, str]] | None:
    """The model under FSDP1 to which an optimizer's parameters belong, and first name -> key.

    None if none does. The names are those of `registry.names_in`, the others of no prepared model.

    Raises:
        OptionError: Some are of that model, and some are not.
    """
    models = {id(model): model for model, _, _ in names.values()}
    if not any(is_flat(model) for model in models.values()):
        return None
    if others or len(models) > 1:
        raise OptionError(
            "Under fsdp1 an optimizer's whole state can be had only if all its parameters belong "
            f"to one prepared model. This one has parameters of {len(models)} prepared models and "
            f"{len(others)} parameters of none. Use an optimizer for each model, or fsdp."
        )
    return next(iter(models.values())), {name: key for key, (_, name, _) in names.items()}


def optimizer_state(
    model: Prepared, optimizer: Optimizer, keys: Mapping[str, str]
) -> dict[str, Any]:
    """Gather what `full_state.full_optimizer_state` does. Collective: every rank.

    The optimizer has parameters of the model alone; keys are first name -> key in the result.
    """
    # By default (torch 2.11 to 2.13) what is gathered is moved to the host, which on the CPU leaves
    # all moments of a parameter in the one buffer that they were gathered in: each is the last
    # one. The test of states that go from fsdp1 shows it.
    copies = FullOptimStateDictConfig(offload_to_cpu=False)
    with warnings.catch_warnings():
        # It names a successor for FSDP2; this is FSDP1's own way.
        warnings.simplefilter("ignore", FutureWarning)
        with FullyShardedDataParallel.state_dict_type(
            model.outer, StateDictType.FULL_STATE_DICT, optim_state_dict_config=copies
        ):
            state = FullyShardedDataParallel.optim_state_dict(model.outer, optimizer)
    return _rename(state, keys)


def load_optimizer_state(
    model: Prepared, optimizer: Optimizer, keys: Mapping[str, str], state: Mapping[str, Any]
) -> None:
    """Load as `full_state.load_full_optimizer_state`. Collective: every rank, with equal state."""
    groups, old_groups = optimizer.param_groups, list(optimizer.param_groups)
    named = _rename(state, {key: name for name, key in keys.items()})
    parts = FullyShardedDataParallel.optim_state_dict_to_load(model.outer, optimizer, named)
    optimizer.load_state_dict(parts)
    # torch has made the groups anew; who holds the old ones, such as a cell, is to see the new.
    for old, new in zip(old_groups, optimizer.param_groups, strict=True):
        old.update(new)
    groups[:] = old_groups
    optimizer.param_groups = groups


def _rename(state: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """An optimizer's state with other keys of its parameters."""
    return {
        "state": {names[key]: dict(values) for key, values in state["state"].items()},
        "param_groups": [
            {**group, "params": [names[key] for key in group["params"]]}
            for group in state["param_groups"]
        ],
    }
