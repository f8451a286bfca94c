"""The timeline of a trace as one piece of HTML: the data that timeline.js reads, and the page."""

from __future__ import annotations

import base64
from collections.abc import Sequence

import numpy as np

from nbdist.core.finding import Finding
from nbdist.recording.view import iframe as recording_iframe
from nbdist.recording.view.iframe import MOST_BYTES, clip
from nbdist.trace.downsample import Items, TraceRows, finest_fitting, full_window
from nbdist.trace.trace import KINDS, Integers, Trace
from nbdist.trace.view.image import COLOURS, span_ns

# What a browser has to unpack at most.
MOST_ITEMS = 150_000
# Of each finding.
MOST_SPOTS = 5
# Marks of steps, of all ranks together.
MOST_STEPS = 20_000
# Of the timeline: legend, axis and hint; a rank's header; a row. timeline.js has the same.
_AROUND_PX, _RANK_PX, _ROW_PX = 68, 24, 15
_LEAST_PX, _MOST_PX = 180, 620


def steps_of_each(trace: Trace) -> int:
    """How many steps of each rank are marked at most."""
    return MOST_STEPS // max(len(trace.ranks), 1)


def pack_timeline(
    trace: Trace, events: TraceRows, findings: Sequence[Finding] = ()
) -> tuple[Items, str]:
    """The finest items of a trace that fit MOST_BYTES, and what timeline.js reads, as base64.

    Where events have to be merged, half of the room is for a stretch that is kept in full.
    """
    places = {rank.rank: place for place, rank in enumerate(trace.ranks)}
    # Rule, place of the rank, begin and end of what findings point at.
    spots = [
        (clip(finding.rule), places[spot.rank], spot.start_ns, spot.end_ns)
        for finding in findings
        for spot in finding.spots[:MOST_SPOTS]
    ]
    head = _head(trace, events) | {"spots": spots}
    most_items = MOST_ITEMS
    items = finest_fitting(events, most_items)
    while True:
        if items.width_ns:
            items = finest_fitting(events, most_items, full_window(trace, events, most_items // 2))
        data = base64.b64encode(_pack(head, trace, events, items))
        if len(data) <= MOST_BYTES or most_items <= 0:
            return items, data.decode("ascii")
        most_items = min(most_items * 3 // 4, len(items) - 1)
        items = finest_fitting(events, most_items)


def height_px(ranks: int, rows: int) -> int:
    """How high a timeline is that shows all rows at once, as far as a page has room for them."""
    needed = _AROUND_PX + ranks * _RANK_PX + rows * _ROW_PX
    return min(max(needed, _LEAST_PX), _MOST_PX)


def _pack(head: dict[str, object], trace: Trace, events: TraceRows, items: Items) -> bytes:
    """A JSON head with the texts, then the columns; all gzipped, equal for equal traces."""
    used, name = np.unique(items.name, return_inverse=True)
    firsts = np.searchsorted(items.row, np.arange(len(events.rows) + 1))
    begin_ns, end_ns = span_ns(trace)
    # Small numbers pack better: each start is relative to the one before it in its row.
    distance_ns = np.diff(items.start_ns, prepend=begin_ns)
    inner = firsts[:-1]  # each row has an item
    distance_ns[inner] = items.start_ns[inner] - begin_ns
    columns: dict[str, Integers] = {
        "start": distance_ns,
        "busy": items.busy_ns,
        "extent": (items.end_ns - items.start_ns)[items.count > 1],
        "count": items.count,
        "name": name,
        "kind": items.kind,
        "size": items.size_bytes,
        "group": items.group + 1,
    }
    whole_head = head | {
        "names": [clip(events.names[at]) for at in used],
        "width": items.width_ns,
        "full": items.full_ns,
        "firsts": firsts.tolist(),
        "from": begin_ns,
        "to": end_ns,
    }
    return recording_iframe.pack(whole_head, columns)


def _head(trace: Trace, events: TraceRows) -> dict[str, object]:
    most_steps = steps_of_each(trace)
    return {
        "kinds": KINDS,
        "colours": [COLOURS[kind] for kind in KINDS],
        "groups": [clip(group) for group in events.groups],
        "rows": [
            (row.place, clip(trace.ranks[row.place].lanes[row.lane].name), row.depth)
            for row in events.rows
        ],
        "ranks": [
            {
                "rank": rank.rank,
                "problem": clip(rank.problem),
                "steps": [
                    (step.number, step.start_ns, step.end_ns) for step in rank.steps[:most_steps]
                ],
            }
            for rank in trace.ranks
        ],
    }
