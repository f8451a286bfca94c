"""Converts the part of a rank's memory beyond torch's format to plain values and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from nbdist.core.typed_json import MOST, MOST_BYTES, Misfit, Value
from nbdist.memory.snapshot import (
    BACKWARD,
    BEFORE,
    CATEGORIES,
    STEPPING,
    AllocationFrame,
    Blocks,
    OutOfMemory,
    Phase,
    RankMemory,
    Reserved,
    Segment,
)

# The key that holds it, beside torch's own.
OURS = "nbdist"
FORMAT = 1
DEVICES = ("cuda", "cpu")
SEGMENT_KINDS = ("large", "small", "expandable")
_NUMBERS = (
    "limit_bytes", "duration_ns", "allocator_peak_bytes", "reserved_peak_bytes", "lost",
)  # fmt: skip
_TEXTS = ("host", "device_name", "version", "problem")
_COLUMNS = tuple(column.name for column in fields(Blocks))
_TYPES = {
    "category": np.int8, "is_exact": np.bool_, "stack": np.int32, "name": np.int32,
    "operator": np.int32,
}  # fmt: skip


def frames(stacks: Sequence[Sequence[AllocationFrame]]) -> list[list[dict[str, Any]]]:
    """Stacks as torch writes them: equal frames are one object, which a pickle writes once."""
    encoded: dict[AllocationFrame, dict[str, Any]] = {}
    return [[encoded.setdefault(frame, _frame(frame)) for frame in stack] for stack in stacks]


def _frame(frame: AllocationFrame) -> dict[str, Any]:
    encoded: dict[str, Any] = {
        "filename": str(frame.file), "line": int(frame.line), "name": str(frame.function),
    }  # fmt: skip
    return encoded if frame.is_line_known else {**encoded, "is_line_known": 0}


def pack(memory: RankMemory, stacks: Sequence[Any]) -> dict[str, Any]:
    """All of it, of dicts, lists, texts and whole numbers, and of no class derived from them.

    Its stacks are given as `frames` makes them.
    """
    return {
        "format": FORMAT,
        "rank": int(memory.rank),
        "device": str(memory.device),
        **{name: str(getattr(memory, name)) for name in _TEXTS},  # torch's version is no plain one
        **{name: int(getattr(memory, name)) for name in _NUMBERS},
        "blocks": {
            name: getattr(memory.blocks, name).astype(np.int64).tolist() for name in _COLUMNS
        },
        "stacks": list(stacks),
        "names": list(map(str, memory.names)),
        "phases": [_plain(p.kind, p.start_ns, p.end_ns) for p in memory.phases],
        "step_ends_ns": list(map(int, memory.step_ends_ns)),
        "reserved": {
            "time_ns": memory.reserved.time_ns.tolist(),
            "size_bytes": memory.reserved.size_bytes.tolist(),
        },
        "segments": [
            _plain(s.kind, s.address, s.size_bytes, s.allocated_bytes, s.stream)
            for s in memory.segments
        ],
        "failures": [
            _plain(f.time_ns, f.size_bytes, f.free_bytes, f.stack) for f in memory.failures
        ],
    }


def _plain(*values: str | int) -> list[str | int]:
    return [str(value) if isinstance(value, str) else int(value) for value in values]


def unpack(ours: Value) -> RankMemory:
    """Restore what `pack` has packed.

    Raises:
        Misfit: If it is anything else; it says where.
    """
    version = ours["format"].whole()
    if version != FORMAT:
        raise Misfit(
            f"{ours.where}.format is {version}, and this version of nbdist reads {FORMAT}: read it "
            "with the version that wrote it"
        )
    stacks, names = _stacks(ours["stacks"]), ours["names"].texts()
    numbers: dict[str, Any] = {name: ours[name].whole(0) for name in _NUMBERS}
    texts: dict[str, Any] = {name: ours[name].text() for name in _TEXTS}
    return RankMemory(
        rank=ours["rank"].whole(0),
        device=ours["device"].text(DEVICES),
        blocks=_blocks(ours["blocks"], len(stacks), len(names)),
        stacks=stacks,
        names=names,
        phases=tuple(
            Phase(kind.text((BACKWARD, STEPPING)), start_ns.whole(), end_ns.whole())
            for kind, start_ns, end_ns in ours["phases"].rows(3)
        ),
        step_ends_ns=tuple(ours["step_ends_ns"].integers(0).tolist()),
        reserved=_reserved(ours["reserved"]),
        segments=tuple(
            Segment(
                address.size(), size.size(), used.size(), stream.size(), kind.text(SEGMENT_KINDS)
            )
            for kind, address, size, used, stream in ours["segments"].rows(5)
        ),
        failures=tuple(
            OutOfMemory(
                time_ns.whole(), size.whole(0), free.whole(-1), stack.whole(-1, len(stacks) - 1)
            )
            for time_ns, size, free, stack in ours["failures"].rows(4)
        ),
        **numbers,
        **texts,
    )


def _stacks(listed: Value) -> tuple[tuple[AllocationFrame, ...], ...]:
    # By identity, while `listed` keeps all alive: a small file can hold one list very often.
    frames: dict[int, AllocationFrame] = {}
    stacks: dict[int, tuple[AllocationFrame, ...]] = {}
    for stack in listed.entries():
        if id(stack.raw) in stacks:
            continue
        for row in stack.entries():
            if id(row.raw) not in frames:
                frames[id(row.raw)] = frame(row)
        stacks[id(stack.raw)] = tuple(frames[id(row)] for row in stack.raw)
    return tuple(stacks[id(stack)] for stack in listed.raw)


def frame(row: Value) -> AllocationFrame:
    """A line of Python, as torch writes it.

    Raises:
        Misfit: If it is none.
    """
    return AllocationFrame(
        row["filename"].text(),
        row["line"].whole(),
        row["name"].text(),
        bool(row.get("is_line_known", 1).whole()),
    )


def _blocks(table: Value, stack_count: int, name_count: int) -> Blocks:
    bounds = {
        # -1 for what is held in C++, where only its size is known.
        "address": (-1, MOST_BYTES), "size_bytes": (1, MOST_BYTES), "start_ns": (BEFORE, MOST),
        "end_ns": (0, MOST), "category": (0, len(CATEGORIES) - 1), "is_exact": (0, 1),
        "stack": (-1, stack_count - 1), "name": (-1, name_count - 1),
        "operator": (-1, name_count - 1),
    }  # fmt: skip
    columns = {name: table[name].integers(*bounds[name]) for name in _COLUMNS}
    for name, column in columns.items():
        if len(column) != len(columns["address"]):
            raise Misfit(
                f"{table.where}.{name} has {len(column)} entries, and {table.where}.address has "
                f"{len(columns['address'])}"
            )
    starts = columns["start_ns"]
    if (starts[1:] < starts[:-1]).any() or (columns["end_ns"] < starts).any():
        raise Misfit(
            f"{table.where}: they are not in the order of start_ns, or one ends before it starts"
        )
    typed: dict[str, Any] = {
        name: column.astype(_TYPES.get(name, np.int64)) for name, column in columns.items()
    }
    return Blocks(**typed)


def _reserved(table: Value) -> Reserved:
    times, sizes = (table[name].integers(0) for name in ("time_ns", "size_bytes"))
    if len(times) != len(sizes):
        raise Misfit(f"{table.where} has {len(times)} times and {len(sizes)} sizes")
    return Reserved(times, sizes)
