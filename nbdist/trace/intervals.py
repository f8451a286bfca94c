"""Sets of intervals on a line of whole numbers: unions, and how long several go on together."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]


def union(starts: Integers, ends: Integers) -> Integers:
    """Disjoint intervals that cover the same, (n, 2), in order. Empty ones are left out."""
    is_nonempty = ends > starts
    order = np.argsort(starts[is_nonempty], kind="stable")
    starts, ends = starts[is_nonempty][order], ends[is_nonempty][order]
    if not len(starts):
        return np.empty((0, 2), np.int64)
    reached = np.maximum.accumulate(ends)
    firsts = np.flatnonzero(np.concatenate([[True], starts[1:] > reached[:-1]]))
    lasts = np.concatenate([firsts[1:] - 1, [len(starts) - 1]])
    return np.stack([starts[firsts], reached[lasts]], axis=1)


def union_of(sets: Sequence[Integers]) -> Integers:
    """The union of sets that are disjoint each."""
    intervals = np.concatenate([np.empty((0, 2), np.int64), *sets])
    return union(intervals[:, 0], intervals[:, 1])


def pieces(sets: Sequence[Integers]) -> tuple[Integers, npt.NDArray[np.bool_]]:
    """The line cut at every end of an interval; those of one set are disjoint.

    Returns:
        (n, 2) pieces in order, and (sets, n): whether a set covers a piece.
    """
    edges = np.concatenate([np.empty(0, np.int64), *(intervals.reshape(-1) for intervals in sets)])
    if not len(edges):
        return np.empty((0, 2), np.int64), np.empty((len(sets), 0), bool)
    cuts = np.unique(edges)
    segments = np.stack([cuts[:-1], cuts[1:]], axis=1)
    covers = np.zeros((len(sets), len(segments)), bool)
    for number, intervals in enumerate(sets):
        if len(intervals):
            last = np.searchsorted(intervals[:, 0], segments[:, 0], side="right") - 1
            covers[number] = (last >= 0) & (segments[:, 0] < intervals[np.maximum(last, 0), 1])
    return segments, covers


def intersection(first: Integers, second: Integers) -> Integers:
    """The intersection of two sets."""
    segments, covers = pieces([first, second])
    return union_of([segments[covers[0] & covers[1]]])


def difference(intervals: Integers, removed: Integers) -> Integers:
    """The part of one set that is not in the other."""
    segments, covers = pieces([intervals, removed])
    return union_of([segments[covers[0] & ~covers[1]]])


def length(intervals: Integers) -> int:
    """How much a set of disjoint intervals covers."""
    return int((intervals[:, 1] - intervals[:, 0]).sum())
