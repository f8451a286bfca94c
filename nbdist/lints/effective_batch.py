"""A switch changes the batch, and the learning rate stays.

The facts come from lints/kernel/lints.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nbdist.lints.lint import Lint, each


def _sentence(_subject: str, facts: Mapping[str, Any]) -> str:
    before, after, lr = facts["before"], facts["after"], facts["lr"]
    factor = after / before
    return (
        f"the effective batch was {before} samples and is now {after}, but the learning rate stays "
        f"{lr:g} (linear scaling: {lr * factor:g}, square-root scaling: {lr * factor**0.5:.3g})"
    )


LINT = Lint(
    name="effective-batch",
    when="a switch of the strategy changes how many samples one step of the optimizer sees",
    judge=each(_sentence),
    why="a learning rate belongs to a batch size",
    do="set the learning rate, the loader's batch_size, or --accumulate",
    conditions=(
        "a switch of the strategy changes dp x accumulate, and a loader is prepared whose "
        "batches each rank gets whole, and an optimizer"
    ),
    exceptions="with `split_batches`, where a step sees the same; without a prepared loader",
    example=("32 64", {0: {"before": 32, "after": 64, "lr": 0.01}}),
)
