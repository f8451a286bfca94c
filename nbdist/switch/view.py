"""Strategies as text and tables: the current one with all rows, and what a switch did."""

from __future__ import annotations

import html

from nbdist.core import units
from nbdist.core.view import View, table
from nbdist.errors import OptionError
from nbdist.strategy import footprint
from nbdist.strategy.choice import Strategy, described, rows_of
from nbdist.strategy.choose import choose
from nbdist.strategy.degrees import ranks
from nbdist.strategy.table import HELD, ROWS, StrategyRow
from nbdist.switch.report import RankSwitchReport

_NOTHING = "-"


def current(choice: Strategy) -> View:
    """What %dist_strategy shows: the current strategy, and every row on these ranks."""
    n_ranks, recipe = ranks(choice.world_size), footprint.RECIPES["fp32"]
    dp, accumulated = choice.degrees.dp, choice.options.accumulate
    times = f" x {accumulated} accumulated" if accumulated > 1 else ""
    batch = f"effective batch: {dp} x the loader's batch{times}"
    legend = (
        f"B: bytes per parameter on {n_ranks}. Held between steps: {recipe.total} ({recipe.name}) "
        "where not sharded. Sent per step: gradients and parameters, 4 each. Activations add to "
        "both."
    )
    more = (
        "%dist_strategy NAME switches; %dist_strategy --help has degrees and options; "
        "docs/strategies.md explains each."
    )
    return table(
        ["", "strategy", "splits", "B held", "B sent", "use it when"],
        [_cells(row, choice) for row in ROWS.values()],
        before=[
            f"strategy: {described(choice)}",
            f"{batch} (data-parallel degree {dp} on {n_ranks})",
            "",
        ],
        after=["", legend, more],
    )


def _cells(row: StrategyRow, current_choice: Strategy) -> list[str]:
    mark = ">" if row in rows_of(current_choice) else ""
    try:
        choice = choose(row.name, {}, current_choice.world_size)
    except OptionError:  # not with so many ranks
        return [mark, row.name, _NOTHING, _NOTHING, _NOTHING, row.when]
    held = footprint.held_bytes(choice, 1, footprint.RECIPES["fp32"])
    sent = footprint.sent_bytes(choice, 1)
    return [mark, row.name, _splits(choice), f"{held:.1f}", f"{sent:.1f}", row.when]


def _splits(choice: Strategy) -> str:
    """What a row splits; the three things that a rank holds are one word together."""
    parts = [what for what in HELD if footprint.split_axes(choice, what)]
    labels = ["model"] if len(parts) == len(HELD) else parts
    others = ("experts", "batch", "sequence")
    labels += [what for what in others if footprint.split_axes(choice, what)]
    return ", ".join(labels) or "nothing"


def switch_result(report: RankSwitchReport) -> View:
    """What a switch prints: what changed, rebound variables, what still holds old objects."""
    if report.before == report.after:
        return _lines([f"The strategy is already {described(report.after)}. Nothing was changed."])
    changes = {
        "Models": report.models,
        "Rebound variables": report.rebound,
        "Updated lists of parameters": report.lists,
    }
    lines = [
        _head(report),
        *(f"{what}: {', '.join(names)}" for what, names in changes.items() if names),
        *report.notes,
    ]
    if report.stale:
        lines.append("These still hold the old model or its parameters. Assign them again:")
        lines += [f"  {phrase}" for phrase in report.stale]
    return _lines(lines)


def _head(report: RankSwitchReport) -> str:
    after = described(report.after)
    if not report.models:
        return (
            f"{after} from now on (before: {described(report.before)}). No model is prepared yet."
        )
    moved = units.size(report.moved_bytes)
    return (
        f"{described(report.before)} -> {after} in {units.seconds(report.elapsed_s)}, {moved} "
        "moved between ranks"
    )


def _lines(lines: list[str]) -> View:
    body = "".join(f'<div style="white-space:pre-wrap">{html.escape(line)}</div>' for line in lines)
    return View("\n".join(lines), body)
