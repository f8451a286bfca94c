"""Memory written as torch's dict of a snapshot, for torch's viewers; see memory.torch_reader.

They show what the records have: events in order, colours by category, and the segments at the end.
A CPU has none, so each block that is alive gets one of its own. https://pytorch.org/memory_viz
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from nbdist.memory import own_format
from nbdist.memory.snapshot import BEFORE, CATEGORIES, STAYS, Blocks, RankMemory, Segment

US = 1000


def to_torch(memory: RankMemory) -> dict[str, Any]:
    """The dict that torch's viewers read, and `of_torch` without loss.

    It is made of dicts, lists, texts and whole numbers. Times are microseconds since the
    recording began; device 0 is the rank's own.
    """
    stacks = own_format.frames(memory.stacks)
    placed = replace(memory, blocks=_with_addresses(memory.blocks))
    return {
        "segments": _segments(placed, stacks),
        "device_traces": [_trace(placed, stacks)],
        own_format.OURS: own_format.pack(memory, stacks),
    }


def _with_addresses(blocks: Blocks) -> Blocks:
    """With an address for blocks of which only the size is known: behind all others."""
    unknown = np.flatnonzero(blocks.address < 0)
    if not len(unknown):
        return blocks
    address = blocks.address.copy()
    sizes = blocks.size_bytes[unknown]
    begin = int((blocks.address + blocks.size_bytes).max())
    address[unknown] = begin + np.cumsum(sizes) - sizes
    return replace(blocks, address=address)


def _frames(stacks: Sequence[Any], place: int) -> Any:
    return stacks[place] if place >= 0 else []


def _trace(memory: RankMemory, stacks: Sequence[Any]) -> list[dict[str, Any]]:
    """The history, oldest first."""
    # The viewer gives colours in the order in which categories first come: the same for all ranks
    # so. It also fails where there are categories and no event has "unknown" (torch 2.13).
    events = [
        {"action": "snapshot", "addr": 0, "size": 0, "stream": 0, "time_us": 0, "frames": [],
         "category": category}
        for category in CATEGORIES
    ]  # fmt: skip
    blocks = memory.blocks
    address, size = blocks.address.tolist(), blocks.size_bytes.tolist()
    category, stack = blocks.category.tolist(), blocks.stack.tolist()
    failures = list(memory.failures)
    for time_ns, place, is_free in _changes(memory):
        while failures and failures[0].time_ns <= time_ns:
            events.append(_oom_event(failures.pop(0), stacks))
        event = {
            "action": "free_requested" if is_free else "alloc",
            "addr": address[place],
            "size": size[place],
            "stream": 0,
            "time_us": time_ns // US,
            "frames": _frames(stacks, stack[place]),
            "category": CATEGORIES[category[place]],
        }
        events.append(event)
        if is_free:
            events.append({**event, "action": "free_completed"})
    return events + [_oom_event(failure, stacks) for failure in failures]


def _changes(memory: RankMemory) -> Iterator[tuple[int, int, bool]]:
    """(when, block, whether it is freed) in an order in which no address is in use twice.

    At one moment what was there before is freed first; then what is made follows in its order,
    and is freed at once where it ends in the same moment. What was there all the time is made at
    the beginning: the viewer takes colours from events alone.
    """
    is_all_along = (memory.blocks.start_ns == BEFORE) & (memory.blocks.end_ns == STAYS)
    start = np.where(is_all_along, 0, memory.blocks.start_ns)
    end = memory.blocks.end_ns
    allocated, freed = np.flatnonzero(start != BEFORE), np.flatnonzero(end != STAYS)
    time = np.concatenate([start[allocated], end[freed]])
    place = np.concatenate([allocated, freed])
    is_free = np.arange(len(time)) >= len(allocated)
    is_old = is_free & (start[place] < time)
    order = np.lexsort((is_free, np.where(is_old, 0, place), ~is_old, time))
    return zip(time[order].tolist(), place[order].tolist(), is_free[order].tolist(), strict=True)


def _oom_event(failure: Any, stacks: Sequence[Any]) -> dict[str, Any]:
    return {
        "action": "oom",
        "size": int(failure.size_bytes),
        "device_free": max(int(failure.free_bytes), 0),
        "stream": 0,
        "time_us": int(failure.time_ns) // US,
        "frames": _frames(stacks, failure.stack),
    }


def _segments(memory: RankMemory, stacks: Sequence[Any]) -> list[dict[str, Any]]:
    """The allocator's segments with their blocks, and one for each block outside of them."""
    blocks = memory.blocks
    alive = np.flatnonzero(blocks.end_ns == STAYS)
    alive = alive[np.argsort(blocks.address[alive], kind="stable")]
    starts = blocks.address[alive]
    ends = starts + blocks.size_bytes[alive]
    is_placed = np.zeros(len(alive), bool)
    segments = []
    for segment in sorted(memory.segments, key=lambda segment: segment.address):
        first, last = np.searchsorted(
            starts, (segment.address, segment.address + segment.size_bytes)
        )
        inside_places = []
        free_from, end = segment.address, segment.address + segment.size_bytes
        for number in range(first, last):
            if not is_placed[number] and free_from <= starts[number] and ends[number] <= end:
                inside_places.append(int(alive[number]))
                is_placed[number] = True
                free_from = int(ends[number])
        segments.append(_segment(memory, stacks, segment, inside_places))
    for place in alive[~is_placed].tolist():
        size = int(blocks.size_bytes[place])
        single = Segment(int(blocks.address[place]), size, size, 0, "large")
        segments.append(_segment(memory, stacks, single, [place]))
    return segments


def _segment(
    memory: RankMemory, stacks: Sequence[Any], segment: Segment, places: Sequence[int]
) -> dict[str, Any]:
    blocks: list[dict[str, Any]] = []
    at, end = int(segment.address), int(segment.address) + int(segment.size_bytes)
    for place in places:
        begin, size = int(memory.blocks.address[place]), int(memory.blocks.size_bytes[place])
        if begin > at:
            blocks.append(_gap(at, begin - at))
        blocks.append(
            {
                "address": begin,
                "size": size,
                "requested_size": size,
                "state": "active_allocated",
                "frames": _frames(stacks, int(memory.blocks.stack[place])),
                "category": CATEGORIES[memory.blocks.category[place]],
            }
        )
        at = begin + size
    if at < end or not blocks:
        blocks.append(_gap(at, end - at))
    used = sum(block["requested_size"] for block in blocks)
    return {
        "device": 0,
        "address": int(segment.address),
        "total_size": int(segment.size_bytes),
        "allocated_size": used,
        "active_size": used,
        "requested_size": used,
        "stream": int(segment.stream),
        "segment_type": "small" if segment.kind == "small" else "large",
        "is_expandable": int(segment.kind == "expandable"),
        "frames": [],
        "blocks": blocks,
    }


def _gap(address: int, size: int) -> dict[str, Any]:
    return {
        "address": address, "size": size, "requested_size": 0, "state": "inactive", "frames": [],
    }  # fmt: skip
