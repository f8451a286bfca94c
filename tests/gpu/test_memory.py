"""What a cell allocates on a real GPU, against the allocator's own counts."""

import re
from typing import Any

import pytest

from nbdist.errors import DistributedError
from nbdist.memory.snapshot import (
    ACTIVATION,
    BACKWARD,
    GRADIENT,
    OPTIMIZER,
    PARAMETER,
    STAYS,
    STEPPING,
    MemoryOptions,
    RankMemory,
)
from nbdist.notebook.session import Session
from tests.gpu.places import on

_TRAIN = """
model = torch.nn.Sequential(torch.nn.Linear(512, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 64))
model = model.to(device)
optimizer = torch.optim.Adam(model.parameters())
def step():
    optimizer.zero_grad()
    model(torch.ones(256, 512, device=device)).sum().backward()
    optimizer.step()
step()
"""
# Elements of the model's parameters, each of 4 bytes; the allocator rounds up to 512.
_SIZES = (512 * 1024, 1024, 1024 * 64, 64)
_BYTES = sum(-(-4 * n // 512) * 512 for n in _SIZES)


def total(memory: RankMemory, time_ns: int, category: int) -> int:
    """Bytes of a category at a time."""
    blocks = memory.blocks
    there = (blocks.start_ns <= time_ns) & (blocks.end_ns > time_ns)
    return int(blocks.size_bytes[there & (blocks.category == category)].sum())


def peak(memory: RankMemory) -> int:
    """The most that the record has in use: after one of its allocations, or at the beginning."""
    blocks = memory.blocks
    return max(
        int(blocks.size_bytes[(blocks.start_ns <= t) & (blocks.end_ns > t)].sum())
        for t in [0, *blocks.start_ns[blocks.start_ns >= 0].tolist()]
    )


@on("one")
def test_a_gpus_memory_is_recorded_and_adds_up(ranks: Session) -> None:
    """To the allocator's peak; parameters, gradients and state to the bytes of their elements."""
    ranks.run(_TRAIN)
    with ranks.memories.recording(MemoryOptions()):
        ranks.run("for _ in range(2): step()")
    (memory,) = ranks.memory().ranks
    with ranks.memories.recording(MemoryOptions(most_events=10)):
        ranks.run("for _ in range(2): step()")
    (bounded,) = ranks.memory().ranks
    off = ranks.run("print(torch.autograd.backward.__module__, torch._C._cuda_isHistoryEnabled())")
    (now,) = ranks.memories.now().ranks

    assert (memory.problem, memory.lost, memory.device) == ("", 0, "cuda")
    assert memory.device_name
    assert [phase.kind for phase in memory.phases] == [BACKWARD, STEPPING] * 2
    stepping = memory.phases[-1].start_ns
    assert total(memory, stepping, PARAMETER) == total(memory, stepping, GRADIENT) == _BYTES
    # Two moments on the GPU; the count of steps is a tensor on the host.
    assert total(memory, stepping, OPTIMIZER) == 2 * _BYTES
    assert total(memory, memory.phases[0].start_ns, ACTIVATION) >= 4 * 256 * (512 + 1024)
    assert peak(memory) == memory.allocator_peak_bytes <= memory.reserved_peak_bytes
    assert any(frame.file.startswith("cell [") for stack in memory.stacks for frame in stack)
    assert bounded.lost > 0
    assert {rank.text for rank in off.ranks} == {"torch.autograd False\n"}
    assert now.duration_ns == 0
    assert (now.blocks.end_ns == STAYS).all()
    assert total(now, 0, PARAMETER) == _BYTES


FAILS = """
def train():
    hidden = [torch.ones(2**28, device=device)]  # 1 GiB each
    while True:
        hidden.append(hidden[-1] * 2)
train()
"""


@on("one")
def test_out_of_memory_is_explained(ranks: Session, measured: Any) -> None:
    """The allocator's numbers, the frame's list by name, remedies; afterwards all of it is free."""
    with pytest.raises(DistributedError, match="out of memory") as caught:
        ranks.run(FAILS)
    (memory,) = ranks.memory().ranks
    done = ranks.run("import gc; gc.collect(); print(torch.cuda.memory_allocated() < 2**30)")

    lines = caught.value.advice.splitlines()
    assert re.match(r"rank 0 ran out of memory of its GPU 0: 1\.1 GB requested", lines[0])
    assert any("hidden in train" in line for line in lines)
    assert any(line.startswith("  half the batch") for line in lines)
    held = int(memory.blocks.size_bytes.sum())
    measured("held, GB", round(held / 1e9, 1))
    assert held > 0.8 * memory.limit_bytes - 2 * 2**30
    assert memory.device == "cuda"
    assert done[0].text.strip() == "True"
