"""What rules of thumb choose, as a table beside a plan's choice: what the difference costs."""

from __future__ import annotations

from nbdist.core.units import exact_size
from nbdist.core.view import View, table
from nbdist.planner.advice import Advice, gigabytes
from nbdist.planner.plan import Plan, PlanRow
from nbdist.planner.rules_of_thumb import RuleAnswer

_HEAD = ("rule of thumb", "chooses", "because", "fits", "a sample", "memory")


def shown_rules(plan: Plan, advice: Advice) -> View:
    """A row for each rule; nothing where there are none."""
    if not advice.rules:
        return View("")
    best = advice.row
    choice = f" beside {best.typed}: time of a sample, peak memory" if best else ""
    rows = [_cells(plan, answer, best) for answer in advice.rules]
    return table(_HEAD, rows, before=[f"Rules of thumb{choice} (sources: docs/plan.md)"])


def _cells(plan: Plan, answer: RuleAnswer, best: PlanRow | None) -> list[str]:
    first = [answer.rule, answer.typed, answer.because]
    row = answer.row
    if row is None:
        return [*first, "not possible", "-", "-"]
    if best is not None and answer.typed == best.typed:
        return [*first, row.verdict, "the same", "the same"]
    return [*first, row.verdict, _time(plan, row, best), _memory(row, best)]


def _time(plan: Plan, row: PlanRow, best: PlanRow | None) -> str:
    """Of a sample; bytes where no speed is known. Transfers to the host are in no time."""
    if row.choice is not None and row.choice.options.offload:
        return "not counted"
    if row.time is not None:
        if best is None or best.time is None:
            return f"{row.time.cost_s:.2g} s"
        share = row.time.cost_s / best.time.cost_s - 1
        return f"{row.time.cost_s:.2g} s ({100 * share:+.0f} %)"
    if not plan.counts_sent(row):
        return "?"
    return f"{exact_size(row.sent_bytes / row.samples)} sent"


def _memory(row: PlanRow, best: PlanRow | None) -> str:
    assert row.memory is not None
    peak = gigabytes(row.memory.peak)
    if best is None or best.memory is None:
        return peak
    more = row.memory.peak - best.memory.peak
    return f"{peak} ({'+' if more >= 0 else '-'}{gigabytes(abs(more))})"
