"""Strategies as text and tables: the current one with all rows, and what a switch did."""

from __future__ import annotations

import html
import io
from collections.abc import Mapping
from dataclasses import replace

from nbdist.core import units
from nbdist.core.failures import ranks_phrase
from nbdist.core.units import shown
from nbdist.core.view import View, figure_html, table
from nbdist.errors import OptionError
from nbdist.strategy import footprint
from nbdist.strategy.choice import Strategy, described, rows_of
from nbdist.strategy.choose import choose
from nbdist.strategy.degrees import ranks
from nbdist.strategy.expert_tokens import ExpertTokens
from nbdist.strategy.table import HELD, ROWS, StrategyRow
from nbdist.switch.report import RankSwitchReport

_NOTHING = "-"
# A picture of experts: more layers than these would be a long page.
_MOST_LAYERS = 64
_WIDTH_IN, _ROW_IN, _EDGE_IN, _DPI, _FONT_PT = 7.5, 0.16, 0.7, 160, 6


def current(choice: Strategy, tokens: Mapping[str, ExpertTokens] | None = None) -> View:
    """View of %dist_strategy: the current strategy, and every row on these ranks.

    Under ep also how many tokens of the last cell the experts of each model got.
    """
    n_ranks, recipe = ranks(choice.world_size), footprint.RECIPES["fp32"]
    tokens = tokens or {}
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
    view = table(
        ["", "strategy", "splits", "B held", "B sent", "use it when"],
        [_cells(row, choice) for row in ROWS.values()],
        before=[
            f"strategy: {described(choice)}",
            f"{batch} (data-parallel degree {dp} on {n_ranks})",
            *(_expert_line(model, of_model) for model, of_model in tokens.items()),
            "",
        ],
        after=["", legend, more],
    )
    images = [expert_png(of_model) for of_model in tokens.values()]
    figures = (figure_html(image, "Tokens by layer and expert") for image in images)
    return replace(view, html=view.html + "".join(figures), png=images[0] if images else b"")


def _expert_line(model: str, tokens: ExpertTokens) -> str:
    rank, times = tokens.busiest_rank
    layer, expert, share = tokens.busiest_expert
    return (
        f"experts of {model} in the last cell: {tokens.total:,} tokens; "
        f"rank {rank} computed {shown(f'{times:.1f}')} times the mean, and expert {expert} of "
        f"{layer} got {shown(f'{share:.0%}')} (evenly {tokens.even(layer):.0%})"
    )


def expert_png(tokens: ExpertTokens) -> bytes:
    """Layers down, experts across: each one's tokens by its even share; ranks above."""
    names = list(tokens.layers)[:_MOST_LAYERS]
    n_experts = max(len(tokens.layers[name]) for name in names)
    grid = [
        [tokens.layers[name][e] / max(1, tokens.layers[name].total()) / tokens.even(name)
         for e in range(n_experts)]
        for name in names
    ]  # fmt: skip
    import matplotlib.style
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    with matplotlib.style.context("default"):
        height_in = _EDGE_IN + _ROW_IN * len(names)
        figure = Figure(figsize=(_WIDTH_IN, height_in), dpi=_DPI, layout="constrained")
        axes = figure.subplots()
        image = axes.imshow(grid, cmap="RdBu_r", vmin=0, vmax=2, aspect="auto")
        axes.set_yticks(range(len(names)), names, fontsize=_FONT_PT, parse_math=False)
        axes.set_xlabel("expert", fontsize=_FONT_PT)
        axes.tick_params(labelsize=_FONT_PT)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        width = n_experts / len(tokens.shares)
        for share, owners in enumerate(tokens.shares):
            axes.axvline(share * width - 0.5, color="black", linewidth=1)
            axes.text((share + 0.5) * width - 0.5, -0.6, ranks_phrase(owners), ha="center",
                      fontsize=_FONT_PT)  # fmt: skip
        bar = figure.colorbar(image, ax=axes, ticks=[0, 1, 2], shrink=0.8)
        bar.ax.set_yticklabels(["none", "even", "twice"], fontsize=_FONT_PT)
        file = io.BytesIO()
        figure.savefig(file, format="png", metadata={"Software": None})
    return file.getvalue()


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
    """Parts that a row splits; the three things that a rank holds are one word together."""
    parts = [what for what in HELD if footprint.split_axes(choice, what)]
    labels = ["model"] if len(parts) == len(HELD) else parts
    others = ("experts", "batch", "sequence")
    labels += [what for what in others if footprint.split_axes(choice, what)]
    return ", ".join(labels) or "nothing"


def switch_result(report: RankSwitchReport) -> View:
    """View of a switch: changes, rebound variables, and what still holds old objects."""
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
