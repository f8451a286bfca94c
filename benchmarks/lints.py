"""What lints, and a look every ten steps, add to a training step."""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from benchmarks import Row, compare
from benchmarks.ranks import Ranks, join_nbdist, obey

RANKS = 2
STARTS = 3
ROUNDS = 7
# Two looks of --every 10.
STEPS = 20
EVERY = 10
MOST_OF_LINTS = 1.01


def rows() -> list[Row]:
    """Lints alone, and with looks; the same ranks take turns with torch as it is."""
    times: dict[str, list[tuple[float, float]]] = {"lints": [], "every": []}
    for start in range(STARTS):
        with (
            tempfile.TemporaryDirectory(prefix="nbdist-bench-") as name,
            Ranks("lints", "ours", RANKS, Path(name) / "ours") as ranks,
        ):
            ranks.ask("begin")
            for what, pairs in times.items():
                pairs.append(_medians(ranks, what, is_first=bool(start % 2)))
    how = (
        f"processor time; {STARTS} starts of {ROUNDS} turns of {STEPS} steps with a DataLoader; "
        "other: without"
    )
    return [
        _row(f"DDP training step, {RANKS} ranks, all lints on", times["lints"], how, MOST_OF_LINTS),
        _row(f"the same with %dist_check --every {EVERY}", times["every"], how, None),
    ]


def _medians(ranks: Ranks, what: str, *, is_first: bool) -> tuple[float, float]:
    def turn(side: str) -> float:
        return float(max(ranks.ask("turn", side)))

    if is_first:
        return compare(lambda: turn(what), lambda: turn("bare"), ROUNDS)
    other, ours = compare(lambda: turn("bare"), lambda: turn(what), ROUNDS)
    return ours, other


def _row(name: str, pairs: list[tuple[float, float]], how: str, most: float | None) -> Row:
    ours, other = zip(*pairs, strict=True)
    return Row(
        name, statistics.median(ours), statistics.median(other), unit="ms", how=how,
        most_ratio=most,
    )  # fmt: skip


class Side:
    """What a rank does when it is asked."""

    def __init__(self) -> None:
        self._step: Callable[[], None] | None = None
        self._loader: Any = None

    def begin(self) -> None:
        """Make the model and the loader of benchmarks/training.py."""
        from nbdist.lints.rank import watch

        watch.install()  # else its constructor would not be seen
        torch.manual_seed(0)
        model: Any = torch.nn.Sequential(
            torch.nn.Linear(256, 1024), torch.nn.GELU(),
            torch.nn.Linear(1024, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 10),
        )  # fmt: skip
        model = DistributedDataParallel(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        data = TensorDataset(
            torch.randn(64 * STEPS * RANKS, 256), torch.randint(10, (64 * STEPS * RANKS,))
        )
        self._loader = DataLoader(data, batch_size=64, sampler=DistributedSampler(data))

        def step() -> None:
            for inputs, labels in self._loader:
                optimizer.zero_grad()
                loss = torch.nn.functional.cross_entropy(model(inputs), labels)
                loss.backward()
                optimizer.step()

        self._step = step
        step()

    def turn(self, side: str) -> float:
        """Milliseconds of a step; with lints as a cell has them, from its begin to its end.

        Of processor time: lints wait for nobody, and what waits for the other rank says nothing.
        """
        from nbdist.lints.rank import check_every, watch

        assert self._step is not None
        if side == "bare":
            watch.uninstall()
        else:
            watch.install()
            check_every.set_every(EVERY if side == "every" else 0)
        dist.barrier()
        began_s = time.process_time()
        if side != "bare":
            watch.begin()
        self._step()
        if side != "bare":
            watch.collect()
        elapsed_s = time.process_time() - began_s
        check_every.set_every(0)
        return elapsed_s / STEPS * 1000


def main() -> None:
    """On a rank: join, and obey."""
    _, rank, size, folder = sys.argv[1:]
    assert rank
    join_nbdist(int(size), Path(folder))
    side = Side()
    obey({"begin": side.begin, "turn": side.turn})


if __name__ == "__main__":
    main()
