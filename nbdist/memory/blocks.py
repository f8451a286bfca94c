"""Allocations and frees of a history, as they came, become blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from nbdist.memory.snapshot import BEFORE, STAYS, UNKNOWN, Blocks

# The address of what was there before and says only how large it is.
NOWHERE = -1


@dataclass(frozen=True, slots=True)
class Event:
    """A piece of memory comes or goes.

    Attributes:
        time_ns: Since the recording began; not below 0.
        address: Where it begins.
        size_bytes: Of an allocation; below 0 of a free.
        stack: As Blocks.stack.
        operator: As Blocks.operator.
    """

    time_ns: int
    address: int
    size_bytes: int
    stack: int = -1
    operator: int = -1


@dataclass(slots=True)
class _Rows:
    """The blocks so far, each (address, bytes, start, end, stack, operator)."""

    rows: list[list[int]] = field(default_factory=list)
    open: dict[int, int] = field(default_factory=dict)  # by address
    nowhere: dict[int, list[int]] = field(default_factory=dict)  # by size

    def put(self, address: int, size_bytes: int, start_ns: int, stack: int, operator: int) -> None:
        """A block begins, and ends what was at its address."""
        if address == NOWHERE:
            self.nowhere.setdefault(size_bytes, []).append(len(self.rows))
        else:
            self.end(address, start_ns)
            self.open[address] = len(self.rows)
        self.rows.append([address, size_bytes, start_ns, STAYS, stack, operator])

    def free(self, address: int, size_bytes: int, now_ns: int) -> None:
        """It ends; one that nobody saw begin is taken for a block of its size without address."""
        if not self.end(address, now_ns) and self.nowhere.get(size_bytes):
            self.rows[self.nowhere[size_bytes].pop(0)][3] = now_ns

    def end(self, address: int, now_ns: int) -> bool:
        """Whether there was a block at the address; it has ended now, or before."""
        place = self.open.pop(address, None)
        if place is None:
            return False
        self.rows[place][3] = min(self.rows[place][3], now_ns)
        return True


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
        table.put(address, size_bytes, BEFORE, -1, -1)
        table.rows[-1][3] = (gone_ns or {}).get(address, STAYS)
    lost = max(0, len(events) - most_events)
    for number, event in enumerate(events):
        if event.size_bytes > 0:
            start_ns = BEFORE if number < lost else event.time_ns
            table.put(event.address, event.size_bytes, start_ns, event.stack, event.operator)
        elif event.size_bytes < 0:
            table.free(event.address, -event.size_bytes, event.time_ns)
        if number == lost - 1:
            _forget_ended(table, event.time_ns)
    return _blocks(table.rows), lost


def _forget_ended(table: _Rows, now_ns: int) -> None:
    remaining = [place for place, row in enumerate(table.rows) if row[3] > now_ns]
    moved = {old: new for new, old in enumerate(remaining)}
    table.rows = [table.rows[place] for place in remaining]
    table.open = {address: moved[place] for address, place in table.open.items() if place in moved}
    table.nowhere = {
        size: [moved[place] for place in places] for size, places in table.nowhere.items()
    }


def _blocks(rows: list[list[int]]) -> Blocks:
    table = np.array(rows, np.int64).reshape(len(rows), 6)
    table = table[np.argsort(table[:, 2], kind="stable")]
    none = np.full(len(rows), -1, np.int32)
    return Blocks(
        address=table[:, 0].copy(),
        size_bytes=table[:, 1].copy(),
        start_ns=table[:, 2].copy(),
        end_ns=table[:, 3].copy(),
        category=np.full(len(rows), UNKNOWN, np.int8),
        is_exact=np.zeros(len(rows), np.bool_),
        stack=table[:, 4].astype(np.int32),
        name=none,
        operator=table[:, 5].astype(np.int32),
    )
