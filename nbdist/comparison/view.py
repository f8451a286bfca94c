"""Strategies side by side: a table, and one picture of time, memory, bytes and overlap."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from nbdist.comparison.comparison import PARTS, ComparedRow, Comparison
from nbdist.core import units
from nbdist.core.units import shown
from nbdist.core.view import View, figure_html, lines_html, table
from nbdist.trace.view.image import COLOURS

if TYPE_CHECKING:  # it takes half a second to import
    from matplotlib.axes import Axes

_NOTHING = "-"
_IDLE = "#d0d0d0"
# Of what a rank holds: parameters, gradients, optimizer state.
_HELD = (("parameters", "#0072b2"), ("gradients", "#e69f00"), ("optimizer", "#009e73"))
_WIDTH_IN, _ROW_IN, _EDGE_IN, _DPI = 10.0, 0.32, 1.2, 160
_FONT_PT = 7
_MOST_NAME = 28


def comparison_result(comparison: Comparison) -> View:
    """The table, the picture and the notes of a comparison.

    The text has every number.
    """
    rows = _table(comparison.rows)
    lines = list(_notes(comparison))
    text = "\n".join(["", *lines])
    image = _png([row for row in comparison.rows if not row.problem])
    body = ""
    if image:
        body = figure_html(
            image, f"Bar charts of the strategies; the numbers are below. {rows.text}"
        )
    page = f"<div>{body}{rows.html}{lines_html(lines)}</div>"
    return View(rows.text + text, page, png=image)


def partial_result(rows: Sequence[ComparedRow], message: str) -> Iterator[View]:
    """The rows of a comparison that its cell ended, and whether the state is restored."""
    if rows:
        yield _table(rows)
    if message:
        yield View(message)


def _table(rows: Sequence[ComparedRow]) -> View:
    head = [
        "strategy", "ms", "compute", "communication", "copy", "data", "idle", "hidden", "held",
        "formula", "peak", "sent", "formula", "batches",
    ]  # fmt: skip
    done = [row for row in rows if not row.problem]
    refused = [f"{row.asked}: not run. {row.problem}" for row in rows if row.problem]
    if not done:
        return View("\n".join(refused), lines_html(refused))
    return table(head, [_cells(row) for row in done], after=refused)


def _cells(row: ComparedRow) -> list[str]:
    return [
        row.asked,
        shown(f"{row.step_ns / 1e6:.2f}"),
        *map(_percent, row.parts),
        _NOTHING if row.overlap is None else _percent(row.overlap),
        units.size(row.held.total_bytes) if row.held.total_bytes else _NOTHING,
        _size(row.held_formula_bytes),
        _size(row.peak_bytes),
        units.size(row.sent_bytes),
        _size(row.sent_formula_bytes),
        str(row.dp),
    ]


def _percent(share: float) -> str:
    return shown(f"{100 * share:.1f}")


def _size(value_bytes: float | None) -> str:
    return _NOTHING if value_bytes is None else units.size(value_bytes)


def _notes(comparison: Comparison) -> Iterator[str]:
    done = [row for row in comparison.rows if not row.problem]
    if done:
        cells = "" if all(row.has_steps for row in done) else " (of the cell where it has no steps)"
        yield (
            f"ms: of a step{cells}, recorded after a warm-up run, on the slowest rank. "
            "compute to idle: % of that over all ranks. communication: time not overlapped by "
            "compute. hidden: share of communication overlapped by compute."
        )
        yield (
            "held: parameters, gradients and optimizer state on the rank with the most, right "
            "after an optimizer step. The formula assumes Adam."
        )
        yield "peak: " + shown(
            "maximum of torch's allocator on the GPU."
            if done[0].is_device
            else "resident memory of the process in the warm-up, with Python, torch and "
            "freed memory that malloc has kept."
        )
        yield (
            "sent: per rank and step. The formula covers parameters and gradients; activations add "
            "to it. batches: loader batches per step; where rows differ, so does the amount of "
            "data in a step."
        )
    models = ", ".join(comparison.models)
    what = f"{models} and the training state" if models else "all variables"
    yield (
        f"Restored under {comparison.before}: {what}. %dist_trace shows the trace of the last "
        "strategy."
    )


def _png(rows: Sequence[ComparedRow]) -> bytes:
    """Panels of bars, a bar per strategy; empty without one. Leaves matplotlib as it is."""
    if not rows:
        return b""
    import matplotlib.style
    from matplotlib.figure import Figure

    with matplotlib.style.context("default"):
        height_in = _EDGE_IN + _ROW_IN * len(rows)
        figure = Figure(figsize=(_WIDTH_IN, height_in), dpi=_DPI, layout="constrained")
        panels = [_time, _memory, _sent, _overlap]
        if all(row.peak_bytes is not None for row in rows):
            panels.insert(2, _peak)
        ratios = [_WIDTHS.get(panel.__name__, 1.0) for panel in panels]
        every = figure.subplots(1, len(panels), sharey=True, width_ratios=ratios)
        for panel, axes in zip(panels, every, strict=True):
            panel(axes, rows)
        time = every[0]
        names = [
            name if len(name) <= _MOST_NAME else f"{name[: _MOST_NAME - 3]}..."
            for name in (row.asked for row in rows)
        ]
        time.set_yticks(range(len(rows)), names, parse_math=False)
        time.invert_yaxis()
        for axes in every:
            axes.tick_params(labelsize=_FONT_PT)
            for side in ("top", "right"):
                axes.spines[side].set_visible(False)
        file = io.BytesIO()
        figure.savefig(file, format="png", metadata={"Software": None})
    return file.getvalue()


def _bars(axes: Axes, series: Sequence[tuple[str, str, Sequence[float]]], title: str) -> None:
    """Bars of several parts, one after the other."""
    starts = [0.0] * len(series[0][2])
    for name, colour, values in series:
        if any(values):
            axes.barh(range(len(values)), values, left=starts, color=colour, label=name, height=0.7)
        starts = [start + value for start, value in zip(starts, values, strict=True)]
    axes.set_title(title, fontsize=_FONT_PT + 1)
    axes.set_xlim(left=0)


def _legend(axes: Axes) -> None:
    if not axes.get_legend_handles_labels()[0]:
        return
    axes.legend(
        fontsize=_FONT_PT - 1, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.15),
        ncols=2, handlelength=1, columnspacing=1, markerscale=0.4,
    )  # fmt: skip


def _time(axes: Axes, rows: Sequence[ComparedRow]) -> None:
    series = [
        (part, COLOURS.get(part, _IDLE), [row.step_ns / 1e6 * row.parts[index] for row in rows])
        for index, part in enumerate(PARTS)
    ]
    what = "a step" if all(row.has_steps for row in rows) else "a step or the cell"
    _bars(axes, series, f"time of {what}, ms")
    _legend(axes)


def _memory(axes: Axes, rows: Sequence[ComparedRow]) -> None:
    unit_bytes, unit = _unit([row.held.total_bytes for row in rows])
    series = [
        (name, colour, [getattr(row.held, f"{name}_bytes") / unit_bytes for row in rows])
        for name, colour in _HELD
    ]
    _bars(axes, series, f"held by a rank, {unit}")
    _marks(axes, [row.held_formula_bytes for row in rows], unit_bytes)
    _legend(axes)


def _peak(axes: Axes, rows: Sequence[ComparedRow]) -> None:
    peaks = [row.peak_bytes or 0 for row in rows]
    unit_bytes, unit = _unit(peaks)
    what = "GPU" if rows[0].is_device else "process"
    values = [peak / unit_bytes for peak in peaks]
    _bars(axes, [("peak", COLOURS["host"], values)], f"peak of the {what}, {unit}")


def _sent(axes: Axes, rows: Sequence[ComparedRow]) -> None:
    unit_bytes, unit = _unit([row.sent_bytes for row in rows])
    values = [row.sent_bytes / unit_bytes for row in rows]
    _bars(axes, [("measured", COLOURS["communication"], values)], f"sent, {unit}")
    _marks(axes, [row.sent_formula_bytes for row in rows], unit_bytes)
    _legend(axes)


def _overlap(axes: Axes, rows: Sequence[ComparedRow]) -> None:
    values = [100 * (row.overlap or 0.0) for row in rows]
    _bars(axes, [("hidden", COLOURS["compute"], values)], "hidden, %")
    axes.set_xlim(0, 100)


# How wide panels are beside others of 1.
_WIDTHS = {"_time": 1.5, "_memory": 1.5, "_overlap": 0.7}


def _unit(sizes_bytes: Sequence[float]) -> tuple[float, str]:
    """The largest unit that the largest size has one of."""
    most = max(sizes_bytes)
    return next((unit for unit in units.BYTE_UNITS if most >= unit[0]), (1.0, "B"))


def _marks(axes: Axes, formulas_bytes: Sequence[float | None], unit_bytes: float) -> None:
    """A line across each bar where the formula says that it ends."""
    ends = {at: size / unit_bytes for at, size in enumerate(formulas_bytes) if size is not None}
    if ends:
        axes.scatter(
            [*ends.values()], [*ends], marker="|", s=180, color="black", label="formula", zorder=3
        )
