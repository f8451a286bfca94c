"""How many bytes were in use at each moment, and for what: exact sums of whole numbers.

A block is in use from the nanosecond of its allocation up to, and without, that of its release. So
what is released and allocated in the same nanosecond is not in use together; a block that comes and
goes within one counts for that nanosecond. What was there before the recording is in use from 0 on.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nbdist.memory.snapshot import CATEGORIES, STAYS, Blocks, Integers, Reserved

Truths = npt.NDArray[np.bool_]
# Each category twice: what is inferred, then what is exact.
CLASSES = 2 * len(CATEGORIES)


@dataclass(frozen=True, slots=True)
class Curve:
    """Bytes in use, a moment per entry.

    Attributes:
        time_ns: Each later than the one before.
        size_bytes: (moments, categories, 2): from then until the next moment; of the last axis
            first what is inferred, then what is exact.
    """

    time_ns: Integers
    size_bytes: Integers

    @property
    def total_bytes(self) -> Integers:
        """Bytes in use at each moment: all categories, exact and guessed, together."""
        total: Integers = self.size_bytes.sum(axis=(1, 2))
        return total


@dataclass(frozen=True, slots=True)
class Changes:
    """Allocations and releases in the order in which they count.

    Attributes:
        time_ns: When; equal ones count as one moment.
        size_bytes: Below 0 for a release.
        code: 2 x category + is_exact.
        block: Place in Blocks.
    """

    time_ns: Integers
    size_bytes: Integers
    code: Integers
    block: Integers


def lifetimes(blocks: Blocks) -> tuple[Integers, Integers]:
    """From when, and up to when, each block is in use; STAYS where to the end."""
    start_ns = np.maximum(blocks.start_ns, 0)
    least_ns = np.where(blocks.end_ns == STAYS, 0, start_ns + 1)
    return start_ns, np.maximum(blocks.end_ns, least_ns)


def is_in_use(blocks: Blocks, time_ns: int) -> Truths:
    """Which blocks are in use at a moment."""
    start_ns, end_ns = lifetimes(blocks)
    is_alive: Truths = (start_ns <= time_ns) & (time_ns < end_ns)
    return is_alive


def codes(blocks: Blocks) -> Integers:
    """2 x category + is_exact of each block."""
    return blocks.category.astype(np.int64) * 2 + blocks.is_exact


def changes(blocks: Blocks) -> Changes:
    """All of them, by time; of one moment releases first, then as the blocks stand."""
    start_ns, end_ns = lifetimes(blocks)
    ends = np.flatnonzero(end_ns != STAYS)
    block = np.concatenate([ends, np.arange(len(blocks))])
    time_ns = np.concatenate([end_ns[ends], start_ns])
    size_bytes = np.concatenate([-blocks.size_bytes[ends], blocks.size_bytes])
    order = np.argsort(time_ns, kind="stable")
    block = block[order]
    return Changes(time_ns[order], size_bytes[order], codes(blocks)[block], block)


def totals(block_changes: Changes) -> tuple[Integers, Integers]:
    """(time, bytes in use from then on), one entry for each moment; 0 is always among them."""
    time_ns = np.concatenate([[0], block_changes.time_ns])
    total = np.concatenate([[0], np.cumsum(block_changes.size_bytes)])
    last = np.append(np.flatnonzero(np.diff(time_ns)), len(time_ns) - 1)
    return time_ns[last], total[last]


def curve(blocks: Blocks, most: int | None = None) -> Curve:
    """The bytes of each category over time, at all moments or at about `most` of them.

    The moment of the most in use is always among them, and so is the last one.
    """
    block_changes = changes(blocks)
    time_ns, total = totals(block_changes)
    if most is not None:
        time_ns = time_ns[m4_downsample(time_ns, total, most)]
    return Curve(time_ns, sizes_at(block_changes, time_ns))


def sizes_at(block_changes: Changes, time_ns: Integers) -> Integers:
    """(moments, categories, 2): the bytes of each category at these moments, which are sorted."""
    sizes = np.zeros((len(time_ns), CLASSES), np.int64)
    for code in np.unique(block_changes.code):
        of_code = np.flatnonzero(block_changes.code == code)
        until = np.searchsorted(block_changes.time_ns[of_code], time_ns, side="right")
        sizes[:, code] = np.concatenate([[0], np.cumsum(block_changes.size_bytes[of_code])])[until]
    return sizes.reshape(len(time_ns), len(CATEGORIES), 2)


def m4_downsample(time_ns: Integers, value: Integers, most: int) -> Integers:
    """Places of about `most` moments that show what all of them show.

    Time is cut into stretches of equal length; of each the first and last moment, the lowest and
    the highest are kept. Source: M4, https://doi.org/10.14778/2732951.2732953.
    """
    if len(time_ns) <= max(most, 4):
        return np.arange(len(time_ns))
    stretches = max(1, most // 4)
    span_ns = int(time_ns[-1] - time_ns[0]) + 1
    stretch = (time_ns - time_ns[0]) // max(1, -(-span_ns // stretches))
    firsts = np.concatenate([[0], np.flatnonzero(np.diff(stretch)) + 1])
    lasts = np.append(firsts[1:], len(time_ns)) - 1
    chosen = [firsts, lasts, _first_of(np.maximum, value, firsts)]
    return np.unique(np.concatenate([*chosen, _first_of(np.minimum, value, firsts)]))


def highest(time_ns: Integers, value: Integers, edges: Integers) -> Integers:
    """The place of the first highest value that holds in each stretch between two edges.

    What holds when a stretch begins counts too. Edges are sorted, and not before the first time.
    """
    firsts = np.searchsorted(time_ns, edges[:-1], side="right") - 1
    lasts = np.maximum(np.searchsorted(time_ns, edges[1:], side="left"), firsts + 1)
    # Ranks among all values tell the places apart; of equal ones the first has the highest.
    order = np.lexsort((-np.arange(len(value)), value))
    rank = np.empty(len(value) + 1, np.int64)
    rank[order] = np.arange(len(value))
    rank[-1] = -1
    highest_ranks = np.maximum.reduceat(rank, np.stack([firsts, lasts], axis=1).ravel())[::2]
    places: Integers = order[highest_ranks]
    return places


def _first_of(extreme: np.ufunc, value: Integers, firsts: Integers) -> Integers:
    """The place of the first highest (or lowest) value of each stretch that begins at `firsts`."""
    lengths = np.diff(firsts, append=len(value))
    matches = np.flatnonzero(value == np.repeat(extreme.reduceat(value, firsts), lengths))
    places: Integers = matches[np.searchsorted(matches, firsts)]
    return places


def peak_ns(blocks: Blocks) -> int:
    """The first moment of the most in use; 0 without blocks."""
    time_ns, total = totals(changes(blocks))
    return int(time_ns[np.argmax(total)])


def reserved_at(reserved: Reserved, time_ns: int) -> int:
    """Bytes that the allocator held at a moment; 0 where it is not known."""
    at = int(np.searchsorted(reserved.time_ns, time_ns, side="right")) - 1
    return int(reserved.size_bytes[at]) if at >= 0 else 0
