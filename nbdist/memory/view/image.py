"""Memory over time as a PNG, for wherever scripts do not run.

Each column of pixels shows the moment of the most in use of its stretch of time, so the peak is in
the picture however many blocks there are. All ranks have one scale of bytes and one of time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from nbdist.core import units
from nbdist.core.units import one_line
from nbdist.memory.peak import RankPeak, when
from nbdist.memory.snapshot import (
    ACTIVATION,
    BACKWARD,
    BUFFER,
    CATEGORIES,
    COMMUNICATION,
    GRADIENT,
    OPTIMIZER,
    PARAMETER,
    TEMPORARY,
    UNKNOWN,
    Integers,
    RankMemory,
    Snapshot,
)
from nbdist.memory.timeline import CLASSES, changes, codes, highest, lifetimes, sizes_at, totals
from nbdist.recording.view import png as recording_png
from nbdist.recording.view.png import DARK, FONT_PT, INNER, LANE, LINE, PIXEL, READABLE, UNITS_NS

if TYPE_CHECKING:  # it takes half a second to import, and most sessions draw no picture
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which people with any colour vision tell apart, but for grey. From the
# bottom: what stays the longest lies lowest, so that it is level.
_COLOUR_OF = {
    PARAMETER: "#0072b2",
    BUFFER: "#56b4e9",
    OPTIMIZER: "#009e73",
    GRADIENT: "#d55e00",
    ACTIVATION: "#e69f00",
    COMMUNICATION: "#cc79a7",
    TEMPORARY: "#f0e442",
    UNKNOWN: "#8a8a8a",
}
ORDER = tuple(_COLOUR_OF)
COLOURS = {CATEGORIES[category]: colour for category, colour in _COLOUR_OF.items()}
# Classes (2 x category + is_exact) from the bottom: of each category the exact part first.
LAYERS = tuple(2 * category + is_exact for category in ORDER for is_exact in (1, 0))
# What is guessed has stripes of this share of the background, as wide and as far apart as that.
PALER = 0.55
STRIPE, PERIOD = 2, 6

HEADER, GAP, PHASES = 26, 14, 7
PANEL, LEAST_PANEL, BAR = 300, 14, 40
# Where there are many ranks their headers are as low as letters allow.
MANY, LOW_HEADER, LOW_GAP = 12, 17, 3
MOST_RANKS = 24
# Above the highest of all.
_HEADROOM = 1.06
# A device's limit is in the picture where that takes at most so much of it.
_MOST_LIMIT = 1.35
_RESERVED, _BACKWARD, _STEPPING, _FAILED = "#1a1a1a", "#4d4d4d", "#9a9a9a", "#c00000"
# Blocks that are higher than so many pixels have an edge, as light as this.
_EDGED, _EDGE = 4, 0.72
_MOST_EDGED = 3000
Pixels = npt.NDArray[np.uint8]
_POINTS_DOWN = 7  # matplotlib's number of a triangle whose tip is the point


@dataclass(frozen=True, slots=True)
class Scales:
    """Scales that all ranks of a picture share.

    Attributes:
        end_ns: Where time ends; 1 for snapshots of one moment.
        most_bytes: The top.
        has_history: Whether there is time at all.
    """

    end_ns: int
    most_bytes: int
    has_history: bool

    @property
    def whole(self) -> int:
        """End of the axis below: a time, or bytes where there is none."""
        return self.end_ns if self.has_history else self.most_bytes

    @property
    def unit(self) -> tuple[float, str]:
        """The largest unit that the axis reaches: its size and name."""
        every = UNITS_NS if self.has_history else (*units.BYTE_UNITS, (1, "B"))
        return next(unit for unit in every if self.whole >= unit[0])


def scales(snapshot: Snapshot, peaks: tuple[RankPeak, ...]) -> Scales:
    """One scale of time, from 0, and one of bytes for all ranks."""
    has_history = any(rank.duration_ns for rank in snapshot.ranks)
    ends = [int(rank.blocks.start_ns.max(initial=0)) + 1 for rank in snapshot.ranks]
    needed = max((max(peak.size_bytes, peak.reserved_peak_bytes) for peak in peaks), default=0)
    limits = [peak.limit_bytes for peak in peaks if peak.limit_bytes <= _MOST_LIMIT * needed]
    most = max([needed * _HEADROOM, *(limit * 1.02 for limit in limits)])
    end_ns = max([1, *ends, *(rank.duration_ns for rank in snapshot.ranks)]) if has_history else 1
    return Scales(end_ns, max(1, int(most)), has_history)


def png(snapshot: Snapshot, peaks: tuple[RankPeak, ...]) -> bytes:
    """The picture, 1600 pixels wide and about 1200 high at most, of MOST_RANKS ranks at most.

    Leaves matplotlib's settings, figures and backend as they are.
    """
    shared, peak_of = scales(snapshot, peaks), {peak.rank: peak for peak in peaks}
    # The ranks that need most, as many as one can look at.
    needed = defaultdict(int, {peak.rank: peak.size_bytes for peak in peaks})
    most_needy = sorted(snapshot.ranks, key=lambda rank: -needed[rank.rank])[:MOST_RANKS]
    ranks = sorted(most_needy, key=lambda rank: rank.rank)
    header, gap = (LOW_HEADER, LOW_GAP) if len(ranks) > MANY else (HEADER, GAP)
    room = recording_png.MOST_HEIGHT // max(len(ranks), 1) - header - gap
    high = min(PANEL, max(LEAST_PANEL, room)) if shared.has_history else BAR
    with recording_png.drawing((header + high + gap) * len(ranks) - gap) as figure:
        for place, rank in enumerate(ranks):
            axes = recording_png.panel(figure, place * (header + high + gap), high, header)
            peak = peak_of.get(rank.rank)
            recording_png.header(
                axes, header, f"rank {rank.rank}", one_line(_header_text(rank, peak), 150)
            )
            axes.set_xlim(0, shared.whole)
            if shared.has_history:
                _over_time(axes, rank, peak, shared)
            else:
                _at_one_moment(axes, rank, shared)
            if place == len(ranks) - 1:
                recording_png.axis(axes, shared.unit[1])
                axes.xaxis.set_major_formatter(lambda x, _at: f"{x / shared.unit[0]:g}")
        _legend(figure, ranks)
        return recording_png.encode(figure)


def _over_time(axes: Axes, rank: RankMemory, peak: RankPeak | None, shared: Scales) -> None:
    """Blocks stacked by their class; what the allocator held, steps, phases and failures."""
    panel = round(axes.bbox.height)
    strip = PHASES if rank.phases and panel >= 5 * PHASES else 0
    row = shared.most_bytes / (panel - strip)  # bytes of a row of pixels
    block_changes = changes(rank.blocks)
    time_ns, total = totals(block_changes)
    edges = np.arange(INNER + 1) * shared.end_ns // INNER
    at_ns = np.maximum(time_ns[highest(time_ns, total, edges)], edges[:-1])
    tops = _tops(sizes_at(block_changes, at_ns))
    pixels = _colour(_layers(tops, row, panel - strip)[::-1])
    _darken_edges(pixels, rank, (at_ns, tops), row)
    extent = (0, shared.end_ns, 0, shared.most_bytes)
    axes.imshow(pixels, extent=extent, aspect="auto", interpolation="nearest")
    axes.set_ylim(-strip * row, shared.most_bytes)
    _marks(axes, rank, shared)
    if strip:
        axes.axhspan(-strip * row, 0, color="white", linewidth=0)
        for phase in rank.phases:
            axes.broken_barh(
                [(phase.start_ns, phase.end_ns - phase.start_ns)],
                (-strip * row, (strip - 2) * row),
                color=_BACKWARD if phase.kind == BACKWARD else _STEPPING,
                linewidth=PIXEL,
                antialiased=False,
            )
    if peak is not None:
        axes.plot(
            peak.time_ns, peak.size_bytes + 2 * row, marker=_POINTS_DOWN, markersize=5,
            color=_RESERVED, clip_on=False,
        )  # fmt: skip
    if panel >= 5 * READABLE:
        nbins = panel // (3 * READABLE)
        axes.locator_params(axis="y", nbins=nbins, steps=[1, 2, 5, 10], integer=True)
        axes.yaxis.set_major_formatter(
            lambda y, _at: units.exact_size(y).replace(".0 ", " ") if y >= 0 else ""
        )
    else:
        axes.set_yticks([])


def _at_one_moment(axes: Axes, rank: RankMemory, shared: Scales) -> None:
    tops = _tops(sizes_at(changes(rank.blocks), np.zeros(1, np.int64)))
    layer = _layers(tops, shared.most_bytes / INNER, INNER).T
    axes.imshow(
        _colour(layer.repeat(BAR, axis=0)), extent=(0, shared.most_bytes, 0, 1), aspect="auto",
        interpolation="nearest",
    )  # fmt: skip
    axes.set_yticks([])


def _tops(size_bytes: Integers) -> Integers:
    """(moments, layers): up to where each layer goes that lies on those before it."""
    return np.cumsum(size_bytes.reshape(len(size_bytes), CLASSES)[:, LAYERS], axis=1)


def _layers(tops: Integers, row: float, n_rows: int) -> Integers:
    """(rows, moments): which layer each pixel shows, from the bottom; the last one is none.

    Where anything is in use there is one row at least.
    """
    edges = np.rint(tops / row)
    edges[:, -1] = np.maximum(edges[:, -1], tops[:, -1] > 0)
    layer = np.zeros((n_rows, len(tops)), np.int64)
    for edge in edges.T:
        layer += np.arange(n_rows)[:, None] >= edge
    return layer


def _colour(layer: Integers) -> Pixels:
    """The colours of layers, with stripes where a category is guessed."""
    lane = np.array(recording_png.rgb(LANE))
    strong = np.array(
        [*(recording_png.rgb(COLOURS[CATEGORIES[code // 2]]) for code in LAYERS), lane]
    )
    pale = (strong + (lane - strong) * PALER).round()
    is_guessed = np.array([*(code % 2 == 0 for code in LAYERS), False])
    y, x = np.indices(layer.shape)
    is_stripe = is_guessed[layer] & ((x + y) % PERIOD < STRIPE)
    pixels: Pixels = np.where(is_stripe[..., None], pale[layer], strong[layer]).astype(np.uint8)
    return pixels


def _darken_edges(
    pixels: Pixels, rank: RankMemory, moments: tuple[Integers, Integers], row: float
) -> None:
    """A line on top of each block that is high enough, as far as they are not too many."""
    at_ns, tops = moments
    start_ns, end_ns = lifetimes(rank.blocks)
    is_high = rank.blocks.size_bytes >= _EDGED * row
    # Many edges side by side would be noise.
    is_long = end_ns - start_ns > _EDGED * max(1, int(at_ns[-1])) / INNER
    large = np.flatnonzero(is_high & is_long)
    if not 0 < len(large) <= _MOST_EDGED:
        return
    layer = np.argsort(LAYERS)[codes(rank.blocks)[large]]
    order = np.lexsort((start_ns[large], layer))
    large, layer = large[order], layer[order]
    start_ns, end_ns, size_bytes = start_ns[large], end_ns[large], rank.blocks.size_bytes[large]
    bases = np.pad(tops, ((0, 0), (1, 0)))
    for column, moment in enumerate(at_ns):
        there = np.flatnonzero((start_ns <= moment) & (moment < end_ns))
        present_layers, summed = layer[there], np.cumsum(size_bytes[there])
        firsts = np.searchsorted(present_layers, present_layers)
        before = np.where(firsts > 0, summed[firsts - 1], 0)
        up = np.rint((bases[column, present_layers] + summed - before) / row).astype(np.int64)
        rows = len(pixels) - up[up <= len(pixels)]
        pixels[rows, column] = (pixels[rows, column] * _EDGE).astype(np.uint8)


def _marks(axes: Axes, rank: RankMemory, shared: Scales) -> None:
    """The ends of steps, what the allocator held, the device's limit, and what failed."""
    if 4 * len({end_ns * INNER // shared.end_ns for end_ns in rank.step_ends_ns}) < INNER:
        axes.vlines(rank.step_ends_ns, 0, shared.most_bytes, color=LINE, alpha=0.4, linewidth=PIXEL)
    reserved = rank.reserved
    if len(reserved.time_ns):
        first = int(reserved.time_ns[0]) * INNER // shared.end_ns
        edges = np.maximum(
            np.arange(first, INNER + 1) * shared.end_ns // INNER, reserved.time_ns[0]
        )
        most = reserved.size_bytes[highest(reserved.time_ns, reserved.size_bytes, edges)]
        axes.step(
            edges, [*most, most[-1]], where="post", color=_RESERVED, linewidth=2 * PIXEL,
            antialiased=False,
        )  # fmt: skip
    if 0 < rank.limit_bytes <= shared.most_bytes:
        axes.axhline(rank.limit_bytes, color=_FAILED, linewidth=2 * PIXEL, dashes=(4, 2))
    for failure in rank.failures:
        axes.axvline(failure.time_ns, color=_FAILED, linewidth=3 * PIXEL)


def _header_text(rank: RankMemory, peak: RankPeak | None) -> str:
    if peak is None:
        return rank.problem or "nothing was allocated"
    words = [f"peak {units.exact_size(peak.size_bytes)}"]
    if peak.phase:
        words[0] += f" in {when(peak)}"
    if peak.reserved_peak_bytes:
        words.append(f"reserved {units.exact_size(peak.reserved_peak_bytes)} (black line)")
    if peak.limit_bytes:
        words.append(f"limit {units.exact_size(peak.limit_bytes)}")
    if rank.failures:
        words.append("out of memory (red)")
    if rank.problem:
        words.append(rank.problem)
    return ", ".join(words)


def _legend(figure: Figure, ranks: Sequence[RankMemory]) -> None:
    """The categories that are there, and what stripes mean."""
    there = {int(category) for rank in ranks for category in np.unique(rank.blocks.category)}
    names = [CATEGORIES[category] for category in ORDER if category in there]
    recording_png.legend(
        figure, [(COLOURS[name], name) for name in names], "no memory was recorded"
    )
    if names:
        words = "striped: guessed category; bottom line: dark backward, grey optimizer"
        figure.text(0.985, 0.004, words, ha="right", fontsize=FONT_PT - 1, color=DARK)
