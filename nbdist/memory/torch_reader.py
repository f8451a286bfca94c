"""Memory read from torch's own dict of a snapshot; see memory.torch_writer.

The dict is what `torch.cuda.memory._snapshot()` gives and `_dump_snapshot` pickles. Source:
torch/cuda/memory.py and torch/csrc/cuda/memory_snapshot.cpp; older versions lack fields.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np

from nbdist.core.typed_json import MOST, Misfit, Value
from nbdist.errors import SnapshotError
from nbdist.memory import own_format
from nbdist.memory.blocks import held_bytes
from nbdist.memory.snapshot import (
    BEFORE,
    STAYS,
    AllocationFrame,
    BlockRow,
    OutOfMemory,
    RankMemory,
    Reserved,
    Segment,
    make_blocks,
)

US = 1000
# The size of the segments that blocks of up to 1 MiB come from (kSmallBuffer).
SMALL_BYTES = 2 * 2**20
_RESERVES = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
# As the unwinder names what is no Python.
_C_SUFFIXES = (".c", ".cc", ".cpp", ".cxx", ".cu", ".cuh", ".h", ".hpp", ".inl", ".S", "??")
NO_TIMES = "This version of torch recorded no times: each event counts as one microsecond."


@dataclass(slots=True)
class _Stacks:
    """Every stack of the dict once, without frames of C."""

    places: dict[tuple[AllocationFrame, ...], int] = field(default_factory=dict)
    by_id: dict[int, int] = field(default_factory=dict)  # by identity, while the dict lives
    frames: dict[int, AllocationFrame | None] = field(default_factory=dict)

    def place(self, stack: Value) -> int:
        """The stack's place; -1 where there is none."""
        if id(stack.raw) not in self.by_id:
            frames = tuple(filter(None, map(self._frame, stack.entries())))
            place = self.places.setdefault(frames, len(self.places)) if frames else -1
            self.by_id[id(stack.raw)] = place
        return self.by_id[id(stack.raw)]

    def _frame(self, row: Value) -> AllocationFrame | None:
        if id(row.raw) not in self.frames:
            frame = own_format.frame(row)
            self.frames[id(row.raw)] = None if frame.file.endswith(_C_SUFFIXES) else frame
        return self.frames[id(row.raw)]


@dataclass(slots=True)
class _Replay:
    """Blocks as the history makes and frees them.

    The history has the size that was asked for, and only blocks that are there have the held one.
    """

    rows: list[BlockRow] = field(default_factory=list)
    open: dict[int, BlockRow] = field(default_factory=dict)  # by address
    asked: dict[int, int] = field(default_factory=dict)  # address -> when it was to be freed

    def add(self, address: int, size: int, start: int, end: int, stack: int) -> BlockRow:
        """Note a block that was in use from `start` to `end`."""
        row = BlockRow(address, size, start, end, stack)
        self.rows.append(row)
        return row

    def alloc(self, address: int, size: int, now: int, stack: int) -> None:
        """It is in use; what was there has been freed, if the history does not say when."""
        if address in self.open:
            self.open.pop(address).end_ns = self.asked.pop(address, now)
        self.open[address] = self.add(address, held_bytes(size), now, STAYS, stack)

    def ask(self, address: int, size: int, now: int, _stack: int) -> None:
        """Python has let go of it; a stream may still use it."""
        if address not in self.open:  # its beginning is older than the history
            self.open[address] = self.add(address, held_bytes(size), BEFORE, STAYS, -1)
        self.asked[address] = now

    def free(self, address: int, size: int, now: int, _stack: int) -> None:
        """Others may have it from now on."""
        self.asked.pop(address, None)
        row = self.open.pop(address, None)
        if row is None:
            row = self.add(address, held_bytes(size), BEFORE, STAYS, -1)
        row.end_ns = now


def of_torch(
    snapshot: Mapping[str, Any],
    *,
    rank: int = 0,
    host: str = "",
    device_index: int = 0,
    start_us: int | None = None,
    end_us: int | None = None,
) -> RankMemory:
    """A rank's memory from torch's dict; where nbdist wrote it, all that nbdist knew.

    Categories are unknown otherwise. A block without an event of its allocation was there before
    the history began; one whose freeing was asked for and has not completed is still in use.

    Args:
        snapshot: Of `torch.cuda.memory._snapshot()`.
        rank: Whose, where the dict does not tell.
        host: Where it ran, likewise.
        device_index: Which of the dict's devices.
        start_us: When the recording began, by the clock of the events; None for the first event.
        end_us: When it ended; None for the last event.

    Raises:
        SnapshotError: If a value is not what it has to be; it says where and what.
    """
    try:
        whole = Value(Value(snapshot, "snapshot").mapping(), "")
        if own_format.OURS in snapshot:
            return own_format.unpack(whole[own_format.OURS])
        return _of_torch(whole, rank, host, device_index, (start_us, end_us))
    except Misfit as error:
        raise SnapshotError(f"{error}.") from None


def _of_torch(
    whole: Value, rank: int, host: str, device_index: int, within_us: tuple[int | None, int | None]
) -> RankMemory:
    start_us, end_us = within_us
    # Without a history old versions leave the key out.
    traces = whole.get("device_traces", ()).entries()
    has_trace = device_index < len(traces)
    events = traces[device_index] if has_trace else Value((), "device_traces")
    segments = [
        segment
        for segment in whole["segments"].entries()
        if segment.get("device", 0).whole() == device_index
    ]
    times, zero_us, problem = _times(events, start_us)
    duration = max(times[-1] if times else 0, 0 if end_us is None else (end_us - zero_us) * US)
    stacks = _Stacks()
    replay, failures = _replay_events(events, times, stacks)
    pieces, unknown = _reconcile(replay, segments, stacks, duration)
    if unknown:
        problem = f"{problem} {unknown}".strip()
    return RankMemory(
        rank=rank,
        host=host,
        device="cuda",
        # The others were freed before the recording.
        blocks=make_blocks(row for row in replay.rows if row.end_ns >= 0),
        duration_ns=duration,
        stacks=tuple(stacks.places),
        reserved=_reserved(events.raw, times, sum(piece.size_bytes for piece in pieces)),
        segments=tuple(pieces),
        failures=tuple(failure for failure in failures if failure.time_ns >= 0),
        problem=problem,
    )


def _times(events: Value, start_us: int | None) -> tuple[list[int], int, str]:
    """Nanoseconds since the beginning for each event, that beginning, and what is missing."""
    records = events.records()
    if not records:
        return [], start_us or 0, ""
    if not any("time_us" in event for event in records):
        return [number * US for number in range(len(records))], 0, NO_TIMES
    # 2^50 us are 35 years since 1970: beyond it nanoseconds would not fit into 64 bits.
    noted_us = events.sizes_of("time_us")
    zero_us = noted_us[0] if start_us is None else start_us
    times_us = (np.maximum.accumulate(np.array(noted_us, np.int64)) - zero_us).tolist()
    for number, time_us in enumerate(times_us):
        if abs(time_us) > MOST // US:
            Value(time_us, f"{events.where}[{number}].time_us").whole(-MOST // US, MOST // US)
    return [time_us * US for time_us in times_us], zero_us, ""


def _replay_events(
    events: Value, times: Sequence[int], stacks: _Stacks
) -> tuple[_Replay, list[OutOfMemory]]:
    """Replay the history's events on memory. Times below 0 are before the recording."""
    replay = _Replay()
    failures = []
    steps = {
        "alloc": replay.alloc, "free_requested": replay.ask, "free_completed": replay.free,
        "free": replay.free,
    }  # fmt: skip
    actions, sizes, addresses = (
        events.texts_of("action"), events.sizes_of("size", 0), events.sizes_of("addr", 0),
    )  # fmt: skip
    for number, (action, address, size, now) in enumerate(
        zip(actions, addresses, sizes, times, strict=True)
    ):
        step = steps.get(action)
        if step is None and action != "oom":
            continue
        frames = events.raw[number].get("frames", ())
        stack = stacks.by_id.get(id(frames)) if frames != () else -1
        if stack is None:
            stack = stacks.place(Value(frames, f"{events.where}[{number}].frames"))
        if step is not None and size:
            step(address, size, now if now >= 0 else BEFORE, stack)
        elif step is None:
            event = Value(events.raw[number], f"{events.where}[{number}]")
            failures.append(OutOfMemory(now, size, event.get("device_free", -1).whole(-1), stack))
    return replay, failures


def _reconcile(
    replay: _Replay, segments: Sequence[Value], stacks: _Stacks, now: int
) -> tuple[list[Segment], str]:
    """Compare what the history left in use with what is; add the blocks that it does not have."""
    pieces = []
    alive: dict[int, int] = {}  # address -> size
    lists: set[int] = set()
    for segment in segments:
        blocks = segment["blocks"]
        if id(blocks.raw) in lists:  # a small file could hold one long list very often
            raise Misfit(f"{blocks.where} is the same list as another segment's")
        lists.add(id(blocks.raw))
        used = _used(segment, blocks)
        for block, address, size in used:
            alive[address] = size
            open_block = replay.open.get(address)
            if open_block is not None:
                open_block.size_bytes = size  # held, where the history has what was asked for
                continue
            frames = _frames(block)
            replay.add(address, size, BEFORE, STAYS, stacks.place(frames) if frames.raw else -1)
        pieces.append(_segment(segment, sum(size for _, _, size in used)))
    if not segments:
        return pieces, ""
    gone = [address for address in replay.open if address not in alive]
    for address in gone:
        replay.open[address].end_ns = max(replay.asked.get(address, now), 0)
    lost = sum(address not in replay.asked for address in gone)
    problem = (
        f"The history does not say when {lost} of its blocks were freed: their ends are too late."
    )
    return pieces, problem if lost else ""


def _frames(block: Value) -> Value:
    """Frames of a block's allocation; in torch before 2.1 they stand in the block's history."""
    history = block.get("history", ()).raw
    if "frames" not in block.raw and type(history) is list and history:
        block = block["history"].entries()[0]
        if type(block.raw) is not dict:
            return Value((), block.where)
    return block.get("frames", ())


def _used(segment: Value, blocks: Value) -> list[tuple[Value, int, int]]:
    """(block, address, size) of a segment's blocks that are in use."""
    sizes, states = blocks.sizes_of("size"), blocks.texts_of("state")
    address = segment["address"].size()
    used = []
    for block, size, state in zip(blocks.entries(), sizes, states, strict=True):
        # Older versions do not say where a block is: it follows the one before it.
        address = block.get("address", address).size()
        if state.startswith("active") and size:
            used.append((block, address, size))
        address += size
    return used


def _segment(segment: Value, used: int) -> Segment:
    size = segment["total_size"].size()
    kind = segment.get("segment_type", "").text()
    if segment.get("is_expandable", default=False).raw:
        kind = "expandable"
    if kind not in own_format.SEGMENT_KINDS:
        kind = "large" if size > SMALL_BYTES else "small"
    return Segment(
        address=segment["address"].size(),
        size_bytes=size,
        allocated_bytes=segment.get("allocated_size", used).size(),
        stream=segment.get("stream", 0).whole(0),
        kind=kind,
    )


def _reserved(events: Sequence[Mapping[str, Any]], times: Sequence[int], at_end: int) -> Reserved:
    """Bytes that the allocator held, counted back from its end, which is known."""
    changes = [
        (max(now, 0), sign * event["size"])
        for event, now in zip(events, times, strict=True)
        if (sign := _RESERVES.get(event["action"], 0)) and event.get("size", 0)
    ]
    before = at_end - sum(change for _, change in changes)
    states = accumulate((change for _, change in changes), initial=before)
    sizes = np.array([min(max(state, 0), MOST) for state in states], np.int64)
    change_ns = np.array([0, *(now for now, _ in changes)], np.int64)
    # Changes before the recording, or at its very beginning, are one state.
    is_last = np.append(change_ns[1:] > change_ns[:-1], True)
    return Reserved(change_ns[is_last], sizes[is_last])
