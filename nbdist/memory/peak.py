"""When each rank had the most in use: for what, from which lines, and whose."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from nbdist.memory.call_site import innermost_library, innermost_own
from nbdist.memory.snapshot import (
    CATEGORIES,
    FORWARD,
    STAYS,
    AllocationFrame,
    Blocks,
    Integers,
    RankMemory,
    Snapshot,
)
from nbdist.memory.timeline import Truths, codes, is_in_use, peak_ns, reserved_at

# Rows of places and of owners.
MOST_SITES = 12
MOST_OWNERS = 10
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)")
# An optimizer's state of a parameter: `0.weight: exp_avg`.
_STATE = re.compile(r": \w+$")


@dataclass(frozen=True, slots=True)
class Bytes:
    """Bytes of one category.

    Attributes:
        exact: Read off the object that owns them.
        guessed: Inferred from when and where the blocks came and went.
    """

    exact: int
    guessed: int

    @property
    def total(self) -> int:
        """The category's bytes, exact and guessed together."""
        return self.exact + self.guessed


@dataclass(frozen=True, slots=True)
class Site:
    """Blocks in use that one line of the program allocated.

    Attributes:
        category: Place in CATEGORIES.
        is_exact: Whether that was read off an owner.
        operator: The operator that allocated it; empty where it is not known.
        line: The user's innermost line; None where there is none.
        via: The library's innermost line.
    """

    category: int
    is_exact: bool
    operator: str
    line: AllocationFrame | None
    via: AllocationFrame | None
    count: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class PeakOwner:
    """Blocks in use under one name, at a peak.

    Attributes:
        name: Of the layers that differ in their number alone, with `*` for it; of all that an
            optimizer keeps of a parameter.
        category: Place in CATEGORIES.
    """

    name: str
    category: int
    count: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class RankPeak:
    """When a rank had the most in use.

    Attributes:
        time_ns: The first such moment.
        phase: "forward", "backward", "optimizer"; empty for a snapshot of one moment.
        step: The step that was under way, from 0; -1 after the last one, or without steps.
        size_bytes: In use.
        parts: Of each of CATEGORIES.
        at_end: The same at the end of the recording.
        sites: The lines that allocated the most of it, the most first.
        owners: The owners of the most of it, the most first.
        allocator_bytes: The allocator's own peak; 0 where it does not count.
        reserved_bytes: The allocator's memory at that moment; 0 where it is not known.
        reserved_peak_bytes: The most that it held.
        reserved_end_bytes: The allocator's memory at the end.
        segment_bytes, free_bytes: Of the segments at the end: all, and what of it was not in use.
        largest_free_bytes: The largest free part of one of them; one hole or several.
        limit_bytes: The device's memory; 0 where it is not known.
    """

    rank: int
    time_ns: int
    phase: str
    step: int
    size_bytes: int
    parts: tuple[Bytes, ...]
    at_end: tuple[Bytes, ...]
    sites: tuple[Site, ...]
    owners: tuple[PeakOwner, ...]
    allocator_bytes: int
    reserved_bytes: int
    reserved_peak_bytes: int
    reserved_end_bytes: int
    segment_bytes: int
    free_bytes: int
    largest_free_bytes: int
    limit_bytes: int

    @property
    def unused_bytes(self) -> int:
        """Held by the allocator at the peak, and not in use then."""
        return max(0, self.reserved_bytes - self.size_bytes)

    @property
    def guessed_bytes(self) -> int:
        """Bytes at the peak whose category is inferred."""
        return sum(part.guessed for part in self.parts)

    @property
    def need_bytes(self) -> int:
        """The bytes that the device needs: the most that the allocator held, or that was in use."""
        return max(self.size_bytes, self.allocator_bytes, self.reserved_peak_bytes)

    @property
    def headroom_bytes(self) -> int:
        """Bytes left to the device's limit; of use where there is one."""
        return self.limit_bytes - self.need_bytes

    @property
    def end_bytes(self) -> int:
        """In use at the end of the recording."""
        return sum(part.total for part in self.at_end)


def peaks(snapshot: Snapshot) -> tuple[RankPeak, ...]:
    """Return the peak of every rank that has blocks, in rank order."""
    return tuple(_peak(rank) for rank in snapshot.ranks if len(rank.blocks))


def worst(peaks: Sequence[RankPeak]) -> RankPeak | None:
    """The rank that needs most, the first of equals."""
    return max(peaks, key=lambda peak: peak.size_bytes, default=None)


def when(peak: RankPeak) -> str:
    """`backward of step 3`; empty for a snapshot of one moment."""
    step = f" of step {peak.step}" if peak.phase and peak.step >= 0 else ""
    return f"{peak.phase}{step}"


def _peak(rank: RankMemory) -> RankPeak:
    time_ns = peak_ns(rank.blocks)
    there = is_in_use(rank.blocks, time_ns)
    steps_done = int(np.searchsorted(np.array(rank.step_ends_ns), time_ns, side="right"))
    in_segments = sum(segment.size_bytes for segment in rank.segments)
    return RankPeak(
        rank=rank.rank,
        time_ns=time_ns,
        phase=_phase(rank, time_ns),
        step=steps_done if steps_done < len(rank.step_ends_ns) else -1,
        size_bytes=int(rank.blocks.size_bytes[there].sum()),
        parts=_parts(rank.blocks, there),
        at_end=_parts(rank.blocks, rank.blocks.end_ns == STAYS),
        sites=sites(rank, there),
        owners=_owners(rank, there),
        allocator_bytes=rank.allocator_peak_bytes,
        reserved_bytes=reserved_at(rank.reserved, time_ns),
        reserved_peak_bytes=max(
            rank.reserved_peak_bytes, int(rank.reserved.size_bytes.max(initial=0))
        ),
        reserved_end_bytes=int(rank.reserved.size_bytes[-1]) if len(rank.reserved.time_ns) else 0,
        segment_bytes=in_segments,
        free_bytes=in_segments - sum(segment.allocated_bytes for segment in rank.segments),
        largest_free_bytes=max(
            (segment.size_bytes - segment.allocated_bytes for segment in rank.segments), default=0
        ),
        limit_bytes=rank.limit_bytes,
    )


def _phase(rank: RankMemory, time_ns: int) -> str:
    """The name of the phase at a moment; empty without a history."""
    if not rank.duration_ns:
        return ""
    under_way = (p.kind for p in rank.phases if p.start_ns <= time_ns < p.end_ns)
    return next(under_way, FORWARD)


def _parts(blocks: Blocks, chosen: Truths) -> tuple[Bytes, ...]:
    """Bytes of the chosen blocks, of each of CATEGORIES."""
    sums = [0] * (2 * len(CATEGORIES))
    code, size_bytes = codes(blocks)[chosen], blocks.size_bytes[chosen]
    for number in np.unique(code):  # bincount would add as floats
        sums[number] = int(size_bytes[code == number].sum())
    return tuple(Bytes(sums[2 * at + 1], sums[2 * at]) for at in range(len(CATEGORIES)))


def sites(rank: RankMemory, chosen: Truths, most: int = MOST_SITES) -> tuple[Site, ...]:
    """Sites at which the chosen blocks were allocated, the most bytes first."""
    blocks, places = rank.blocks, np.flatnonzero(chosen)
    key = np.stack([codes(blocks)[places], blocks.operator[places], blocks.stack[places]])
    sums_by_site: dict[
        tuple[int, bool, str, AllocationFrame | None, AllocationFrame | None], list[int]
    ] = {}
    for (code, operator, stack), count, size_bytes in _group(key, blocks.size_bytes[places]):
        frames = rank.stacks[stack] if stack >= 0 else ()
        line, via = innermost_own(frames), innermost_library(frames)
        name = rank.names[operator] if operator >= 0 else ""
        sums = sums_by_site.setdefault((code // 2, bool(code % 2), name, line, via), [0, 0])
        sums[0] += count
        sums[1] += size_bytes
    every = (Site(*what, count, size_bytes) for what, (count, size_bytes) in sums_by_site.items())
    return tuple(sorted(every, key=lambda site: -site.size_bytes)[:most])


def _owners(rank: RankMemory, chosen: Truths) -> tuple[PeakOwner, ...]:
    """The owners of the chosen blocks that have a name, the most bytes first."""
    blocks = rank.blocks
    places = np.flatnonzero(chosen & (blocks.name >= 0))
    key = np.stack([blocks.category[places].astype(np.int64), blocks.name[places]])
    alike_by_title: dict[tuple[str, int], dict[str, list[int]]] = {}
    for (category, number), count, size_bytes in _group(key, blocks.size_bytes[places]):
        name = rank.names[number]
        title = _NUMBER.sub("*", _STATE.sub("", name))
        alike = alike_by_title.setdefault((title, category), {})
        sums = alike.setdefault(name, [0, 0])
        sums[0] += count
        sums[1] += size_bytes
    owners = []
    for (title, category), alike in alike_by_title.items():
        first, *more = alike
        whole_names = {_STATE.sub("", name) for name in alike}
        # The one name; without the state's where there are several of them.
        name = title if len(whole_names) > 1 else whole_names.pop() if more else first
        counts, sizes = zip(*alike.values(), strict=True)
        owners.append(PeakOwner(name, category, sum(counts), sum(sizes)))
    return tuple(sorted(owners, key=lambda owner: -owner.size_bytes)[:MOST_OWNERS])


def _group(key: Integers, size_bytes: Integers) -> Iterator[tuple[tuple[int, ...], int, int]]:
    """(key, count, bytes) of each key, in order; `key` has a column for each size."""
    if not len(size_bytes):
        return
    order = np.lexsort(key[::-1])
    sorted_key = key[:, order]
    firsts = np.concatenate([[0], np.flatnonzero(np.diff(sorted_key).any(axis=0)) + 1])
    counts = np.diff(firsts, append=len(order))
    sums = np.add.reduceat(size_bytes[order], firsts)
    for column, count, size in zip(sorted_key[:, firsts].T, counts, sums, strict=True):
        yield tuple(map(int, column)), int(count), int(size)
