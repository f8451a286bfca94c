"""Gradients of several backwards are added up, and nothing divides the loss.

The facts come from lints/rank/optimizer_steps.
"""

from __future__ import annotations

from nbdist.lints.lint import Lint, each

LINT = Lint(
    name="loss-not-divided",
    when="in two steps in a row one line calls backward several times, its loss is a mean, "
    "and neither it nor an Accelerator divides it",
    judge=each(
        "{place} called backward {count} times per step on a mean loss that was not divided, "
        "and the gradients were added up".format
    ),
    why="if these are parts of one batch, its gradient is that many times too large",
    do="divide the loss by the number of parts, or use accelerator.accumulate with "
    "gradient_accumulation_steps",
    conditions="in two steps in a row one line calls `backward` the same number of times, "
    "twice or more, the gradients are added up, and the loss is a mean that nothing divides: "
    "neither `/` behind it nor the Accelerator's `gradient_accumulation_steps`",
    exceptions="losses that are sums, weighted or divided anywhere; a model that was compiled; "
    "two lines, as of a GAN. Whether the parts are of one batch cannot be known, so it says "
    '"if"',
    example=("line 7 of cell [12]", {0: {"place": "line 7 of cell [12]", "count": 4}}),
)
