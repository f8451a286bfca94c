"""Training steps under a strategy, beside the same written by hand in torch."""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from benchmarks import Row, compare
from benchmarks.language_model import Net, Size, batch, make, mean_loss
from benchmarks.ranks import Ranks, join, join_nbdist, obey

MUON = "fsdp by Muon"
STRATEGIES = ("ddp", "fsdp", "tp", "pp", MUON)
RANKS = 2
# Some 200 ms of work in a step on a core.
SIZE = Size(width=384, n_blocks=4, n_words=512)
LENGTH = 64
# Of one step over all ranks. Under ddp and fsdp each rank sees a half.
SAMPLES = 8
MICROBATCHES = 4
# A process is up to 5 % faster or slower than the next one for as long as it lives, by where its
# memory lies. So there are several of each side.
STARTS = 7
ROUNDS = 6
STEPS_IN_A_TURN = 3
# Steps per second are to be at least this much of those by hand.
LEAST = 0.98
# Losses of the first steps, between the two sides.
CLOSE = 1e-5

Step = Callable[[], torch.Tensor]


def rows() -> list[Row]:
    """One row for each strategy: two groups of two ranks, which take turns, several times."""
    times: dict[str, list[tuple[float, float]]] = {strategy: [] for strategy in STRATEGIES}
    for start in range(STARTS):
        for strategy, medians in _started(backward=bool(start % 2)).items():
            times[strategy].append(medians)
    return [_row(strategy, pairs) for strategy, pairs in times.items()]


def _started(*, backward: bool) -> dict[str, tuple[float, float]]:
    """Medians of both sides in milliseconds; `backward` starts the other side first."""
    with tempfile.TemporaryDirectory(prefix="nbdist-bench-") as name, ExitStack() as stack:
        groups = {}
        for side in ("hand", "ours") if backward else ("ours", "hand"):
            ranks = Ranks("strategies", side, RANKS, Path(name) / side)
            groups[side] = stack.enter_context(ranks)
        return {
            strategy: _medians(strategy, groups["ours"], groups["hand"]) for strategy in STRATEGIES
        }


def _medians(strategy: str, ours: Ranks, hand: Ranks) -> tuple[float, float]:
    losses = [group.ask("begin", strategy) for group in (ours, hand)]
    for loss, other in zip(*losses, strict=True):
        assert all(abs(a - b) < CLOSE for a, b in zip(loss, other, strict=True)), losses
    medians = compare(lambda: max(ours.ask("turn")), lambda: max(hand.ask("turn")), ROUNDS)
    for group in (ours, hand):
        group.ask("end")
    return medians


def _row(strategy: str, pairs: list[tuple[float, float]]) -> Row:
    ours, hand = zip(*pairs, strict=True)
    return Row(
        f"{strategy}: one step, 2 ranks",
        statistics.median(ours),
        statistics.median(hand),
        unit="ms",
        how=f"{STARTS} starts of {ROUNDS} turns of {STEPS_IN_A_TURN} steps, {_HOW[strategy]}",
        most_ratio=1 / LEAST,
    )


_HOW = {
    "ddp": "by hand DistributedDataParallel",
    "fsdp": "by hand fully_shard on each block and the model",
    "tp": "by hand parallelize_module with one plan",
    "pp": "by hand two stages written out, PipelineStage and Schedule1F1B",
    MUON: "by hand fully_shard and torch.optim.Muon on the matrices of blocks",
}


class Side:
    """What a rank does when it is asked."""

    def __init__(self, rank: int, makers: dict[str, Callable[[int], Step]]) -> None:
        self._rank = rank
        self._makers = makers
        self._step: Step | None = None

    def begin(self, strategy: str) -> list[float]:
        """Make a model and return its first losses, equal on all ranks."""
        self._step = self._makers[strategy](self._rank)
        losses = []
        for _ in range(STEPS_IN_A_TURN):
            loss = self._step().detach().clone()
            dist.all_reduce(loss)
            losses.append(loss.item() / RANKS)
        return losses

    def turn(self) -> float:
        """Milliseconds for a step: the mean of a few, after one that warms the caches up."""
        assert self._step is not None
        self._step()
        dist.barrier()
        began_s = time.perf_counter()
        for _ in range(STEPS_IN_A_TURN):
            self._step()
        return (time.perf_counter() - began_s) / STEPS_IN_A_TURN * 1000

    def end(self) -> None:
        """Let go of the model."""
        self._step = None


def _data(strategy: str, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A rank's share of the batch; the whole where ranks share a copy of the model."""
    tokens, labels = batch(SIZE, SAMPLES, LENGTH, seed=1)
    if strategy in ("tp", "pp"):
        return tokens, labels
    share = slice(rank, None, RANKS)
    return tokens[share], labels[share]


def _optimizer(strategy: str, model: nn.Module) -> torch.optim.Optimizer:
    if strategy != MUON:
        return torch.optim.AdamW(model.parameters())
    # At a rate at which what bf16 rounds apart is not seen in a loss.
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "blocks" in name]
    return torch.optim.Muon(matrices, lr=1e-5)


def _ours(strategy: str, rank: int) -> Step:
    from nbdist.parallel.accelerator.accelerator import Accelerator
    from nbdist.parallel.live import registry
    from nbdist.strategy.choose import choose

    given = {"microbatches": MICROBATCHES} if strategy == "pp" else {}
    row = strategy.split(maxsplit=1)[0]
    registry.set_choice(choose(row, given, RANKS, device_type="cpu", backend="gloo"))
    accelerator = Accelerator()
    model: Any = make(SIZE)
    model, optimizer = accelerator.prepare(model, _optimizer(strategy, model))
    tokens, labels = _data(strategy, rank)

    def step() -> torch.Tensor:
        loss = model(tokens, labels)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss  # type: ignore[no-any-return]

    return step


def _plain_loop(model: nn.Module, strategy: str, rank: int) -> Step:
    optimizer = _optimizer(strategy, model)
    tokens, labels = _data(strategy, rank)

    def step() -> torch.Tensor:
        loss = model(tokens, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss  # type: ignore[no-any-return]

    return step


def _ddp(rank: int) -> Step:
    return _plain_loop(DistributedDataParallel(make(SIZE)), "ddp", rank)


def _fsdp(rank: int, strategy: str = "fsdp") -> Step:
    model = make(SIZE)
    mesh = init_device_mesh("cpu", (RANKS,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _plain_loop(model, strategy, rank)


def _tp(rank: int) -> Step:
    model = make(SIZE)
    plan: dict[str, Any] = {
        "embed": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    for name in ("q_proj", "k_proj", "v_proj", "up_proj"):
        plan[f"blocks.*.{name}"] = ColwiseParallel()
    for name in ("o_proj", "down_proj"):
        plan[f"blocks.*.{name}"] = RowwiseParallel()
    parallelize_module(model, init_device_mesh("cpu", (RANKS,)), plan)
    return _plain_loop(model, "tp", rank)


class First(nn.Module):
    """The first stage."""

    def __init__(self, whole: Net) -> None:
        super().__init__()
        self.embed = whole.embed
        self.blocks = whole.blocks[: SIZE.n_blocks // 2]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Tokens to hidden states."""
        h: torch.Tensor = self.embed(tokens)
        for block in self.blocks:
            h = block(h)
        return h


class Last(nn.Module):
    """The last stage."""

    def __init__(self, whole: Net) -> None:
        super().__init__()
        self.blocks = whole.blocks[SIZE.n_blocks // 2 :]
        self.head = whole.head

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        """Hidden states to logits."""
        for block in self.blocks:
            h = block(h)
        logits: torch.Tensor = self.head(h)
        return logits


def _pp(rank: int) -> Step:
    model = make(SIZE)
    part: Any = (First if rank == 0 else Last)(model)
    stage = PipelineStage(part, rank, RANKS, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=mean_loss)
    optimizer = torch.optim.AdamW(part.parameters())
    tokens, labels = _data("pp", rank)

    def step() -> torch.Tensor:
        losses: list[torch.Tensor] = []
        if rank == 0:
            schedule.step(tokens)
        else:
            schedule.step(target=labels, losses=losses)
        # Every rank is to know the loss.
        loss = torch.stack(losses).mean().detach() if losses else torch.zeros(())
        dist.all_reduce(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def main() -> None:
    """On a rank: join, and obey."""
    side, rank, size, folder = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    makers: dict[str, Callable[[int], Step]]
    if side == "ours":
        join_nbdist(size, folder)
        makers = {name: lambda rank, name=name: _ours(name, rank) for name in STRATEGIES}  # type: ignore[misc]
    else:
        join(rank, size, folder)
        makers = {"ddp": _ddp, "fsdp": _fsdp, "tp": _tp, "pp": _pp}
        makers[MUON] = lambda rank: _fsdp(rank, MUON)
    sides = Side(rank, makers)
    obey({"begin": sides.begin, "turn": sides.turn, "end": sides.end})


if __name__ == "__main__":
    main()
