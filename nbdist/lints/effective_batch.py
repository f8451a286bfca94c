"""A switch changes the batch, and the learning rate stays.

The facts come from lints/kernel/lints.
"""

from __future__ import annotations

from nbdist.lints.lint import Lint, each


def _batch_sentence(*, before: int, after: int, lr: float, **_subject: str) -> str:
    factor = after / before
    return (
        f"the effective batch was {before} samples and is now {after}, but the learning rate stays "
        f"{lr:g} (linear scaling: {lr * factor:g}, square-root scaling: {lr * factor**0.5:.3g})"
    )


LINT = Lint(
    name="effective-batch",
    when="a switch of the strategy changes how many samples one step of the optimizer sees",
    judge=each(_batch_sentence),
    why="a learning rate belongs to a batch size",
    do="set the learning rate, the loader's batch_size, or --accumulate",
    conditions="a switch of the strategy changes dp x accumulate, and a loader is prepared "
    "whose batches each rank gets whole, and an optimizer",
    exceptions="with `split_batches`, where a step sees the same; without a prepared loader",
    example=("32 64", {0: {"before": 32, "after": 64, "lr": 0.01}}),
)
