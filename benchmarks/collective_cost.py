"""What the call log adds to a collective call and to a training step."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

from benchmarks import Row, compare

CALLS = 1000
CALL_ROUNDS = 100
STEP_ROUNDS = 300
# Steps without the wrappers against the same again came out between 0.90 and 1.00 in five pairs of
# processes. So there are several.
STARTS = 5
DEADLINE_S = 120.0


def rows() -> list[Row]:
    """One call in a world of one rank, and one DDP step on two. Each in processes of its own."""
    with tempfile.TemporaryDirectory(prefix="nbdist-bench-") as name:
        call = _medians(name, "call", ranks=1)
        steps = []
        for start in range(STARTS):
            folder = Path(name) / str(start)
            folder.mkdir()
            steps.append(_medians(str(folder), "step", ranks=2))
        step = [statistics.median(side) for side in zip(*steps, strict=True)]
    return [
        Row(
            "all_reduce of 3 floats, 1 rank",
            *call,
            unit="us",
            how=f"{CALL_ROUNDS} x {CALLS} calls, taking turns with torch's own function",
            most_more=3.0,
        ),
        Row(
            "DDP step and all_reduce of the loss, 2 ranks",
            *step,
            unit="us",
            how=f"{STARTS} starts of {STEP_ROUNDS} turns of 3 steps, with the wrappers and without",
            most_ratio=1.01,
        ),
    ]


def main() -> None:
    """Print the rows: bare, with, difference, ratio."""
    for row in rows():
        print(
            f"{row.name}: bare {row.other:.2f} {row.unit}, with the box {row.ours:.2f}, "
            f"difference {row.ours - row.other:.2f}, ratio {row.ratio:.4f}"
            f"{'' if row.is_kept else '  NOT KEPT'}"
        )


def _medians(folder: str, what: str, ranks: int) -> tuple[float, float]:
    """(with the log, without), in microseconds, from rank 0 of a group of processes."""
    env = os.environ | {
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": str(Path(__file__).resolve().parents[1]),
    }
    program = [sys.executable, "-m", "benchmarks.collective_cost", what]
    processes = [
        subprocess.Popen(
            [*program, str(rank), str(ranks), folder], env=env, stdout=subprocess.PIPE, text=True
        )
        for rank in range(ranks)
    ]
    try:
        outputs = [process.communicate(timeout=DEADLINE_S)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    ours, other = json.loads(outputs[0])
    return ours, other


def _rank(what: str, rank: int, ranks: int, folder: str) -> None:
    import torch.distributed as dist

    from nbdist.hang.rank import call_log

    store = dist.FileStore(str(Path(folder) / what), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    log = call_log.open_log(Path(folder), rank)
    measure = {"call": _calls, "step": _steps}[what]

    measure_once, rounds = measure()
    bare = _held()
    call_log.install(log)
    wrapped = {place: _value(*place) for place in bare}

    def with_(functions: dict[tuple[Any, str], Any]) -> float:
        # Faster than to install and uninstall, whose work would leave the caches cold.
        for (owner, name), function in functions.items():
            setattr(owner, name, function)
        return measure_once()

    medians = compare(lambda: with_(wrapped), lambda: with_(bare), rounds, warm_up=5)
    print(json.dumps(medians))
    sys.stdout.flush()
    dist.destroy_process_group()


def _held() -> dict[tuple[Any, str], Any]:
    """All functions of torch.distributed, and where they are held: what a log can replace."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    modules = [(module, name) for module in (dist, c10d) for name in vars(module)]
    functions = [p for p in modules if type(_value(*p)) is FunctionType]
    return {p: _value(*p) for p in [*functions, (dist.Work, "wait")]}


def _value(owner: Any, name: str) -> Any:
    return vars(owner)[name]


def _calls() -> tuple[Callable[[], float], int]:
    import torch
    import torch.distributed as dist

    x = torch.zeros(3)

    def once() -> float:
        call = dist.all_reduce
        began_s = time.perf_counter()
        for _ in range(CALLS):
            call(x)
        return (time.perf_counter() - began_s) / CALLS * 1e6

    return once, CALL_ROUNDS


def _steps() -> tuple[Callable[[], float], int]:
    import torch
    import torch.distributed as dist
    from torch import nn

    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(256, 256), nn.ReLU())]
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    x = torch.randn(64, 256)

    def step() -> float:
        dist.barrier()  # so that none waits for the other's uninstall
        began_s = time.perf_counter()
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        dist.all_reduce(loss.detach())
        return (time.perf_counter() - began_s) * 1e6

    def once() -> float:
        return statistics.median(step() for _ in range(3))

    return once, STEP_ROUNDS


if __name__ == "__main__":
    if len(sys.argv) > 1:
        _rank(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
    else:
        main()
