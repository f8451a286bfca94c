"""A DistributedSampler shuffles every epoch alike.

The facts come from lints/rank/data.
"""

from __future__ import annotations

from nbdist.lints.lint import Lint, each

LINT = Lint(
    name="set-epoch",
    when="a cell trains twice over a DistributedSampler that shuffles, at the same epoch",
    judge=each(
        "{subject} was iterated again with its DistributedSampler still at epoch {epoch}".format
    ),
    why="every epoch has the same order, and each rank always sees the same samples",
    do="call sampler.set_epoch(epoch) before each loop, or pass the loader to accelerator.prepare",
    conditions="in one cell two loops that train go over a `DistributedSampler` that shuffles, "
    "at the same epoch",
    exceptions="loops in two cells: running a cell again is no mistake",
    example=("loader", {0: {"epoch": 0}, 1: {"epoch": 0}}),
)
