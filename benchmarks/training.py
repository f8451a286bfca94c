"""Training steps in a distributed cell, beside the same code under torchrun."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks import Row
from benchmarks.kernels import Notebook
from benchmarks.start import cells_of_ours

RANKS = 2
# A process is up to 5 % faster or slower than the next one, by where its memory lies.
STARTS = 7
# Steps per second are to be at least this much of those under torchrun.
LEAST = 0.98
DEADLINE_S = 300.0
# As a user writes it, and the same text on both sides: five turns of 20 steps.
CODE = """
import statistics, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Linear(256, 1024), torch.nn.GELU(),
    torch.nn.Linear(1024, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 10))
model = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
inputs, labels = torch.randn(64, 256), torch.randint(10, (64,))
taken = []
for turn in range(6):
    began = time.perf_counter()
    for step in range(20):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print('loss', f'{loss.item():.3f}')
    taken.append((time.perf_counter() - began) / 20)
slowest = torch.tensor(statistics.median(taken[1:]))
dist.all_reduce(slowest, dist.ReduceOp.MAX)
print(f'\\nstep {slowest.item():.9f}')
"""
SCRIPT = f"""
import torch.distributed as dist
dist.init_process_group("gloo")
{CODE}
dist.barrier()
dist.destroy_process_group()
"""


def rows() -> list[Row]:
    """One row; each start of one side is followed by one of the other."""
    with tempfile.TemporaryDirectory(prefix="nbdist-bench-") as name:
        pairs = []
        for number in range(STARTS):
            folder = Path(name) / str(number)
            folder.mkdir()
            sides = [_in_a_cell, _under_torchrun]
            order = sides if number % 2 else sides[::-1]
            times = {side: side(folder) for side in order}
            pairs.append((times[_in_a_cell], times[_under_torchrun]))
    ours, other = zip(*pairs, strict=True)
    return [
        Row(
            "DDP training step, 2 ranks",
            statistics.median(ours) * 1000,
            statistics.median(other) * 1000,
            unit="ms",
            how=f"{STARTS} starts of each side, by turns, 5 x 20 steps in each; other: torchrun",
            most_ratio=1 / LEAST,
        )
    ]


def _in_a_cell(folder: Path) -> float:
    with Notebook(folder) as notebook:
        for cell in cells_of_ours(RANKS)[:-1]:
            notebook.run(cell)
        # What a rank imports once it is idle would be imported in the middle of the steps.
        notebook.run("%%distributed\nimport torch._dynamo\naccelerator.num_processes")
        text = notebook.run(f"%%distributed\n{CODE}").text
        notebook.run("%dist_shutdown")
    return _step_s(text)


def _under_torchrun(folder: Path) -> float:
    path = folder / "script.py"
    path.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS)]
    done = subprocess.run(
        [*command, "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", str(path)],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    return _step_s(done.stdout)


def _step_s(text: str) -> float:
    steps = [line.rpartition("step ")[2] for line in text.splitlines() if "step " in line]
    assert steps, text
    return float(steps[0])
