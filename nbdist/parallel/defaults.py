"""What the user's Accelerator() says, where the strategy's options say nothing."""

from __future__ import annotations

from dataclasses import dataclass, replace

from nbdist.parallel.precision import DTYPES
from nbdist.strategy.choice import Strategy


@dataclass(slots=True)
class _Said:
    precision: str = "fp32"


_said = _Said()


def note(mixed_precision: str) -> None:
    """Remember what this rank's Accelerator was made with: no, bf16 or fp16."""
    _said.precision = mixed_precision if mixed_precision in DTYPES else "fp32"


def filled(choice: Strategy) -> Strategy:
    """The choice with the Accelerator's precision, unless its own options name one."""
    if choice.options.precision != "fp32" or _said.precision == "fp32":
        return choice
    return replace(choice, options=replace(choice.options, precision=_said.precision))
