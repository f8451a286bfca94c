"""Records of memory, drawn at random, and torch's dict of a GPU, by hand."""

from typing import Any

import numpy as np

from nbdist.memory.snapshot import (
    BACKWARD,
    BEFORE,
    CATEGORIES,
    STAYS,
    STEPPING,
    AllocationFrame,
    Blocks,
    OutOfMemory,
    Phase,
    RankMemory,
    Reserved,
    Segment,
)

_FILES = ("cell [1]", "model.py", "/opt/train é\n.py", "")
_DEVICES = ("cpu", "cuda")


def drawn(seed: int) -> RankMemory:
    """Any memory of a rank: few or many blocks, with everything that a record can hold."""
    chance = np.random.default_rng(seed)
    count = int(chance.integers(0, 40))
    stacks = tuple(
        tuple(
            AllocationFrame(
                _FILES[chance.integers(4)], int(chance.integers(1, 10**5)), "f",
                is_line_known=bool(chance.integers(2)),
            )
            for _ in range(chance.integers(1, 4))
        )
        for _ in range(chance.integers(1, 5))
    )  # fmt: skip
    names = ("layer.0.weight", "aten::empty", "x" * 300)[: chance.integers(1, 4)]
    start = np.sort(chance.integers(BEFORE, 10**6, count))
    end = np.where(
        chance.random(count) < 0.3, STAYS, np.maximum(start, 0) + chance.integers(0, 10**6, count)
    )
    times = np.sort(chance.integers(1, 10**6, 3))
    return RankMemory(
        rank=int(chance.integers(0, 9)),
        host="node-1",
        device=_DEVICES[chance.integers(2)],
        blocks=Blocks(
            address=np.cumsum(chance.integers(2**20, 2**21, count)),
            size_bytes=chance.integers(1, 2**20, count),
            start_ns=start,
            end_ns=end,
            category=chance.integers(0, len(CATEGORIES), count).astype(np.int8),
            is_exact=chance.random(count) < 0.5,
            stack=chance.integers(-1, len(stacks), count).astype(np.int32),
            name=chance.integers(-1, len(names), count).astype(np.int32),
            operator=chance.integers(-1, len(names), count).astype(np.int32),
        ),
        device_name="",
        limit_bytes=int(chance.integers(0, 2**40)),
        duration_ns=2 * 10**6,
        stacks=stacks,
        names=names,
        phases=(Phase(BACKWARD, 5, 10), Phase(STEPPING, 12, 20))[: chance.integers(0, 3)],
        step_ends_ns=tuple(times.tolist()),
        reserved=Reserved(np.array([0, *times]), chance.integers(0, 2**40, 4)),
        segments=tuple(
            Segment(2**21 * n, 2**21 * int(chance.integers(1, 4)), 5, n, kind)
            for n, kind in enumerate(("large", "small", "expandable")[: chance.integers(0, 4)])
        ),
        allocator_peak_bytes=int(chance.integers(0, 2**40)),
        reserved_peak_bytes=int(chance.integers(0, 2**40)),
        failures=(OutOfMemory(7, 2**40), OutOfMemory(10**6, 5, 3, 0))[: chance.integers(0, 3)],
        lost=int(chance.integers(0, 5)),
        version="2.13.0",
        problem="one sentence." if chance.integers(2) else "",
    )


def at(line: int, function: str = "train") -> dict[str, Any]:
    """A frame of a user's program, as torch has it."""
    return {"filename": "train.py", "line": line, "name": function}


MIB = 2**20
# A GPU on which a tensor was freed on one stream while another one still read it, and one is older
# than the history. Sizes of events are those asked for, of blocks those that are held.
GPU: dict[str, Any] = {
    "segments": [
        {
            "device": 0, "address": 20 * MIB, "total_size": 20 * MIB, "stream": 0,
            "segment_type": "large", "allocated_size": 13 * MIB, "active_size": 13 * MIB,
            "requested_size": 13 * MIB - 100, "segment_pool_id": (0, 0), "is_expandable": False,
            "frames": [],
            "blocks": [
                {"address": 20 * MIB, "size": 8 * MIB, "requested_size": 8 * MIB,
                 "state": "active_allocated", "frames": [at(3, "load")]},
                {"address": 28 * MIB, "size": 3 * MIB, "requested_size": 3 * MIB - 100,
                 "state": "active_allocated", "frames": [at(9)]},
                {"address": 31 * MIB, "size": 7 * MIB, "requested_size": 0, "state": "inactive",
                 "frames": []},
                {"address": 38 * MIB, "size": 2 * MIB, "requested_size": 2 * MIB,
                 "state": "active_pending_free", "frames": [at(5)]},
            ],
        },
        {
            "device": 0, "address": 50 * MIB, "total_size": 2 * MIB, "stream": 77,
            "segment_type": "small", "allocated_size": 0, "active_size": 0, "requested_size": 0,
            "segment_pool_id": (0, 0), "is_expandable": False, "frames": [],
            "blocks": [{"address": 50 * MIB, "size": 2 * MIB, "requested_size": 0,
                        "state": "inactive", "frames": []}],
        },
        {
            "device": 1, "address": 20 * MIB, "total_size": MIB, "stream": 0,
            "segment_type": "large", "blocks": [{"size": MIB, "state": "active_allocated"}],
        },
    ],
    "device_traces": [
        [
            # Older than the history, and freed in it.
            {"action": "free_requested", "addr": 31 * MIB, "size": MIB, "stream": 0,
             "time_us": 1000, "frames": []},
            {"action": "free_completed", "addr": 31 * MIB, "size": MIB, "stream": 0,
             "time_us": 1000, "frames": []},
            {"action": "segment_alloc", "addr": 50 * MIB, "size": 2 * MIB, "stream": 77,
             "time_us": 1002, "frames": []},
            {"action": "alloc", "addr": 50 * MIB, "size": 1000, "stream": 77, "time_us": 1003,
             "frames": [at(5), {"filename": "??", "line": 0, "name": "c10::alloc"}, at(1, "main")],
             "user_metadata": "", "compile_context": "0/0"},
            {"action": "free_requested", "addr": 50 * MIB, "size": 1000, "stream": 77,
             "time_us": 1004, "frames": []},
            {"action": "alloc", "addr": 38 * MIB, "size": 2 * MIB, "stream": 0, "time_us": 1005,
             "frames": [at(5)]},
            {"action": "free_completed", "addr": 50 * MIB, "size": 1000, "stream": 77,
             "time_us": 1007, "frames": []},
            # The address of the one before, with another size.
            {"action": "alloc", "addr": 28 * MIB, "size": 3 * MIB - 100, "stream": 0,
             "time_us": 1008, "frames": [at(9)]},
            {"action": "free_requested", "addr": 38 * MIB, "size": 2 * MIB, "stream": 0,
             "time_us": 1009, "frames": []},
            {"action": "oom", "size": 2**40, "device_free": 5 * MIB, "stream": 0, "time_us": 1010,
             "frames": [at(11)]},
            {"action": "snapshot", "addr": 0, "size": 0, "stream": 0, "time_us": 1011},
        ],
        [],
    ],
    "allocator_settings": {"expandable_segments": False, "garbage_collection_threshold": 0.0},
}  # fmt: skip
