"""Ranks that share one copy of a model call it with different inputs.

The facts come from lints/rank/model_inputs.
"""

from __future__ import annotations

from nbdist.lints.lint import TWO_VALUES, Lint, apart

LINT = Lint(
    name="model-inputs",
    when="ranks that share one copy of a model (under pp, tp, cp, ulysses) call it with different "
    "inputs",
    judge=apart("{subject} was called with different inputs on {who}, which share one copy of it"),
    why="each rank computes a part of the model with its own inputs, so the results belong to no "
    "batch",
    do="take batches from a prepared DataLoader, or share them out with "
    "accelerator.split_between_processes",
    needs_success=True,
    conditions="in a cell that ended well on all its ranks, ranks that share one copy of a "
    "prepared model (along the axes pp, cp and tp) called it with different tensors, in training "
    "or evaluation. The first training step after `prepare` or a switch fails instead",
    exceptions="models that the user's own torch.compile runs; calls of what is inside the "
    "prepared model",
    example=("model", TWO_VALUES),
)
