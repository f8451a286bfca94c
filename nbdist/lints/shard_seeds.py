"""fully_shard gets pieces of different models.

The facts come from lints/rank/initial_values.
"""

from __future__ import annotations

from nbdist.lints.lint import TWO_VALUES, Lint, apart

LINT = Lint(
    name="shard-seeds",
    when="fully_shard gets a model whose values differ between its ranks",
    judge=apart("fully_shard got different values of {subject} on {who}"),
    why="it sends no values: unless a state is loaded later, the model consists of pieces of "
    "different models",
    do="seed all ranks alike before the model is built (%dist_init --seed 0), or use "
    "accelerator.prepare, which sends rank 0's values",
    conditions="torch's own `fully_shard` gets values that differ in its mesh: it sends none",
    exceptions="`fully_shard` that was imported before FSDP was loaded for a second",
    example=("model", TWO_VALUES),
)
