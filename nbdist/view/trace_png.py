"""The timeline of a trace as a PNG, for wherever scripts do not run.

Every pixel of a row has the colour of the kind that took most of its time, the paler the less
went on. That is computed from all events at once, so a million of them cost little.
"""

from __future__ import annotations

import io
import warnings
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from nbdist.core.trace import KINDS, Integers, RankTrace, Trace
from nbdist.core.trace_levels import Laid

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
BACK, LANE, HEAD, LINE = 0xFFFFFF, 0xF0F0F0, 0xDCDCDC, 0x6B6B6B
# What goes on for next to no time can be seen all the same; timeline.js draws alike.
LEAST_SHADE = 0.25
LEAST_PIXELS = 1e-3
# In pixels of the file.
WIDTH, LEFT, RIGHT, TOP, BOTTOM = 1600, 170, 20, 50, 60
MOST_HEIGHT = 1100
HEADER, ROW, GAP = 24, 20, 8
DPI = 160
# How many letters fit beside each other.
MOST_LETTERS = 140
_FONT_PT = 7
_READABLE = 11  # pixels of a row that a text needs
_UNITS_NS = ((1e9, "s"), (1e6, "ms"), (1e3, "us"), (1, "ns"))

Pixels = npt.NDArray[np.uint8]
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


def png(trace: Trace, events: Laid) -> bytes:
    """The picture, 1600 pixels wide and at most 1100 high or as many as there are rows and ranks.

    Leaves matplotlib's settings, figures and backend as they are.
    """
    import matplotlib.style
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    begin_ns, end_ns = span_ns(trace)
    bands = _bands(trace, events)
    height = TOP + bands.height + BOTTOM
    with matplotlib.style.context("default"), warnings.catch_warnings():
        # Letters that matplotlib's font lacks are boxes here; in the text they are all right.
        warnings.filterwarnings("ignore", message="Glyph", category=UserWarning)
        figure = Figure(figsize=(WIDTH / DPI, height / DPI), dpi=DPI, facecolor="white")
        FigureCanvasAgg(figure)
        inner = WIDTH - LEFT - RIGHT
        axes = figure.add_axes(
            (LEFT / WIDTH, BOTTOM / height, inner / WIDTH, bands.height / height)
        )
        unit_ns, unit = next(u for u in _UNITS_NS if end_ns - begin_ns >= u[0])
        image = _image(trace, events, bands, inner)
        extent = (begin_ns / unit_ns, end_ns / unit_ns, bands.height, 0)
        axes.imshow(image, extent=extent, aspect="auto", interpolation="nearest")
        axes.set_xlabel(unit, fontsize=_FONT_PT)
        _texts(axes, trace, events, bands)
        _step_labels(axes, trace, bands, unit_ns)
        _legend(figure, events)
        file = io.BytesIO()
        figure.savefig(file, format="png", metadata={"Software": None})
    return file.getvalue()


def span_ns(trace: Trace) -> tuple[int, int]:
    """Where the picture begins and ends: what events and steps take, at least 1 ns."""
    first = [int(r.events.start_ns.min()) for r in trace.ranks if len(r.events)]
    steps = [step for rank in trace.ranks for step in rank.steps]
    begin_ns = min([0, *first, *(step.start_ns for step in steps)])
    return begin_ns, max([begin_ns + 1, trace.duration_ns, *(step.end_ns for step in steps)])


def shares(events: Laid, rows: slice, between_ns: tuple[int, int], columns: int) -> Reals:
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


def _bands(trace: Trace, events: Laid) -> _Bands:
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


def _image(trace: Trace, events: Laid, bands: _Bands, columns: int) -> Pixels:
    """All rows, headers and step marks, a pixel each."""
    begin_ns, end_ns = span_ns(trace)
    places = [row.place for row in events.rows]
    image = np.empty((bands.height, columns, 3), np.uint8)
    image[:] = _rgb(BACK)
    for place, (rank, y) in enumerate(zip(trace.ranks, bands.heads, strict=True)):
        rows = slice(bisect_left(places, place), bisect_right(places, place))
        stop = y + bands.head + (rows.stop - rows.start) * bands.row
        image[y : y + bands.head] = _rgb(HEAD)
        image[y + bands.head : stop] = _rgb(LANE)
        image[y:stop, _marks(rank, begin_ns, end_ns, columns)] = _rgb(LINE)
        taken = shares(events, rows, (begin_ns, end_ns), columns)
        coloured = _coloured(taken)
        for row, top in enumerate(bands.rows[rows]):
            is_busy = taken[row].any(axis=0)
            gap = bands.row > _READABLE  # between rows, where they are high enough for it
            image[top : top + bands.row - gap, is_busy] = coloured[row, is_busy]
    return image


def _coloured(share: Reals) -> Pixels:
    """(rows, columns, 3): the colour of the largest share, as strong as all of them together.

    Of use only where there is a share.
    """
    colours = np.array([_rgb(int(COLOURS[kind][1:], 16)) for kind in KINDS], float)
    together = share.sum(axis=1)
    strength = LEAST_SHADE + (1 - LEAST_SHADE) * together.clip(0, 1)
    lane = np.array(_rgb(LANE), float)
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


def _rgb(colour: int) -> tuple[int, int, int]:
    return colour >> 16, colour >> 8 & 255, colour & 255


def _texts(axes: Axes, trace: Trace, events: Laid, bands: _Bands) -> None:
    """Ranks and lanes on the left, as far as they are high enough to be read."""
    axes.set_yticks([])
    axes.tick_params(labelsize=_FONT_PT)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)

    every = max(1, -(-_READABLE // max(bands.head + bands.row, 1)))
    for place, (rank, y) in enumerate(zip(trace.ranks, bands.heads, strict=True)):
        if place % every == 0:
            _left(axes, y + bands.head / 2, f"rank {rank.rank}", "bold")
        if rank.problem and bands.head >= _READABLE:
            _inside(axes, y + bands.head / 2, _short(rank.problem, 120))
    if bands.row < _READABLE:
        return
    for row, y in zip(events.rows, bands.rows, strict=True):
        if row.depth == 0:
            lane = trace.ranks[row.place].lanes[row.lane].name
            _left(axes, y + bands.row / 2, _short(lane, 22), "normal")


def _left(axes: Axes, y: float, words: str, weight: str) -> None:
    axes.text(
        -0.006,
        y,
        words,
        transform=axes.get_yaxis_transform(),
        ha="right",
        va="center",
        weight=weight,
        fontsize=_FONT_PT,
        parse_math=False,  # a dollar sign is one
    )


def _inside(axes: Axes, y: float, words: str) -> None:
    axes.text(
        0.006,
        y,
        words,
        transform=axes.get_yaxis_transform(),
        va="center",
        fontsize=_FONT_PT,
        parse_math=False,
    )


def _short(text: str, most: int) -> str:
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[: most - 3]}..."


def _step_labels(axes: Axes, trace: Trace, bands: _Bands, unit_ns: float) -> None:
    """The numbers of steps, where all of them have room."""
    begin_ns, end_ns = span_ns(trace)
    if bands.head < _READABLE:
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
                    fontsize=_FONT_PT - 1,
                    color="#404040",
                )


def _legend(figure: Figure, events: Laid) -> None:
    from matplotlib.patches import Patch

    present = np.unique(events.kind)
    handles = [Patch(color=COLOURS[KINDS[kind]], label=KINDS[kind]) for kind in present]
    if handles:
        figure.legend(
            handles=handles,
            loc="upper left",
            ncols=len(handles),
            frameon=False,
            fontsize=_FONT_PT,
            borderpad=0.2,
        )
    else:
        figure.text(0.5, 0.5, "no events were recorded", ha="center", fontsize=_FONT_PT + 2)
