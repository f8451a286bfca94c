"""Memory over time as one piece of HTML: the data that memory.js reads, and the page."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from nbdist.memory.call_site import frame_text, innermost_library, is_own
from nbdist.memory.downsample import Level, level
from nbdist.memory.peak import RankPeak, when
from nbdist.memory.snapshot import (
    BEFORE,
    CATEGORIES,
    STAYS,
    AllocationFrame,
    Integers,
    RankMemory,
    Snapshot,
)
from nbdist.memory.timeline import codes, lifetimes, m4_downsample
from nbdist.memory.view.image import COLOURS, LAYERS, PALER, scales
from nbdist.recording.view import iframe as recording_iframe
from nbdist.recording.view.iframe import MOST_BYTES, clip

Places = npt.NDArray[np.int32]
T = TypeVar("T")
# In the order in which they stand in the page.
SCRIPTS = ("memory/view/memory_data.js", "memory/view/memory.js")
# What a browser has to unpack at most.
MOST_ITEMS = 150_000
# Steps, phases and failures that are marked, of all ranks together.
MOST_MARKS = 20_000
# Changes of what the allocator held, of each rank.
MOST_HELD = 2000
# The user's own lines of a block: the innermost ones.
MOST_LINES = 4
# As in viewer.js and memory.js: legend, axis and hint; a rank's header and the space below it.
_AROUND_PX, _RANK_PX = 74, 30
_LEAST_PX, _MOST_PX = 200, 660
PANELS_PX = {1: 300, 2: 220, 3: 160, 4: 140}
PANEL_PX, BAR_PX = 110, 40


def pack_page(
    snapshot: Snapshot, peaks: tuple[RankPeak, ...], most_bytes: int = MOST_BYTES
) -> tuple[Level, str]:
    """The finest level of a snapshot that fits so many bytes, and what memory.js reads, as base64.

    What does not become smaller (ranks, marks of steps) may exceed it.
    """
    most = MOST_ITEMS
    while True:
        shown = level(snapshot.ranks, most)
        n_blocks = sum(len(rank.blocks) for rank in shown.ranks)
        size = shown.n_items / MOST_ITEMS
        if size <= 1 or most <= 0:
            data = base64.b64encode(_pack(snapshot, peaks, shown))
            if len(data) <= most_bytes or most <= 0:
                return shown, data.decode("ascii")
            size = len(data) / most_bytes
        # Where nothing is shown alone any more, moments become fewer.
        most = min(int(most * 0.9 / size), max(n_blocks - 1, 0) or most // 2)


def height_px(snapshot: Snapshot) -> int:
    """How high a picture is that shows all ranks at once, as far as a page has room for them."""
    whole = _AROUND_PX + len(snapshot.ranks) * (_RANK_PX + _panel_px(snapshot))
    return min(max(whole, _LEAST_PX), _MOST_PX)


def _panel_px(snapshot: Snapshot) -> int:
    if not any(rank.duration_ns for rank in snapshot.ranks):
        return BAR_PX
    return PANELS_PX.get(len(snapshot.ranks), PANEL_PX)


def _pack(snapshot: Snapshot, peaks: tuple[RankPeak, ...], shown: Level) -> bytes:
    texts = _Texts(shown, snapshot.ranks)
    shared = scales(snapshot, peaks)
    reserved = [_reserved(rank) for rank in snapshot.ranks]
    peak_of = {peak.rank: peak for peak in peaks}
    marks = MOST_MARKS // max(len(snapshot.ranks), 1)
    head = {
        "categories": CATEGORIES,
        "colours": [COLOURS[name] for name in CATEGORIES],
        "layers": LAYERS,
        "paler": PALER,
        "names": [clip(name) for name in texts.names],
        "lines": [clip(line) for line in texts.lines],
        "stacks": texts.stacks,
        "least": shown.least_bytes,
        "merged": shown.merged,
        "to": shared.end_ns if shared.has_history else shared.most_bytes,
        "most": shared.most_bytes,
        "moment": not shared.has_history,
        "panel": _panel_px(snapshot),
        "firsts": _firsts(len(rank.blocks) for rank in shown.ranks),
        "restFirsts": _firsts(len(rank.time_ns) for rank in shown.ranks),
        "heldFirsts": _firsts(len(time_ns) for time_ns, _ in reserved),
        "ranks": [
            _rank(rank, peak_of.get(rank.rank), marks)
            | {"before": int((drawn.blocks.start_ns == BEFORE).sum())}
            for rank, drawn in zip(snapshot.ranks, shown.ranks, strict=True)
        ],
    }
    spans = [lifetimes(rank.blocks) for rank in shown.ranks]
    columns = {
        "start": _join(_distances(start_ns) for start_ns, _ in spans),
        "life": _join(np.where(end == STAYS, 0, end - start) for start, end in spans),
        "size": _join(rank.blocks.size_bytes for rank in shown.ranks),
        "code": _join(codes(rank.blocks) for rank in shown.ranks),
        "name": texts.name,
        "operator": texts.operator,
        "stack": texts.stack,
        "restTime": _join(_distances(rank.time_ns) for rank in shown.ranks),
        "restCode": _join(rank.code for rank in shown.ranks),
        # Signs go into the lowest bit: columns hold no number below 0.
        "rest": _join(2 * abs(rank.size_bytes) + (rank.size_bytes < 0) for rank in shown.ranks),
        "heldTime": _join(_distances(time_ns) for time_ns, _ in reserved),
        "held": _join(size_bytes for _, size_bytes in reserved),
    }
    return recording_iframe.pack(head, columns)


def _rank(rank: RankMemory, peak: RankPeak | None, marks: int) -> dict[str, object]:
    """Facts of a rank for the page, beside its blocks."""
    return {
        "rank": rank.rank,
        "problem": clip(rank.problem),
        "limit": rank.limit_bytes,
        "end": rank.duration_ns,
        "peak": [peak.time_ns, peak.size_bytes, when(peak)] if peak else None,
        "phases": [[p.kind, p.start_ns, p.end_ns] for p in rank.phases[:marks]],
        "steps": rank.step_ends_ns[:marks],
        "failures": [[failure.time_ns, failure.size_bytes] for failure in rank.failures[:marks]],
    }


class _Texts:
    """Names and lines of all ranks, each once, and which of them each block has.

    Attributes:
        names: Of owners and operators.
        lines: Of stacks, as people read them.
        stacks: Of each, places in `lines`: the library's innermost or -1, then the user's own.
        name, operator, stack: Of each block, a place that is one more; 0 where there is none.
    """

    def __init__(self, shown: Level, ranks: Sequence[RankMemory]) -> None:
        self._names: dict[str, int] = {}
        self._lines: dict[str, int] = {}
        self._stacks: dict[tuple[int, ...], int] = {}
        columns = [
            (
                _numbers(drawn.blocks.name, rank.names.__getitem__, self._names),
                _numbers(drawn.blocks.operator, rank.names.__getitem__, self._names),
                _numbers(drawn.blocks.stack, partial(self._stack, rank.stacks), self._stacks),
            )
            for drawn, rank in zip(shown.ranks, ranks, strict=True)
        ]
        self.name, self.operator, self.stack = (
            _join(each) for each in (zip(*columns, strict=True) if columns else ((), (), ()))
        )
        self.names, self.lines = tuple(self._names), tuple(self._lines)
        self.stacks = tuple(self._stacks)

    def _stack(self, stacks: Sequence[Sequence[AllocationFrame]], at: int) -> tuple[int, ...]:
        frames = stacks[at]
        via = innermost_library(frames)
        lines = [frame for frame in frames if is_own(frame)][:MOST_LINES]
        return (-1 if via is None else self._line(via), *map(self._line, lines))

    def _line(self, frame: AllocationFrame) -> int:
        return self._lines.setdefault(frame_text(frame), len(self._lines))


def _numbers(column: Places, value_of: Callable[[int], T], places: dict[T, int]) -> Integers:
    """Replace each entry by the place of its value, counted from 1; 0 where there is none."""
    used, place = np.unique(column, return_inverse=True)
    numbers = [
        places.setdefault(value_of(at), len(places)) + 1 if at >= 0 else 0 for at in used.tolist()
    ]
    return np.array(numbers, np.int64)[place]


def _reserved(rank: RankMemory) -> tuple[Integers, Integers]:
    """Bytes that the allocator held, at moments that show how it runs."""
    reserved = rank.reserved
    if not len(reserved.time_ns):
        return reserved.time_ns, reserved.size_bytes
    at = m4_downsample(reserved.time_ns, reserved.size_bytes, MOST_HELD)
    return reserved.time_ns[at], reserved.size_bytes[at]


def _firsts(lengths: Iterable[int]) -> list[int]:
    """Index of each rank's first entry, and the end of the last rank's."""
    return [0, *np.cumsum(list(lengths), dtype=np.int64).tolist()]


def _distances(time_ns: Integers) -> Integers:
    """Small numbers pack better: each time is a difference to the one before it."""
    return np.diff(time_ns, prepend=0)


def _join(columns: Iterable[Integers]) -> Integers:
    return np.concatenate([np.zeros(0, np.int64), *columns])
