"""Memory that was recorded as text with its numbers, and as a picture."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from nbdist.core import finding, units
from nbdist.core.failures import ranks_phrase
from nbdist.core.finding import Finding
from nbdist.core.units import PLACEHOLDER, is_stored, one_line, shown
from nbdist.core.view import View, lines, table
from nbdist.memory.call_site import written
from nbdist.memory.downsample import Level
from nbdist.memory.peak import RankPeak, Site, when, worst
from nbdist.memory.snapshot import (
    BUFFER,
    CATEGORIES,
    GRADIENT,
    OPTIMIZER,
    PARAMETER,
    RankMemory,
    Snapshot,
)
from nbdist.memory.view.colours import ORDER
from nbdist.memory.view.image import MOST_RANKS, png
from nbdist.memory.view.page import height_px, packed, page
from nbdist.recording.view.iframe import MOST_BYTES, MOST_NAME

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
    """What %dist_memory shows: memory over time, the peak of each rank, and what it is made of.

    The text has every number. The HTML has the picture above the same numbers and asks nothing of
    the network; the whole stays below 2 MB for any snapshot. Where outputs are stored and compared
    there is no HTML, and of the numbers only those that are equal on every machine.
    """
    # Which rank needs most differs from run to run where they need about the same.
    most = peaks[0] if peaks and is_stored() else worst(peaks)
    parts = [
        lines(_head(snapshot, most)),
        lines(
            finding.report(
                findings,
                order="the largest first",
                none="no rule found memory that need not be used",
            )
        ),
        _ranks(snapshot, peaks),
        *([] if most is None else _of(snapshot, most)),
        lines(_notes(snapshot, peaks)),
    ]
    image, live = png(snapshot, peaks), ""
    if not is_stored():
        room = min(MOST_BYTES, _ROOM - 8 * len(image) // 3)
        level, data = packed(snapshot, peaks, room)
        parts.append(lines(_left_out(snapshot, level)))
        below = "".join(part.html for part in parts if part.text)
        live = _live(image, data, snapshot) + _SIZE.sub(r"\1&nbsp;\2", below)
    return View("\n\n".join(part.text for part in parts if part.text), live, png=image)


def _live(image: bytes, data: str, snapshot: Snapshot) -> str:
    """The picture over its image."""
    head = next(_head(snapshot, None))
    alt = f"Memory over time: {head}. The numbers stand below it."
    return page(image, alt, data, height_px(snapshot))


def _head(snapshot: Snapshot, most: RankPeak | None) -> Iterator[str]:
    ranks = [rank.rank for rank in snapshot.ranks]
    told = [f"memory of {ranks_phrase(ranks) if ranks else 'no ranks'}"]
    told += [snapshot.strategy] if snapshot.strategy else []
    took_ns = max((rank.duration_ns for rank in snapshot.ranks), default=0)
    if took_ns:
        counts = sorted({len(rank.step_ends_ns) for rank in snapshot.ranks})
        steps = "-".join(str(count) for count in sorted({counts[0], counts[-1]}))
        told.append(
            "no steps" if steps == "0" else f"{steps} {'step' if steps == '1' else 'steps'}"
        )
        told.append(units.duration(took_ns))
    else:
        told.append("at one moment")
    yield ", ".join(one_line(one) for one in told)
    if most is not None:
        yield _most(most, len(ranks))


def _most(most: RankPeak, n_ranks: int) -> str:
    """Which rank needs most, when, and what is left."""
    who = f"rank {shown(most.rank)} has" + (" the most in use" if n_ranks > 1 else " in use")
    if is_stored():
        return f"{who}: {PLACEHOLDER}"
    told = f"{who}: {units.size(most.size_bytes)}"
    if most.phase:
        told += f" {units.duration(most.time_ns)} after the beginning, in {when(most)}"
    if most.reserved_peak_bytes:
        told += f"; its allocator holds {units.size(most.reserved_peak_bytes)}"
    if most.limit_bytes:
        left = units.size(max(0, most.headroom_bytes))
        told += f"; of {units.size(most.limit_bytes)} {left} are left"
    return told


def _ranks(snapshot: Snapshot, found: Sequence[RankPeak]) -> View:
    """A line for each rank: its peak, when that was, and what it was made of."""
    if not found:
        return View("")
    has_time = any(rank.duration_ns for rank in snapshot.ranks)
    has_held = any(one.reserved_peak_bytes for one in found)
    there = [at for at in ORDER if is_stored() or any(one.parts[at].total for one in found)]
    head = ["rank", "peak" if has_time else "in use", *(["in"] if has_time else [])]
    head += [*(CATEGORIES[at] for at in there), "guessed"]
    head += ["reserved", "unused", "left"] if has_held else []
    rows = []
    for one in found:
        row = [str(one.rank), units.size(one.size_bytes), *([shown(when(one))] if has_time else [])]
        row += [*(units.size(one.parts[at].total) for at in there), units.size(one.guessed_bytes)]
        row += _held(one) if has_held else []
        rows.append(row)
    legend = ["guessed: bytes whose category is concluded, not read off an owner"]
    if has_held:
        legend.append(
            "reserved: the most that the allocator held; unused: what it held at the peak and was "
            "in no block; left: to the device's limit"
        )
    return table(head, rows, after=legend)


def _held(one: RankPeak) -> list[str]:
    """Reserved, unused and left."""
    share = f" ({one.unused_bytes / one.reserved_bytes:.0%})" if one.reserved_bytes else ""
    left = units.size(max(0, one.headroom_bytes)) if one.limit_bytes else "-"
    unused = units.size(one.unused_bytes) + shown(share).replace(PLACEHOLDER, "")
    return [units.size(one.reserved_peak_bytes), unused, shown(left)]


def _of(snapshot: Snapshot, one: RankPeak) -> list[View]:
    """What the rank that needs most has at its peak and at the end."""
    has_time = any(rank.duration_ns for rank in snapshot.ranks)
    who = f"rank {one.rank}{' at its peak' if has_time else ''}"
    return [_categories(one, has_time=has_time), _sites(one, who), _owners(one, who)]


def _categories(one: RankPeak, *, has_time: bool) -> View:
    """Bytes of each category. What is exact at the end is equal on every machine."""
    at = "at its peak" if has_time else "in use"
    head = ["category", at, "%", "guessed", *(["at the end", "exact"] if has_time else [])]
    rows = []
    for place in ORDER:
        part, held = one.parts[place], one.held[place]
        if not (part.total or held.total or is_stored()):
            continue
        share = shown(f"{100 * part.total / max(1, one.size_bytes):.1f}")
        row = [CATEGORIES[place], units.size(part.total), share, units.size(part.guessed)]
        is_equal = not is_stored() or place in _EQUAL
        exact = units.exact_size(held.exact) if is_equal else PLACEHOLDER
        rows.append([*row, *([units.size(held.total), exact] if has_time else [])])
    title = f"rank {one.rank}, by what memory is for:"
    return table(head, rows, before=[title], after=[_sum(one)] if has_time else [])


def _sum(one: RankPeak) -> str:
    total = f"together {units.size(one.size_bytes)}"
    return f"{total} at the peak, {units.size(one.held_bytes)} at the end"


def _sites(one: RankPeak, who: str) -> View:
    """The lines that allocated the most; which they are differs from run to run."""
    head = ["bytes", "%", "blocks", "category", "operator", "line", "via"]
    rows = [_site(one, site) for site in one.sites]
    if not rows:
        return View("")
    if is_stored():
        rows = [[PLACEHOLDER] * len(head)]
    title = f"{who}, by the lines that allocated it:"
    legend = "?: the category is guessed; -: no line is known (allocated before the recording)"
    return table(head, rows, before=[title], after=[legend])


def _site(one: RankPeak, site: Site) -> list[str]:
    return [
        units.size(site.size_bytes),
        f"{100 * site.size_bytes / max(1, one.size_bytes):.1f}",
        str(site.count),
        CATEGORIES[site.category] + ("" if site.is_exact else "?"),
        one_line(site.operator) or "-",
        one_line(written(site.own)),
        one_line(written(site.via)),
    ]


def _owners(one: RankPeak, who: str) -> View:
    """Whose memory it is, by name."""
    head = ["owner", "category", "blocks", "bytes"]
    rows = [
        [
            one_line(owner.name),
            CATEGORIES[owner.category],
            str(owner.count),
            units.size(owner.size_bytes),
        ]
        for owner in one.owners
    ]
    if not rows:
        return View("")
    if is_stored():
        rows = [[PLACEHOLDER] * len(head)]
    return table(head, rows, before=[f"{who}, by owner:"])


def _notes(snapshot: Snapshot, found: Sequence[RankPeak]) -> Iterator[str]:
    """What is missing, what failed, and where two counts differ."""
    for rank in snapshot.ranks:
        yield from _of_rank(rank)
    if not is_stored():
        for one in found:
            yield from _counts(one)
    yield from (one_line(note, 400) for note in snapshot.notes)


def _left_out(snapshot: Snapshot, level: Level) -> Iterator[str]:
    """How the picture differs from what was recorded."""
    if len(snapshot.ranks) > MOST_RANKS:
        yield f"The image shows the {MOST_RANKS} ranks that need most."
    if level.merged:
        yield (
            f"In the picture blocks smaller than {units.size(level.least_bytes)} are merged "
            f"with the others of their category ({level.merged:,} of "
            f"{sum(len(rank.blocks) for rank in snapshot.ranks):,}), but for the largest of "
            "those in use at the peaks."
        )


def _of_rank(rank: RankMemory) -> Iterator[str]:
    if rank.problem:
        yield f"rank {rank.rank}: {one_line(rank.problem, MOST_NAME)}"
    elif not len(rank.blocks):
        yield f"rank {rank.rank}: nothing was allocated"
    for failure in rank.failures[:MOST_FAILURES]:
        stack = rank.stacks[failure.stack] if failure.stack >= 0 else ()
        where = f" at {one_line(written(stack[0]))}" if stack else ""
        free = f"; {units.size(failure.free_bytes)} were free" if failure.free_bytes >= 0 else ""
        yield (
            f"rank {rank.rank}: out of memory {units.duration(failure.time_ns)} after the "
            f"beginning, {units.size(failure.size_bytes)} were asked for{where}{free}"
        )
    if len(rank.failures) > MOST_FAILURES:
        yield f"rank {rank.rank}: and {len(rank.failures) - MOST_FAILURES} more that failed"
    if rank.lost:
        yield (
            f"rank {rank.rank}: the oldest {shown(f'{rank.lost:,}')} events no longer fitted the "
            "history; what was allocated in them has no line and no beginning (--most-events N "
            "keeps more)"
        )


def _counts(one: RankPeak) -> Iterator[str]:
    """The allocator's own numbers where they say something else."""
    more = one.allocator_bytes - one.size_bytes
    if one.allocator_bytes and abs(more) > 0.01 * one.allocator_bytes:
        yield (
            f"rank {one.rank}: the allocator counts {units.size(one.allocator_bytes)} at its "
            f"peak, the blocks of the history make {units.size(one.size_bytes)}: "
            + ("what the history lost or rounding" if more > 0 else "the peak was before it began")
        )
    if one.segment_bytes:
        share = one.free_bytes / one.segment_bytes
        yield (
            f"rank {one.rank}: at the end {units.size(one.segment_bytes)} are in the allocator's "
            f"segments, {units.size(one.free_bytes)} of it free ({share:.0%}), at most "
            f"{units.size(one.largest_free_bytes)} in one segment"
        )
