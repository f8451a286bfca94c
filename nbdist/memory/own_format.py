"""What nbdist knows of a rank's memory beyond torch's format, as plain values and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from nbdist.errors import SnapshotError
from nbdist.memory import json_fields as fields
from nbdist.memory.snapshot import (
    BACKWARD,
    BEFORE,
    CATEGORIES,
    STEPPING,
    Blocks,
    Frame,
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
_COLUMNS = (
    "address", "size_bytes", "start_ns", "end_ns", "category", "is_exact", "stack", "name",
    "operator",
)  # fmt: skip
_TYPES = {
    "category": np.int8, "is_exact": np.bool_, "stack": np.int32, "name": np.int32,
    "operator": np.int32,
}  # fmt: skip


def frames(stacks: Sequence[Sequence[Frame]]) -> list[list[dict[str, Any]]]:
    """Stacks as torch writes them: equal frames are one object, which a pickle writes once."""
    made: dict[Frame, dict[str, Any]] = {}
    return [[made.setdefault(one, _frame(one)) for one in stack] for stack in stacks]


def _frame(one: Frame) -> dict[str, Any]:
    told: dict[str, Any] = {
        "filename": str(one.file), "line": int(one.line), "name": str(one.function),
    }  # fmt: skip
    return told if one.is_line_known else {**told, "is_line_known": 0}


def packed(memory: RankMemory, stacks: Sequence[Any]) -> dict[str, Any]:
    """All of it, of dicts, lists, texts and whole numbers, and of no class derived from them.

    Args:
        memory: Of one rank.
        stacks: Its stacks, as `frames` makes them.
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
        "phases": [[str(one.kind), int(one.start_ns), int(one.end_ns)] for one in memory.phases],
        "step_ends_ns": list(map(int, memory.step_ends_ns)),
        "reserved": {
            "time_ns": memory.reserved.time_ns.tolist(),
            "size_bytes": memory.reserved.size_bytes.tolist(),
        },
        "segments": [
            [
                str(one.kind),
                *map(int, (one.address, one.size_bytes, one.allocated_bytes, one.stream)),
            ]
            for one in memory.segments
        ],
        "failures": [
            list(map(int, (one.time_ns, one.size_bytes, one.free_bytes, one.stack)))
            for one in memory.failures
        ],
    }


def unpacked(value: object) -> RankMemory:
    """What `packed` was given.

    Raises:
        SnapshotError: If it is anything else; it says where.
    """
    ours = fields.record(value, OURS)
    version = fields.whole_of(ours, "format", OURS)
    if version != FORMAT:
        raise SnapshotError(
            f"{OURS}.format is {version}, and this version of nbdist reads {FORMAT}: read it with "
            "the version that wrote it."
        )
    numbers: dict[str, Any] = {
        name: fields.whole_of(ours, name, OURS, least=0) for name in _NUMBERS
    }
    told: dict[str, Any] = {name: fields.text_of(ours, name, OURS) for name in _TEXTS}
    stacks = _stacks(fields.field(ours, "stacks", OURS))
    names = fields.texts(fields.field(ours, "names", OURS), f"{OURS}.names")
    return RankMemory(
        rank=fields.whole_of(ours, "rank", OURS, least=0),
        device=_one_of(fields.field(ours, "device", OURS), f"{OURS}.device", DEVICES),
        blocks=_blocks(fields.field(ours, "blocks", OURS), len(stacks), len(names)),
        stacks=stacks,
        names=names,
        phases=_phases(fields.field(ours, "phases", OURS)),
        step_ends_ns=tuple(_numbers(ours, "step_ends_ns").tolist()),
        reserved=_reserved(fields.field(ours, "reserved", OURS)),
        segments=_segments(fields.field(ours, "segments", OURS)),
        failures=_failures(fields.field(ours, "failures", OURS), len(stacks)),
        **numbers,
        **told,
    )


def _numbers(ours: Mapping[str, Any], key: str) -> Any:
    return fields.wholes(fields.field(ours, key, OURS), f"{OURS}.{key}", 0)


def _one_of(value: object, where: str, choices: Sequence[str]) -> str:
    found = fields.text(value, where)
    if found not in choices:
        raise fields.refused(value, where, f"one of {', '.join(choices)}")
    return found


def _rows(value: object, where: str, length: int) -> list[Sequence[Any]]:
    found = [
        fields.entries(row, f"{where}[{number}]")
        for number, row in enumerate(fields.entries(value, where))
    ]
    for number, row in enumerate(found):
        if len(row) != length:
            raise SnapshotError(f"{where}[{number}] has {len(row)} entries, not {length}.")
    return found


def _stacks(value: object) -> tuple[tuple[Frame, ...], ...]:
    where = f"{OURS}.stacks"
    # By identity, while `value` keeps all alive: a small file can hold one list very often.
    known: dict[int, Frame] = {}
    stacks: dict[int, tuple[Frame, ...]] = {}
    listed = fields.entries(value, where)
    for number, stack in enumerate(listed):
        if id(stack) in stacks:
            continue
        place = f"{where}[{number}]"
        rows = fields.records(stack, place)
        for depth, row in enumerate(rows):
            if id(row) not in known:
                known[id(row)] = frame(row, f"{place}[{depth}]")
        stacks[id(stack)] = tuple(known[id(row)] for row in rows)
    return tuple(stacks[id(stack)] for stack in listed)


def frame(row: Mapping[str, Any], where: str) -> Frame:
    """A line of Python, as torch writes it.

    Raises:
        SnapshotError: If it is none.
    """
    return Frame(
        fields.text_of(row, "filename", where),
        fields.whole_of(row, "line", where),
        fields.text_of(row, "name", where),
        bool(fields.whole_of(row, "is_line_known", where, default=1)),
    )


def _blocks(value: object, stack_count: int, name_count: int) -> Blocks:
    where = f"{OURS}.blocks"
    table = fields.record(value, where)
    bounds = {
        # -1 for what is held in C++, where only its size is told.
        "address": (-1, fields.MOST_BYTES), "size_bytes": (1, fields.MOST_BYTES),
        "start_ns": (BEFORE, fields.MOST),
        "end_ns": (0, fields.MOST), "category": (0, len(CATEGORIES) - 1), "is_exact": (0, 1),
        "stack": (-1, stack_count - 1), "name": (-1, name_count - 1),
        "operator": (-1, name_count - 1),
    }  # fmt: skip
    columns: dict[str, Any] = {}
    for name in _COLUMNS:
        listed = fields.field(table, name, where)
        columns[name] = fields.wholes(listed, f"{where}.{name}", *bounds[name])
        if len(columns[name]) != len(columns["address"]):
            raise SnapshotError(
                f"{where}.{name} has {len(columns[name])} entries, and {where}.address has "
                f"{len(columns['address'])}."
            )
    starts = columns["start_ns"]
    if (starts[1:] < starts[:-1]).any() or (columns["end_ns"] < starts).any():
        raise SnapshotError(
            f"{where}: they are not in the order of start_ns, or one ends before it starts."
        )
    return Blocks(**{name: one.astype(_TYPES.get(name, np.int64)) for name, one in columns.items()})


def _phases(value: object) -> tuple[Phase, ...]:
    where = f"{OURS}.phases"
    return tuple(
        Phase(
            _one_of(kind, f"{where}[{number}][0]", (BACKWARD, STEPPING)),
            fields.whole(start, f"{where}[{number}][1]"),
            fields.whole(end, f"{where}[{number}][2]"),
        )
        for number, (kind, start, end) in enumerate(_rows(value, where, 3))
    )


def _reserved(value: object) -> Reserved:
    where = f"{OURS}.reserved"
    table = fields.record(value, where)
    times, sizes = (
        fields.wholes(fields.field(table, name, where), f"{where}.{name}", 0)
        for name in ("time_ns", "size_bytes")
    )
    if len(times) != len(sizes):
        raise SnapshotError(f"{where} has {len(times)} times and {len(sizes)} sizes.")
    return Reserved(times, sizes)


def _segments(value: object) -> tuple[Segment, ...]:
    where = f"{OURS}.segments"
    found = []
    for number, (kind, *numbers) in enumerate(_rows(value, where, 5)):
        place = f"{where}[{number}]"
        address, size_bytes, allocated_bytes, stream = (
            fields.whole(one, f"{place}[{column}]", 0, fields.MOST_BYTES)
            for column, one in enumerate(numbers, 1)
        )
        checked = _one_of(kind, f"{place}[0]", SEGMENT_KINDS)
        found.append(Segment(address, size_bytes, allocated_bytes, stream, checked))
    return tuple(found)


def _failures(value: object, stack_count: int) -> tuple[OutOfMemory, ...]:
    where = f"{OURS}.failures"
    return tuple(
        OutOfMemory(
            fields.whole(time_ns, f"{where}[{number}][0]"),
            fields.whole(size_bytes, f"{where}[{number}][1]", 0),
            fields.whole(free_bytes, f"{where}[{number}][2]", -1),
            fields.whole(stack, f"{where}[{number}][3]", -1, stack_count - 1),
        )
        for number, (time_ns, size_bytes, free_bytes, stack) in enumerate(_rows(value, where, 4))
    )
