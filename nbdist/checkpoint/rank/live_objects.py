"""What there is to save, or to load into: the models and optimizers that all ranks have prepared.

Names are those of the variables, as rank 0 has them.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer

from nbdist.checkpoint.manifest import SavedModel, SavedOptimizer, SavedTensor
from nbdist.errors import CheckpointError
from nbdist.parallel import registry
from nbdist.parallel.accelerator import save_state
from nbdist.parallel.accelerator.model_state import portable
from nbdist.parallel.consensus import all_or_none
from nbdist.parallel.dp import fsdp, fsdp1_state
from nbdist.parallel.prepared import Prepared
from nbdist.parallel.reshard.common import OptimizerHandle, common_models, common_optimizers
from nbdist.parallel.reshard.full_state import dtypes_of, full_optimizer_state, local_state
from nbdist.parallel.reshard.rebind import names_for
from nbdist.strategy.tensor_layout import Placement

_PLAIN = (bool, int, float, str, type(None))


@dataclass(slots=True)
class Model:
    """A prepared model.

    Attributes:
        name: Of a variable that holds it.
        place: The how manieth of all prepared ones.
        one: What is known of it.
        names: First name -> all names, of those that are saved: not of passing buffers.
        dtypes: By first name.
        held: This rank's local parts, by first name.
    """

    name: str
    place: int
    one: Prepared
    names: dict[str, tuple[str, ...]]
    dtypes: dict[str, torch.dtype]
    held: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def is_flat(self) -> bool:
        """Whether it is under FSDP1, which gathers and scatters whole values by itself."""
        return fsdp1_state.is_flat(self.one)

    def side(self, first: str) -> Placement:
        """How a tensor lies: under FSDP1 as if every rank had all of it."""
        return self.one.whole(first) if self.is_flat else self.one.side(first)

    def saved(self) -> SavedModel:
        """As the manifest tells it."""
        tensors = tuple(
            SavedTensor(first, tuple(self.one.layouts[first].shape), dtype_text(self.dtypes[first]))
            for first in self.names
        )
        tied = {other: first for first, names in self.names.items() for other in names[1:]}
        return SavedModel(self.one.built.title, tensors, tied)


@dataclass(slots=True)
class PreparedOptimizer:
    """A prepared optimizer.

    Attributes:
        name: Of a variable that holds it or its wrapper.
        stepper: It, its parameters and what it remembers.
        labels: Unique name of a parameter -> as it is in the checkpoint: MODEL.FIRST.
        others: How many of its parameters are of no prepared model.
        whole: All that it remembers, under FSDP1, which has no layouts; by unique names.
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

    def labels_as(self, models: Mapping[str, str]) -> dict[str, str]:
        """The labels with other names of models: name here -> name in the checkpoint."""
        own = {key: first for key, (_, first, _) in self.stepper.names.items()}
        here = {key: label.removesuffix(f".{own[key]}") for key, label in self.labels.items()}
        return {key: f"{models.get(here[key], here[key])}.{first}" for key, first in own.items()}

    def groups(self, models: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
        """Its groups' settings, with labels as their `params`. Those of others are left out."""
        labels = self.labels_as(models or {})
        known = {id(held): labels[key] for key, (_, _, held) in self.stepper.names.items()}
        return [
            {**group, "params": [known[id(p)] for p in group["params"] if id(p) in known]}
            for group in self.optimizer.param_groups
        ]

    def saved(self, models: Mapping[str, str] | None = None) -> SavedOptimizer:
        """As the manifest tells it; with other names of models, as `labels_as`."""
        groups = self.groups(models)
        agreed = self.stepper.agreed
        keys = dict.fromkeys(key for _, key in (agreed.entries if agreed else ()))
        return SavedOptimizer(
            type(self.optimizer).__name__,
            tuple(tuple(group["params"]) for group in groups),
            tuple(_told(group) for group in groups),
            tuple(keys),
        )


@dataclass(slots=True)
class LiveObjects:
    """All that is saved of live objects.

    Attributes:
        models, optimizers: In the order in which they were prepared.
        accelerators: Those that were set up, by which schedulers, loaders and scalers are known.
    """

    models: list[Model]
    optimizers: list[PreparedOptimizer]
    accelerators: list[Any]


def find(what: str) -> LiveObjects:
    """Find what all ranks have. Collective: every rank.

    Args:
        what: Is done, for messages: "Saving PATH".

    Raises:
        CheckpointError: No model is prepared, or it cannot be saved in parts.
        NbdistError: Ranks differ.
    """
    accelerators = accelerators_here()
    common = common_models(what)
    all_or_none(what, lambda: _check(common))
    for one in common:
        fsdp.settle(one.built.job.root)
    steppers = common_optimizers(what, common, is_quick=True)
    counts = all_or_none(what, lambda: len(accelerators))
    for accelerator in accelerators[: min(counts)]:
        save_state.agree(accelerator, is_collected=True)
    named = all_or_none(what, lambda: variable_names(common, steppers, accelerators))[0]
    models = [_model(one, at, named[0][at]) for at, one in enumerate(common)]
    optimizers = [_stepping(one, models, named[1][at]) for at, one in enumerate(steppers)]
    return LiveObjects(models, optimizers, accelerators[: min(counts)])


def accelerators_here() -> list[Any]:
    """This rank's that were set up. What a cell that was run again has left is collected."""
    if _may_be_left(_accelerators()):
        gc.collect()
    return _accelerators()


def _accelerators() -> list[Any]:
    return [one for one in registry.watchers() if hasattr(one, "_schedulers")]


def _may_be_left(accelerators: Iterable[Any]) -> bool:
    """Whether some of what lives may be of a cell that was run again, and gone once collected."""
    held = [registry.prepared()]
    for one in accelerators:
        held += [one._schedulers, one._dataloaders, one._custom_objects]  # noqa: SLF001  # ours
    return any(len(several) > 1 for several in held)


def dtype_text(dtype: torch.dtype) -> str:
    """As the manifest has it: `float32`."""
    return str(dtype).removeprefix("torch.")


def dtype_of(text: str) -> torch.dtype:
    """A dtype by its name.

    Raises:
        CheckpointError: There is none in this torch.
    """
    found = getattr(torch, text, None)
    if not isinstance(found, torch.dtype):
        raise CheckpointError(f"torch {torch.__version__} has no dtype {text!r}. Upgrade torch.")
    return found


def _check(common: list[Prepared]) -> None:
    if registry.current().name == "deepspeed":
        raise CheckpointError(
            "DeepSpeed's optimizer keeps its state in a form of its own, which cannot be saved in "
            "parts for other strategies. Use accelerator.save_state(DIR) and load_state(DIR), or "
            "train under fsdp or zero1, which split the same."
        )
    if not common:
        raise CheckpointError(
            "No model is prepared on the ranks, so there is nothing to save or to load into. "
            "Prepare it first: model, optimizer = accelerator.prepare(model, optimizer)."
        )


def variable_names(
    models: list[Prepared], steppers: list[OptimizerHandle], accelerators: list[Any]
) -> tuple[list[str], list[str]]:
    """What a person calls them; each name once."""
    wrappers = {
        id(wrapper.optimizer): wrapper
        for accelerator in accelerators
        for wrapper in accelerator._optimizers  # noqa: SLF001  # our own list
    }
    own = [
        next(iter([*names_for(one.outer), *names_for(one.base)]), one.built.title.lower())
        for one in models
    ]
    steps = []
    for one in steppers:
        wrapper = wrappers.get(id(one.optimizer))
        held = names_for(wrapper) if wrapper is not None else []
        kind = type(one.optimizer).__name__.lower()
        steps.append(next(iter([*held, *names_for(one.optimizer)]), kind))
    return _each_once(own), _each_once(steps)


def _each_once(names: Iterable[str]) -> list[str]:
    found: list[str] = []
    for name in names:
        number, one = 1, name
        while one in found:
            number += 1
            one = f"{name}_{number}"
        found.append(one)
    return found


def _model(one: Prepared, place: int, name: str) -> Model:
    """A model with what this rank holds. Collective under FSDP1, else this rank alone."""
    kept = set(portable(one.base).saved_names())
    names = {first: all_ for first, all_ in one.built.names.items() if kept.intersection(all_)}
    values = fsdp1_state.values(one) if fsdp1_state.is_flat(one) else local_state(one)
    held = {first: values[first] for first in names if first in values}
    return Model(name, place, one, names, dtypes_of(one), held)


def _stepping(one: OptimizerHandle, models: list[Model], name: str) -> PreparedOptimizer:
    own = {id(model.one): model for model in models}
    labels = {key: f"{own[id(o)].name}.{first}" for key, (o, first, _) in one.names.items()}
    count = sum(len(group["params"]) for group in one.optimizer.param_groups)
    whole = None
    if any(fsdp1_state.is_flat(o) for o, _, _ in one.names.values()):
        whole = full_optimizer_state(one.optimizer)
    return PreparedOptimizer(name, one, labels, count - len(one.names), whole)


def _told(group: dict[str, Any]) -> dict[str, Any]:
    """A group's numbers, for a person: what is no plain value is left out."""
    found = {}
    for key, value in group.items():
        several = list(value) if isinstance(value, tuple) else [value]
        if key != "params" and all(isinstance(one, _PLAIN) for one in several):
            found[key] = several if isinstance(value, tuple) else value
    return found
