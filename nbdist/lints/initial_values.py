"""A model that is prepared, or that fully_shard gets, differs between ranks.

The facts come from lints/rank/initial_values.
"""

from __future__ import annotations

from nbdist.lints.lint import TWO_VALUES, Lint, apart

LINT = Lint(
    name="initial-values",
    when="prepare gets a model whose values differ between ranks",
    judge=apart(
        "the initial values of {subject} differed between {who}; prepare replaced them with "
        "rank 0's"
    ),
    why="the values that the other ranks had drawn or loaded are gone",
    do="seed all ranks alike until the model is built (%dist_init --seed 0)",
    conditions="`prepare` gets a model whose values differ between ranks. It takes rank 0's, "
    "under every strategy",
    exceptions="only the first 16 elements of each tensor are compared",
    example=("model", TWO_VALUES),
)
SHARD_SEEDS = Lint(
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
