"""A trace as text with its numbers, as a picture, and as a timeline that can be moved."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from nbdist.core import finding, units
from nbdist.core.failures import ranks_phrase
from nbdist.core.finding import Finding
from nbdist.core.units import is_stored, one_line, shown
from nbdist.core.view import View, figure_html, lines, measured, table
from nbdist.recording.view.iframe import Live, over
from nbdist.trace.breakdown import TimeBreakdown
from nbdist.trace.downsample import Items, TraceRows, layout_rows
from nbdist.trace.trace import KINDS, Trace
from nbdist.trace.view.image import png
from nbdist.trace.view.page import height_px, pack_timeline, steps_of_each

# Rows of a picture that one can still take in; more where lanes and ranks alone make more.
MOST_ROWS = 32
MOST_TRAFFIC = 20
MOST_NOTE = 400


def trace_report(trace: Trace, shares: TimeBreakdown, findings: Sequence[Finding]) -> View:
    """View of %dist_trace: the timeline, where the time went, and what to do about it.

    The text has every number. The HTML has the timeline above the same numbers and asks nothing
    of the network; the whole stays below 2 MB for any trace. Where outputs are stored and
    compared the timeline is a picture without scripts.
    """
    events = layout_rows(trace, MOST_ROWS)
    items, data = pack_timeline(trace, events, findings)
    parts = [
        lines([_head(trace, shares)]),
        lines(
            finding.report(
                findings,
                order="the most expensive first",
                none="no rule found anything that slows the cell down",
                has_share=True,
            )
        ),
        _ranks(shares),
        lines(_slowest(shares)),
        _operations(shares),
        _traffic(shares),
        lines(_notes(trace, shares, events, items)),
    ]
    shown_parts = [part for part in parts if part.text]
    image = png(trace, events)
    alt = f"Timeline: {_head(trace, shares)}. The numbers are below it."
    live = Live(("trace/view/timeline.js",), "timeline of the trace", data)
    height = height_px(len(trace.ranks), len(events.rows))
    picture = figure_html(image, alt) if is_stored() else over(image, alt, live, height)
    return View(
        "\n\n".join(part.text for part in shown_parts),
        picture + "".join(part.html for part in shown_parts),
        png=image,
    )


def _head(trace: Trace, shares: TimeBreakdown) -> str:
    numbers = [rank.rank for rank in trace.ranks]
    ranks = f"trace of {ranks_phrase(numbers) if numbers else 'no ranks'}"
    counts = sorted({len(rank.steps) for rank in trace.ranks}) or [0]
    steps = "-".join(str(count) for count in sorted({counts[0], counts[-1]}))
    steps_text = "no steps" if steps == "0" else f"{steps} {'step' if steps == '1' else 'steps'}"
    if shares.step_ns:
        steps_text += f" of {units.duration(shares.step_ns)}"
    strategy = [trace.strategy] if trace.strategy else []
    return ", ".join([ranks, units.duration(trace.duration_ns), steps_text, *strategy])


def _ranks(shares: TimeBreakdown) -> View:
    """Table of each rank's time by what it went to."""
    has_steps = any(rank.steps_ns for rank in shares.ranks)
    unit = "step" if has_steps else "recording"
    if not shares.ranks:
        return View("")
    head = ["rank", f"{unit}, ms", "compute", "communication", "copy", "data", "idle", "hidden"]
    rows = []
    for rank in shares.ranks:
        took_ns = statistics.median(rank.steps_ns) if rank.steps_ns else rank.window_ns
        parts = (rank.compute_ns, rank.exposed_ns, rank.copy_ns, rank.data_ns, rank.idle_ns)
        cells = [_share(part, rank.window_ns) for part in parts]
        hidden = _share(rank.overlap_ns, rank.communication_ns)
        rows.append([str(rank.rank), shown(f"{took_ns / 1e6:.2f}"), *cells, hidden])
    legend = (
        f"% of the {unit}, each moment counted once; communication: time not overlapped by "
        "compute; hidden: share of communication overlapped by compute"
    )
    return table(head, rows, after=[legend])


def _share(part: float, whole: float) -> str:
    return _percent(part / whole) if whole else shown("-")


def _percent(share: float) -> str:
    return shown(f"{100 * share:.1f}")


def _slowest(shares: TimeBreakdown) -> list[str]:
    """Which rank the others wait for, and what that costs."""
    unit = "a step" if shares.step_ns else "the cell"
    slowest = shares.slowest
    if len(shares.ranks) < 2:
        return []
    if slowest is None:
        return [f"slowest rank: {shown('none (no rank waits for another)')}"]
    gain = f"{unit} would be {_percent(slowest.share)} % faster ({units.duration(slowest.cost_ns)})"
    doubt = f"; {slowest.doubt}" if slowest.doubt else ""
    return [f"slowest rank: {shown(f'{slowest.rank}; without it {gain}{doubt}')}"]


def _operations(shares: TimeBreakdown) -> View:
    """The most expensive operations; which ones they are differs from run to run."""
    head = ["operation", "kind", "calls", "ms", "%"]
    rows = [
        [
            one_line(operation.name),
            KINDS[operation.kind],
            str(operation.count),
            f"{operation.self_ns / 1e6:.2f}",
            _percent(operation.share),
        ]
        for operation in shares.operations
    ]
    if not rows:
        return View("")
    before = ["most expensive operations on all ranks, by self time:"]
    return measured(table(head, rows, before=before))


def _traffic(shares: TimeBreakdown) -> View:
    """Bytes that a rank sends, and the strategy's formula for the same."""
    per = "per step" if shares.step_ns else "in all"
    total = f"a rank sends {units.size(shares.sent_bytes)} {per}"
    if shares.formula_bytes is not None:
        formula = f" ({', '.join(shares.formula)})" if shares.formula else ""
        total += f"; the strategy's formula gives {units.size(shares.formula_bytes)}{formula}"
    rows = [
        [
            one_line(traffic.name),
            one_line(traffic.group),
            units.size(traffic.size_bytes),
            f"{traffic.count:.3g}",
            units.size(traffic.sent_bytes),
            units.duration(traffic.median_ns),
        ]
        for traffic in shares.traffic[:MOST_TRAFFIC]
    ]
    if not rows:
        return lines([total]) if shares.formula_bytes is not None else View("")
    head = ["collective", "group", "size", f"calls {per}", f"sent {per}", "median time"]
    n_more = len(shares.traffic) - len(rows)
    notes = [f"and {n_more} more with less traffic"] if n_more else []
    return table(head, rows, after=[*notes, total])


def _notes(trace: Trace, shares: TimeBreakdown, events: TraceRows, items: Items) -> Iterator[str]:
    """Notes on gaps in picture and numbers; of the trace's own notes `shares` has each."""
    if not is_stored():
        yield from _left_out(trace, events, items)
    yield from (one_line(note, MOST_NOTE) for note in shares.notes)


def _left_out(trace: Trace, events: TraceRows, items: Items) -> Iterator[str]:
    """How the picture differs from the trace, as sentences."""
    if items.merged:
        begin_ns, end_ns = items.full_ns
        yield (
            f"In the picture, events shorter than {units.duration(items.width_ns)} are merged with "
            f"their neighbours ({items.merged:,} of {len(events):,}), except in the "
            f"{units.duration(end_ns - begin_ns)} from {units.duration(begin_ns)} on."
        )
    if events.left_out:
        levels = "level" if events.depth == 1 else "levels"
        yield (
            f"It shows {events.depth} {levels} of nested events; "
            f"{events.left_out:,} deeper ones are left out."
        )
    most_steps = steps_of_each(trace)
    if any(len(rank.steps) > most_steps for rank in trace.ranks):
        yield f"It marks the first {most_steps:,} steps of each rank."
