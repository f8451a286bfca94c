"""A checkpoint saved and loaded, beside torch.save and torch.distributed.checkpoint by hand."""

from __future__ import annotations

import contextlib
import itertools
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks import Row
from benchmarks.language_model import batch, make
from benchmarks.ranks import Ranks, join_nbdist, obey
from benchmarks.switching import SIZES

RANKS = 2
# Parameters in millions: for saves and loads; for saves beside training, most of whose time is
# the same for any size in the first, and a copy to memory in the second.
MILLIONS = 30
BESIDE_MILLIONS = (30, 100)
ROUNDS = {30: 5, 100: 3}
# For saves beside training: one process copies a third faster than the next, by where its memory
# lies.
STARTS = {30: 3, 100: 1}
SAMPLES, LENGTH = 4, 64
# A save beside training may let it stand still for this part of what a save takes.
MOST_STALL = 0.05
OTHERS = {
    "plain": "torch.save and torch.load of the full state dict on rank 0, from and to all ranks",
    "dcp": "torch.distributed.checkpoint, save and load of get_state_dict",
}
# What the others leave out.
MORE = {
    "save": "reads all back from the disk and compares it",
    "load": "compares all files with their checksums first",
}
MB = 1e6


def rows() -> list[Row]:
    """Saves and loads in turns, then how long training stands still for one beside it."""
    with _training(MILLIONS) as (ranks, folder):
        size_bytes = sum(ranks.ask("begin"))
        turns = [
            {way: _turn(ranks, way, folder / way) for way in ("ours", *OTHERS)}
            for _ in range(ROUNDS[MILLIONS] + 1)
        ][1:]
    rows = []
    for at, what in enumerate(("save", "load")):
        middle = {way: statistics.median(turn[way][at] for turn in turns) for way in turns[0]}
        rows += [_row(what, way, middle, size_bytes) for way in OTHERS]
    return rows + [row for millions in BESIDE_MILLIONS for row in _stalls(millions)]


@contextlib.contextmanager
def _training(millions: int) -> Iterator[tuple[Ranks, Path]]:
    """Ranks with a model of so many parameters, and a folder for what they save."""
    with tempfile.TemporaryDirectory(prefix="nbdist-bench-") as name:
        folder = Path(name)
        with Ranks("checkpoints", str(millions), RANKS, folder / "ranks") as ranks:
            yield ranks, folder


def _turn(ranks: Ranks, way: str, path: Path) -> tuple[float, float]:
    """Seconds of a save and of a load, until the last rank is done; what comes back is right."""
    before = ranks.ask("total")
    saved_s = max(ranks.ask("save", way, str(path)))
    ranks.ask("step")
    loaded_s = max(ranks.ask("load", way, str(path)))
    assert ranks.ask("total") == before, way
    ranks.ask("step")
    shutil.rmtree(path, ignore_errors=True)
    path.unlink(missing_ok=True)
    return saved_s, loaded_s


def _beside(ranks: Ranks, path: Path) -> tuple[float, float, float]:
    """Seconds of a save that is waited for, of the stop for one beside, of its steps' delay."""
    ranks.ask("step")
    saved_s = max(ranks.ask("save", "ours", str(path)))
    times = ranks.ask("beside", str(path))
    shutil.rmtree(path)
    return saved_s, *(max(seconds) for seconds in zip(*times, strict=True))


def _row(what: str, way: str, middle: dict[str, float], size_bytes: int) -> Row:
    rates = ", ".join(f"{size_bytes / middle[side] / MB:.0f} MB/s" for side in ("ours", way))
    return Row(
        f"{what} of {size_bytes / MB:.0f} MB, {MILLIONS} million parameters with AdamW, fsdp, "
        f"{RANKS} ranks",
        middle["ours"],
        middle[way],
        unit="s",
        how=f"{ROUNDS[MILLIONS]} turns, {rates}; ours {MORE[what]}; other: {OTHERS[way]}",
    )


def _stalls(millions: int) -> list[Row]:
    beside = []
    for _ in range(STARTS[millions]):
        with _training(millions) as (ranks, folder):
            size_bytes = sum(ranks.ask("begin"))
            turns = [_beside(ranks, folder / "beside") for _ in range(ROUNDS[millions] + 1)]
            beside += turns[1:]
    saved_s, stall_s, slower_s = (statistics.median(v) for v in zip(*beside, strict=True))
    starts = "1 start" if STARTS[millions] == 1 else f"{STARTS[millions]} starts"
    how = f"{starts} of {ROUNDS[millions]} turns; other: the save that training waits for"
    size = f"{size_bytes / MB:,.0f} MB"
    return [
        Row(
            f"training stands still for a save of {size} beside it",
            stall_s,
            saved_s,
            unit="s",
            how=f"{how}. A copy of all of it to memory",
            most_ratio=MOST_STALL,
        ),
        Row(
            f"steps are slower while {size} are written, all together",
            slower_s,
            saved_s,
            unit="s",
            how=f"{how}. As many steps without a save are taken off; ranks use all cores",
        ),
    ]


class Rank:
    """A model in training on a rank, and three ways to save it."""

    def __init__(self, rank: int, millions: int, folder: Path) -> None:
        import torch

        from nbdist.parallel.accelerator.accelerator import Accelerator
        from nbdist.parallel.live import registry
        from nbdist.strategy.choose import choose

        join_nbdist(RANKS, folder)
        self._rank = rank
        self._size = SIZES[millions]
        self._tokens = itertools.count()
        registry.set_choice(choose("fsdp", {}, RANKS, device_type="cpu", backend="gloo"))
        model = make(self._size)
        optimizer = torch.optim.AdamW(model.parameters())
        self.model, self.optimizer = Accelerator().prepare(model, optimizer)

    def begin(self) -> int:
        """A step, so that there are moments; this rank's bytes of all that is saved."""
        from torch.distributed.tensor import DTensor

        self.step()
        tensors = [p.to_local() if isinstance(p, DTensor) else p for p in self.model.parameters()]
        return 3 * sum(tensor.nbytes for tensor in tensors)

    def step(self) -> float:
        """One step; its loss."""
        tokens, labels = batch(self._size, SAMPLES, LENGTH, seed=1)
        loss = self.model(tokens[self._rank :: RANKS], labels[self._rank :: RANKS])
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())

    def total(self) -> float:
        """A number that tells these weights and moments from others."""
        tensors = [*self.model.parameters()]
        tensors += [value for state in self._plain.state.values() for value in state.values()]
        return sum(float(_local(tensor).double().abs().sum()) for tensor in tensors)

    def save(self, way: str, path: str) -> float:
        """Seconds until this rank goes on; rank 0 does when all is in its place."""
        return self._timed(lambda: getattr(self, f"_save_{way}")(path))

    def load(self, way: str, path: str) -> float:
        """Seconds until this rank goes on."""
        return self._timed(lambda: getattr(self, f"_load_{way}")(path))

    def beside(self, path: str) -> tuple[float, float]:
        """A save beside training: how long that stands still, and how much longer steps take."""
        import torch.distributed as dist

        from nbdist.checkpoint.rank import jobs, save

        token, count = self._token(), 0
        self.step()  # training is under way: its files of before have long been removed
        stall_s = self._timed(lambda: save.begin(path, token, is_async=True))
        began_s = time.perf_counter()
        is_over = False
        while not is_over:
            self.step()
            count += 1
            states: list[Any] = [None] * RANKS
            dist.all_gather_object(states, jobs.state(token).state)
            is_over = "running" not in states
        with_s = time.perf_counter() - began_s
        assert set(states) == {"done"}, states
        without_s = self._timed(lambda: [self.step() for _ in range(count)])
        return stall_s, with_s - without_s

    @property
    def _plain(self) -> Any:
        return self.optimizer.optimizer

    def _token(self) -> str:
        return f"save {next(self._tokens)}"

    def _timed(self, function: Callable[[], object]) -> float:
        import torch.distributed as dist

        dist.barrier()
        began_s = time.perf_counter()
        function()
        return time.perf_counter() - began_s

    def _save_ours(self, path: str) -> None:
        from nbdist.checkpoint.rank import jobs, save

        token = self._token()
        save.begin(path, token, is_async=False)
        outcome = jobs.wait(token)
        assert outcome.state == "done", outcome

    def _load_ours(self, path: str) -> None:
        from nbdist.checkpoint.rank import load

        load.load(path)

    def _state(self, **options: Any) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

        state, moments = get_state_dict(
            self.model, self._plain, options=StateDictOptions(**options)
        )
        return {"model": state, "optimizer": moments}

    def _set_state(self, state: dict[str, Any], **options: Any) -> None:
        from torch.distributed.checkpoint import state_dict

        # One after the other: set_state_dict takes ranks without values for ranks without a model.
        given = state_dict.StateDictOptions(**options)
        state_dict.set_model_state_dict(self.model, state.get("model", {}), options=given)
        state_dict.set_optimizer_state_dict(
            self.model, self._plain, state.get("optimizer", {}), options=given
        )

    def _save_plain(self, path: str) -> None:
        import torch

        state = self._state(full_state_dict=True, cpu_offload=True)
        if self._rank == 0:
            torch.save(state, path)

    def _load_plain(self, path: str) -> None:
        import torch

        state = torch.load(path, mmap=True) if self._rank == 0 else {}
        self._set_state(state, full_state_dict=True, broadcast_from_rank0=True)

    def _save_dcp(self, path: str) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.save(self._state(), checkpoint_id=path)

    def _load_dcp(self, path: str) -> None:
        import torch.distributed.checkpoint as dcp

        state = self._state()
        dcp.load(state, checkpoint_id=path)
        self._set_state(state)


def _local(tensor: Any) -> Any:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def main(millions: str, rank: str, _size: str, folder: str) -> None:
    """A rank."""
    side = Rank(int(rank), int(millions), Path(folder))
    names = ("begin", "step", "total", "save", "load", "beside")
    obey({name: getattr(side, name) for name in names})


if __name__ == "__main__":
    main(*sys.argv[1:])
