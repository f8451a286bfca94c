"""The table of steps: which file does what an axis or an option asks for."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterable

from nbdist.parallel.transform import Transform

# Name -> module and attribute. Imported when first used: some need packages of their own.
STEPS = {
    "pp": "pp.partition:STEP",
    "tp": "tp.tp:STEP",
    "options": "options:STEP",
    "fsdp": "dp.fsdp:STEP",
    "fsdp1": "dp.fsdp1:STEP",
    "precision": "precision:STEP",
    "ddp": "dp.ddp:STEP",
    "zero1": "dp.zero1:STEP",
    "cp": "cp.cp:STEP",
    "pipeline": "pp.partition:PIPELINE",
    "deepspeed": "dp.deepspeed:STEP",
}


def load(names: Iterable[str]) -> tuple[Transform, ...]:
    """What these names stand for in the table, in the same order."""
    return tuple(pkgutil.resolve_name(f"nbdist.parallel.{STEPS[name]}") for name in names)
