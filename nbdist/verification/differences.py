"""How far a step is from its reference, tensor by tensor, and how far rounding alone may get."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

# In execution order: a difference of an earlier phase explains those of the later ones.
FORWARD, BACKWARD, GRADIENTS, PARAMETERS = "forward", "backward", "gradients", "parameters"
PHASES = (FORWARD, BACKWARD, GRADIENTS, PARAMETERS)

INPUT, OUTPUT = "input", "output"
OUTPUT_GRADIENT, INPUT_GRADIENT = "gradient of the output", "gradient of the input"
GRADIENT, PARAMETER = "gradient", "value after the step"
PHASE_OF = {
    INPUT: FORWARD,
    OUTPUT: FORWARD,
    OUTPUT_GRADIENT: BACKWARD,
    INPUT_GRADIENT: BACKWARD,
    GRADIENT: GRADIENTS,
    PARAMETER: PARAMETERS,
}

# How many times as far as a reference whose inputs were moved by one unit in the last place.
FACTOR = 4.0
# Roundings of each element that no movement of the inputs shows, in units of the last place.
ROUNDINGS = 4.0
# The same of elements that cancel out: in units of the last place of the phase's largest tensor.
CANCELLED = 1.0


@dataclass(frozen=True, slots=True, order=True)
class TensorKey:
    """Which tensor of a step.

    Attributes:
        what: A key of PHASE_OF.
        name: Of the module, or of the parameter.
        item: Its place among the module's inputs or outputs.
        call: Of the module within the step, from 0.
    """

    what: str
    name: str
    item: int = 0
    call: int = 0

    @property
    def phase(self) -> str:
        """The part of the step in which it is computed."""
        return PHASE_OF[self.what]


@dataclass(frozen=True, slots=True)
class Addition:
    """Term added to a gradient, if one number explains it.

    Attributes:
        amount: The number.
        what: What it is a factor of, as a phrase.
        left: Of the difference that is left without it.
    """

    amount: float
    what: str
    left: float


@dataclass(frozen=True, slots=True)
class Difference:
    """One tensor on one rank beside the reference's; sizes are roots of mean squares.

    Attributes:
        order: When the reference computed it within its phase.
        error: Of the difference.
        moved: Of the difference between the reference and the one with moved inputs.
        size: Of the reference's own values.
        factor: By what the reference has to be multiplied to be nearest.
        left: Of the difference that is left then.
        addition: What explains a gradient's difference best, if that were added; None elsewhere.
        problem: Why it was not compared; empty where it was.
    """

    key: TensorKey
    order: int = 0
    error: float = 0.0
    moved: float = 0.0
    size: float = 0.0
    factor: float = 1.0
    left: float = 0.0
    addition: Addition | None = None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """One tensor on all ranks that have it.

    Attributes:
        tolerance: The largest difference that rounding explains, as a root of mean squares.
        worst: Of the rank with the largest difference.
        outside: Ranks on which it is larger than the tolerance.
        errors: Rank -> difference as a share of the tolerance.
    """

    key: TensorKey
    order: int
    tolerance: float
    worst: Difference
    outside: tuple[int, ...]
    errors: dict[int, float]

    @property
    def relative(self) -> float:
        """The largest difference as a share of the reference's size."""
        return self.worst.error / self.worst.size if self.worst.size else float("inf")

    @property
    def allowed(self) -> float:
        """The tolerance as a share of the reference's size."""
        return self.tolerance / self.worst.size if self.worst.size else float("inf")


def tolerance(difference: Difference, eps: float, largest: float) -> float:
    """The largest difference that rounding explains (TTrace, arXiv 2506.09280, has the method).

    Args:
        difference: Of one rank; its `moved` is what the perturbation analysis has measured.
        eps: torch.finfo(dtype).eps of the dtype that is computed in.
        largest: The largest size of a tensor of this phase.
    """
    roundings = ROUNDINGS * difference.size + CANCELLED * largest
    return FACTOR * difference.moved + eps * roundings


def rows(reports: Sequence[Iterable[Difference]], eps: float) -> tuple[Row, ...]:
    """Every tensor that was compared, in execution order; `reports` are the ranks' in order."""
    by_key: dict[TensorKey, dict[int, Difference]] = {}
    for rank, differences in enumerate(reports):
        for difference in differences:
            if not difference.problem:
                by_key.setdefault(difference.key, {})[rank] = difference
    largest = {
        what: max((d.size for k, ranks in by_key.items() if k.what == what for d in ranks.values()),
                  default=0.0)
        for what in PHASE_OF
    }  # fmt: skip
    all_rows = []
    for key, ranks in by_key.items():
        limit = max(tolerance(d, eps, largest[key.what]) for d in ranks.values())
        worst = max(ranks.values(), key=lambda d: d.error)
        shares = {rank: _share(d.error, limit) for rank, d in ranks.items()}
        outside = tuple(rank for rank, share in shares.items() if not share <= 1)
        all_rows.append(Row(key, worst.order, limit, worst, outside, shares))
    return tuple(sorted(all_rows, key=lambda row: (PHASES.index(row.key.phase), row.order)))


def _share(error: float, limit: float) -> float:
    return error / limit if limit else (0.0 if error == 0 else float("inf"))


def problems(reports: Sequence[Iterable[Difference]]) -> dict[str, str]:
    """Module or parameter -> why nothing of it was compared, on any rank."""
    compared = {d.key.name for differences in reports for d in differences if not d.problem}
    return {
        d.key.name: d.problem
        for differences in reports
        for d in differences
        if d.problem and d.key.name not in compared
    }


def first_outside(all_rows: Iterable[Row]) -> Row | None:
    """The first tensor in execution order that is outside of its tolerance."""
    return next((row for row in all_rows if row.outside), None)
