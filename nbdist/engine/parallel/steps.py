"""The table of steps: which file does what an axis or an option asks for."""

from __future__ import annotations

import importlib
from collections.abc import Iterable

from nbdist.core.strategy import Choice, steps_of
from nbdist.engine.parallel.step import Step

# Name -> module and attribute. Imported when first used: some need packages of their own.
STEPS = {
    "pp": ("pp", "STEP"),
    "tp": ("tp", "STEP"),
    "options": ("options", "STEP"),
    "fsdp": ("fsdp", "STEP"),
    "fsdp1": ("fsdp1", "STEP"),
    "precision": ("precision", "STEP"),
    "ddp": ("ddp", "STEP"),
    "zero1": ("zero1", "STEP"),
    "cp": ("cp", "STEP"),
    "pipeline": ("pp", "PIPELINE"),
    "deepspeed": ("deepspeed", "STEP"),
}


def steps_for(choice: Choice) -> tuple[Step, ...]:
    """What a choice does to a model, in order."""
    return named(steps_of(choice))


def named(names: Iterable[str]) -> tuple[Step, ...]:
    """What these names stand for in the table, in the same order."""
    return tuple(_step(name) for name in names)


def _step(name: str) -> Step:
    module, attribute = STEPS[name]
    step = getattr(importlib.import_module(f"nbdist.engine.parallel.{module}"), attribute)
    assert isinstance(step, Step)
    return step
