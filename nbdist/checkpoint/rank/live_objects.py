"""The objects that are saved, or loaded into: models and optimizers that all ranks have prepared.

Names are those of the variables, as rank 0 has them.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from nbdist.checkpoint.manifest import SavedModel, SavedOptimizer, SavedTensor
from nbdist.checkpoint.rank import peft_adapters
from nbdist.errors import CheckpointError
from nbdist.parallel.accelerator import save_state
from nbdist.parallel.accelerator.model_state import portable
from nbdist.parallel.base.consensus import all_or_none
from nbdist.parallel.dp import fsdp
from nbdist.parallel.libraries import quantized
from nbdist.parallel.live import fsdp1_state, registry
from nbdist.parallel.live.prepared import Prepared
from nbdist.parallel.reshard.common import OptimizerHandle, common_models, common_optimizers
from nbdist.parallel.reshard.full_state import dtypes_of, full_optimizer_state, local_state
from nbdist.parallel.reshard.optimizer_state import MergedState
from nbdist.parallel.reshard.rebind import names_for
from nbdist.strategy.tensor_layout import Placement

_PLAIN = (bool, int, float, str, type(None))


@dataclass(slots=True)
class CheckpointModel:
    """A prepared model with the local tensors of this rank.

    Attributes:
        name: The name of a variable that holds it.
        names: First name -> all names, of saved tensors: not of non-persistent buffers.
        dtypes: Types by first name.
        local: This rank's local parts, by first name.
    """

    name: str
    prepared: Prepared
    names: dict[str, tuple[str, ...]]
    dtypes: dict[str, torch.dtype]
    local: dict[str, torch.Tensor]

    @property
    def is_flat(self) -> bool:
        """Whether it is under FSDP1, which gathers and scatters whole values by itself."""
        return fsdp1_state.is_flat(self.prepared)

    def side(self, first: str) -> Placement:
        """How a tensor lies: under FSDP1 as if every rank had all of it."""
        return self.prepared.whole(first) if self.is_flat else self.prepared.side(first)

    def record(self) -> SavedModel:
        """The manifest's record of it."""
        tensors = tuple(
            SavedTensor(
                first, tuple(self.prepared.layouts[first].shape), dtype_text(self.dtypes[first])
            )
            for first in self.names
        )
        tied = {other: first for first, names in self.names.items() for other in names[1:]}
        return SavedModel(self.prepared.built.title, tensors, tied)


@dataclass(slots=True)
class PreparedOptimizer:
    """A prepared optimizer with its state and its parameters' names.

    Attributes:
        name: The name of a variable that holds it or its wrapper.
        stepper: The optimizer, its parameters and its state.
        labels: Unique name of a parameter -> as it is in the checkpoint: MODEL.FIRST.
        others: How many of its parameters belong to no prepared model.
        whole: The whole state, under FSDP1, which has no layouts; by unique names.
    """

    name: str
    stepper: OptimizerHandle
    labels: dict[str, str]
    others: int
    whole: dict[str, Any] | None = None

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer, torch's own object."""
        return self.stepper.optimizer

    @property
    def agreed(self) -> MergedState:
        """The optimizer's state on all ranks together; not under FSDP1."""
        assert self.stepper.agreed is not None
        return self.stepper.agreed

    def labels_as(self, models: Mapping[str, str]) -> dict[str, str]:
        """The labels with other names of models: name here -> name in the checkpoint."""
        firsts = {key: first for key, (_, first, _) in self.stepper.names.items()}
        model_names = {
            key: label.removesuffix(f".{firsts[key]}") for key, label in self.labels.items()
        }
        return {
            key: f"{models.get(model_names[key], model_names[key])}.{first}"
            for key, first in firsts.items()
        }

    def groups(self, models: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
        """Return the groups' settings, with labels as `params`; other models' are left out."""
        labels = self.labels_as(models or {})
        label_of = {
            id(parameter): labels[key] for key, (_, _, parameter) in self.stepper.names.items()
        }
        return [
            {**group, "params": [label_of[id(p)] for p in group["params"] if id(p) in label_of]}
            for group in self.optimizer.param_groups
        ]

    def record(self, models: Mapping[str, str] | None = None) -> SavedOptimizer:
        """The manifest's record of it; with other names of models, as `labels_as`."""
        groups = self.groups(models)
        keys = dict.fromkeys(key for _, key in self.stepper.agreed.entries)
        return SavedOptimizer(
            type(self.optimizer).__name__,
            tuple(tuple(group["params"]) for group in groups),
            tuple(_plain_settings(group) for group in groups),
            tuple(keys),
        )


@dataclass(slots=True)
class LiveObjects:
    """The live objects that a checkpoint saves.

    Attributes:
        models, optimizers: In the order in which they were prepared.
        accelerators: Accelerators that were set up; they have the schedulers, loaders and scalers.
    """

    models: list[CheckpointModel]
    optimizers: list[PreparedOptimizer]
    accelerators: list[Any]


def find(what: str, *, is_adapters: bool = False) -> LiveObjects:
    """Find the models and optimizers of all ranks. Collective: every rank.

    Args:
        what: The act, for messages: "Saving PATH".
        is_adapters: Take the adapters of PEFT alone, not whole models.

    Raises:
        CheckpointError: No model is prepared, or it cannot be saved in parts.
        OptionError: A model has no adapters.
        NbdistError: Ranks differ.
    """
    accelerators = accelerators_here()
    common = common_models(what)
    all_or_none(what, lambda: _check(common))
    for prepared in common:
        fsdp.settle(prepared.built.job.root)
    steppers = common_optimizers(what, common, is_quick=True)
    counts = all_or_none(what, lambda: len(accelerators))
    for accelerator in accelerators[: min(counts)]:
        save_state.agree(accelerator, is_collected=True)
    names = all_or_none(what, lambda: variable_names(common, steppers, accelerators))[0]
    models = [_model(*pair) for pair in zip(common, names[0], strict=True)]
    narrow = _leave_adapters if is_adapters else _refuse_quantized
    all_or_none(what, lambda: list(map(narrow, models)))
    model_names = {id(model.prepared): model.name for model in models}
    pairs = zip(steppers, names[1], strict=True)
    optimizers = [_prepared_optimizer(stepper, name, model_names) for stepper, name in pairs]
    return LiveObjects(models, optimizers, accelerators[: min(counts)])


def accelerators_here() -> list[Any]:
    """Return this rank's accelerators; those of cells that were run again are collected first."""
    if _may_be_left():  # a function, so that it holds nothing of it any more
        gc.collect()
    return _accelerators()


def _may_be_left() -> bool:
    lists = [registry.prepared()]
    for accelerator in _accelerators():
        lists += [accelerator._schedulers, accelerator._dataloaders, accelerator._custom_objects]  # noqa: SLF001  # ours
    return any(len(objects) > 1 for objects in lists)


def _accelerators() -> list[Any]:
    return [watcher for watcher in registry.watchers() if hasattr(watcher, "_schedulers")]


def dtype_text(dtype: torch.dtype) -> str:
    """Write a dtype as the manifest does: `float32`."""
    return str(dtype).removeprefix("torch.")


def dtype_of(text: str) -> torch.dtype:
    """A dtype by its name.

    Raises:
        CheckpointError: There is none in this torch.
    """
    dtype = getattr(torch, text, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"torch {torch.__version__} has no dtype {text!r}. Upgrade torch.")
    return dtype


def _check(common: list[Prepared]) -> None:
    if registry.current().name == "deepspeed":
        raise CheckpointError(
            "DeepSpeed's optimizer keeps its state in its own format, which cannot be saved in "
            "parts for other strategies. Use accelerator.save_state(DIR) and load_state(DIR), or "
            "train under fsdp or zero1, which shard the same state."
        )
    if not common:
        raise CheckpointError(
            "No model is prepared on the ranks, so there is nothing to save or to load into. "
            "Prepare it first: model, optimizer = accelerator.prepare(model, optimizer)."
        )


def variable_names(
    models: list[Prepared], steppers: list[OptimizerHandle], accelerators: list[Any]
) -> tuple[list[str], list[str]]:
    """The names of variables that hold models, and of those that hold optimizers; each once."""
    wrappers = {
        id(wrapper.optimizer): wrapper
        for accelerator in accelerators
        for wrapper in accelerator._optimizers  # noqa: SLF001  # our own list
    }
    model_names = [
        next(iter([*names_for(model.outer), *names_for(model.base)]), model.built.title.lower())
        for model in models
    ]
    optimizer_names = []
    for stepper in steppers:
        wrapper = wrappers.get(id(stepper.optimizer))
        wrapper_names = names_for(wrapper) if wrapper is not None else []
        kind = type(stepper.optimizer).__name__.lower()
        optimizer_names.append(next(iter([*wrapper_names, *names_for(stepper.optimizer)]), kind))
    return _each_once(model_names), _each_once(optimizer_names)


def _each_once(names: Iterable[str]) -> list[str]:
    unique: list[str] = []
    for name in names:
        number, candidate = 1, name
        while candidate in unique:
            number += 1
            candidate = f"{name}_{number}"
        unique.append(candidate)
    return unique


def _model(prepared: Prepared, name: str) -> CheckpointModel:
    """A model with what this rank holds. Collective under FSDP1, else this rank alone."""
    saved_names = set(portable(prepared.base).saved_names())
    names = {
        first: aliases
        for first, aliases in prepared.built.names.items()
        if saved_names.intersection(aliases)
    }
    values = (
        fsdp1_state.values(prepared) if fsdp1_state.is_flat(prepared) else local_state(prepared)
    )
    local = {first: values[first] for first in names if first in values}
    return CheckpointModel(name, prepared, names, dtypes_of(prepared), local)


def _refuse_quantized(model: CheckpointModel) -> None:
    if packed := quantized.quantized_names(model.prepared.base):
        raise CheckpointError(
            f"{packed[0]} has 4-bit weights, whose constants a checkpoint does not hold. Save the "
            "adapters alone: %dist_save PATH --adapters."
        )


def _leave_adapters(model: CheckpointModel) -> None:
    """Leave of what is saved of a model what its adapters train. This rank alone."""
    base, layouts = model.prepared.base, model.prepared.layouts
    empty = {
        alias: torch.empty(layouts[first].shape, dtype=model.dtypes[first], device="meta")
        for first, names in model.names.items()
        for alias in names
    }
    adapters = peft_adapters.names_in_state(base, empty)
    model.names = {
        first: names for first, names in model.names.items() if adapters.intersection(names)
    }
    model.local = {first: value for first, value in model.local.items() if first in model.names}


def _prepared_optimizer(
    stepper: OptimizerHandle, name: str, model_names: Mapping[int, str]
) -> PreparedOptimizer:
    labels = {
        key: f"{model_names[id(prepared)]}.{first}"
        for key, (prepared, first, _) in stepper.names.items()
    }
    count = sum(len(group["params"]) for group in stepper.optimizer.param_groups)
    whole = None
    if any(fsdp1_state.is_flat(prepared) for prepared, _, _ in stepper.names.values()):
        whole = full_optimizer_state(stepper.optimizer)
    return PreparedOptimizer(name, stepper, labels, count - len(stepper.names), whole)


def _plain_settings(group: dict[str, Any]) -> dict[str, Any]:
    """A group's numbers, for a person: what is no plain value is left out."""
    settings = {}
    for key, value in group.items():
        items = list(value) if isinstance(value, tuple) else [value]
        if key != "params" and all(isinstance(item, _PLAIN) for item in items):
            settings[key] = items if isinstance(value, tuple) else value
    return settings
