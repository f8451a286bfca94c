"""Compares two snapshots: the lines and names whose memory has grown, and by how much.

Compared is what is in use at the end of each. A block of the second was there in the first if one
of the same address, size and stack was: addresses are used again, so none of these alone will do.
A CPU's recording knows no stack of what was there when it began; such a block is the one of the
same address and size, and counts under the lines that the other snapshot has of it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from nbdist.core.failures import ranks_are
from nbdist.memory.call_site import is_own
from nbdist.memory.snapshot import STAYS, AllocationFrame, RankMemory, Snapshot

# `losses[17]` and `losses[18]` are of one list.
_ITEM = re.compile(r"\[[^\]]*\]")
NO_LINES = (
    "No lines are known: a CPU snapshot of one moment has none. Record a cell with "
    "%%dist_memory before and after to see which lines allocated the growth."
)


@dataclass(frozen=True, slots=True)
class Amount:
    """A number of blocks, and their bytes together."""

    count: int = 0
    size_bytes: int = 0


@dataclass(frozen=True, slots=True)
class BlockKind:
    """Kind of blocks: the properties that all blocks counted as one share.

    Attributes:
        lines: The user's own lines that led to them, innermost first; the library's where there
            are no others, and nothing where no stack is known.
        category: Place in CATEGORIES.
        name: With `[...]` for places in lists and dicts.
        size_bytes: Of each, where nothing else tells them apart; 0 otherwise.
    """

    lines: tuple[AllocationFrame, ...]
    category: int
    name: str
    size_bytes: int = 0


@dataclass(frozen=True, slots=True)
class BlockChange:
    """Blocks of one kind in both snapshots, and the difference.

    Attributes:
        before, after: At the end of the first and of the second.
        ranks: Rank -> by how many bytes it grew there; ranks where it did not change are left out.
    """

    kind: BlockKind
    before: Amount
    after: Amount
    ranks: Mapping[int, int]

    @property
    def grown_bytes(self) -> int:
        """Bytes more; negative where it shrank."""
        return self.after.size_bytes - self.before.size_bytes


@dataclass(frozen=True, slots=True)
class SnapshotDiff:
    """The memory that grew and shrank between two snapshots.

    Attributes:
        grown: The most bytes first.
        shrunk: Likewise.
        ranks: Rank -> all that was in use, before and after.
        notes: Sentences on parts that could not be compared.
    """

    grown: tuple[BlockChange, ...]
    shrunk: tuple[BlockChange, ...]
    ranks: Mapping[int, tuple[Amount, Amount]]
    notes: tuple[str, ...] = ()


def diff(before: Snapshot, after: Snapshot) -> SnapshotDiff:
    """Compare the memory in use at the end of the second snapshot with that of the first."""
    first = {rank.rank: rank for rank in before.ranks if _is_there(rank)}
    second = {rank.rank: rank for rank in after.ranks if _is_there(rank)}
    both = sorted(first.keys() & second.keys())
    blocks_by_kind: dict[BlockKind, _BlocksByRank] = defaultdict(dict)
    totals = {}
    for rank in both:
        old, new = _alive(first[rank]), _alive(second[rank])
        totals[rank] = (_amount(old), _amount(new))
        for pair in _pairs(old, new):
            sides = blocks_by_kind[_better(*pair)].setdefault(rank, ([], []))
            for side, block in zip(sides, pair, strict=True):
                if block is not None:
                    side.append(block)
    changes = [_change(kind, blocks) for kind, blocks in blocks_by_kind.items()]
    return SnapshotDiff(
        tuple(sorted((c for c in changes if c.grown_bytes > 0), key=_order)),
        tuple(sorted((c for c in changes if c.grown_bytes < 0), key=_order)),
        totals,
        (*_missing(before, "first"), *_missing(after, "second"), *_notes(first, second, changes)),
    )


def _is_there(rank: RankMemory) -> bool:
    return bool(len(rank.blocks)) or not rank.problem


def _missing(snapshot: Snapshot, which: str) -> Iterator[str]:
    for rank in snapshot.ranks:
        if not _is_there(rank):
            yield f"rank {rank.rank} has nothing in the {which} snapshot: {rank.problem}"


@dataclass(frozen=True, slots=True)
class _Block:
    kind: BlockKind
    address: int
    size_bytes: int
    stack: tuple[AllocationFrame, ...]


# Rank -> blocks of one kind before, and after.
_BlocksByRank = dict[int, tuple[list[_Block], list[_Block]]]


def _alive(memory: RankMemory) -> list[_Block]:
    """The blocks in use at the end of a recording, or in one moment."""
    b = memory.blocks
    names = [_ITEM.sub("[...]", name) for name in memory.names]
    lines = [tuple(filter(is_own, stack)) or stack for stack in memory.stacks]
    alive = []
    for place in np.flatnonzero(b.end_ns == STAYS).tolist():
        stack, name, size = int(b.stack[place]), int(b.name[place]), int(b.size_bytes[place])
        kind = BlockKind(
            lines[stack] if stack >= 0 else (),
            int(b.category[place]),
            names[name] if name >= 0 else "",
            size if stack < 0 and name < 0 else 0,
        )
        whole = memory.stacks[stack] if stack >= 0 else ()
        alive.append(_Block(kind, int(b.address[place]), size, whole))
    return alive


def _amount(blocks: Iterable[_Block]) -> Amount:
    sizes = [block.size_bytes for block in blocks]
    return Amount(len(sizes), sum(sizes))


def _pairs(old: list[_Block], new: list[_Block]) -> Iterator[tuple[_Block | None, _Block | None]]:
    """The same block in both, or one that is only in one of them."""
    candidates: dict[tuple[int, int], list[_Block]] = defaultdict(list)
    for block in old:
        candidates[block.address, block.size_bytes].append(block)
    for other in new:
        matching = candidates[other.address, other.size_bytes]
        match = next((o for o in matching if o.stack == other.stack), None) or next(
            (o for o in matching if not o.stack or not other.stack), None
        )
        if match is not None:
            matching.remove(match)
        yield match, other
    for unmatched in candidates.values():
        yield from ((block, None) for block in unmatched)


def _better(earlier: _Block | None, later: _Block | None) -> BlockKind:
    """Kind of a block by the snapshot that knows more of it; by the later where both do."""
    kinds = [block.kind for block in (later, earlier) if block is not None]
    best = max(kinds, key=lambda kind: bool(kind.lines))
    name = best.name or next((kind.name for kind in kinds if kind.name), "")
    size = best.size_bytes if not best.lines and not name else 0
    return replace(best, name=name, size_bytes=size)


def _change(kind: BlockKind, blocks_by_rank: _BlocksByRank) -> BlockChange:
    before, after = (
        _amount(chain.from_iterable(sides)) for sides in zip(*blocks_by_rank.values(), strict=True)
    )
    grown = {
        rank: _amount(new).size_bytes - _amount(old).size_bytes
        for rank, (old, new) in blocks_by_rank.items()
    }
    ranks = {rank: more_bytes for rank, more_bytes in grown.items() if more_bytes}
    return BlockChange(kind, before, after, ranks)


def _order(change: BlockChange) -> tuple[object, ...]:
    kind = change.kind
    lines = tuple((frame.file, frame.line) for frame in kind.lines)
    return (-abs(change.grown_bytes), kind.category, kind.name, lines)


def _notes(
    first: Mapping[int, RankMemory], second: Mapping[int, RankMemory], changes: list[BlockChange]
) -> Iterator[str]:
    for ranks, where in (
        (first.keys() - second.keys(), "first"),
        (second.keys() - first.keys(), "second"),
    ):
        if ranks:
            yield f"{ranks_are(sorted(ranks))} only in the {where} snapshot, and not compared."
    for rank in sorted(first.keys() & second.keys()):
        old, new = first[rank], second[rank]
        if old.device != new.device:
            yield (
                f"rank {rank}: the first snapshot is of {old.device} memory, the second of "
                f"{new.device} memory."
            )
        yield from (
            f"rank {rank}: {rank_memory.problem}"
            for rank_memory in (old, new)
            if rank_memory.problem
        )
    grown = [change.kind for change in changes if change.grown_bytes > 0]
    if grown and not any(kind.lines for kind in grown):
        yield NO_LINES
    elif any(kind.size_bytes for kind in grown):
        yield "Blocks without a line and a name are matched by size alone."
