"""Trained parameters of a DDP model have no gradient.

The facts come from lints/rank/ddp.
"""

from __future__ import annotations

from collections.abc import Sequence

from nbdist.lints.lint import Lint, each

# More names of unused parameters than these are counted.
SHOWN_NAMES = 4


def _unused_sentence(*, subject: str, names: Sequence[str], count: int, total: int) -> str:
    more = f" and {count - SHOWN_NAMES} more" if count > SHOWN_NAMES else ""
    return (
        f"{', '.join(names[:SHOWN_NAMES])}{more} of {subject} got no gradient in the first step "
        f"({count} of {total} parameters)"
    )


def _dead(subject: str, names: Sequence[str] = (), count: int = 0, total: int = 0) -> str:
    if not names:
        return (
            f"a loss used {subject} as it was before prepare or a switch: that part trains nothing"
        )
    more = f" and {count - len(names)} more" if count > len(names) else ""
    return (
        f"an optimizer of {subject} stepped {', '.join(names)}{more} as they were before prepare, "
        f"a switch or the end of a forward: {count} of its {total} parameters train nothing"
    )


LINT = Lint(
    name="unused-parameters",
    when="after the first step of a DDP model without --find-unused, trained parameters have "
    "no gradient",
    judge=each(_unused_sentence),
    why="DDP waits for the gradient of each of them, leaves gradients of the same bucket "
    "unreduced, and fails in the next forward",
    do="use them in the loss, freeze them with requires_grad_(False) before the model is "
    "wrapped, or %dist_strategy ddp --find-unused",
    conditions="after the first step of a DDP model without `find_unused_parameters` and "
    "`static_graph`, some parameters have no gradient; it names them, also above the error "
    "that torch raises in the next forward",
    exceptions="parameters that are left out only later",
    example=("model", {0: {"names": ["head.bias"], "count": 1, "total": 12}}),
)
DEAD_PARAMETERS = Lint(
    name="dead-parameters",
    when="an optimizer steps, or a loss uses, parameters that a prepared model no longer has",
    judge=each(_dead),
    why="the strategy has put other parameters in their place, and those get the gradients",
    do="give the optimizer to accelerator.prepare, or take parameters from the model after prepare",
    conditions="a backward comes to a parameter of a prepared model as it was before `prepare` or "
    "a switch, as of a penalty on a weight that was kept; or in the first step of an optimizer in "
    "a cell, it holds such parameters, or those gathered between a forward and its backward under "
    "fsdp with grad-op",
    exceptions="later steps of the cell; an optimizer that leaves out parameters, which can be "
    "meant",
    example=(
        "model",
        {0: {"names": ["embed.weight", "head.weight"], "count": 2, "total": 52}},
    ),
)
