"""Writes how close plans' times are to what others measured.

python -m tests.accuracy.time_report docs/accuracy.md
"""

from __future__ import annotations

import itertools
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from nbdist.errors import OptionError
from nbdist.planner.devices import PER_HOST
from nbdist.planner.memory import check_fits
from nbdist.strategy.choice import Strategy
from tests.accuracy import steps
from tests.accuracy.fit import fit, halves, times_by
from tests.accuracy.steps import Step
from tests.support import tables

COMMAND = "make accuracy, times"
# Pairs of which one took so much longer are put in order.
APART = 0.05
_HEAD = (
    "set", "steps", "refused", "mean error", "median", "90th percentile", "bias", "tau",
    "order of pairs > 5 % apart", "regret", "worst",
)  # fmt: skip
_SINGLE = (
    ("Megatron's tables", steps.megatron), ("torchtitan", steps.torchtitan),
    ("SimuMax's B200", steps.simumax), (steps.QLORA, steps.qlora),
    ("SimuMax's B200, experts", steps.simumax_experts), (steps.AUTOMODEL, steps.automodel),
    (steps.BRIDGE, steps.bridge), (steps.ONE_GPU, steps.one_gpu),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Timed:
    """A measured step and its prediction, in seconds."""

    step: Step
    predicted_s: float

    @property
    def error(self) -> float:
        """Of the prediction, as a part of what was measured."""
        return self.predicted_s / self.step.measured_s - 1


@dataclass(frozen=True, slots=True)
class Score:
    """How close predictions are; order and regret are means over groups, None without groups.

    Attributes:
        count, refused: Steps that were planned, and that no plan takes.
        mean, median, most: Of the errors without their sign; `most` is the 90th percentile.
        bias: Mean error with its sign.
        tau: Kendall's tau-a.
        order: The same over pairs more than APART apart.
        regret: Time of the configuration that is predicted as fastest over that of the fastest; of
            a tie the mean.
        worst: The largest regret of a group.
    """

    count: int
    refused: int
    mean: float
    median: float
    most: float
    bias: float
    tau: float | None = None
    order: float | None = None
    regret: float | None = None
    worst: float | None = None


def timed(many: Iterable[Step], constants: Mapping[str, float] | None = None) -> list[Timed]:
    """Each with its prediction, by the product's constants or others; NaN of what is refused."""
    result = []
    for step in many:
        try:
            check_fits(step.model, step.choice, step.load)
        except OptionError:
            result.append(Timed(step, math.nan))
            continue
        predicted = step.predicted().step_s if constants is None else times_by(step, constants)
        result.append(Timed(step, predicted))
    return result


def score(taken: Sequence[Timed]) -> Score:
    """Errors of all that were planned, and order and regret in groups of three and more."""
    many = [timed_step for timed_step in taken if not math.isnan(timed_step.predicted_s)]
    errors = [timed_step.error for timed_step in many]
    sizes = sorted(abs(error) for error in errors)
    # Linear between ranks, as numpy's quantile.
    most = statistics.quantiles(sizes, n=10, method="inclusive")[-1]
    groups: dict[tuple[object, ...], list[Timed]] = defaultdict(list)
    for timed_step in many:
        groups[timed_step.step.group].append(timed_step)
    groups = {key: group for key, group in groups.items() if key and len(group) >= 3}
    base = Score(
        len(many), len(taken) - len(many), statistics.mean(sizes), statistics.median(sizes), most,
        statistics.mean(errors),
    )  # fmt: skip
    if not groups:
        return base
    regrets = [regret(group) for group in groups.values()]
    orders = [order(group, APART) for group in groups.values()]
    return replace(
        base,
        tau=statistics.mean(order(group) or 0.0 for group in groups.values()),
        order=statistics.mean(value for value in orders if value is not None),
        regret=statistics.mean(regrets),
        worst=max(regrets),
    )


def order(group: Sequence[Timed], apart: float = 0.0) -> float | None:
    """Pairs in the right order less those in the wrong one, of all; a tie counts 0.

    Only of pairs whose measured times are more than `apart` apart; None without one.
    """
    total = count = 0
    for timed_step, other in itertools.combinations(group, 2):
        times = timed_step.step.measured_s, other.step.measured_s
        if max(times) <= min(times) * (1 + apart):
            continue
        count += 1
        if not math.isclose(timed_step.predicted_s, other.predicted_s, rel_tol=1e-9):
            same = (timed_step.predicted_s < other.predicted_s) == (times[0] < times[1])
            total += 1 if same else -1
    return total / count if count else None


def regret(group: Sequence[Timed]) -> float:
    """How much longer the configuration takes that is predicted as fastest; of a tie the mean."""
    least = min(timed_step.predicted_s for timed_step in group)
    picks = [
        timed_step.step.measured_s
        for timed_step in group
        if math.isclose(timed_step.predicted_s, least, rel_tol=1e-9)
    ]
    return statistics.mean(picks) / min(timed_step.step.measured_s for timed_step in group) - 1


def scores() -> list[tuple[str, Score]]:
    """A score for each set, and of the sets that were fitted for what was held out."""
    lines = []
    for title, load in ((steps.VTRAIN, steps.vtrain), (steps.FOUNDRY, steps.llm_foundry)):
        many = timed(load())
        names = steps.fitted_names([timed_step.step for timed_step in many])
        held = [timed_step for timed_step in many if timed_step.step.name not in names]
        lines += [(f"{title}, held out", score(held)), (f"{title}, all", score(many))]
        if title == steps.VTRAIN:
            lines += _by_tp(many, "39.1B")
    flash = [replace(step, choice=_with_flash(step.choice)) for step in steps.vtrain()]
    lines.append((f"{steps.VTRAIN}, all, as if by flash attention", score(timed(flash))))
    return lines + [(title, score(timed(load()))) for title, load in _SINGLE]


def _by_tp(many: Sequence[Timed], model: str) -> list[tuple[str, Score]]:
    """A model's rows with tp 8, a whole host, and the others: docs/accuracy.md says why."""
    rows = [row for row in many if row.step.name == model]
    whole = [row for row in rows if row.step.choice.degrees.tp == PER_HOST]
    parts = [row for row in rows if row not in whole]
    title = f"{rows[0].step.source}, {model}, tp"
    return [(f"{title} 8", score(whole)), (f"{title} below 8", score(parts))]


def _with_flash(choice: Strategy) -> Strategy:
    return replace(choice, options=replace(choice.options, sdpa=""))


def swapped_scores() -> list[tuple[str, Score]]:
    """Each half by the constants that the other half gives: no step is judged by its own model."""
    first, second = halves()
    many = timed(first, fit(second)) + timed(second, fit(first))
    return [
        (f"{title}, each half by the other", score([t for t in many if t.step.source == title]))
        for title in (steps.VTRAIN, steps.FOUNDRY)
    ]


def text() -> str:
    """The scores, and a line for each published step that belongs to no group."""
    rows = [_line(title, each) for title, each in scores() + swapped_scores()]
    names = [
        f"{title}: fitted on {', '.join(sorted(steps.fitted_names(list(load()))))}"
        for title, load in ((steps.VTRAIN, steps.vtrain), (steps.FOUNDRY, steps.llm_foundry))
    ]
    singles = [
        (title, timed_step.step.name, timed_step.step.label, _seconds(timed_step.step.measured_s),
         _seconds(timed_step.predicted_s), _signed(timed_step.error))
        for title, load in _SINGLE
        for timed_step in timed(load())
    ]  # fmt: skip
    head = ("set", "model", "configuration", "measured (s)", "predicted (s)", "error")
    return "\n\n".join(
        [tables.table(_HEAD, rows), ". ".join(names) + ".", tables.table(head, singles)]
    )


def _line(title: str, values: Score) -> tuple[str, ...]:
    parts = (values.mean, values.median, values.most)
    order_cells = ("-" if value is None else f"{value:.2f}" for value in (values.tau, values.order))
    regrets = ("-" if value is None else _percent(value) for value in (values.regret, values.worst))
    return (
        title, str(values.count), str(values.refused), *map(_percent, parts), _signed(values.bias),
        *order_cells, *regrets,
    )  # fmt: skip


def _percent(part: float) -> str:
    return f"{100 * part:.1f} %"


def _signed(part: float) -> str:
    return f"{100 * part:+.1f} %"


def _seconds(value_s: float) -> str:
    return f"{value_s:.3g}" if value_s < 100 else f"{value_s:.0f}"


if __name__ == "__main__":
    page = Path(sys.argv[1])
    page.write_text(tables.replaced(page.read_text(), COMMAND, text()))
