"""The timeline of a trace as one piece of HTML that needs no network and no kernel.

The picture lies in a frame of its own (`sandbox="allow-scripts"`: it can reach neither the notebook
nor its cookies) right over an image. Front ends that strip frames from what they do not trust
show the image.
"""

from __future__ import annotations

import base64
import gzip
import html
import json
import struct
from collections.abc import Iterator, Sequence
from importlib.resources import files

import numpy as np
import numpy.typing as npt

from nbdist.core.trace import KINDS, Integers, Trace
from nbdist.core.trace_findings import TraceFinding
from nbdist.core.trace_levels import Items, Laid, finest, full
from nbdist.view.trace_png import COLOURS, span_ns

# In the order in which they stand in the page.
SCRIPTS = ("timeline_data.js", "timeline_draw.js", "timeline.js")
# What a browser has to unpack: at most so many items, and so many bytes as base64.
MOST_ITEMS = 150_000
MOST_BYTES = 1_300_000
# Longer names are cut in the middle: those of kernels made of templates run to pages.
MOST_NAME = 160
# Of each finding.
MOST_SPOTS = 5
# Marks of steps, of all ranks together.
MOST_STEPS = 20_000
# Of the timeline: legend, axis and hint; a rank's header; a row. timeline_draw.js has the same.
_AROUND_PX, _RANK_PX, _ROW_PX = 68, 24, 15
_LEAST_PX, _MOST_PX = 180, 620


def clipped(text: str, most: int = MOST_NAME) -> str:
    """The text, or its beginning and end where it is longer than `most`."""
    if len(text) <= most:
        return text
    end = (most - 3) // 2
    return f"{text[: most - 3 - end]}...{text[-end:]}"


def steps_of_each(trace: Trace) -> int:
    """How many steps of each rank are marked at most."""
    return MOST_STEPS // max(len(trace.ranks), 1)


def packed(trace: Trace, events: Laid, findings: Sequence[TraceFinding] = ()) -> tuple[Items, str]:
    """The finest items of a trace that fit MOST_BYTES, and what timeline.js reads, as base64.

    Where events have to be merged, half of the room is for a stretch that is kept in full.
    """
    head = _head(trace, events) | {"spots": list(_spots(trace, findings))}
    most = MOST_ITEMS
    items = finest(events, most)
    while True:
        if items.width_ns:
            items = finest(events, most, full(trace, events, most // 2))
        data = base64.b64encode(_packed(head, trace, events, items))
        if len(data) <= MOST_BYTES or most <= 0:
            return items, data.decode("ascii")
        most = min(most * 3 // 4, len(items) - 1)
        items = finest(events, most)


def page(image: bytes, alt: str, data: str, height_px: int) -> str:
    """The image with the live timeline over it, as HTML.

    Args:
        image: PNG, shown where frames are not.
        alt: What it shows, for those who cannot see it.
        data: From `packed`.
        height_px: Of the timeline; more where the image is higher.
    """
    # The frame's page is an attribute of this one, so it is escaped as a whole. What users and
    # libraries have named is inside `data`, where nothing can be taken for markup.
    scripts = "\n".join(map(_resource, SCRIPTS))
    inner = _resource("timeline.html").replace("{{SCRIPT}}", scripts)
    srcdoc = html.escape(inner.replace("{{TRACE}}", data), quote=True)
    source = base64.b64encode(image).decode("ascii")
    return (
        f'<div style="position:relative;min-height:{height_px}px">'
        f'<img src="data:image/png;base64,{source}" alt="{html.escape(alt, quote=True)}"'
        ' style="display:block;width:100%;height:auto">'
        '<iframe sandbox="allow-scripts" title="timeline of the trace"'
        ' style="position:absolute;inset:0;width:100%;height:100%;border:0"'
        f' srcdoc="{srcdoc}"></iframe></div>'
    )


def height_px(ranks: int, rows: int) -> int:
    """How high a timeline is that shows all rows at once, as far as a page has room for them."""
    whole = _AROUND_PX + ranks * _RANK_PX + rows * _ROW_PX
    return min(max(whole, _LEAST_PX), _MOST_PX)


def _resource(name: str) -> str:
    return files("nbdist.view").joinpath(name).read_text(encoding="utf-8")


def _packed(head: dict[str, object], trace: Trace, events: Laid, items: Items) -> bytes:
    """A JSON head with the texts, then the columns; all gzipped, equal for equal traces."""
    used, name = np.unique(items.name, return_inverse=True)
    firsts = np.searchsorted(items.row, np.arange(len(events.rows) + 1))
    begin_ns, end_ns = span_ns(trace)
    # Small numbers pack better: each start is told from the one before it in its row.
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
    planes = [_planes(column) for column in columns.values()]
    own_head = head | {
        "names": [clipped(events.names[at]) for at in used],
        "width": items.width_ns,
        "full": items.full_ns,
        "firsts": firsts.tolist(),
        "from": begin_ns,
        "to": end_ns,
        "columns": [
            (title, len(own), len(column))
            for (title, column), own in zip(columns.items(), planes, strict=True)
        ],
    }
    text = json.dumps(own_head, separators=(",", ":")).encode()
    body = b"".join(own.tobytes() for own in planes)
    return gzip.compress(struct.pack("<I", len(text)) + text + body, 6, mtime=0)


def _head(trace: Trace, events: Laid) -> dict[str, object]:
    most = steps_of_each(trace)
    return {
        "kinds": KINDS,
        "colours": [COLOURS[kind] for kind in KINDS],
        "groups": [clipped(group) for group in events.groups],
        "rows": [
            (row.place, clipped(trace.ranks[row.place].lanes[row.lane].name), row.depth)
            for row in events.rows
        ],
        "ranks": [
            {
                "rank": rank.rank,
                "problem": clipped(rank.problem),
                "steps": [(one.number, one.start_ns, one.end_ns) for one in rank.steps[:most]],
            }
            for rank in trace.ranks
        ],
    }


def _spots(trace: Trace, findings: Sequence[TraceFinding]) -> Iterator[tuple[str, int, int, int]]:
    """(rule, place of the rank, begin, end) of what findings point at."""
    places = {rank.rank: place for place, rank in enumerate(trace.ranks)}
    for one in findings:
        for spot in one.spots[:MOST_SPOTS]:
            yield clipped(one.rule), places[spot.rank], spot.start_ns, spot.end_ns


def _planes(column: Integers) -> npt.NDArray[np.uint8]:
    """The lowest bytes of all numbers, then the second ones, ...: equal bytes stand together.

    As many planes as the largest number needs; numbers are at least 0.
    """
    needed = (int(column.max(initial=0)).bit_length() + 7) // 8
    octets = np.ascontiguousarray(column, "<i8").view(np.uint8).reshape(-1, 8)
    return np.ascontiguousarray(octets[:, :needed].T)
