"""The timeline of a trace as a PNG, for wherever scripts do not run.

Every pixel of a row has the colour of the kind that took most of its time, the paler the less
went on. That is computed from all events at once, so a million of them cost little.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from nbdist.recording.view import png as recording_png
from nbdist.recording.view.png import (
    BACK,
    FONT_PT,
    HEAD,
    LANE,
    LINE,
    MOST_HEIGHT,
    MOST_LETTERS,
    READABLE,
    UNITS_NS,
    Pixels,
    rgb,
    short,
)
from nbdist.trace.downsample import TraceRows
from nbdist.trace.trace import KINDS, Integers, RankTrace, Trace

if TYPE_CHECKING:  # it takes half a second to import, and most sessions draw no trace
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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
Reals = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class _Bands:
    """Where ranks and rows lie, in pixels from the top of the drawn area.

    Attributes:
        heads: Top of each rank's header.
        head: Height of a header.
        rows: Top of each row.
        row: Height of a row.
        height: Of all.
    """

    heads: tuple[int, ...]
    head: int
    rows: tuple[int, ...]
    row: int
    height: int


def png(trace: Trace, events: TraceRows) -> bytes:
    """The picture, 1600 pixels wide and at most 1100 high or as many as there are rows and ranks.

    Leaves matplotlib's settings, figures and backend as they are.
    """
    begin_ns, end_ns = span_ns(trace)
    bands = _bands(trace, events)
    unit_ns, unit = next(u for u in UNITS_NS if end_ns - begin_ns >= u[0])
    pixels = _image(trace, events, bands, recording_png.INNER)
    with recording_png.drawing(bands.height) as (figure, axes):
        extent = (begin_ns / unit_ns, end_ns / unit_ns, bands.height, 0)
        axes.imshow(pixels, extent=extent, aspect="auto", interpolation="nearest")
        axes.set_xlabel(unit, fontsize=FONT_PT)
        _texts(axes, trace, events, bands)
        _step_labels(axes, trace, bands, unit_ns)
        _legend(figure, events)
        return recording_png.written(figure)


def span_ns(trace: Trace) -> tuple[int, int]:
    """Where the picture begins and ends: what events and steps take, at least 1 ns."""
    first = [int(r.events.start_ns.min()) for r in trace.ranks if len(r.events)]
    steps = [step for rank in trace.ranks for step in rank.steps]
    begin_ns = min([0, *first, *(step.start_ns for step in steps)])
    return begin_ns, max([begin_ns + 1, trace.duration_ns, *(step.end_ns for step in steps)])


def shares(events: TraceRows, rows: slice, between_ns: tuple[int, int], columns: int) -> Reals:
    """What share of each pixel's time is taken by each kind: (rows, kinds, columns).

    Exact but for events that take next to no time, which get a trace of a share. Overlapping
    events of one row and kind add up.

    Args:
        events: Of all rows.
        rows: Those of them that are wanted.
        between_ns: Where the first pixel begins and the last one ends.
        columns: How many pixels.
    """
    own = slice(*np.searchsorted(events.row, [rows.start, rows.stop]))
    begin_ns, end_ns = between_ns
    scale = columns / (end_ns - begin_ns)
    left = np.asarray((events.start_ns[own] - begin_ns) * scale, float)
    wide = np.asarray(np.maximum(events.duration_ns[own] * scale, LEAST_PIXELS), float)
    place = (events.row[own] - rows.start) * len(KINDS) + events.kind[own]
    shape = (rows.stop - rows.start, len(KINDS), columns)
    found = _before(place, left + wide, shape) - _before(place, left, shape)
    return np.where(found > LEAST_PIXELS / 2, found, 0)  # the rest is rounding


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


def _bands(trace: Trace, events: TraceRows) -> _Bands:
    """Rows as high as there is room; at least 3 pixels each."""
    ranks, rows = len(trace.ranks), len(events.rows)
    whole = ranks * (HEADER + GAP) + rows * ROW
    factor = min(1.0, MOST_HEIGHT / max(whole, 1))
    head, row, gap = (max(3, int(size * factor)) for size in (HEADER, ROW, GAP))
    heads, tops, y = [], [], 0
    for place in range(ranks):
        heads.append(y)
        own = sum(one.place == place for one in events.rows)
        tops += [y + head + at * row for at in range(own)]
        y += head + own * row + gap
    return _Bands(tuple(heads), head, tuple(tops), row, max(y - gap, 60))


def _image(trace: Trace, events: TraceRows, bands: _Bands, columns: int) -> Pixels:
    """All rows, headers and step marks, a pixel each."""
    begin_ns, end_ns = span_ns(trace)
    places = [row.place for row in events.rows]
    pixels = np.empty((bands.height, columns, 3), np.uint8)
    pixels[:] = rgb(BACK)
    for place, (rank, y) in enumerate(zip(trace.ranks, bands.heads, strict=True)):
        rows = slice(bisect_left(places, place), bisect_right(places, place))
        stop = y + bands.head + (rows.stop - rows.start) * bands.row
        pixels[y : y + bands.head] = rgb(HEAD)
        pixels[y + bands.head : stop] = rgb(LANE)
        pixels[y:stop, _marks(rank, begin_ns, end_ns, columns)] = rgb(LINE)
        taken = shares(events, rows, (begin_ns, end_ns), columns)
        coloured = _coloured(taken)
        for row, top in enumerate(bands.rows[rows]):
            is_busy = taken[row].any(axis=0)
            gap = bands.row > READABLE  # between rows, where they are high enough for it
            pixels[top : top + bands.row - gap, is_busy] = coloured[row, is_busy]
    return pixels


def _coloured(share: Reals) -> Pixels:
    """(rows, columns, 3): the colour of the largest share, as strong as all of them together.

    Of use only where there is a share.
    """
    colours = np.array([rgb(COLOURS[kind]) for kind in KINDS], float)
    together = share.sum(axis=1)
    strength = LEAST_SHADE + (1 - LEAST_SHADE) * together.clip(0, 1)
    lane = np.array(rgb(LANE), float)
    most = colours[share.argmax(axis=1)]
    mixed: Pixels = (lane + (most - lane) * strength[..., None]).round().astype(np.uint8)
    return mixed


def _marks(rank: RankTrace, begin_ns: int, end_ns: int, columns: int) -> list[int]:
    """Columns of the steps' ends, none where they would stand closer than 4 pixels."""
    if not rank.steps:
        return []
    edges = sorted({edge for step in rank.steps for edge in (step.start_ns, step.end_ns)})
    found = sorted({int((edge - begin_ns) / (end_ns - begin_ns) * (columns - 1)) for edge in edges})
    is_dense = columns < 4 * len(found)
    return [] if is_dense else found


def _texts(axes: Axes, trace: Trace, events: TraceRows, bands: _Bands) -> None:
    """Ranks and lanes on the left, as far as they are high enough to be read."""
    every = max(1, -(-READABLE // max(bands.head + bands.row, 1)))
    for place, (rank, y) in enumerate(zip(trace.ranks, bands.heads, strict=True)):
        if place % every == 0:
            recording_png.left(axes, y + bands.head / 2, f"rank {rank.rank}", weight="bold")
        if rank.problem and bands.head >= READABLE:
            recording_png.inside(axes, y + bands.head / 2, short(rank.problem, 120))
    if bands.row < READABLE:
        return
    for row, y in zip(events.rows, bands.rows, strict=True):
        if row.depth == 0:
            lane = trace.ranks[row.place].lanes[row.lane].name
            recording_png.left(axes, y + bands.row / 2, short(lane, 22))


def _step_labels(axes: Axes, trace: Trace, bands: _Bands, unit_ns: float) -> None:
    """The numbers of steps, where all of them have room."""
    begin_ns, end_ns = span_ns(trace)
    if bands.head < READABLE:
        return
    for rank, y in zip(trace.ranks, bands.heads, strict=True):
        shown = [] if rank.problem else rank.steps
        if sum(len(f"step {step.number}") + 2 for step in shown) > MOST_LETTERS:
            continue
        for step in shown:
            wide = (step.end_ns - step.start_ns) / (end_ns - begin_ns)
            if wide * MOST_LETTERS > len(f"step {step.number}") + 1:
                axes.text(
                    step.start_ns / unit_ns,
                    y + bands.head / 2,
                    f" step {step.number}",
                    va="center",
                    fontsize=FONT_PT - 1,
                    color="#404040",
                )


def _legend(figure: Figure, events: TraceRows) -> None:
    present = np.unique(events.kind)
    if len(present):
        recording_png.legend(figure, [(COLOURS[KINDS[kind]], KINDS[kind]) for kind in present])
    else:
        figure.text(0.5, 0.5, "no events were recorded", ha="center", fontsize=FONT_PT + 2)
