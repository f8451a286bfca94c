"""A model that is prepared differs between ranks.

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
