"""An optimizer steps parameters in whose place a strategy has put others.

The facts come from lints/rank/optimizer_steps.
"""

from __future__ import annotations

from nbdist.lints.lint import Lint, each


def _sentence(subject: str, names: list[str], count: int, total: int) -> str:
    more = f" and {count - len(names)} more" if count > len(names) else ""
    return (
        f"an optimizer of {subject} stepped {', '.join(names)}{more} as they were before prepare, "
        f"a switch or the end of a forward: {count} of its {total} parameters train nothing"
    )


LINT = Lint(
    name="dead-parameters",
    when="an optimizer steps parameters that a prepared model no longer has",
    judge=each(_sentence),
    why="the strategy has put other parameters in their place, and those get the gradients",
    do="give the optimizer to accelerator.prepare, or make it of model.parameters() after prepare",
    conditions="in the first step of an optimizer in a cell, it holds parameters of a prepared "
    "model as they were before `prepare`, before a switch, or gathered between a forward and its "
    "backward under fsdp",
    exceptions="later steps of the cell; an optimizer that leaves out parameters, which can be "
    "meant",
    example=(
        "model",
        {0: {"names": ["embed.weight", "head.weight"], "count": 2, "total": 52}},
    ),
)
