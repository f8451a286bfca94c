"""The table of steps: which file does what an axis or an option asks for."""

from __future__ import annotations

import importlib
from collections.abc import Iterable

from nbdist.parallel.transform import Transform
from nbdist.strategy.choice import Strategy, steps_of

# Name -> module and attribute. Imported when first used: some need packages of their own.
STEPS = {
    "pp": ("pp.partition", "STEP"),
    "tp": ("tp.tp", "STEP"),
    "options": ("options", "STEP"),
    "fsdp": ("dp.fsdp", "STEP"),
    "fsdp1": ("dp.fsdp1", "STEP"),
    "precision": ("precision", "STEP"),
    "ddp": ("dp.ddp", "STEP"),
    "zero1": ("dp.zero1", "STEP"),
    "cp": ("cp.cp", "STEP"),
    "pipeline": ("pp.partition", "PIPELINE"),
    "deepspeed": ("dp.deepspeed", "STEP"),
}


def steps_for(choice: Strategy) -> tuple[Transform, ...]:
    """What a choice does to a model, in order."""
    return named(steps_of(choice))


def named(names: Iterable[str]) -> tuple[Transform, ...]:
    """What these names stand for in the table, in the same order."""
    return tuple(_step(name) for name in names)


def _step(name: str) -> Transform:
    module, attribute = STEPS[name]
    step = getattr(importlib.import_module(f"nbdist.parallel.{module}"), attribute)
    assert isinstance(step, Transform)
    return step
