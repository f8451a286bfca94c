"""Strategies as text and tables: the current one with all rows, and what a switch did."""

from __future__ import annotations

import html
from collections.abc import Iterable

from nbdist.core import units
from nbdist.core.view import View, table
from nbdist.errors import OptionError
from nbdist.strategy import footprint
from nbdist.strategy.choice import Strategy, described, rows_of
from nbdist.strategy.choose import choose
from nbdist.strategy.degrees import ranks
from nbdist.strategy.table import HELD, ROWS, Row
from nbdist.switch.report import RankSwitchReport

_NOTHING = "-"


def current(choice: Strategy) -> View:
    """What %dist_strategy shows: the strategy that counts, and every row on these ranks."""
    rows = [_cells(row, choice) for row in ROWS.values()]
    return table(
        ["", "strategy", "splits", "B held", "B sent", "use it when"],
        rows,
        before=[f"strategy: {described(choice)}", _batch(choice), ""],
        after=["", _legend(choice), _MORE],
    )


_MORE = (
    "%dist_strategy NAME switches; %dist_strategy --help has degrees and options; "
    "docs/strategies.md explains each."
)


def _legend(choice: Strategy) -> str:
    recipe = footprint.RECIPES["fp32"]
    return (
        f"B: bytes per parameter on {ranks(choice.world_size)}. Held between steps: "
        f"{recipe.total} ({recipe.name}) as far as it is not split. Sent per step: gradients and "
        "parameters, 4 each; activations come on top of both."
    )


def _batch(choice: Strategy) -> str:
    dp, accumulated = choice.degrees.dp, choice.options.accumulate
    text = f"effective batch: {dp} x the loader's"
    if accumulated > 1:
        text += f" x {accumulated} accumulated"
    return f"{text} (data-parallel degree {dp} on {ranks(choice.world_size)})"


def _cells(row: Row, current_choice: Strategy) -> list[str]:
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
    held = [what for what in HELD if footprint.split_axes(choice, what)]
    told = ["model"] if len(held) == len(HELD) else held
    told += [what for what in ("batch", "sequence") if footprint.split_axes(choice, what)]
    return ", ".join(told) or "nothing"


def switched(done: RankSwitchReport) -> View:
    """What a switch prints: what changed, which names were rebound, what is still the old."""
    if done.before == done.after:
        return _lines([f"{described(done.after)} already: nothing was changed"])
    lines = [_head(done), *_changes(done), *done.notes]
    if done.stale:
        lines.append("Still the old model or its parameters; assign them again:")
        lines += [f"  {phrase}" for phrase in done.stale]
    return _lines(lines)


def _head(done: RankSwitchReport) -> str:
    after = described(done.after)
    if not done.models:
        return f"{after} from now on (was {described(done.before)}); no model is prepared yet"
    moved = units.size(done.moved_bytes)
    return (
        f"{described(done.before)} -> {after} in {units.seconds(done.elapsed_s)}, {moved} moved "
        "between ranks"
    )


def _changes(done: RankSwitchReport) -> list[str]:
    told = {
        "models": done.models,
        "names that stand for another object now": done.rebound,
        "lists of parameters that were updated": done.lists,
    }
    return [f"{what}: {', '.join(names)}" for what, names in told.items() if names]


def _lines(lines: Iterable[str]) -> View:
    kept = list(lines)
    body = "".join(f'<div style="white-space:pre-wrap">{html.escape(line)}</div>' for line in kept)
    return View("\n".join(kept), body)
