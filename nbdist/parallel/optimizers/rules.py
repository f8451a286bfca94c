"""Optimizers that are known: what each looks at, and where it cannot have that.

Those that are not known here are compared with one process in their first step (first_step.py).
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch.optim import Optimizer

from nbdist.errors import OptionError
from nbdist.strategy.choice import Strategy, label, steps_of
from nbdist.strategy.tensor_layout import TensorLayout

# How parameters lie -> what an optimizer meets there, behind the strategy's label.
_LIE = {
    "flat": "gives it this rank's pieces of flat parameters",
    "split": "makes DTensors of parameters, of which each rank has a part",
    "mixed": "has DTensors beside plain tensors or DTensors of other meshes, which torch does not "
    "put together",
    "staged": "gives a rank the parameters of its own stage alone",
    "owned": "lets each rank step the parameters that it keeps the state of",
}


@dataclass(frozen=True, slots=True)
class _Rule:
    """A rule by which an optimizer is refused.

    Attributes:
        looks: What it does that matters, as a clause.
        refused: Keys of `_LIE`.
        instead: What to take.
    """

    looks: str
    refused: frozenset[str]
    instead: str


_BY_TENSOR = {
    torch.optim.Adafactor: _Rule(
        "takes norms of rows, columns and whole matrices as plain numbers",
        frozenset({"flat", "split"}),
        "ddp, zero1 or pp, or another optimizer (AdamW, SGD, Muon)",
    ),
    torch.optim.LBFGS: _Rule(
        "looks at all gradients together",
        frozenset({"flat", "mixed", "staged", "owned"}),
        "ddp or fsdp, or an optimizer that treats each parameter by itself (AdamW, SGD)",
    ),
    torch.optim.Muon: _Rule(
        "looks at whole matrices",
        frozenset({"flat"}),
        "fsdp or ddp, or an optimizer that treats each element by itself (AdamW, SGD)",
    ),
    torch.optim.Rprop: _Rule(
        "writes to single elements, which DTensors do not have",
        frozenset({"split"}),
        "ddp, zero1 or pp, or another optimizer (AdamW, SGD, Muon)",
    ),
}
# Others by the package of their class.
_BY_PACKAGE = {
    # https://github.com/bitsandbytes-foundation/bitsandbytes/issues/1633: an illegal memory access.
    "bitsandbytes": _Rule(
        "gives the addresses of whole tensors to kernels of its own",
        frozenset({"split"}),
        "ddp, zero1 or pp, or an optimizer of torchao, which knows DTensors",
    ),
}
# torch's that treat each element by itself: a part is to them what a matrix is.
_BY_ELEMENT = frozenset(
    getattr(torch.optim, name)
    for name in (
        "ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "SGD"
    )
)  # fmt: skip


def is_known(optimizer: Optimizer) -> bool:
    """Whether it is one of torch's, and not a class of somebody's that is derived from one."""
    return type(optimizer) in _BY_ELEMENT or type(optimizer) in _BY_TENSOR


def ways(choice: Strategy, layouts: Collection[TensorLayout]) -> set[str]:
    """How parameters lie under a strategy, as far as it matters to optimizers: keys of `_LIE`."""
    steps = steps_of(choice)
    kinds = {(each.shard_dim is None, each.tp_dim is None, each.ep_dim is None) for each in layouts}
    is_split = any(not all(kind) for kind in kinds)
    holds = {
        "flat": "fsdp1" in steps,
        "split": is_split,
        "mixed": is_split and len(kinds) > 1,
        "staged": any(each.stages is not None for each in layouts),
        "owned": "zero1" in steps,
    }
    return {way for way, is_so in holds.items() if is_so}


def check(optimizer: Optimizer, choice: Strategy, layouts: Collection[TensorLayout]) -> None:
    """Refuse an optimizer that would fail under a strategy, or compute something else.

    Args:
        optimizer: torch's own object.
        choice: The strategy.
        layouts: Of its parameters under that.

    Raises:
        OptionError: It is one of those; says why, and what to take instead.
    """
    kind = type(optimizer)
    rules = [_BY_TENSOR[base] for base in kind.__mro__ if base in _BY_TENSOR]
    rule = next(iter(rules), _BY_PACKAGE.get(kind.__module__.partition(".")[0]))
    met = rule.refused & ways(choice, layouts) if rule else frozenset()
    if rule and met:
        what = next(sentence for way, sentence in _LIE.items() if way in met)
        raise OptionError(
            f"{kind.__name__} {rule.looks}, and {label(choice)} {what}. Use {rule.instead}."
        )


def name_unknown(optimizer: Optimizer) -> None:
    """Say that nobody knows what an optimizer makes of fsdp1's flat parameters. Meets no rank."""
    kind = type(optimizer)
    # Rprop: flat pieces are plain tensors.
    if kind not in _BY_ELEMENT | {torch.optim.Rprop}:
        print(  # noqa: T201  # into the cell's output
            f"prepare: under fsdp1 {kind.__name__} gets this rank's pieces of flat parameters. If "
            "it looks at matrices or norms, it computes something else than in one process. fsdp "
            "and ddp keep their shapes.",
            file=sys.stderr,
        )
