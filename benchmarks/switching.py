"""A switch under a live model, beside checkpoint, restart and load by hand."""

from __future__ import annotations

import ctypes
import gc
import itertools
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import Row
from benchmarks.language_model import Size, batch, make
from benchmarks.ranks import Ranks, join, join_nbdist, obey

RANKS = 2
# Millions of parameters -> a model.
SIZES = {
    1: Size(width=128, n_blocks=4, n_words=1024),
    10: Size(width=320, n_blocks=7, n_words=2048),
    30: Size(width=512, n_blocks=8, n_words=4096),
    100: Size(width=768, n_blocks=12, n_words=9728),
}
LARGEST = max(SIZES)
# A small model's times vary most, and cost least.
ROUNDS = {1: 7, 10: 5, 30: 3, 100: 3}
STRATEGIES = ("ddp", "fsdp")
SAMPLES, LENGTH = 4, 16
# A switch is to take at most this part of the time of the way by hand.
MOST = 0.1
# Losses after the switches, between the two sides.
CLOSE = 1e-4
PICTURE = Path(__file__).resolve().parents[1] / "docs" / "pictures" / "switch_time.svg"


@dataclass(frozen=True, slots=True)
class Taken:
    """What both ways took there and back.

    Attributes:
        elapsed_s: Seconds.
        extra_mib: How far the memory of the rank that needed most rose above what it had before
            and after, in MiB.
    """

    elapsed_s: tuple[float, float]
    extra_mib: float


def rows() -> list[Row]:
    """One row for each size, and the largest one's memory; draws the picture."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="nbdist-bench-") as name:
        pairs = {millions: _pairs(millions, Path(name)) for millions in SIZES}
    for millions, taken in pairs.items():
        rows += _rows(millions, taken)
    draw(pairs, PICTURE)
    return rows


def _rows(millions: int, taken: list[tuple[Taken, Taken]]) -> list[Row]:
    ours, hand = zip(*taken, strict=True)
    rows = [
        Row(
            f"ddp to fsdp and back, {millions} million parameters with AdamW, 2 ranks",
            _seconds(ours),
            _seconds(hand),
            unit="s",
            how=f"{len(taken)} rounds; by hand torch.distributed.checkpoint of model and "
            "optimizer, new processes, load",
            most_ratio=MOST if millions == LARGEST else None,
        )
    ]
    if millions == LARGEST:
        rows.append(
            Row(
                "memory of a rank above what it has before and after",
                statistics.median(taken_once.extra_mib for taken_once in ours),
                statistics.median(taken_once.extra_mib for taken_once in hand),
                unit="MiB",
                how="largest resident size meanwhile; by hand of the new process while it loads",
            )
        )
    return rows


def _seconds(taken: tuple[Taken, ...]) -> float:
    return statistics.median(sum(taken_once.elapsed_s) for taken_once in taken)


def _pairs(millions: int, folder: Path) -> list[tuple[Taken, Taken]]:
    """Both ways of one size in turns."""
    place = folder / str(millions)
    with Ranks("switching", "ours", RANKS, place / "ours") as ours:
        ours.ask("begin", millions, "ddp")
        hand = Hand(millions, place)
        with hand:
            taken = [(_switched(ours), hand.there_and_back()) for _ in range(ROUNDS[millions])]
            losses = ours.ask("step"), hand.step()
    for a, b in zip(*losses, strict=True):
        assert abs(a - b) < CLOSE, losses
    return taken


def _switched(ours: Ranks) -> Taken:
    elapsed_s, extra_mib = [], []
    for strategy in reversed(STRATEGIES):
        ours.ask("watch")
        began_s = time.perf_counter()
        ours.ask("switch", strategy)
        elapsed_s.append(time.perf_counter() - began_s)
        extra_mib += ours.ask("extra_mib")
        ours.ask("step")
    return Taken((elapsed_s[0], elapsed_s[1]), max(extra_mib))


class Hand:
    """Two scripts, of ddp and of fsdp, that take turns by way of a checkpoint."""

    def __init__(self, millions: int, place: Path) -> None:
        self._millions = millions
        self._place = place
        self._numbers = itertools.count()
        self._ranks = self._started()
        self._ranks.ask("begin", millions, "ddp")

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        self._ranks.__exit__()

    def step(self) -> list[float]:
        """One training step: its loss on each rank."""
        return self._ranks.ask("step")

    def there_and_back(self) -> Taken:
        """Save, end, start, load; twice."""
        elapsed_s, extra_mib = [], []
        for strategy in reversed(STRATEGIES):
            checkpoint = str(self._place / f"checkpoint.{next(self._numbers)}")
            began_s = time.perf_counter()
            self._ranks.ask("save", checkpoint)
            self._ranks.end()
            self._ranks = self._started()
            self._ranks.ask("load", self._millions, strategy, checkpoint)
            elapsed_s.append(time.perf_counter() - began_s)
            extra_mib += self._ranks.ask("extra_mib")
            self._ranks.ask("step")
        return Taken((elapsed_s[0], elapsed_s[1]), max(extra_mib))

    def _started(self) -> Ranks:
        return Ranks("switching", "hand", RANKS, self._place / f"hand.{next(self._numbers)}")


class Memory:
    """The resident size of this process."""

    def __init__(self) -> None:
        self._before_mib = 0.0

    def watch(self) -> None:
        """Give back what is free, and forget how large it has been."""
        _give_back()
        Path("/proc/self/clear_refs").write_text("5")
        self._before_mib = _status_mib("VmRSS")

    def extra_mib(self) -> float:
        """How far it has been above what it was then, and what it is now."""
        peak_mib = _status_mib("VmHWM")
        _give_back()
        return peak_mib - max(self._before_mib, _status_mib("VmRSS"))


def _give_back() -> None:
    """Free memory to the system: glibc keeps it, and the next switch would find it ready."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)


def _status_mib(key: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    line = next(line for line in lines if line.startswith(f"{key}:"))
    return int(line.split()[1]) / 1024


class Trainer:
    """Steps of a model on a rank: of the variables `model` and `optimizer`, as in a notebook."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._names = vars(sys.modules["__main__"])

    def step(self) -> float:
        """One step on this rank's half of the batch; its loss."""
        tokens, labels = batch(self._names["size"], SAMPLES, LENGTH, seed=1)
        share = slice(self._rank, None, RANKS)
        loss = self._names["model"](tokens[share], labels[share])
        loss.backward()
        self._names["optimizer"].step()
        self._names["optimizer"].zero_grad()
        return float(loss.detach())

    def take(self, **values: Any) -> None:
        """Set variables."""
        self._names.update(values)

    def __getattr__(self, name: str) -> Any:
        return self._names[name]


def _ours(rank: int, folder: Path) -> None:
    import torch

    from nbdist.parallel.accelerator.accelerator import Accelerator
    from nbdist.parallel.live import registry
    from nbdist.strategy.choose import choose
    from nbdist.switch.rank import switch

    join_nbdist(RANKS, folder)
    memory, trainer = Memory(), Trainer(rank)

    def choice(strategy: str) -> Any:
        return choose(strategy, {}, RANKS, device_type="cpu", backend="gloo")

    def begin(millions: int, strategy: str) -> None:
        registry.set_choice(choice(strategy))
        model = make(SIZES[millions])
        optimizer = torch.optim.AdamW(model.parameters())
        model, optimizer = Accelerator().prepare(model, optimizer)
        trainer.take(size=SIZES[millions], model=model, optimizer=optimizer)
        trainer.step()

    def switch_to(strategy: str) -> None:
        report = switch.switch(choice(strategy))
        assert report.rebound == ("model",), report
        assert not report.stale, report

    obey(
        {
            "begin": begin,
            "switch": switch_to,
            "step": trainer.step,
            "watch": memory.watch,
            "extra_mib": memory.extra_mib,
        }
    )


def _by_hand(model: Any, strategy: str) -> Any:
    """A model under ddp or FSDP2 as torch's documentation has it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    if strategy == "ddp":
        return DistributedDataParallel(model)
    mesh = init_device_mesh("cpu", (RANKS,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _hand(rank: int, folder: Path) -> None:
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    join(rank, RANKS, folder)
    memory, trainer = Memory(), Trainer(rank)

    def build(millions: int, strategy: str) -> None:
        model = _by_hand(make(SIZES[millions]), strategy)
        optimizer = torch.optim.AdamW(model.parameters())
        trainer.take(size=SIZES[millions], model=model, optimizer=optimizer)

    def begin(millions: int, strategy: str) -> None:
        build(millions, strategy)
        trainer.step()

    def save(checkpoint: str) -> None:
        model, optimizer = get_state_dict(trainer.model, trainer.optimizer)
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=checkpoint)

    def load(millions: int, strategy: str, checkpoint: str) -> None:
        memory.watch()
        build(millions, strategy)
        model, optimizer = get_state_dict(trainer.model, trainer.optimizer)
        state = {"model": model, "optimizer": optimizer}
        dcp.load(state, checkpoint_id=checkpoint)
        set_state_dict(
            trainer.model,
            trainer.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )

    obey(
        {
            "begin": begin,
            "save": save,
            "load": load,
            "step": trainer.step,
            "extra_mib": memory.extra_mib,
        }
    )


def draw(pairs: dict[int, list[tuple[Taken, Taken]]], path: Path) -> None:
    """Seconds against millions of parameters, of both ways. The same numbers give the same file."""
    import matplotlib as mpl

    mpl.use("svg")
    # Otherwise ids are random and the file carries the date of its making.
    mpl.rcParams["svg.hashsalt"] = "nbdist"
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
    for side, label in enumerate(("switch", "checkpoint, restart, load")):
        seconds = [_seconds(tuple(pair[side] for pair in taken)) for taken in pairs.values()]
        axes.plot(list(pairs), seconds, marker="o", label=label)
    axes.set(
        xscale="log", yscale="log", xlabel="millions of parameters", ylabel="s, there and back"
    )
    axes.legend()
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def main() -> None:
    """On a rank: join, and obey."""
    side, rank, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[4])
    {"ours": _ours, "hand": _hand}[side](rank, folder)


if __name__ == "__main__":
    main()
