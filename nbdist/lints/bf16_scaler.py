"""A GradScaler scales a loss of bf16 autocast.

The facts come from lints/rank/optimizer_steps.
"""

from __future__ import annotations

from nbdist.lints.lint import Lint, each

LINT = Lint(
    name="bf16-scaler",
    when="a GradScaler scales a loss that was computed under bf16 autocast",
    judge=each("a GradScaler scaled a loss computed under bf16 autocast".format),
    why="bf16 has the range of fp32: scaling only adds a check for inf to every step",
    do="remove the scaler, or use fp16",
    conditions="a `GradScaler` that is switched on scales a loss, and the last autocast of "
    "this step was bf16",
    example=("GradScaler", {0: {}, 1: {}}),
)
