"""Merging of short events: against a slow version, and what is kept of times, counts and sizes."""

from collections import defaultdict

import numpy as np
import pytest

from nbdist.trace.downsample import (
    MOST_DEPTH,
    Items,
    TraceRows,
    finest_fitting,
    full_window,
    layout_rows,
    merge_short,
)
from nbdist.trace.trace import HOST, KINDS, Events, Trace
from tests.support.drawn_traces import events, random_trace, rank_trace, training


def rows_of(*recorded: Events, most_rows: int = 10) -> TraceRows:
    """The rows of ranks that have recorded these."""
    ranks = (rank_trace(rank, events) for rank, events in enumerate(recorded))
    return layout_rows(Trace(tuple(ranks)), most_rows)


WIDTHS_NS = (0, 1, 3, 10, 100, 1000, 10**6)


def slowly(
    trace: Trace, depth: int, width_ns: int, full_ns: tuple[int, int] = (0, 0)
) -> list[tuple[object, ...]]:
    """What `merged` has to give, event by event with dictionaries."""
    blocks: dict[tuple[int, ...], list[tuple[object, ...]]] = defaultdict(list)
    for place, rank in enumerate(trace.ranks):
        columns = rank.events
        for i in range(len(columns)):
            if columns.depth[i] >= depth:
                continue
            row = (place, int(columns.lane[i]), int(columns.depth[i]))
            start_ns, took_ns = int(columns.start_ns[i]), int(columns.duration_ns[i])
            kind = int(columns.kind[i])
            group = rank.groups[columns.group[i]] if columns.group[i] >= 0 else None
            name, size_bytes = rank.names[columns.name[i]], int(columns.size_bytes[i])
            is_short = took_ns < width_ns and not full_ns[0] <= start_ns < full_ns[1]
            block = (*row, kind, is_short, start_ns // width_ns if is_short else i)
            blocks[block].append((start_ns, took_ns, name, size_bytes, group))
    items = []
    for (*row, kind, _, _), those in blocks.items():
        longest = max(those, key=lambda event: event[1])
        items.append(
            (
                tuple(row), KINDS[kind], min(event[0] for event in those),
                max(event[0] + event[1] for event in those), sum(event[1] for event in those),
                len(those), longest[2], sum(event[3] for event in those), longest[4],
            )
        )  # fmt: skip
    return sorted(items, key=str)


def read(drawn: TraceRows, items: Items) -> list[tuple[object, ...]]:
    """Items in the form that `slowly` has."""
    rows = []
    for i in range(len(items)):
        row = drawn.rows[items.row[i]]
        group = drawn.groups[items.group[i]] if items.group[i] >= 0 else None
        numbers = (items.start_ns[i], items.end_ns[i], items.busy_ns[i], items.count[i])
        rows.append(
            (
                (row.place, row.lane, row.depth), KINDS[items.kind[i]], *map(int, numbers),
                drawn.names[items.name[i]], int(items.size_bytes[i]), group,
            )
        )  # fmt: skip
    return sorted(rows, key=str)


@pytest.mark.parametrize("width_ns", WIDTHS_NS)
@pytest.mark.parametrize("seed", range(4))
def test_random_events_are_merged_as_by_hand(seed: int, width_ns: int) -> None:
    """Every block and every event that stays, in all columns; ranks differ in names and groups."""
    trace = random_trace(count=400, ranks=3, seed=seed, depths=4)
    drawn = layout_rows(trace, most_rows=1000)
    items = merge_short(drawn, width_ns)

    assert read(drawn, items) == slowly(trace, 4, width_ns)
    assert items.merged == len(drawn) - (items.count == 1).sum()
    assert (np.lexsort((items.start_ns, items.row)) == np.arange(len(items))).all()
    full_ns = (2000, 3000)
    assert read(drawn, merge_short(drawn, width_ns, full_ns)) == slowly(trace, 4, width_ns, full_ns)


@pytest.mark.parametrize("most_items", [5, 50, 500, 4000, 10**6])
def test_the_finest_resolution_that_fits_is_taken(most_items: int) -> None:
    """No finer one of the series has so few items; the whole trace stays where there is room."""
    drawn = layout_rows(random_trace(count=5000, ranks=1, seed=1), most_rows=100)
    items = finest_fitting(drawn, most_items)
    finer = {1: 0, 2: 1, 5: 2}
    width_ns = items.width_ns
    digit = int(str(width_ns)[0]) if width_ns else 0
    before = width_ns // 2 if digit in {1, 2} and width_ns > 2 else None
    before = width_ns * 2 // 5 if digit == 5 else before

    if most_items >= len(drawn):
        assert width_ns == 0
    elif len(items) <= most_items:
        assert len(merge_short(drawn, finer.get(width_ns, before))) > most_items
    else:  # one block for each row and kind is the least
        assert len(items) == len(np.unique(drawn.row * len(KINDS) + drawn.kind))


def test_a_stretch_is_kept_in_full() -> None:
    """The middle step of all ranks, or its beginning with as many events as there is room for."""
    trace = training(4000, steps=5)
    steps = [rank.steps[2] for rank in trace.ranks]
    whole = min(s.start_ns for s in steps), max(s.end_ns for s in steps)
    drawn = layout_rows(trace, most_rows=100)
    full_ns = full_window(trace, drawn, 300)
    items = finest_fitting(drawn, 800, full_ns)
    is_inside = (items.start_ns >= full_ns[0]) & (items.start_ns < full_ns[1])

    assert full_window(trace, drawn, 10**6) == whole
    assert full_ns[0] == whole[0]
    assert is_inside.sum() == 300
    assert (items.count[is_inside] == 1).all()
    assert 300 < len(items) <= 800
    assert items.merged > 0


def test_without_steps_a_part_from_the_middle_on_is_kept_in_full() -> None:
    """That of an empty trace is empty."""
    trace = random_trace(count=1000, ranks=1)
    drawn = layout_rows(trace, most_rows=100)
    begin_ns, end_ns = full_window(trace, drawn, 100)

    assert begin_ns == trace.duration_ns // 2
    assert ((drawn.start_ns >= begin_ns) & (drawn.start_ns < end_ns)).sum() == 100
    assert full_window(Trace(()), layout_rows(Trace(()), 10), 100) == (0, 0)


def test_deep_rows_are_left_out_where_there_is_no_room() -> None:
    """The depth is that of all lanes; what is deeper is counted; the top levels always stay."""
    deep = events([(0, 90 - depth) for depth in range(6)], depth=list(range(6)))
    drawn = {rows: rows_of(deep, deep, most_rows=rows) for rows in (1, 7, 8, 11, 12, 100)}

    assert [rows.left_out for rows in drawn.values()] == [6, 6, 4, 2, 0, 0]
    assert [len(rows.rows) for rows in drawn.values()] == [6, 6, 8, 10, 12, 12]
    assert [(row.place, row.depth) for row in drawn[8].rows] == [
        (place, depth) for place in range(2) for depth in range(4)
    ]


def test_no_lane_shows_more_than_the_deepest_level() -> None:
    """However much room there is."""
    depth = np.arange(MOST_DEPTH + 5)
    deep = events([(0, 100 - int(d)) for d in depth], depth=depth.tolist())
    drawn = rows_of(deep, most_rows=1000)

    assert len(drawn.rows) == MOST_DEPTH
    assert drawn.left_out == 5


def test_lanes_without_events_have_no_row() -> None:
    """Nor have ranks without any."""
    drawn = rows_of(events([]), events([(0, 1)], lane=[1], kind=[HOST]))

    assert [(row.place, row.lane) for row in drawn.rows] == [(1, 1)]


@pytest.mark.parametrize("trace", [Trace(()), Trace((rank_trace(0, events([])),))])
def test_nothing_recorded(trace: Trace) -> None:
    """No rank, or no event: no rows and no items at any resolution."""
    drawn = layout_rows(trace, most_rows=10)

    assert drawn.rows == ()
    assert len(merge_short(drawn, 10)) == len(finest_fitting(drawn, 10)) == 0


def test_names_are_those_of_each_rank() -> None:
    """The same number stands for other names on another rank; equal names become one."""
    each = events([(0, 1), (2, 1)], name=[0, 1])
    ranks = rank_trace(0, each, names=("a", "b")), rank_trace(1, each, names=("b", "c"))
    drawn = layout_rows(Trace(ranks), most_rows=10)

    assert [drawn.names[i] for i in drawn.name] == ["a", "b", "b", "c"]
    assert drawn.names == ("a", "b", "c")
