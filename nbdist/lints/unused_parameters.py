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
