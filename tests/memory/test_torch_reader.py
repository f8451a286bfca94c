"""torch's dict of a snapshot, read and written."""

import copy
import itertools
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from nbdist.errors import SnapshotError
from nbdist.memory.own_format import OURS
from nbdist.memory.snapshot import (
    BEFORE,
    CATEGORIES,
    STAYS,
    UNKNOWN,
    AllocationFrame,
    Blocks,
    OutOfMemory,
    RankMemory,
    Segment,
    make_blocks,
)
from nbdist.memory.torch_reader import NO_TIMES, of_torch
from nbdist.memory.torch_writer import to_torch
from tests.support.drawn_memory import Piece, rank_memory
from tests.support.memory_records import GPU, MIB, at, drawn

HUGE = 2**20000  # more digits than Python writes
_COLUMNS = Blocks.__slots__


def same(memory: RankMemory, other: RankMemory) -> bool:
    """Whether two records are equal, columns and their types too."""
    pairs = [(getattr(memory.blocks, name), getattr(other.blocks, name)) for name in _COLUMNS]
    pairs += [
        (getattr(memory.reserved, name), getattr(other.reserved, name))
        for name in ("time_ns", "size_bytes")
    ]
    no_columns = {"blocks": make_blocks(), "reserved": None}
    return all(np.array_equal(a, b) and a.dtype == b.dtype for a, b in pairs) and (
        replace(memory, **no_columns) == replace(other, **no_columns)
    )


def rows(memory: RankMemory) -> list[tuple[int, ...]]:
    """(address, size, start, end) of each block."""
    b = memory.blocks
    return list(
        zip(*(c.tolist() for c in (b.address, b.size_bytes, b.start_ns, b.end_ns)), strict=True)
    )


@pytest.mark.parametrize("seed", range(60))
def test_round_trip_is_identity(seed: int) -> None:
    """Every record comes back equal, with the types of its columns."""
    memory = drawn(seed)

    assert same(of_torch(to_torch(memory)), memory)


def test_gpu_by_hand() -> None:
    """Times since the first event; sizes held; freed when the stream was done with it."""
    memory = of_torch(GPU, rank=3, host="node-7")

    assert (memory.rank, memory.host, memory.device) == (3, "node-7", "cuda")
    assert memory.duration_ns == 11_000
    assert rows(memory) == [
        (31 * MIB, MIB, BEFORE, 0),
        (20 * MIB, 8 * MIB, BEFORE, STAYS),
        (50 * MIB, 1024, 3_000, 7_000),
        (38 * MIB, 2 * MIB, 5_000, STAYS),
        (28 * MIB, 3 * MIB, 8_000, STAYS),
    ]
    stacks = [memory.stacks[p] if p >= 0 else () for p in memory.blocks.stack]
    line5, main = AllocationFrame("train.py", 5, "train"), AllocationFrame("train.py", 1, "main")
    assert stacks == [
        (), (AllocationFrame("train.py", 3, "load"),), (line5, main), (line5,),
        (AllocationFrame("train.py", 9, "train"),),
    ]  # fmt: skip
    assert set(memory.blocks.category) == {UNKNOWN}
    assert not memory.blocks.is_exact.any()
    assert memory.segments == (
        Segment(20 * MIB, 20 * MIB, 13 * MIB, 0, "large"),
        Segment(50 * MIB, 2 * MIB, 0, 77, "small"),
    )
    assert memory.reserved.time_ns.tolist() == [0, 2_000]
    assert memory.reserved.size_bytes.tolist() == [20 * MIB, 22 * MIB]
    place = memory.stacks.index((AllocationFrame("train.py", 11, "train"),))
    assert memory.failures == (OutOfMemory(10_000, 2**40, 5 * MIB, place),)
    assert memory.problem == ""


def test_history_older_than_the_recording() -> None:
    """What was allocated before the start was there before; what was freed by then never was."""
    memory = of_torch(GPU, start_us=1006, end_us=1020)

    assert memory.duration_ns == 14_000
    assert rows(memory) == [
        (50 * MIB, 1024, BEFORE, 1_000),
        (38 * MIB, 2 * MIB, BEFORE, STAYS),
        (20 * MIB, 8 * MIB, BEFORE, STAYS),
        (28 * MIB, 3 * MIB, 2_000, STAYS),
    ]
    assert memory.reserved.time_ns.tolist() == [0]
    assert memory.reserved.size_bytes.tolist() == [22 * MIB]


def test_other_device() -> None:
    """A device without a history, in an old layout: blocks without an address."""
    memory = of_torch(GPU, device_index=1)

    assert rows(memory) == [(20 * MIB, MIB, BEFORE, STAYS)]
    assert memory.duration_ns == 0
    assert rows(of_torch(GPU, device_index=5)) == []


def test_old_torch_without_addresses_times_and_frames() -> None:
    """Blocks follow each other in their segment; frames stand in a block's history."""
    segment = {
        "device": 0, "address": 1000, "total_size": 4096, "stream": 0, "segment_type": "small",
        "blocks": [
            {"size": 1024, "state": "inactive"},
            {"size": 2048, "state": "active_allocated",
             "history": [{"addr": 2024, "real_size": 2000, "frames": [at(4)]}]},
            {"size": 1024, "state": "active_allocated"},
        ],
    }  # fmt: skip
    events = [
        {"action": "alloc", "addr": 4072, "size": 900, "stream": 0},
        {"action": "alloc", "addr": 1000, "size": 1024, "stream": 0},
        {"action": "free_requested", "addr": 1000, "size": 1024, "stream": 0},
        {"action": "free_completed", "addr": 1000, "size": 1024, "stream": 0},
    ]
    memory = of_torch({"segments": [segment], "device_traces": [events]})

    assert rows(memory) == [
        (2024, 2048, BEFORE, STAYS), (4072, 1024, 0, STAYS), (1000, 1024, 1_000, 3_000),
    ]  # fmt: skip
    assert memory.stacks == ((AllocationFrame("train.py", 4, "train"),),)
    assert memory.segments == (Segment(1000, 4096, 3072, 0, "small"),)
    assert memory.problem == NO_TIMES


def test_freeing_that_the_history_leaves_out() -> None:
    """With skip_actions: an address used again ends the block before; a missing one is told."""
    events = [
        {"action": "alloc", "addr": 512, "size": 512, "time_us": 1},
        {"action": "free_requested", "addr": 512, "size": 512, "time_us": 3},
        {"action": "alloc", "addr": 512, "size": 1024, "time_us": 5},
        {"action": "alloc", "addr": 4096, "size": 512, "time_us": 6},
        {"action": "snapshot", "time_us": 9},
    ]
    segment = {
        "device": 0, "address": 0, "total_size": 8192, "stream": 0,
        "blocks": [{"address": 0, "size": 8192, "state": "inactive"}],
    }  # fmt: skip
    memory = of_torch({"segments": [segment], "device_traces": [events]})

    assert rows(memory) == [
        (512, 512, 0, 2_000),
        (512, 1024, 4_000, 8_000),
        (4096, 512, 5_000, 8_000),
    ]
    assert memory.problem.startswith("The history does not say when 2 of its blocks were freed")


@pytest.mark.parametrize("seed", range(20))
def test_random_history_as_a_simulator_says(seed: int) -> None:
    """In use at each moment, from any beginning of the history on, as a plain simulation."""
    chance = random.Random(seed)
    events: list[dict[str, Any]] = []
    used: dict[int, int] = {}
    asked: list[int] = []
    in_use: list[int] = []  # after each event
    for now in range(200):
        move = chance.random()
        if asked and move < 0.25:
            address = asked.pop(chance.randrange(len(asked)))
            size, action = used.pop(address), "free_completed"
        elif len(used) > len(asked) and move < 0.5:
            address = chance.choice([a for a in used if a not in asked])
            size, action = used[address], "free_requested"
            asked.append(address)
        else:
            free = [a for a in range(0, 64 * 4096, 4096) if a not in used]
            if not free:
                continue
            address, size, action = chance.choice(free), 512 * chance.randint(1, 8), "alloc"
            used[address] = size
        events.append({"action": action, "addr": address, "size": size, "time_us": now + 1})
        in_use.append(sum(used.values()))
    blocks = [
        {"address": a, "size": s, "state": "active_allocated"} for a, s in sorted(used.items())
    ]
    segments = [
        {"device": 0, "address": b["address"], "total_size": b["size"], "blocks": [b]}
        for b in blocks
    ]
    cut = chance.randrange(len(events) // 2)  # the ring has lost the events before
    memory = of_torch({"segments": segments, "device_traces": [events[cut:]]}, start_us=0)

    b = memory.blocks
    for event, size in zip(events[cut:], in_use[cut:], strict=True):
        now = event["time_us"] * 1000
        assert int(b.size_bytes[(b.start_ns <= now) & (b.end_ns > now)].sum()) == size


@pytest.mark.parametrize("seed", range(20))
def test_written_events_lead_to_the_written_segments(seed: int) -> None:
    """What viewers add up: no address twice in use, and after all events the blocks that stay."""
    memory = drawn(seed)
    content = to_torch(memory)

    assert list(content) == ["segments", "device_traces", OURS]
    (events,) = content["device_traces"]
    b = memory.blocks
    older = np.flatnonzero((b.start_ns == BEFORE) & (b.end_ns != STAYS))
    used = {int(b.address[i]): int(b.size_bytes[i]) for i in older}
    asked: set[int] = set()
    for event in events:
        match event["action"]:
            case "alloc":
                assert event["addr"] not in used
                used[event["addr"]] = event["size"]
            case "free_requested":
                assert used[event["addr"]] == event["size"]
                asked.add(event["addr"])
            case "free_completed":
                asked.remove(event["addr"])
                del used[event["addr"]]
    assert [*events] == sorted(events, key=lambda event: event["time_us"])
    assert asked == set()
    sizes = {}
    for segment in content["segments"]:
        at_address = segment["address"]
        for block in segment["blocks"]:
            assert block["address"] == at_address
            at_address += block["size"]
            if block["state"] == "active_allocated":
                sizes[block["address"]] = block["size"]
        assert at_address == segment["address"] + segment["total_size"]
    assert sizes == used
    assert sum(event["action"] == "oom" for event in events) == len(memory.failures)


@pytest.mark.parametrize("seed", range(20))
def test_blocks_that_stay_have_their_colour_in_an_event(seed: int) -> None:
    """torch's viewer takes colours from nowhere else."""
    memory = drawn(seed)
    b = memory.blocks
    (events,) = to_torch(memory)["device_traces"]

    categories = {
        event["addr"]: event["category"] for event in events if event["action"] == "alloc"
    }
    stays = np.flatnonzero(b.end_ns == STAYS)
    assert {a: categories[a] for a in b.address[stays].tolist()} == {
        int(b.address[i]): CATEGORIES[b.category[i]] for i in stays
    }
    assert [event["category"] for event in events[: len(CATEGORIES)]] == [*CATEGORIES]


def test_blocks_without_an_address_get_one_in_the_viewer() -> None:
    """What is held in C++ has a size alone: shown beside the others, and read back as it was."""
    memory = drawn(3)
    nowhere = memory.blocks.address.copy()
    nowhere[2:5] = -1
    memory = replace(memory, blocks=replace(memory.blocks, address=nowhere))
    content = to_torch(memory)

    assert same(of_torch(content), memory)
    used = [
        (event["addr"], event["addr"] + event["size"])
        for event in content["device_traces"][0]
        if event["action"] == "alloc"
    ]
    ends = sorted(used)
    assert all(begin >= 2**20 for begin, _ in ends)
    assert all(block[1] <= other[0] for block, other in itertools.pairwise(ends))


def test_one_address_used_twice_in_one_moment() -> None:
    """Freed first, then taken again, however the clock stood still."""
    spans = ((0, 5), (5, 5), (5, 5), (5, STAYS))
    pieces = [Piece(1 + n, start, end, address=64) for n, (start, end) in enumerate(spans)]
    events = to_torch(rank_memory(0, pieces))["device_traces"][0]

    changes = [
        (e["action"], e["size"]) for e in events if e["action"] in {"alloc", "free_completed"}
    ]
    assert changes == [
        ("alloc", 1), ("free_completed", 1), ("alloc", 2), ("free_completed", 2), ("alloc", 3),
        ("free_completed", 3), ("alloc", 4),
    ]  # fmt: skip


def _paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner: Any = ()
    if isinstance(value, dict):
        inner = value.items()
    elif isinstance(value, (list, tuple)):
        inner = enumerate(value)
    return [
        path,
        *(inner_path for key, value in inner for inner_path in _paths(value, (*path, key))),
    ]


def _with(whole: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    changed = copy.copy(whole) if isinstance(whole, dict) else list(whole)
    changed[path[0]] = _with(whole[path[0]], path[1:], value)
    return changed


_OTHER = (
    None, True, -1, 2**63, HUGE, 0.5, "text", b"x", [], [0], {}, {"a": 0}, (), {1, 2}, object(),
)  # fmt: skip


@pytest.mark.parametrize("source", ["torch", "nbdist"])
def test_any_value_replaced_by_any_other(source: str) -> None:
    """It is read, or refused with the place; never anything else."""
    whole = GPU if source == "torch" else {OURS: to_torch(drawn(3))[OURS]}
    refused = 0
    for path in _paths(whole):
        for value in _OTHER:
            try:
                of_torch(_with(whole, path, value))
            except SnapshotError as error:
                refused += 1
                assert str(error).endswith(".")  # noqa: PT017
                if len(path) > 2:
                    assert str(path[0]) in str(error) or "snapshot" in str(error)  # noqa: PT017
    assert refused > 500


_TRACE = ("device_traces", 0)


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        (
            ("segments", 0, "blocks", 1, "size"), "8",
            "segments[0].blocks[1].size is a text ('8'), not a whole number.",
        ),
        ((*_TRACE, 3, "addr"), None, "device_traces[0][3].addr is nothing, not a whole number."),
        ((*_TRACE, 3, "frames", 0), [], "device_traces[0][3].frames[0] is a list, not a dict."),
        (("segments",), 1.5, "segments is a number with decimals (1.5), not a list."),
        pytest.param((*_TRACE, 0, "size"), HUGE, "is the number of 20001 bits, not", id="huge"),
        pytest.param((*_TRACE, 0, "action"), HUGE, "(of 20001 bits), not a text", id="huge text"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told_with_its_place(
    path: tuple[Any, ...], value: Any, expected: str
) -> None:
    """The place reads like Python."""
    with pytest.raises(SnapshotError) as caught:
        of_torch(_with(GPU, path, value))

    assert expected in str(caught.value)


def test_file_of_a_newer_nbdist() -> None:
    """It says so, with both numbers."""
    whole = to_torch(drawn(1))
    whole[OURS]["format"] = 7
    with pytest.raises(SnapshotError, match=r"format is 7, and this version of nbdist reads 1"):
        of_torch(whole)
