"""A step verified by %dist_verify, beside one plain step."""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import Row, compare
from benchmarks.language_model import Size, batch, make
from benchmarks.ranks import Ranks, elapsed_s, join_nbdist, obey
from benchmarks.switching import Memory

STRATEGIES = ("ddp", "tp")
RANKS = 2
# 5 million parameters.
SIZE = Size(width=256, n_blocks=6, n_words=512)
SAMPLES, LENGTH = 8, 64
ROUNDS = 5
MIB = 2**20


@dataclass(frozen=True, slots=True)
class Taken:
    """What a verification under one strategy took.

    Attributes:
        verified_s, step_s: Of the slowest rank, medians of the rounds.
        extra_mib: How far the memory of the rank that needed most rose, at most.
        parameters_mib: Of the whole model.
    """

    verified_s: float
    step_s: float
    extra_mib: float
    parameters_mib: float


def rows() -> list[Row]:
    """Two rows for each strategy: the time, and the memory."""
    with tempfile.TemporaryDirectory(prefix="nbdist-bench-") as name:
        return [
            row
            for strategy in STRATEGIES
            for row in _rows(strategy, _taken(strategy, Path(name) / strategy))
        ]


def _rows(strategy: str, taken: Taken) -> list[Row]:
    return [
        Row(
            f"{strategy}: %dist_verify of a step, 5 million parameters with AdamW, 2 ranks",
            taken.verified_s,
            taken.step_s,
            unit="s",
            how=f"{ROUNDS} turns; other: the step alone, {SAMPLES} x {LENGTH} tokens",
        ),
        Row(
            f"{strategy}: memory of a rank above what it has before and after",
            taken.extra_mib,
            taken.parameters_mib,
            unit="MiB",
            how="largest resident size meanwhile; other: the parameters of the whole model",
        ),
    ]


def _taken(strategy: str, folder: Path) -> Taken:
    with Ranks("verification", "ours", RANKS, folder) as ranks:
        parameters_mib = max(ranks.ask("begin", strategy))
        extra_mib: list[float] = []

        def verified_s() -> float:
            ranks.ask("watch")
            taken_s: Sequence[float] = ranks.ask("verify")
            extra_mib.extend(ranks.ask("extra_mib"))
            return max(taken_s)

        middle = compare(verified_s, lambda: max(ranks.ask("step")), ROUNDS)
    # The largest of the middle round: the first one brings in what verify imports.
    each = [max(extra_mib[at : at + RANKS]) for at in range(0, len(extra_mib), RANKS)]
    return Taken(*middle, statistics.median(each), parameters_mib)


def _ours(rank: int, folder: Path) -> None:
    import torch

    from nbdist.parallel.accelerator.accelerator import Accelerator
    from nbdist.parallel.live import registry
    from nbdist.strategy.choose import choose
    from nbdist.verification.rank.verify import verify
    from nbdist.verification.verdict import StepRequest

    join_nbdist(RANKS, folder)
    memory, names = Memory(), vars(sys.modules["__main__"])

    def begin(strategy: str) -> float:
        registry.set_choice(choose(strategy, {}, RANKS, device_type="cpu", backend="gloo"))
        accelerator, model = Accelerator(), make(SIZE)
        parameters_mib = sum(p.nbytes for p in model.parameters()) / MIB
        prepared: Any = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        names["model"], names["optimizer"] = prepared
        tokens, labels = batch(SIZE, SAMPLES, LENGTH, seed=1)
        share = slice(rank, None, RANKS) if strategy == "ddp" else slice(None)

        def step() -> None:
            accelerator.backward(names["model"](tokens[share], labels[share]))
            names["optimizer"].step()
            names["optimizer"].zero_grad()

        names["one_step"] = step
        step()
        return parameters_mib

    def verified() -> None:
        result = verify(StepRequest("one_step()"))
        assert result.is_right, (result.first, result.kind, result.findings)

    obey(
        {
            "begin": begin,
            "step": lambda: elapsed_s(names["one_step"]),
            "verify": lambda: elapsed_s(verified),
            "watch": memory.watch,
            "extra_mib": memory.extra_mib,
        }
    )


if __name__ == "__main__":
    _ours(int(sys.argv[2]), Path(sys.argv[4]))
