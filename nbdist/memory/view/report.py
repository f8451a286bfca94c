"""Memory that was recorded as text with its numbers, and as a picture."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from nbdist.core import finding, units
from nbdist.core.failures import ranks_phrase
from nbdist.core.finding import Finding
from nbdist.core.units import is_stored, one_line, shown, shown_lines
from nbdist.core.view import View, figure_html, folded, lines, measured, table
from nbdist.memory.call_site import frame_text
from nbdist.memory.downsample import Level
from nbdist.memory.peak import RankPeak, when, worst
from nbdist.memory.snapshot import (
    BUFFER,
    CATEGORIES,
    GRADIENT,
    OPTIMIZER,
    PARAMETER,
    RankMemory,
    Snapshot,
)
from nbdist.memory.view.image import MOST_RANKS, ORDER, png
from nbdist.memory.view.page import SCRIPTS, height_px, pack_page
from nbdist.recording.view.iframe import MOST_BYTES, MOST_NAME, Live, over

MOST_FAILURES = 5
# Of the output, in bytes, for the picture's data and its image, which is in it twice.
_ROOM = 1_850_000
# A number stays on one line with its unit, however narrow a table is.
_SIZE = re.compile(r"(\d) ([kMG]?B)\b")
# What the model and its optimizer hold at the end is as large on every machine.
_EQUAL = frozenset({PARAMETER, GRADIENT, OPTIMIZER, BUFFER})


def memory_report(
    snapshot: Snapshot, peaks: tuple[RankPeak, ...], findings: Sequence[Finding]
) -> View:
    """View of %dist_memory: memory over time, the peak of each rank, and what it is made of.

    The text has every number. The HTML has the picture above the same numbers and asks nothing of
    the network; the whole stays below 2 MB for any snapshot. Where outputs are stored and compared
    there is a picture without scripts, and only bytes that are equal on every machine are compared.
    """
    # Which rank needs most differs from run to run where they need about the same.
    most = peaks[0] if peaks and is_stored() else worst(peaks)
    parts = [
        lines(_head(snapshot, worst(peaks))),
        lines(
            finding.report(findings, order="the largest first", none="no rule found memory to save")
        ),
        _ranks(snapshot, peaks),
        *([] if most is None else _of(snapshot, most)),
        lines(_notes(snapshot, peaks)),
    ]
    image = png(snapshot, peaks)
    alt = f"Memory over time: {next(_head(snapshot, None))}. The numbers stand below it."
    if is_stored():
        picture = figure_html(image, alt)
    else:
        room = min(MOST_BYTES, _ROOM - 8 * len(image) // 3)
        level, data = pack_page(snapshot, peaks, room)
        parts.append(lines(_left_out(snapshot, level)))
        page = Live(SCRIPTS, "memory of each rank over time", data)
        picture = over(image, alt, page, height_px(snapshot))
    below = "".join(part.html for part in parts if part.text)
    return View(
        "\n\n".join(part.text for part in parts if part.text),
        picture + _SIZE.sub(r"\1&nbsp;\2", below),
        png=image,
    )


def _head(snapshot: Snapshot, most: RankPeak | None) -> Iterator[str]:
    ranks = [rank.rank for rank in snapshot.ranks]
    parts = [f"memory of {ranks_phrase(ranks) if ranks else 'no ranks'}"]
    parts += [snapshot.strategy] if snapshot.strategy else []
    took_ns = max((rank.duration_ns for rank in snapshot.ranks), default=0)
    if took_ns:
        counts = sorted({len(rank.step_ends_ns) for rank in snapshot.ranks})
        steps = "-".join(str(count) for count in sorted({counts[0], counts[-1]}))
        steps_text = (
            "no steps" if steps == "0" else f"{steps} {'step' if steps == '1' else 'steps'}"
        )
        parts += [steps_text, units.duration(took_ns)]
    else:
        parts.append("at one moment")
    yield ", ".join(one_line(part) for part in parts)
    if most is not None:
        yield _most(most, len(ranks))


def _most(most: RankPeak, n_ranks: int) -> str:
    """Which rank needs most, when, and what is left."""
    who = f"rank {shown(most.rank)} has" + (" the most in use" if n_ranks > 1 else " in use")
    text = units.size(most.size_bytes)
    if most.phase:
        text += f", {units.duration(most.time_ns)} after the start, in {when(most)}"
    if most.reserved_peak_bytes:
        text += f"; the allocator holds {units.size(most.reserved_peak_bytes)}"
    if most.limit_bytes:
        headroom = units.size(max(0, most.headroom_bytes))
        text += f"; {headroom} of {units.size(most.limit_bytes)} left"
    return f"{who}: {shown(text)}"


def _ranks(snapshot: Snapshot, peaks: Sequence[RankPeak]) -> View:
    """A line for each rank: its peak, when that was, and what it was made of."""
    if not peaks:
        return View("")
    has_time = any(rank.duration_ns for rank in snapshot.ranks)
    has_held = any(peak.reserved_peak_bytes for peak in peaks)
    there = [at for at in ORDER if any(peak.parts[at].total for peak in peaks)]
    head = ["rank", "peak" if has_time else "in use", *(["in"] if has_time else [])]
    head += [*(CATEGORIES[at] for at in there), "guessed"]
    head += ["reserved", "unused", "left"] if has_held else []
    rows = []
    for peak in peaks:
        row = [
            str(peak.rank),
            units.size(peak.size_bytes),
            *([shown(when(peak))] if has_time else []),
        ]
        row += [*(units.size(peak.parts[at].total) for at in there), units.size(peak.guessed_bytes)]
        row += _allocator_cells(peak) if has_held else []
        rows.append(row)
    legend = ["guessed: bytes whose category is inferred"]
    if has_held:
        legend.append(
            "reserved: most held by the allocator; unused: held at the peak, but in no block; "
            "left: up to the device's limit"
        )
    # A GPU has an allocator of its own, and which categories there are differs from run to run.
    return measured(table(head, rows, after=legend))


def _allocator_cells(peak: RankPeak) -> list[str]:
    """Reserved, unused and left."""
    share = f" ({peak.unused_bytes / peak.reserved_bytes:.0%})" if peak.reserved_bytes else ""
    headroom = units.size(max(0, peak.headroom_bytes)) if peak.limit_bytes else "-"
    return [units.size(peak.reserved_peak_bytes), units.size(peak.unused_bytes) + share, headroom]


def _of(snapshot: Snapshot, peak: RankPeak) -> list[View]:
    """Tables of the rank that needs most, at its peak: categories, sites and owners."""
    has_time = any(rank.duration_ns for rank in snapshot.ranks)
    who = f"rank {peak.rank}{' at its peak' if has_time else ''}"
    return [_categories(peak, has_time=has_time), _sites(peak, who), _owners(peak, who)]


def _categories(peak: RankPeak, *, has_time: bool) -> View:
    """Bytes of each category. What is exact at the end is equal on every machine."""
    at = "at its peak" if has_time else "in use"
    head = ["category", at, "%", "guessed", *(["at the end", "exact"] if has_time else [])]
    rows = []
    for place in ORDER:
        part, at_end = peak.parts[place], peak.at_end[place]
        if not (part.total or at_end.total or is_stored()):
            continue
        share = shown(f"{100 * part.total / max(1, peak.size_bytes):.1f}")
        row = [CATEGORIES[place], units.size(part.total), share, units.size(part.guessed)]
        exact = (units.exact_size if place in _EQUAL else units.size)(at_end.exact)
        rows.append([*row, *([units.size(at_end.total), exact] if has_time else [])])
    title = f"rank {peak.rank}, by category"
    sizes = (units.size(peak.size_bytes), units.size(peak.end_bytes))
    total = f"total {sizes[0]} at the peak, {sizes[1]} at the end"
    return _folded(title, table(head, rows, after=[total] if has_time else []))


def _sites(peak: RankPeak, who: str) -> View:
    """The lines that allocated the most; which they are differs from run to run."""
    head = ["bytes", "%", "blocks", "category", "operator", "line", "via"]
    rows = [
        [
            units.size(site.size_bytes),
            f"{100 * site.size_bytes / max(1, peak.size_bytes):.1f}",
            str(site.count),
            CATEGORIES[site.category] + ("" if site.is_exact else "?"),
            one_line(site.operator) or "-",
            one_line(frame_text(site.line)),
            one_line(frame_text(site.via)),
        ]
        for site in peak.sites
    ]
    if not rows:
        return View("")
    legend = "?: guessed category; -: no known line (allocated before the recording)"
    return _folded(f"{who}, by allocating line", measured(table(head, rows, after=[legend])))


def _owners(peak: RankPeak, who: str) -> View:
    """Table of the owners of memory, by name."""
    head = ["owner", "category", "blocks", "bytes"]
    rows = [
        [
            one_line(owner.name),
            CATEGORIES[owner.category],
            str(owner.count),
            units.size(owner.size_bytes),
        ]
        for owner in peak.owners
    ]
    if not rows:
        return View("")
    return _folded(f"{who}, by owner", measured(table(head, rows)))


def _folded(title: str, rows: View) -> View:
    """A table below its title, which opens it in the HTML."""
    return View(f"{title}:\n{rows.text}", folded(title, rows.html))


def _notes(snapshot: Snapshot, peaks: Sequence[RankPeak]) -> Iterator[str]:
    """Notes on missing data, on failures, and on places where two counts differ."""
    for rank in snapshot.ranks:
        yield from _of_rank(rank)
    yield from shown_lines(line for peak in peaks for line in _counts(peak))
    yield from (one_line(note, 400) for note in snapshot.notes)


def _left_out(snapshot: Snapshot, level: Level) -> Iterator[str]:
    """How the picture differs from what was recorded."""
    if len(snapshot.ranks) > MOST_RANKS:
        yield f"The image shows the {MOST_RANKS} ranks that need the most."
    if level.merged:
        yield (
            f"The picture merges blocks smaller than {units.size(level.least_bytes)} "
            f"by category ({level.merged:,} of "
            f"{sum(len(rank.blocks) for rank in snapshot.ranks):,}), except the largest "
            "in use at the peaks."
        )


def _of_rank(rank: RankMemory) -> Iterator[str]:
    if rank.problem:
        yield f"rank {rank.rank}: {one_line(rank.problem, MOST_NAME)}"
    elif not len(rank.blocks):
        yield f"rank {rank.rank}: nothing was allocated"
    for failure in rank.failures[:MOST_FAILURES]:
        stack = rank.stacks[failure.stack] if failure.stack >= 0 else ()
        where = f" at {one_line(frame_text(stack[0]))}" if stack else ""
        free = f"; {units.size(failure.free_bytes)} were free" if failure.free_bytes >= 0 else ""
        yield (
            f"rank {rank.rank}: out of memory {units.duration(failure.time_ns)} after the "
            f"start, {units.size(failure.size_bytes)} requested{where}{free}"
        )
    if len(rank.failures) > MOST_FAILURES:
        yield f"rank {rank.rank}: {len(rank.failures) - MOST_FAILURES} more allocations failed"
    if rank.lost:
        yield (
            f"rank {rank.rank}: the oldest {shown(f'{rank.lost:,}')} events did not fit into the "
            "history; blocks allocated in them have no line and no start (--most-events N keeps "
            "more)"
        )


def _counts(peak: RankPeak) -> Iterator[str]:
    """The allocator's own numbers where they say something else."""
    more = peak.allocator_bytes - peak.size_bytes
    if peak.allocator_bytes and abs(more) > 0.01 * peak.allocator_bytes:
        yield (
            f"rank {peak.rank}: the allocator counted {units.size(peak.allocator_bytes)} at its "
            f"peak, the recorded blocks add up to {units.size(peak.size_bytes)}: "
            + ("lost events, or rounding" if more > 0 else "its peak was before the recording")
        )
    if peak.segment_bytes:
        share = peak.free_bytes / peak.segment_bytes
        yield (
            f"rank {peak.rank}: at the end the allocator's segments hold "
            f"{units.size(peak.segment_bytes)}, of which {units.size(peak.free_bytes)} "
            f"({share:.0%}) are free, at most {units.size(peak.largest_free_bytes)} in one segment"
        )
