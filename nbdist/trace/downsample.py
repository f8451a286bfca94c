"""A trace with events too short to be seen merged, so that a picture of any trace is bounded.

A picture has rows: one for each depth of each lane of each rank. At a resolution of `width_ns`,
the events of one row and kind that are shorter than this and begin in the same stretch of that
width become one block, which keeps how many they are and how long they took together. All other
events stay as they are, and so do those of one stretch that is kept in full.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nbdist.trace.trace import KINDS, Events, Integers, Trace

# Deeper events than this are left out even where there is room: a lane has no more readable rows.
MOST_DEPTH = 8
# The number of levels of nested events that are shown for any number of ranks.
LEAST_DEPTH = 3
NOWHERE = (0, 0)
_WIDTHS_NS = (0, *(digit * 10**power for power in range(19) for digit in (1, 2, 5)))

Truths = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class TimelineRow:
    """One row of the picture.

    Attributes:
        place, lane: Places in Trace.ranks and in RankTrace.lanes.
        depth: The depth of its events.
    """

    place: int
    lane: int
    depth: int


@dataclass(frozen=True, slots=True)
class TraceRows:
    """The events of all ranks as one set of columns, in the order of row, kind and start.

    Attributes:
        rows: From the top of the picture to its bottom; each has an event.
        names, groups: Of events, and process groups, each once.
        depth: How many levels of nested events a lane shows at most.
        left_out: Events that are nested deeper than that.
        row: Place in `rows` of each event.
        name, group: Places in `names` and `groups`; -1 for no group.
        kind, start_ns, duration_ns, size_bytes: As in Events.
    """

    rows: tuple[TimelineRow, ...]
    names: tuple[str, ...]
    groups: tuple[str, ...]
    depth: int
    left_out: int
    row: Integers
    kind: Integers
    start_ns: Integers
    duration_ns: Integers
    name: Integers
    size_bytes: Integers
    group: Integers

    def __len__(self) -> int:
        return len(self.row)


@dataclass(frozen=True, slots=True)
class Items:
    """Events and blocks of events at one resolution, in the order of row and start.

    Attributes:
        width_ns: Events shorter than this may be in blocks; 0: every item is an event.
        full_ns: No event that begins between these two is in a block.
        row, kind: As in TraceRows, of all events of a block.
        start_ns: The start of the first event of a block.
        end_ns: The latest end.
        busy_ns: The durations together.
        count: Events in it; an item of one is that event itself.
        name, group: As in TraceRows, of the longest event, the first of equals.
        size_bytes: Together.
    """

    width_ns: int
    full_ns: tuple[int, int]
    row: Integers
    kind: Integers
    start_ns: Integers
    end_ns: Integers
    busy_ns: Integers
    count: Integers
    name: Integers
    size_bytes: Integers
    group: Integers

    def __len__(self) -> int:
        return len(self.row)

    @property
    def merged(self) -> int:
        """Events that are shown in blocks with others."""
        return int(self.count[self.count > 1].sum())


def layout_rows(trace: Trace, most_rows: int) -> TraceRows:
    """All events of a trace in rows, nested ones as deep as `most_rows` allows.

    Each lane shows LEAST_DEPTH levels in any case, as far as it has them.
    """
    heights = [_heights(rank.events, len(rank.lanes)) for rank in trace.ranks]
    every = np.concatenate([*heights, _NONE])
    depths = range(MOST_DEPTH, LEAST_DEPTH, -1)
    depth = next((d for d in depths if np.minimum(every, d).sum() <= most_rows), LEAST_DEPTH)
    rows = tuple(
        TimelineRow(place, lane, level)
        for place, lanes in enumerate(heights)
        for lane, height in enumerate(lanes)
        for level in range(min(height, depth))
    )
    first_row = {(row.place, row.lane): at for at, row in enumerate(rows) if row.depth == 0}
    names: dict[str, int] = {}
    groups: dict[str, int] = {}
    parts = [[_NONE] * 7]
    for place, rank in enumerate(trace.ranks):
        shown = rank.events.depth < depth
        lanes = [first_row.get((place, lane), 0) for lane in range(len(rank.lanes))]
        events = rank.events
        parts.append(
            [
                np.array(lanes, np.int64)[events.lane[shown]] + events.depth[shown],
                events.kind[shown].astype(np.int64),
                events.start_ns[shown],
                events.duration_ns[shown],
                _numbers(rank.names, names)[events.name[shown]],
                events.size_bytes[shown],
                _numbers(rank.groups, groups)[events.group[shown]],
            ]
        )
    row, kind, start_ns, *others = (np.concatenate(column) for column in zip(*parts, strict=True))
    order = np.lexsort((start_ns, row * len(KINDS) + kind))
    return TraceRows(
        rows,
        tuple(names),
        tuple(groups),
        depth,
        sum(len(rank.events) for rank in trace.ranks) - len(row),
        *(column[order] for column in (row, kind, start_ns, *others)),
    )


def merge_short(events: TraceRows, width_ns: int, full_ns: tuple[int, int] = NOWHERE) -> Items:
    """The events at one resolution: at most one block for each row, kind and stretch of time.

    Durations, counts and sizes of each row and kind add up to those of the events.
    """
    is_short = _is_short(events, width_ns, full_ns)
    short, long = np.flatnonzero(is_short), np.flatnonzero(~is_short)
    first = _begins(events, short, width_ns)
    blocks = _blocks(events, short, first)
    singles = [
        *(getattr(events, name)[long] for name in ("row", "kind", "start_ns")),
        events.start_ns[long] + events.duration_ns[long],
        events.duration_ns[long],
        np.ones(len(long), np.int64),
        *(getattr(events, name)[long] for name in ("name", "size_bytes", "group")),
    ]
    columns = [np.concatenate(pair) for pair in zip(blocks, singles, strict=True)]
    order = np.lexsort((columns[2], columns[0]))
    return Items(width_ns, full_ns, *(column[order] for column in columns))


def finest_fitting(events: TraceRows, most_items: int, full_ns: tuple[int, int] = NOWHERE) -> Items:
    """The events at the finest resolution of the series 0, 1, 2, 5, 10 ... ns with so few items.

    Where even the coarsest has more (a block for each row and kind, and what is kept in full) it
    is that.
    """
    end_ns = events.start_ns + events.duration_ns
    span_ns = int(end_ns.max(initial=0)) - int(events.start_ns.min(initial=0))
    widths = _WIDTHS_NS[: bisect_right(_WIDTHS_NS, 2 * span_ns) + 1]  # the last one merges all
    finest = bisect_left(
        widths, True, hi=len(widths) - 1,
        key=lambda width_ns: _count(events, width_ns, full_ns) <= most_items,
    )  # fmt: skip
    return merge_short(events, widths[finest], full_ns)


def full_window(trace: Trace, events: TraceRows, most_items: int) -> tuple[int, int]:
    """A stretch in which so few events begin: the middle step, or as much of it as has room.

    Without steps it is a part of the whole recording, from its middle on.
    """
    steps = [step for rank in trace.ranks for step in rank.steps]
    numbers = sorted({step.number for step in steps})
    middle = [step for step in steps if step.number == numbers[len(numbers) // 2]]
    begin_ns = min((step.start_ns for step in middle), default=trace.duration_ns // 2)
    end_ns = max((step.end_ns for step in middle), default=trace.duration_ns)
    starts_ns = np.sort(events.start_ns[_is_within(events, (begin_ns, end_ns))])
    if len(starts_ns) > most_items:
        end_ns = int(starts_ns[most_items])
    return begin_ns, end_ns


_NONE = np.zeros(0, np.int64)


def _heights(events: Events, lanes: int) -> Integers:
    """How many levels of nested events each lane has; 0 for a lane without events."""
    heights = np.zeros(lanes, np.int64)
    np.maximum.at(heights, events.lane, events.depth.astype(np.int64) + 1)
    return heights


def _numbers(texts: Sequence[str], numbers: dict[str, int]) -> Integers:
    """The number of each text among those of all ranks; -1 stays -1."""
    return np.array([*(numbers.setdefault(text, len(numbers)) for text in texts), -1], np.int64)


def _begins(events: TraceRows, short: Integers, width_ns: int) -> Integers:
    """Places in `short` at which another block begins."""
    if not len(short):
        return _NONE
    code = events.row[short] * len(KINDS) + events.kind[short]
    stretch = events.start_ns[short] // width_ns
    differs = (np.diff(code) != 0) | (np.diff(stretch) != 0)
    return np.concatenate([[0], np.flatnonzero(differs) + 1])


def _blocks(events: TraceRows, short: Integers, first: Integers) -> list[Integers]:
    """The columns of the blocks that begin at these places in `short`, as Items has them."""
    if not len(first):
        return [_NONE] * 9
    start_ns, duration_ns = events.start_ns[short], events.duration_ns[short]
    count = np.diff(first, append=len(short))
    longest_ns = np.maximum.reduceat(duration_ns, first)
    is_longest = np.flatnonzero(duration_ns == np.repeat(longest_ns, count))
    longest = short[is_longest[np.searchsorted(is_longest, first)]]
    return [
        events.row[short[first]],
        events.kind[short[first]],
        start_ns[first],
        np.maximum.reduceat(start_ns + duration_ns, first),
        np.add.reduceat(duration_ns, first),
        count,
        events.name[longest],
        np.add.reduceat(events.size_bytes[short], first),
        events.group[longest],
    ]


def _is_within(events: TraceRows, between_ns: tuple[int, int]) -> Truths:
    begin_ns, end_ns = between_ns
    return (events.start_ns >= begin_ns) & (events.start_ns < end_ns)


def _is_short(events: TraceRows, width_ns: int, full_ns: tuple[int, int]) -> Truths:
    return (events.duration_ns < width_ns) & ~_is_within(events, full_ns)


def _count(events: TraceRows, width_ns: int, full_ns: tuple[int, int]) -> int:
    """How many items `merge_short` makes, without making them."""
    short = np.flatnonzero(_is_short(events, width_ns, full_ns))
    return len(events) - len(short) + len(_begins(events, short, width_ns))
