"""Memory over time as a PNG, for wherever scripts do not run.

Each column of pixels shows the moment of the most in use of its stretch of time, so the peak is in
the picture however many blocks there are. All ranks have one scale of bytes and one of time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from nbdist.core import units
from nbdist.memory.peak import RankPeak, when
from nbdist.memory.snapshot import BACKWARD, CATEGORIES, Integers, RankMemory, Snapshot
from nbdist.memory.timeline import CLASSES, Changes, changes, highest, lifetimes, sizes_at, totals
from nbdist.memory.view.colours import COLOURS, LAYERS, PALER, PERIOD, STRIPE
from nbdist.recording.view import png as recording_png
from nbdist.recording.view.png import (
    BACK,
    FONT_PT,
    HEAD,
    INNER,
    LANE,
    LINE,
    MOST_HEIGHT,
    READABLE,
    UNITS_NS,
    Pixels,
    rgb,
    short,
)

if TYPE_CHECKING:  # it takes half a second to import, and most sessions draw no picture
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HEADER, GAP, PHASES = 26, 14, 7
PANEL, LEAST_PANEL, BAR = 300, 14, 40
# Where there are many ranks their headers are as low as letters allow.
MANY, LOW_HEADER, LOW_GAP = 12, 17, 3
MOST_RANKS = 24
# Above the highest of all.
_HEADROOM = 1.06
# A device's limit is in the picture where that takes at most so much of it.
_MOST_LIMIT = 1.35
_RESERVED, _BACKWARD, _STEPPING, _FAILED = 0x1A1A1A, 0x4D4D4D, 0x9A9A9A, 0xC00000
# Blocks that are higher than this have an edge.
_EDGED = 4
_MOST_EDGED = 3000


@dataclass(frozen=True, slots=True)
class Scales:
    """What all ranks of a picture share.

    Attributes:
        end_ns: Where time ends; 1 for snapshots of one moment.
        most_bytes: The top.
        has_history: Whether there is time at all.
    """

    end_ns: int
    most_bytes: int
    has_history: bool


def scales(snapshot: Snapshot, peaks: tuple[RankPeak, ...]) -> Scales:
    """One scale of time, from 0, and one of bytes for all ranks."""
    has_history = any(rank.duration_ns for rank in snapshot.ranks)
    ends = [int(rank.blocks.start_ns.max(initial=0)) + 1 for rank in snapshot.ranks]
    needed = max((max(one.size_bytes, one.reserved_peak_bytes) for one in peaks), default=0)
    limits = [one.limit_bytes for one in peaks if one.limit_bytes <= _MOST_LIMIT * needed]
    most = max([needed * _HEADROOM, *(limit * 1.02 for limit in limits)])
    end_ns = max([1, *ends, *(rank.duration_ns for rank in snapshot.ranks)]) if has_history else 1
    return Scales(end_ns, max(1, int(most)), has_history)


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where ranks lie, in pixels from the top of the drawn area.

    Attributes:
        shared: The scales.
        header, panel, gap: Heights of each rank's parts.
    """

    shared: Scales
    header: int
    panel: int
    gap: int

    @property
    def each(self) -> int:
        """Of a rank."""
        return self.header + self.panel + self.gap

    def area(self, place: int) -> int:
        """Where the panel of a rank begins."""
        return place * self.each + self.header

    def high(self, rank: RankMemory) -> int:
        """How high the stacked blocks are; below them are the phases, where there is room."""
        has_phases = rank.phases and self.shared.has_history and self.panel >= 5 * PHASES
        return self.panel - PHASES if has_phases else self.panel


def png(snapshot: Snapshot, peaks: tuple[RankPeak, ...]) -> bytes:
    """The picture, 1600 pixels wide and about 1200 high at most, of MOST_RANKS ranks at most.

    Leaves matplotlib's settings, figures and backend as they are.
    """
    snapshot = replace(snapshot, ranks=_chosen(snapshot, peaks))
    layout = _layout(snapshot, peaks)
    shared = layout.shared
    height = max(60, layout.each * len(snapshot.ranks) - layout.gap)
    pixels: Pixels = np.empty((height, INNER, 3), np.uint8)
    pixels[:] = rgb(BACK)
    for place, rank in enumerate(snapshot.ranks):
        top = layout.area(place)
        pixels[top - layout.header : top] = rgb(HEAD)
        pixels[top : top + layout.panel] = _panel(rank, layout)
    with recording_png.drawing(height) as (figure, axes):
        unit, name = _unit(shared)
        whole = shared.end_ns if shared.has_history else shared.most_bytes
        axes.imshow(
            pixels, extent=(0, whole / unit, height, 0), aspect="auto", interpolation="nearest"
        )
        axes.set_xlabel(name, fontsize=FONT_PT)
        _texts(axes, snapshot, {one.rank: one for one in peaks}, layout)
        _legend(figure, snapshot)
        return recording_png.written(figure)


def _chosen(snapshot: Snapshot, peaks: tuple[RankPeak, ...]) -> tuple[RankMemory, ...]:
    """The ranks that need most, in rank order, as many as one can look at."""
    needed = {one.rank: one.size_bytes for one in peaks}
    most = sorted(snapshot.ranks, key=lambda rank: -needed.get(rank.rank, 0))[:MOST_RANKS]
    return tuple(sorted(most, key=lambda rank: rank.rank))


def _layout(snapshot: Snapshot, peaks: tuple[RankPeak, ...]) -> _Layout:
    shared, n_ranks = scales(snapshot, peaks), len(snapshot.ranks)
    header, gap = (LOW_HEADER, LOW_GAP) if n_ranks > MANY else (HEADER, GAP)
    room = MOST_HEIGHT // max(n_ranks, 1) - header - gap
    panel = min(PANEL, max(LEAST_PANEL, room)) if shared.has_history else BAR
    return _Layout(shared, header, panel, gap)


def _unit(shared: Scales) -> tuple[float, str]:
    if shared.has_history:
        return next(unit for unit in UNITS_NS if shared.end_ns >= unit[0])
    every = (*units.BYTE_UNITS, (1, "B"))
    return next(unit for unit in every if shared.most_bytes >= unit[0])


def _panel(rank: RankMemory, layout: _Layout) -> Pixels:
    """A rank's pixels."""
    shared, high = layout.shared, layout.high(rank)
    if not shared.has_history:
        return _bar(rank, shared, layout.panel)
    made = changes(rank.blocks)
    at_ns = _moments(made, shared)
    sizes = sizes_at(made, at_ns).reshape(INNER, CLASSES)[:, LAYERS]
    tops = np.cumsum(sizes, axis=1)
    pixels = _stacked(tops, shared.most_bytes, high)
    _edges(pixels, rank, at_ns, (tops, shared.most_bytes))
    _marks(pixels, rank, shared)
    return np.concatenate([pixels, _phases(rank, shared)]) if high < layout.panel else pixels


def _moments(made: Changes, shared: Scales) -> Integers:
    """The moment that each column shows: that of the most in use of its stretch."""
    time_ns, total = totals(made)
    edges = np.arange(INNER + 1) * shared.end_ns // INNER
    found: Integers = np.maximum(time_ns[highest(time_ns, total, edges)], edges[:-1])
    return found


def _stacked(tops: Integers, most_bytes: int, high: int) -> Pixels:
    """(high, columns, 3): each layer in its colour up to its top, stripes where it is guessed."""
    rows = _rows(tops, most_bytes, high)
    layer = np.zeros((high, len(tops)), np.int64)
    from_bottom = np.arange(high)[::-1, None]
    for at in range(tops.shape[1]):
        layer += from_bottom >= rows[:, at]
    return _coloured(layer)


def _rows(tops: Integers, most_bytes: int, high: int) -> Integers:
    """How many rows of pixels so many bytes are; at least one for all together."""
    rows: Integers = np.rint(tops * (high / most_bytes)).astype(np.int64)
    rows[:, -1] = np.where(tops[:, -1] > 0, np.maximum(rows[:, -1], 1), 0)
    return rows


def _coloured(layer: Integers) -> Pixels:
    """The colours of layers; one too many is the background."""
    lane = np.array(rgb(LANE), float)
    full = [np.array(rgb(COLOURS[CATEGORIES[code // 2]]), float) for code in LAYERS]
    strong = np.array([*full, lane]).round().astype(np.uint8)
    pale = np.array([*(one + (lane - one) * PALER for one in full), lane]).round().astype(np.uint8)
    y, x = np.indices(layer.shape)
    guessed = np.array([code % 2 == 0 for code in LAYERS] + [False])
    is_stripe = guessed[layer] & ((x + y) % PERIOD < STRIPE)
    pixels: Pixels = np.where(is_stripe[..., None], pale[layer], strong[layer])
    return pixels


def _edges(pixels: Pixels, rank: RankMemory, at_ns: Integers, scale: tuple[Integers, int]) -> None:
    """A darker line on top of each block that is high enough, as far as they are not too many."""
    tops, most_bytes = scale
    high = len(pixels)
    least = most_bytes * _EDGED / high
    start_ns, end_ns = lifetimes(rank.blocks)
    # Many edges side by side would be noise.
    is_long = end_ns - start_ns > _EDGED * max(1, int(at_ns[-1])) / INNER
    large = np.flatnonzero((rank.blocks.size_bytes >= least) & is_long)
    if not len(large) or len(large) > _MOST_EDGED:
        return
    start_ns, end_ns = start_ns[large], end_ns[large]
    place_of = {code: at for at, code in enumerate(LAYERS)}
    code = 2 * rank.blocks.category[large].astype(np.int64) + rank.blocks.is_exact[large]
    layer = np.array([place_of[one] for one in code.tolist()])
    order = np.lexsort((start_ns, layer))
    start_ns, end_ns, layer = start_ns[order], end_ns[order], layer[order]
    size_bytes = rank.blocks.size_bytes[large][order]
    bases = np.concatenate([np.zeros((len(tops), 1), np.int64), tops[:, :-1]], axis=1)
    for column, moment in enumerate(at_ns):
        there = np.flatnonzero((start_ns <= moment) & (moment < end_ns))
        if not len(there):
            continue
        own, summed = layer[there], np.cumsum(size_bytes[there])
        firsts = np.searchsorted(own, own)
        before = np.where(firsts > 0, summed[firsts - 1], 0)
        row = high - np.rint((bases[column, own] + summed - before) * (high / most_bytes))
        rows = row[(row >= 0) & (row < high)].astype(np.int64)
        pixels[rows, column] = (pixels[rows, column] * 0.72).astype(np.uint8)


def _bar(rank: RankMemory, shared: Scales, panel: int) -> Pixels:
    """One moment: the bytes from left to right."""
    sizes = sizes_at(changes(rank.blocks), np.zeros(1, np.int64)).reshape(1, CLASSES)[:, LAYERS]
    columns = _rows(np.cumsum(sizes, axis=1), shared.most_bytes, INNER)[0]
    layer = np.searchsorted(columns, np.arange(INNER), side="right")
    return _coloured(np.repeat(layer[None], panel, axis=0))


def _column(time_ns: int, shared: Scales) -> int:
    return min(INNER - 1, max(0, time_ns * INNER // shared.end_ns))


def _marks(pixels: Pixels, rank: RankMemory, shared: Scales) -> None:
    """The ends of steps, what the allocator held, the device's limit, and what failed."""
    ends = sorted({_column(one, shared) for one in rank.step_ends_ns})
    if 4 * len(ends) < INNER:
        pixels[:, ends] = (pixels[:, ends] * 0.6 + np.array(rgb(LINE)) * 0.4).astype(np.uint8)
    _reserved_line(pixels, rank, shared)
    if 0 < rank.limit_bytes <= shared.most_bytes:
        y = _row(rank.limit_bytes, shared, len(pixels))
        pixels[y : y + 2, np.arange(INNER) % 12 < 8] = rgb(_FAILED)
    for failure in rank.failures:
        column = _column(failure.time_ns, shared)
        pixels[:, max(0, column - 1) : column + 2] = rgb(_FAILED)


def _row(size_bytes: int, shared: Scales, high: int) -> int:
    return high - 1 - min(high - 1, round(size_bytes * high / shared.most_bytes))


def _reserved_line(pixels: Pixels, rank: RankMemory, shared: Scales) -> None:
    """What the allocator held: the most of each column's stretch of time."""
    held = rank.reserved
    if not len(held.time_ns):
        return
    first = _column(int(held.time_ns[0]), shared)
    edges = np.maximum(np.arange(first, INNER + 1) * shared.end_ns // INNER, held.time_ns[0])
    most = held.size_bytes[highest(held.time_ns, held.size_bytes, edges)]
    rows = [_row(size_bytes, shared, len(pixels)) for size_bytes in most.tolist()]
    for at, (y, before) in enumerate(zip(rows, [rows[0], *rows], strict=False)):
        pixels[max(0, min(y, before) - 1) : max(y, before) + 1, first + at] = rgb(_RESERVED)


def _phases(rank: RankMemory, shared: Scales) -> Pixels:
    """A line that is dark while backward is under way, grey in the optimizer's step."""
    pixels: Pixels = np.empty((PHASES, INNER, 3), np.uint8)
    pixels[:] = rgb(BACK)
    for phase in rank.phases:
        colour = _BACKWARD if phase.kind == BACKWARD else _STEPPING
        columns = slice(_column(phase.start_ns, shared), _column(phase.end_ns, shared) + 1)
        pixels[2:, columns] = rgb(colour)
    return pixels


def _texts(axes: Axes, snapshot: Snapshot, peaks: dict[int, RankPeak], layout: _Layout) -> None:
    """Ranks and their peaks in the headers, bytes on the left, a mark at each peak."""
    for place, rank in enumerate(snapshot.ranks):
        top, peak = layout.area(place), peaks.get(rank.rank)
        y = top - layout.header / 2
        recording_png.left(axes, y, f"rank {rank.rank}", weight="bold")
        recording_png.inside(axes, y, short(_told(rank, peak), 150))
        if not layout.shared.has_history:
            continue
        if layout.panel >= 5 * READABLE:
            _bytes_axis(axes, layout.shared, top, layout.high(rank))
        if peak is not None:
            _peak_mark(axes, peak, layout.shared, (top, layout.high(rank)))


def _told(rank: RankMemory, peak: RankPeak | None) -> str:
    if peak is None:
        return rank.problem or "nothing was allocated"
    told = [f"peak {units.exact_size(peak.size_bytes)}"]
    if peak.phase:
        told[0] += f" in {when(peak)}"
    if peak.reserved_peak_bytes:
        told.append(f"reserved {units.exact_size(peak.reserved_peak_bytes)} (black line)")
    if peak.limit_bytes:
        told.append(f"limit {units.exact_size(peak.limit_bytes)}")
    if rank.failures:
        told.append("out of memory (red)")
    if rank.problem:
        told.append(rank.problem)
    return ", ".join(told)


def _bytes_axis(axes: Axes, shared: Scales, top: int, high: int) -> None:
    """Round numbers of bytes beside a panel."""
    least = shared.most_bytes * 2.2 * READABLE / high
    power = 10 ** int(np.floor(np.log10(max(least, 1))))
    step = next(one for one in (power, 2 * power, 5 * power, 10 * power) if one >= least)
    for at in range(0, shared.most_bytes + 1, step):
        recording_png.left(
            axes,
            top + high - at * high / shared.most_bytes,
            units.exact_size(at).replace(".0 ", " "),
        )


def _peak_mark(axes: Axes, peak: RankPeak, shared: Scales, area: tuple[int, int]) -> None:
    """A triangle on top of the peak."""
    (top, high), (unit, _) = area, _unit(shared)
    y = top + high - peak.size_bytes * high / shared.most_bytes
    axes.plot(
        [peak.time_ns / unit], [y - 6], marker="v", markersize=5, color="#1a1a1a", clip_on=False
    )


def _legend(figure: Figure, snapshot: Snapshot) -> None:
    """The categories that are there, and what stripes mean."""
    there = {int(one) for rank in snapshot.ranks for one in np.unique(rank.blocks.category)}
    entries = [
        (COLOURS[CATEGORIES[code // 2]], CATEGORIES[code // 2])
        for code in LAYERS
        if code % 2 and code // 2 in there
    ]
    if not entries:
        figure.text(0.5, 0.5, "no memory was recorded", ha="center", fontsize=FONT_PT + 2)
        return
    recording_png.legend(figure, entries)
    figure.text(
        0.985,
        0.004,
        "striped: the category is guessed; bottom line: dark backward, grey optimizer",
        ha="right",
        va="bottom",
        fontsize=FONT_PT - 1,
        color="#404040",
    )
