"""Memory with small blocks merged, so that a live picture of any snapshot is bounded.

Blocks of at least `least_bytes` stay as they are, and so do the largest of those that are in use at
the peak. Of all others the picture has what they make together of each category, at every moment at
which a block that stays comes or goes, and at those that show how the total runs. So at each of
these moments the sums are exact, and the peak is one of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nbdist.memory.snapshot import STAYS, Blocks, Integers, RankMemory
from nbdist.memory.timeline import (
    CLASSES,
    changes,
    is_in_use,
    lifetimes,
    m4_downsample,
    sizes_at,
    totals,
)

# Moments that show how the total runs where blocks are merged, of all ranks together.
MOST_MOMENTS = 12_000
# 0, 1, 2, 5, 10, ... up to more than any block has.
_SIZES = (0, *(digit * 10**power for power in range(19) for digit in (1, 2, 5)))


@dataclass(frozen=True, slots=True)
class DownsampledRank:
    """The part of one rank's memory that a live picture shows.

    Attributes:
        blocks: Blocks that are shown alone.
        time_ns: When the sum of the merged blocks changes, sorted.
        code: 2 x category + is_exact of the part that changes.
        size_bytes: The change; below 0 where the sum becomes less.
        merged: How many blocks are shown together with others.
    """

    blocks: Blocks
    time_ns: Integers
    code: Integers
    size_bytes: Integers
    merged: int


@dataclass(frozen=True, slots=True)
class Level:
    """All ranks of a picture.

    Attributes:
        least_bytes: Smaller blocks are merged, but for some that are in use at the peak.
        ranks: In rank order.
    """

    least_bytes: int
    ranks: tuple[DownsampledRank, ...]

    @property
    def merged(self) -> int:
        """Blocks that are shown together with others."""
        return sum(rank.merged for rank in self.ranks)

    @property
    def n_items(self) -> int:
        """Blocks that are shown alone, and changes of the others."""
        return sum(len(rank.blocks) + len(rank.time_ns) for rank in self.ranks)


def level(ranks: Sequence[RankMemory], most_blocks: int) -> Level:
    """About `most_blocks` blocks of all ranks together, those of at least 0, 1, 2, 5, 10 ... bytes.

    A fifth of the room is for the blocks of the peaks.
    """
    at_peaks = most_blocks // 5 // max(len(ranks), 1)
    every = np.sort(np.concatenate([np.zeros(0, np.int64), *(r.blocks.size_bytes for r in ranks)]))
    room = most_blocks if most_blocks >= len(every) else most_blocks - at_peaks * len(ranks)
    least = next(
        least_bytes
        for least_bytes in _SIZES
        if len(every) - np.searchsorted(every, least_bytes) <= room
    )
    moments = min(MOST_MOMENTS, 2 * most_blocks) // max(len(ranks), 1)
    return Level(least, tuple(downsample(rank, least, at_peaks, moments) for rank in ranks))


def downsample(rank: RankMemory, least_bytes: int, at_peak: int, moments: int) -> DownsampledRank:
    """One rank; blocks below `least_bytes` merged but for the `at_peak` largest at the peak.

    About so many `moments` show how the total runs.
    """
    blocks = rank.blocks
    is_shown = blocks.size_bytes >= least_bytes
    if is_shown.all():
        none = np.zeros(0, np.int64)
        return DownsampledRank(blocks, none, none, none, 0)
    block_changes = changes(blocks)
    time_ns, total = totals(block_changes)
    there = np.flatnonzero(is_in_use(blocks, int(time_ns[np.argmax(total)])) & ~is_shown)
    largest = there[np.argsort(-blocks.size_bytes[there], kind="stable")[:at_peak]]
    is_shown[largest] = True
    start_ns, end_ns = lifetimes(blocks.take(is_shown))
    curve_ns = time_ns[m4_downsample(time_ns, total, moments)]
    at_ns = np.unique(np.concatenate([curve_ns, start_ns, end_ns[end_ns != STAYS]]))
    sizes = sizes_at(changes(blocks.take(~is_shown)), at_ns).reshape(len(at_ns), CLASSES)
    steps = np.diff(sizes, axis=0, prepend=0)
    moment, code = np.nonzero(steps)
    return DownsampledRank(
        blocks.take(is_shown), at_ns[moment], code, steps[moment, code], int((~is_shown).sum())
    )
