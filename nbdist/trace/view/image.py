"""The timeline of a trace as a PNG, for wherever scripts do not run.

Every pixel of a row has the colour of the kind that took most of its time, the paler the less
went on. That is computed from all events at once, so a million of them cost little.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from nbdist.core.units import one_line
from nbdist.recording.view import png as recording_png
from nbdist.recording.view.png import (
    DARK,
    FONT_PT,
    INNER,
    LANE,
    LINE,
    MOST_LETTERS,
    PIXEL,
    READABLE,
)
from nbdist.trace.downsample import TraceRows
from nbdist.trace.trace import KINDS, Integers, RankTrace, Trace

if TYPE_CHECKING:  # it takes half a second to import, and most sessions draw no trace
    from matplotlib.axes import Axes

# Okabe and Ito's colours, which people with any colour vision tell apart, but for grey.
COLOURS = {
    "compute": "#0072b2",
    "communication": "#d55e00",
    "copy": "#009e73",
    "data": "#cc79a7",
    "wait": "#e69f00",
    "host": "#8a8a8a",
    "mark": "#56b4e9",
}
# What goes on for next to no time can be seen all the same; timeline.js draws alike.
LEAST_SHADE = 0.25
LEAST_PIXELS = 1e-3
HEADER, ROW, GAP = 24, 20, 8
Pixels = npt.NDArray[np.uint8]
Reals = npt.NDArray[np.float64]


def png(trace: Trace, events: TraceRows) -> bytes:
    """The picture, 1600 pixels wide and at most 1100 high or as many as there are rows and ranks.

    Leaves matplotlib's settings, figures and backend as they are.
    """
    between_ns = begin_ns, end_ns = span_ns(trace)
    unit_ns, unit = next(unit for unit in recording_png.UNITS_NS if end_ns - begin_ns >= unit[0])
    edges = np.searchsorted([row.place for row in events.rows], np.arange(len(trace.ranks) + 1))
    head, row, gap = _heights(len(trace.ranks), len(events.rows))
    with recording_png.drawing(
        len(trace.ranks) * (head + gap) + len(events.rows) * row - gap
    ) as figure:
        for place, rank in enumerate(trace.ranks):
            rows = slice(*edges[place : place + 2].tolist())
            high = max(1, (rows.stop - rows.start) * row)
            top = place * (head + gap) + rows.start * row
            axes = recording_png.panel(figure, top, high, head)
            _rows(axes, shares(events, rows, between_ns, INNER), between_ns)
            _steps(axes, rank, head)
            name = "" if place % -(-READABLE // (head + row)) else f"rank {rank.rank}"
            words = one_line(rank.problem, 120) if head >= READABLE else ""
            recording_png.header(axes, head, name, words)
            if row >= READABLE:
                lanes = [
                    (at, timeline_row.lane)
                    for at, timeline_row in enumerate(events.rows[rows])
                    if not timeline_row.depth
                ]
                names = [one_line(rank.lanes[lane].name, 22) for _, lane in lanes]
                axes.set_yticks([at + 0.5 for at, _ in lanes], names, parse_math=False)
            if place == len(trace.ranks) - 1:
                recording_png.axis(axes, unit)
                axes.xaxis.set_major_formatter(lambda x, _at: f"{x / unit_ns:g}")
        kinds = [KINDS[kind] for kind in np.unique(events.kind)]
        recording_png.legend(
            figure, [(COLOURS[kind], kind) for kind in kinds], "no events were recorded"
        )
        return recording_png.encode(figure)


def span_ns(trace: Trace) -> tuple[int, int]:
    """Start and end of the picture: of all events and steps, at least 1 ns."""
    first = [int(r.events.start_ns.min()) for r in trace.ranks if len(r.events)]
    steps = [step for rank in trace.ranks for step in rank.steps]
    begin_ns = min([0, *first, *(step.start_ns for step in steps)])
    return begin_ns, max([begin_ns + 1, trace.duration_ns, *(step.end_ns for step in steps)])


def shares(events: TraceRows, rows: slice, between_ns: tuple[int, int], columns: int) -> Reals:
    """Share of each pixel's time taken by each kind: (rows, kinds, columns).

    Exact but for events that take next to no time, which get a trace of a share. Overlapping
    events of one row and kind add up. `between_ns`: where the pixels begin and end.
    """
    chosen = slice(*np.searchsorted(events.row, [rows.start, rows.stop]))
    begin_ns, end_ns = between_ns
    scale = columns / (end_ns - begin_ns)
    left_px = np.asarray((events.start_ns[chosen] - begin_ns) * scale, float)
    width_px = np.asarray(np.maximum(events.duration_ns[chosen] * scale, LEAST_PIXELS), float)
    place = (events.row[chosen] - rows.start) * len(KINDS) + events.kind[chosen]
    shape = (rows.stop - rows.start, len(KINDS), columns)
    share = _before(place, left_px + width_px, shape) - _before(place, left_px, shape)
    return np.where(share > LEAST_PIXELS / 2, share, 0)  # the rest is rounding


def _before(place: Integers, edge: Reals, shape: tuple[int, int, int]) -> Reals:
    """How much of each pixel lies before the edges of its row and kind, summed over them."""
    rows, kinds, columns = shape
    whole = np.clip(edge.astype(np.int64), 0, columns)
    at = place * (columns + 1) + whole
    size = rows * kinds * (columns + 1)
    count = np.bincount(at, minlength=size).reshape(rows, kinds, columns + 1)
    part = np.bincount(at, edge - whole, minlength=size).reshape(rows, kinds, columns + 1)
    after = count[..., ::-1].cumsum(axis=-1)[..., ::-1] - count
    return np.asarray((after + part)[..., :columns])


def _heights(ranks: int, rows: int) -> tuple[int, int, int]:
    """Return the heights of headers, rows and gaps that fit, at least 3 pixels each."""
    needed = ranks * (HEADER + GAP) + rows * ROW
    factor = min(1.0, recording_png.MOST_HEIGHT / max(needed, 1))
    head, row, gap = (max(3, int(size * factor)) for size in (HEADER, ROW, GAP))
    return head, row, gap


def _rows(axes: Axes, share: Reals, between_ns: tuple[int, int]) -> None:
    """A row of pixels: the colour of the largest share, as strong as all of them together."""
    colours = np.array([recording_png.rgb(COLOURS[kind]) for kind in KINDS], np.uint8)
    together = share.sum(axis=1)
    strength = LEAST_SHADE + (1 - LEAST_SHADE) * together.clip(0, 1)
    alpha = np.where(together > 0, 255 * strength, 0).round().astype(np.uint8)
    pixels = np.concatenate([colours[share.argmax(axis=1)], alpha[..., None]], axis=-1)
    n_rows = len(share)
    if n_rows:
        axes.imshow(
            pixels, extent=(*between_ns, n_rows, 0), aspect="auto", interpolation="nearest",
            zorder=2,
        )  # fmt: skip
    axes.set(xlim=between_ns, ylim=(max(n_rows, 1), 0), yticks=[])
    if axes.bbox.height > READABLE * n_rows:
        axes.hlines(range(1, n_rows), *between_ns, color=LANE, linewidth=PIXEL, zorder=2)


def _steps(axes: Axes, rank: RankTrace, head: int) -> None:
    """The ends of steps, and their numbers, as far as there is room."""
    begin_ns, end_ns = axes.get_xlim()
    edges_ns = sorted({edge for step in rank.steps for edge in (step.start_ns, step.end_ns)})
    height = axes.bbox.height
    # Where they would stand closer than 4 pixels there are none.
    columns = {int((edge - begin_ns) / (end_ns - begin_ns) * INNER) for edge in edges_ns}
    if 4 * len(columns) <= INNER:
        axes.vlines(
            edges_ns, 0, 1 + head / height, transform=axes.get_xaxis_transform(), clip_on=False,
            color=LINE, linewidth=PIXEL,
        )  # fmt: skip
    names = [f" step {step.number}" for step in rank.steps]
    if head < READABLE or rank.problem or sum(len(name) + 1 for name in names) > MOST_LETTERS:
        return
    for step, name in zip(rank.steps, names, strict=True):
        if (step.end_ns - step.start_ns) / (end_ns - begin_ns) * MOST_LETTERS > len(name):
            axes.text(
                step.start_ns, 1 + head / 2 / height, name, transform=axes.get_xaxis_transform(),
                va="center", fontsize=FONT_PT - 1, color=DARK,
            )  # fmt: skip
