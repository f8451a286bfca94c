"""Blocks of a history: each allocation with the free that ended it, whatever was not seen."""

from __future__ import annotations

import random

import numpy as np
import pytest

from nbdist.memory.blocks import NOWHERE, Event, pair_events
from nbdist.memory.snapshot import BEFORE, STAYS

Rows = list[tuple[int, int, int, int]]


def rows(
    before: list[tuple[int, int]],
    events: list[Event],
    most_events: int = 100,
    gone_ns: dict[int, int] | None = None,
) -> tuple[Rows, int]:
    """(address, bytes, start, end) of each block, and what was lost."""
    blocks, lost = pair_events(before, events, most_events, gone_ns)
    columns = (blocks.address, blocks.size_bytes, blocks.start_ns, blocks.end_ns)
    return [tuple(map(int, row)) for row in zip(*columns, strict=True)], lost  # type: ignore[misc]


def test_an_allocation_ends_with_its_free_or_stays() -> None:
    """Its stack and operator are its own."""
    events = [Event(5, 100, 8, 3, 4), Event(6, 200, 16), Event(9, 100, -8)]

    assert rows([], events) == ([(100, 8, 5, 9), (200, 16, 6, STAYS)], 0)
    blocks, _ = pair_events([], events, 100)
    assert (blocks.stack.tolist(), blocks.operator.tolist()) == ([3, -1], [4, -1])


def test_what_was_there_before_can_be_freed() -> None:
    """A free of what nobody saw is left out."""
    events = [Event(2, 100, -8), Event(3, 999, -8)]

    assert rows([(100, 8), (300, 4)], events)[0] == [
        (100, 8, BEFORE, 2), (300, 4, BEFORE, STAYS),
    ]  # fmt: skip


def test_a_second_allocation_at_an_address_ends_the_first() -> None:
    """Its free was made where nobody looks, as by another thread."""
    assert rows([(100, 8)], [Event(4, 100, 16), Event(7, 100, 24)])[0] == [
        (100, 8, BEFORE, 4), (100, 16, 4, 7), (100, 24, 7, STAYS),
    ]  # fmt: skip


def test_blocks_without_an_address_end_by_their_size() -> None:
    """The first of two alike; one of another size stays."""
    blocks = rows([(NOWHERE, 8), (NOWHERE, 8), (NOWHERE, 16)], [Event(4, 500, -8)])[0]

    assert blocks == [
        (NOWHERE, 8, BEFORE, 4), (NOWHERE, 8, BEFORE, STAYS), (NOWHERE, 16, BEFORE, STAYS),
    ]  # fmt: skip


def test_what_was_there_ends_when_it_was_seen_to_go() -> None:
    """By what was noted, or by the next allocation at its address, whichever is first."""
    events = [Event(50, 1, 7), Event(60, 2, 9), Event(70, 2, -9)]

    assert rows([(1, 10), (2, 20), (3, 30)], events, 100, {1: 40, 2: 65})[0] == [
        (1, 10, BEFORE, 40),
        (2, 20, BEFORE, 60),  # noted later than it was allocated anew: the clocks differ
        (3, 30, BEFORE, STAYS), (1, 7, 50, STAYS), (2, 9, 60, 70),
    ]  # fmt: skip


def test_what_goes_after_the_bound_is_kept() -> None:
    """Of the oldest events only what is still there counts, and what goes later still is."""
    events = [Event(10, 5, 1), Event(20, 6, 1), Event(30, 6, -1)]

    assert rows([(1, 10), (2, 20)], events, 1, {1: 15, 2: 25}) == (
        [(2, 20, BEFORE, 25), (5, 1, BEFORE, STAYS), (6, 1, BEFORE, 30)], 2,
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(30))
def test_bytes_in_use_are_those_of_a_simulated_allocator(seed: int) -> None:
    """After each event that is kept, with any bound."""
    draw = random.Random(seed)
    before = {address: draw.randint(1, 50) for address in range(draw.randint(0, 5))}
    heap, events, in_use = dict(before), [], []
    for now in range(1, 60):
        if heap and draw.random() < 0.45:
            address = draw.choice(sorted(heap))
            events.append(Event(now, address, -heap.pop(address)))
        else:
            address = draw.choice([place for place in range(100) if place not in heap])
            heap[address] = draw.randint(1, 50)
            events.append(Event(now, address, heap[address]))
        in_use.append((now, dict(heap)))
    bound = draw.randint(1, 70)
    blocks, lost = pair_events(list(before.items()), events, bound)

    assert lost == max(0, len(events) - bound)
    assert bool((np.diff(blocks.start_ns) >= 0).all())
    for now, there in in_use[lost:]:
        is_there = (blocks.start_ns <= now) & (blocks.end_ns > now)
        addresses, sizes = blocks.address[is_there].tolist(), blocks.size_bytes[is_there].tolist()
        drawn = dict(zip(addresses, sizes, strict=True))
        assert drawn == there
