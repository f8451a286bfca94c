"""Gradients that bypass the wrapper of DDP.

The facts come from lints/rank/ddp.
"""

from __future__ import annotations

from nbdist.lints.lint import Lint, each

LINT = Lint(
    name="beside-wrapper",
    when="an optimizer steps with gradients of a backward while its DDP model was not called",
    judge=each(
        "the optimizer of {subject} stepped with gradients that did not come through "
        "{subject}".format
    ),
    why="DDP reduces gradients of its own forward only, so the ranks have diverged",
    do="call the wrapped model, not its .module or the model from before prepare; "
    "%dist_sync_model makes the ranks equal again",
    conditions="an optimizer steps after a backward, and its DDP model was not called since "
    "its last step: the gradients came through `model.module`, or through the model from "
    "before `prepare`",
    exceptions="where the wrapper was called in the same step as well",
    example=("model", {0: {}, 1: {}}),
)
