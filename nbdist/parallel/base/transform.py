"""The change of a model by one axis or option: the same three functions for each, in a table."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from nbdist.parallel.base.mesh import ParallelMesh
from nbdist.strategy.choice import Strategy
from nbdist.strategy.tensor_layout import TensorLayout

# Name (as in base.named_parameters and named_buffers, the first one of tied weights) -> layout.
Layouts = dict[str, TensorLayout]


@dataclass(slots=True)
class ModelBuild:
    """One model that is being put under a strategy on this rank.

    Attributes:
        base: The user's module. It stays the same object.
        device: Where parameters lie.
        root: What is called in base's place by further steps; a pipeline stage, else base.
        step_data: What a step leaves for its own later calls, by step.
        accelerator: Whose model it is, for the scaler; None in tests of a step alone.
    """

    base: torch.nn.Module
    choice: Strategy
    mesh: ParallelMesh
    device: torch.device
    root: torch.nn.Module = field(init=False)
    step_data: dict[str, Any] = field(default_factory=dict)
    accelerator: Any = None

    def __post_init__(self) -> None:
        self.root = self.base


@dataclass(frozen=True, slots=True)
class Transform:
    """The change of a model by an axis or an option, in this order.

    Attributes:
        plan: Says how parameters and buffers will lie: takes and returns layouts. Nothing is
            changed and no rank is met; base may be real or meta. Raises OptionError, alike on
            all ranks, where the model does not allow it.
        lay_out: Changes modules. Every parameter is on meta and whole (several steps: as the
            one before has left it); afterwards it is a meta DTensor where it is split. No
            rank is met; real values are filled in later, by the caller.
        wrap: Parameters are real now. Returns what the user calls. No rank is met.
    """

    plan: Callable[[ModelBuild, Layouts], Layouts] = lambda _job, layouts: layouts
    lay_out: Callable[[ModelBuild], None] = lambda _job: None
    wrap: Callable[[ModelBuild, torch.nn.Module], torch.nn.Module] = lambda _job, outer: outer


# Name -> module and attribute. Imported when first used: some need packages of their own.
STEPS = {
    "pp": "pp.partition:STEP",
    "tp": "tp.tp:STEP",
    "ep": "ep.ep:STEP",
    "options": "base.options:STEP",
    "fsdp": "dp.fsdp:STEP",
    "fsdp1": "dp.fsdp1:STEP",
    "precision": "base.precision:STEP",
    "ddp": "dp.ddp:STEP",
    "zero1": "dp.zero1:STEP",
    "cp": "cp.cp:STEP",
    "pipeline": "pp.partition:PIPELINE",
    "deepspeed": "dp.deepspeed:STEP",
}


def load(names: Iterable[str]) -> tuple[Transform, ...]:
    """Look these names up in STEPS, in the same order."""
    return tuple(pkgutil.resolve_name(f"nbdist.parallel.{STEPS[name]}") for name in names)
