"""Tests of how memory ends that was there before a recording."""

from dataclasses import replace

import pytest

from nbdist.memory.blocks import NOWHERE, Event, pair_events
from nbdist.memory.categories import Claim, categorise
from nbdist.memory.snapshot import BEFORE, COMMUNICATION, STAYS, empty


def rows(blocks: object) -> list[tuple[int, int, int, int]]:
    """(address, bytes, start, end) of each."""
    names = ("address", "size_bytes", "start_ns", "end_ns")
    return list(zip(*(getattr(blocks, name).tolist() for name in names), strict=True))


def test_what_was_there_ends_when_it_was_seen_to_go() -> None:
    """By what was noted, or by the next allocation at its address, whichever is first."""
    events = [Event(50, 1, 7), Event(60, 2, 9), Event(70, 2, -9)]
    blocks, _ = pair_events([(1, 10), (2, 20), (3, 30)], events, 100, {1: 40, 2: 65})

    assert rows(blocks) == [
        (1, 10, BEFORE, 40),
        (2, 20, BEFORE, 60),  # noted later than it was allocated anew: the clocks differ
        (3, 30, BEFORE, STAYS),
        (1, 7, 50, STAYS),
        (2, 9, 60, 70),
    ]


def test_what_goes_after_the_bound_is_kept() -> None:
    """Of the oldest events only what is still there counts, and what goes later still is."""
    events = [Event(10, 5, 1), Event(20, 6, 1), Event(30, 6, -1)]
    blocks, lost = pair_events([(1, 10), (2, 20)], events, 1, {1: 15, 2: 25})

    assert lost == 2
    assert rows(blocks) == [(2, 20, BEFORE, 25), (5, 1, BEFORE, STAYS), (6, 1, BEFORE, 30)]


def claimed(time_ns: int, *sizes: int) -> list[Claim]:
    """What DDP says of its buckets."""
    return [Claim(time_ns, NOWHERE, size, COMMUNICATION, f"bucket {size}") for size in sizes]


@pytest.mark.parametrize(("new", "end_ns"), [((10, 20), 50), ((10, 21), STAYS)])
def test_buckets_go_when_as_many_bytes_come_in_their_place(
    new: tuple[int, int], end_ns: int
) -> None:
    """DDP still tells of the old one; other bytes that are sent replace nothing."""
    events = [Event(50, 5, new[0]), Event(55, 6, new[1]), Event(60, 7, 4), Event(61, 7, -4)]
    blocks, _ = pair_events([(NOWHERE, 30)], events, 100)
    blocks = replace(blocks, operator=blocks.operator * 0)
    memory = replace(empty(0, "a", ""), blocks=blocks, duration_ns=100, names=("c10d::broadcast_",))
    result = categorise(memory, [*claimed(0, 30), *claimed(90, 30)]).blocks

    assert rows(result)[0] == (NOWHERE, 30, BEFORE, end_ns)


def test_buckets_that_were_made_anew_before_stay() -> None:
    """DDP tells of them only while they are used: other sizes, and nothing was allocated."""
    blocks, _ = pair_events([(NOWHERE, 30)], [Event(50, 5, 4)], 100)
    memory = replace(empty(0, "a", ""), blocks=blocks, duration_ns=100)
    result = categorise(memory, [*claimed(0, 30), *claimed(90, 10, 20)]).blocks

    assert rows(result)[0] == (NOWHERE, 30, BEFORE, STAYS)


def test_buckets_go_when_their_successors_come() -> None:
    """Only the sizes of DDP's buckets are known: of 30 at first, of 10 and 20 in the end."""
    events = [Event(50, 5, 10), Event(55, 6, 20)]
    blocks, _ = pair_events([(NOWHERE, 30), (NOWHERE, 8)], events, 100)
    blocks = replace(blocks, operator=blocks.operator * 0)
    memory = replace(empty(0, "a", ""), blocks=blocks, duration_ns=100, names=("c10d::broadcast_",))
    result = categorise(memory, [*claimed(0, 30, 8), *claimed(90, 10, 20, 8)]).blocks

    assert sorted(rows(result)) == [
        (NOWHERE, 8, BEFORE, STAYS),
        (NOWHERE, 30, BEFORE, 50),
        (5, 10, 50, STAYS),
        (6, 20, 55, STAYS),
    ]
    assert result.category.tolist() == [COMMUNICATION] * 4
