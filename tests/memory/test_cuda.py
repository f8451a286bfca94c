"""The allocator's history of a GPU becomes a record: from torch's dict, without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.optim import optimizer as optimizers

from nbdist.memory.rank import cuda
from nbdist.memory.rank.cuda import CudaRecorder, assemble
from nbdist.memory.rank.marks import Marks
from nbdist.memory.rank.owners import StorageOwner
from nbdist.memory.snapshot import (
    BACKWARD,
    BEFORE,
    CATEGORIES,
    GRADIENT,
    OPTIMIZER,
    PARAMETER,
    STAYS,
    STEPPING,
    UNKNOWN,
    MemoryOptions,
    Phase,
    empty,
)
from nbdist.rpc.rank import crash_files

BASE_US = 1_700_000_000_000_000
CELL = "/tmp/ipykernel/123.py"
DEVICE = torch.device("cuda:1")


def frames(line: int) -> list[dict[str, Any]]:
    """Innermost first, as the unwinder gives them."""
    return [
        {"filename": "??", "name": "c10::alloc", "line": 0},
        {"filename": "/env/site-packages/torch/nn/modules/module.py", "name": "_call", "line": 9},
        {"filename": CELL, "name": "<module>", "line": line},
    ]


def event(action: str, address: int, size: int, after_us: int, line: int = 1) -> dict[str, Any]:
    return {
        "action": action, "addr": address, "size": size, "stream": 0,
        "time_us": BASE_US + after_us, "frames": frames(line),
    }  # fmt: skip


def snapshot_of_a_step() -> dict[str, Any]:
    """On the second device: a weight from before, an activation, a gradient, state, a scratch."""
    events = [
        event("alloc", 2000, 512, 10, 2),  # activation
        event("alloc", 3000, 512, 110, 2),  # gradient
        event("free_requested", 2000, 512, 120),
        event("free_completed", 2000, 512, 120),
        event("alloc", 4000, 512, 210, 3),  # state
        event("alloc", 5000, 512, 220, 3),  # scratch of the step
        event("free_requested", 5000, 512, 230),
        event("free_completed", 5000, 512, 230),
        event("free_requested", 3000, 512, 310),
        event("free_completed", 3000, 512, 310),
    ]
    blocks = [
        {"size": 1024, "state": "active_allocated", "address": 1000, "frames": []},
        {"size": 512, "state": "active_allocated", "address": 4000, "frames": frames(3)},
    ]
    segment = {
        "device": 1, "address": 1000, "total_size": 1 << 21, "allocated_size": 1536,
        "active_size": 1536, "stream": 0, "segment_type": "small", "blocks": blocks,
    }  # fmt: skip
    return {"segments": [segment], "device_traces": [[], events]}


def owner(address: int, category: int, name: str, device: str = "cuda:1") -> StorageOwner:
    return StorageOwner(address, 512, category, name, device)


MARKS = Marks(
    first=0,
    before=(owner(1000, PARAMETER, "weight"), owner(2000, PARAMETER, "another's", "cuda:0")),
    owners=[
        (1, (owner(3000, GRADIENT, "weight"),)),
        (2, (owner(4000, OPTIMIZER, "weight: exp_avg"),)),
        (3, (owner(4000, UNKNOWN, "x"),)),
    ],
    steppings=[(1, 2)],
    ends=[2],
)
TIMES_NS = [(BASE_US + after) * 1000 for after in (0, 200, 300, 400)]
BACKWARDS_NS = [
    ((BASE_US + start) * 1000, (BASE_US + end) * 1000) for start, end in ((-50, -40), (100, 150))
]


def test_a_step_on_a_gpu_is_taken_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Claims of the right device, phases by the host's clock, lines of the cell."""
    monkeypatch.setattr(crash_files, "cells", {CELL: 7})
    here = replace(empty(3, "one", ""), version="2.13")
    rank = assemble(snapshot_of_a_step(), MARKS, here, TIMES_NS, BACKWARDS_NS, DEVICE)
    b = rank.blocks
    blocks_by_address = {
        int(a): (CATEGORIES[c], bool(e), int(s), int(end))
        for a, c, e, s, end in zip(
            b.address, b.category, b.is_exact, b.start_ns, b.end_ns, strict=True
        )
    }

    assert blocks_by_address == {
        1000: ("parameters", True, BEFORE, STAYS),
        2000: ("activations", False, 10_000, 120_000),
        3000: ("gradients", True, 110_000, 310_000),
        4000: ("optimizer state", True, 210_000, STAYS),
        5000: ("temporary", False, 220_000, 230_000),
    }
    assert rank.phases == (
        Phase(BACKWARD, 100_000, 150_000), Phase(STEPPING, 200_000, 300_000),
    )  # fmt: skip
    assert rank.step_ends_ns == (300_000,)
    assert {frame.file for stack in rank.stacks for frame in stack} == {"cell [7]"}
    places = list(zip(b.address, b.stack, strict=True))
    lines = {int(a): rank.stacks[n][0].line for a, n in places if n >= 0}
    assert lines == {2000: 2, 3000: 2, 4000: 3, 5000: 3}
    assert (rank.rank, rank.device, rank.version, rank.duration_ns) == (3, "cuda", "2.13", 400_000)
    assert [segment.size_bytes for segment in rank.segments] == [1 << 21]


class Gpu:
    """torch.cuda as far as it is asked, with a history that a test fills."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.stats = {"allocation.all.allocated": 100, "allocation.all.freed": 40}
        self.snapshot: dict[str, Any] = snapshot_of_a_step()
        self.fails = False

    def record(self, **options: Any) -> None:
        self.asked.append(options)

    def take(self) -> dict[str, Any]:
        if self.fails:
            raise RuntimeError("no room")
        return self.snapshot


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    """Stands for a GPU; nothing of torch stays replaced."""
    fake = Gpu()
    place = SimpleNamespace(place=SimpleNamespace(rank=0, device="cuda:1"))
    monkeypatch.setattr(cuda, "this_rank", lambda: place)
    # A torch for CUDA asks the driver, which may not be there.
    monkeypatch.setattr(torch._C, "_cuda_isHistoryEnabled", lambda: False, raising=False)
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", fake.record)
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", fake.take)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda _device: dict(fake.stats))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _device: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _device: 1536)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda _device: 1 << 21)
    properties = SimpleNamespace(name="GPU", total_memory=1 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: properties)
    before = torch.autograd.backward, torch.autograd.grad
    yield fake
    assert (torch.autograd.backward, torch.autograd.grad) == before
    assert not optimizers._global_optimizer_pre_hooks


def begun(**options: Any) -> CudaRecorder:
    """A recorder that has begun, with its first mark."""
    recorder = CudaRecorder(MemoryOptions(**options))
    assert recorder.start()
    assert recorder.mark() == 0
    return recorder


def test_a_recording_bounds_the_history_and_ends_it(gpu: Gpu) -> None:
    """Peaks are the allocator's own; nothing is lost below the bound."""
    recorder = begun(most_events=50, has_stacks=False)
    recorder.stop()
    recorder.stop()
    rank = recorder.read(Marks(), empty(0, "one", ""))

    assert [call["enabled"] for call in gpu.asked] == ["all", None]
    assert (gpu.asked[0]["max_entries"], gpu.asked[0]["context"]) == (50, None)
    assert gpu.asked[0]["stacks"] == "python"
    assert (rank.allocator_peak_bytes, rank.reserved_peak_bytes) == (1536, 1 << 21)
    assert (rank.device_name, rank.limit_bytes, rank.lost) == ("GPU", 1 << 30, 0)


def test_events_beyond_the_bound_are_counted(gpu: Gpu) -> None:
    """By the allocator's own counts: ten are kept of 37."""
    recorder = begun(most_events=10)
    gpu.stats = {
        "allocation.all.allocated": 115, "allocation.all.freed": 50, "active.all.freed": 10,
        "segment.all.allocated": 2,
    }  # fmt: skip
    recorder.stop()

    assert recorder.read(Marks(), empty(0, "one", "")).lost == 27


def test_backwards_are_noted_once_each(gpu: Gpu) -> None:
    """Also one that fails; one within another is a part of it."""
    recorder = begun()
    x = torch.ones(2, requires_grad=True)

    class Inner(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
            return value * 2

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            with torch.enable_grad():
                inner = torch.ones(1, requires_grad=True)
                (inner * 3).sum().backward()
            return gradient * 2

    Inner.apply(x).sum().backward()
    torch.autograd.grad((x * 2).sum(), x)
    with pytest.raises(RuntimeError):
        (x * 2).backward()
    recorder.stop()
    x.sum().backward()
    rank = recorder.read(Marks(), empty(0, "one", ""))

    assert [phase.kind for phase in rank.phases] == [BACKWARD] * 3


def test_a_recording_of_the_user_s_own_is_left_alone(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is told, and how to end it."""
    monkeypatch.setattr(torch._C, "_cuda_isHistoryEnabled", lambda: True, raising=False)
    recorder = CudaRecorder(MemoryOptions())

    assert not recorder.start()
    assert "recording of your own runs" in recorder.problem
    recorder.stop()
    assert gpu.asked == []


def test_a_history_that_cannot_be_read_is_ended_all_the_same(gpu: Gpu) -> None:
    """The next one can begin."""
    recorder = begun()
    gpu.fails = True
    with pytest.raises(RuntimeError, match="no room"):
        recorder.stop()

    assert gpu.asked[-1] == {"enabled": None}


def test_a_torch_without_a_history_says_so(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else is touched."""
    monkeypatch.delattr(torch.cuda.memory, "_record_memory_history")
    recorder = CudaRecorder(MemoryOptions())

    assert not recorder.start()
    assert recorder.problem == cuda.NO_HISTORY


def test_of_this_moment_there_are_the_blocks_that_are_there(gpu: Gpu) -> None:
    """With their owners; events of a history do not count."""
    rank = cuda.of_now([owner(1000, PARAMETER, "weight")], empty(0, "one", ""))

    assert rank.duration_ns == 0
    assert rank.blocks.address.tolist() == [1000, 4000]
    assert [CATEGORIES[category] for category in rank.blocks.category] == ["parameters", "unknown"]
