"""The parameters of a DDP model differ between its ranks.

The facts come from lints/rank/initial_values.
"""

from __future__ import annotations

from nbdist.lints.lint import TWO_VALUES, Lint, apart

LINT = Lint(
    name="parameters-apart",
    when="after a cell with steps the parameters of a DDP model differ between its ranks (the "
    "first elements of each are compared)",
    judge=apart("the parameters of {subject} differ between {who} after this cell"),
    why="DDP sends gradients, not parameters: ranks that differ go on differing",
    do="%dist_check shows where; %dist_sync_model makes them equal",
    needs_success=True,
    conditions="after a cell that ended well on all its ranks, parameters of a DDP model that "
    "was called or stepped in it differ (the first 16 elements of each)",
    exceptions="differences in other elements: `%dist_check` compares all. After a cell that "
    "failed, the notebook compares all anyway",
    example=("model", TWO_VALUES),
)
