"""Terms of a loss, read from autograd's graph between a model and its backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

_MODEL = "the model's own loss"
# A graph outside of a model that is larger than this is that of another model.
_MOST_NODES = 2000
_MEAN = 1  # torch.nn._reduction.get_enum("mean")


@dataclass(frozen=True, slots=True)
class GraphTerm:
    """A reduction, or a model's output, that may be a term of a loss: its gradient tells.

    Attributes:
        node: Of autograd's graph.
        kind, count, divisions: As of LossTerm.
        above: The numbers of those between it and the loss.
    """

    node: Any
    kind: str
    count: float
    above: tuple[int, ...]
    divisions: int


def terms_of(roots: Sequence[Any], outputs: Sequence[Any], accumulate: int) -> list[GraphTerm]:
    """Possible terms from the loss on, the first summands first, not into the model."""
    terms: list[GraphTerm] = []
    seen: set[Any] = set()
    left: list[tuple[Any, tuple[int, ...], int]] = [(node, (), 0) for node in reversed(roots)]
    while left and len(seen) < _MOST_NODES:
        node, above, divisions = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        is_output = any(node is output for output in outputs)
        count = 1.0 if is_output else _count(node)
        if count is not None:
            kind = _MODEL if is_output else node.name()
            terms.append(GraphTerm(node, kind, count, above, divisions))
            above = (*above, len(terms) - 1)
        if not is_output:
            divisions += _is_division(node, accumulate)
            left += [(below, above, divisions) for below, _ in reversed(node.next_functions)]
    return terms


def _count(node: Any) -> float | None:
    """By what a reduction divides, from what autograd has saved of it; None for anything else."""
    name = node.name()
    if name.startswith("Sum") or getattr(node, "_saved_reduction", _MEAN) != _MEAN:
        return 1.0
    if hasattr(node, "_saved_total_weight"):  # that of the labels that count
        return float(node._saved_total_weight)  # noqa: SLF001  # documented by torch
    if name.startswith("Mean") and hasattr(node, "_saved_self_sym_numel"):
        return float(node._saved_self_sym_numel)  # noqa: SLF001
    return float(node._saved_self.numel()) if hasattr(node, "_saved_reduction") else None  # noqa: SLF001


def _is_division(node: Any, steps: int) -> bool:
    other = getattr(node, "_saved_other", None) if node.name().startswith("Div") else None
    is_number = isinstance(other, (int, float)) or (
        isinstance(other, torch.Tensor) and other.numel() == 1
    )
    return steps > 1 and is_number and float(other) == steps  # type: ignore[arg-type]
