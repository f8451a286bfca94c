"""Bytes over time: against counting block by block, and what is kept where moments are left out."""

from collections import defaultdict

import numpy as np
import pytest

from nbdist.memory.snapshot import (
    BEFORE,
    CATEGORIES,
    STAYS,
    Blocks,
    Reserved,
    empty,
)
from nbdist.memory.timeline import (
    curve,
    highest,
    is_in_use,
    m4_downsample,
    peak_ns,
    reserved_at,
)
from tests.support.drawn_memory import Piece, blocks, random_blocks


def slowly(columns: Blocks) -> dict[int, dict[tuple[int, bool], int]]:
    """The bytes of each (category, is exact) at each nanosecond, counted block by block."""
    last = max([0, *(int(e) for e in columns.end_ns if e != STAYS), *map(int, columns.start_ns)])
    sums: dict[int, dict[tuple[int, bool], int]] = {ns: defaultdict(int) for ns in range(last + 2)}
    for at in range(len(columns)):
        begin = max(0, int(columns.start_ns[at]))
        end = int(columns.end_ns[at])
        end = last + 2 if end == STAYS else max(end, begin + 1)
        for ns in range(begin, min(end, last + 2)):
            what = int(columns.category[at]), bool(columns.is_exact[at])
            sums[ns][what] += int(columns.size_bytes[at])
    return sums


@pytest.mark.parametrize("seed", range(6))
def test_every_moment_is_as_counted_by_hand(seed: int) -> None:
    """All categories, exact and guessed, at every nanosecond, with equal times and short lives."""
    columns = random_blocks(150, seed)
    in_use = curve(columns)

    for ns, sums in slowly(columns).items():
        at = np.searchsorted(in_use.time_ns, ns, side="right") - 1
        for category in range(len(CATEGORIES)):
            for is_exact in (False, True):
                size_bytes = in_use.size_bytes[at, category, int(is_exact)]
                assert size_bytes == sums[category, is_exact], (ns, category, is_exact)
    assert (np.diff(in_use.time_ns) > 0).all()
    assert in_use.time_ns[0] == 0


@pytest.mark.parametrize("most", [4, 20, 60])
@pytest.mark.parametrize("seed", range(4))
def test_the_peak_is_never_left_out(seed: int, most: int) -> None:
    """Fewer moments have the same peak at the same time, and are right where they are."""
    columns = random_blocks(200, seed, span_ns=2000)
    truth = {ns: sum(sums.values()) for ns, sums in slowly(columns).items()}
    thin = curve(columns, most)
    at = int(np.argmax(thin.total_bytes))

    assert len(thin.time_ns) <= 2 * most
    assert int(thin.total_bytes[at]) == max(truth.values())
    assert int(thin.time_ns[at]) == peak_ns(columns) == max(truth, key=lambda ns: truth[ns])
    assert [truth[int(ns)] for ns in thin.time_ns] == thin.total_bytes.tolist()
    assert thin.size_bytes[-1].sum() == truth[max(truth)]


@pytest.mark.parametrize("seed", range(4))
def test_the_highest_of_each_stretch_counts_what_holds_when_it_begins(seed: int) -> None:
    """Against looking at every nanosecond."""
    random = np.random.default_rng(seed)
    time_ns = np.unique(np.append(random.integers(0, 300, 60), 0))
    value = random.integers(0, 9, len(time_ns))
    edges = np.unique(np.append(random.integers(0, 320, 25), 0))
    places = highest(time_ns, value, edges)

    for place, begin, end in zip(places, edges[:-1], edges[1:], strict=True):
        there = [np.searchsorted(time_ns, ns, side="right") - 1 for ns in range(begin, end)]
        best = max(value[at] for at in there)
        assert value[place] == best
        assert place == next(at for at in there if value[at] == best)


def test_few_moments_are_all_told() -> None:
    """There is nothing to leave out."""
    assert m4_downsample(np.arange(5), np.arange(5), 10).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("pieces", "ns", "peak_bytes"),
    [
        ([], 0, 0),
        ([Piece(1, 5, 6)], 5, 1),
        ([Piece(9, 0, 1), Piece(3, 50, 60)], 0, 9),
        ([Piece(9, BEFORE, 1), Piece(3, 50, 60)], 0, 9),
        ([Piece(3 << 40, 5, 9), Piece(1 << 40, 6, 9), Piece(1, 7, 9)], 7, (4 << 40) + 1),
        ([Piece(4, 5, 9), Piece(4, 20, 30)], 5, 4),
    ],
)
def test_the_peak_is_the_first_of_equals(pieces: list[Piece], ns: int, peak_bytes: int) -> None:
    """At the beginning, of one block, without any (also a curve), of more bytes than 2**40."""
    columns = blocks(pieces)
    in_use = curve(columns, 4)

    assert peak_ns(columns) == ns
    assert columns.size_bytes[is_in_use(columns, ns)].sum() == peak_bytes
    assert (in_use.time_ns[0], in_use.total_bytes.max()) == (0, peak_bytes)


def test_reserved_at_a_moment() -> None:
    """What holds from then on; nothing where the allocator holds nothing."""
    reserved = Reserved(np.array([0, 10]), np.array([5, 8]))

    assert [reserved_at(reserved, ns) for ns in (0, 9, 10, 99)] == [5, 5, 8, 8]
    assert reserved_at(empty(0, "a", "").reserved, 5) == 0
