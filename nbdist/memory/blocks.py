"""Allocations and frees of a history, as they came, become blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from nbdist.memory.snapshot import BEFORE, STAYS, BlockRow, Blocks, make_blocks

# The address of what was there before and says only how large it is.
NOWHERE = -1
# c10/cuda/CUDACachingAllocator.h: every size is rounded up to a multiple of kMinBlockSize.
ROUNDING_BYTES = 512


def held_bytes(size_bytes: int) -> int:
    """The bytes that a GPU's allocator takes for a block of this size."""
    return -(-size_bytes // ROUNDING_BYTES) * ROUNDING_BYTES


@dataclass(frozen=True, slots=True)
class Event:
    """A piece of memory comes or goes.

    Attributes:
        time_ns: Since the recording began; not below 0.
        size_bytes: The size of an allocation; below 0 for a free.
        stack, operator: As in Blocks.
    """

    time_ns: int
    address: int
    size_bytes: int
    stack: int = -1
    operator: int = -1


@dataclass(slots=True)
class _Rows:
    """The blocks so far, and which of them can still be freed."""

    rows: list[BlockRow] = field(default_factory=list)
    open: dict[int, BlockRow] = field(default_factory=dict)  # by address
    nowhere: dict[int, list[BlockRow]] = field(default_factory=dict)  # by size

    def put(self, row: BlockRow) -> None:
        """Begin a block; it ends the one at its address, where that is known."""
        if row.address == NOWHERE:
            self.nowhere.setdefault(row.size_bytes, []).append(row)
        else:
            self.end(row.address, row.start_ns)
            self.open[row.address] = row
        self.rows.append(row)

    def free(self, address: int, size_bytes: int, now_ns: int) -> None:
        """End a block; one of unknown begin is taken for a block of its size without address."""
        if not self.end(address, now_ns) and self.nowhere.get(size_bytes):
            self.nowhere[size_bytes].pop(0).end_ns = now_ns

    def end(self, address: int, now_ns: int) -> bool:
        """Whether there was a block at the address; it has ended now, or before."""
        row = self.open.pop(address, None)
        if row is not None:
            row.end_ns = min(row.end_ns, now_ns)
        return row is not None

    def forget_ended(self, now_ns: int) -> None:
        """Drop the blocks that have ended by now."""
        self.rows = [row for row in self.rows if row.end_ns > now_ns]
        self.open = {place: row for place, row in self.open.items() if row.end_ns > now_ns}


def pair_events(
    before: Sequence[tuple[int, int]],
    events: Sequence[Event],
    most_events: int,
    gone_ns: Mapping[int, int] | None = None,
) -> tuple[Blocks, int]:
    """The blocks of a history, and how many of its events are left out.

    A second allocation at an address ends the first one there: its free was not seen. A free of
    what nobody saw begin is left out. Of more events than the bound the oldest are left out: what
    they allocated and is still there counts as there before.

    Args:
        before: Address and bytes of what was there, each once; NOWHERE for an unknown address.
        events: In order of time.
        most_events: The bound.
        gone_ns: Address -> when what was there before went, where no event says so.
    """
    table = _Rows()
    for address, size_bytes in before:
        end_ns = (gone_ns or {}).get(address, STAYS)
        table.put(BlockRow(address, size_bytes, BEFORE, end_ns))
    lost = max(0, len(events) - most_events)
    for number, event in enumerate(events):
        if event.size_bytes > 0:
            start_ns = BEFORE if number < lost else event.time_ns
            table.put(BlockRow(
                event.address, event.size_bytes, start_ns, STAYS, event.stack, event.operator
            ))  # fmt: skip
        elif event.size_bytes < 0:
            table.free(event.address, -event.size_bytes, event.time_ns)
        if number == lost - 1:
            table.forget_ended(event.time_ns)
    return make_blocks(table.rows), lost
