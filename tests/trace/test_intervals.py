"""Sets of intervals against sets of points."""

import numpy as np

from nbdist.trace import intervals

_LENGTH = 60


def random_intervals(random: np.random.Generator, count: int) -> np.ndarray:
    starts = random.integers(0, _LENGTH, count)
    return np.stack([starts, np.minimum(starts + random.integers(0, 9, count), _LENGTH)], axis=1)


def points(pieces: np.ndarray) -> set[int]:
    return {point for start, end in pieces.tolist() for point in range(start, end)}


def test_operations_on_intervals_are_those_on_their_points() -> None:
    """Union, intersection, difference and length, over many random sets, empty ones included."""
    random = np.random.default_rng(0)
    for _ in range(200):
        first, second = (random_intervals(random, int(random.integers(0, 9))) for _ in range(2))
        a, b = intervals.union(*first.T), intervals.union(*second.T)

        assert points(a) == points(first)
        assert all(a[:-1, 1] < a[1:, 0])  # disjoint, in order, and none touches the next
        assert points(intervals.union_of([a, b])) == points(a) | points(b)
        assert points(intervals.intersection(a, b)) == points(a) & points(b)
        assert points(intervals.difference(a, b)) == points(a) - points(b)
        assert intervals.length(a) == len(points(first))


def test_pieces_cover_the_line_between_all_ends() -> None:
    """Each piece says which sets it is in."""
    first, second = np.array([[0, 4], [8, 9]]), np.array([[2, 6]])

    cut, covers = intervals.pieces([first, second])

    assert cut.tolist() == [[0, 2], [2, 4], [4, 6], [6, 8], [8, 9]]
    assert covers.tolist() == [[True, True, False, False, True], [False, True, True, False, False]]
