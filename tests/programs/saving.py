"""What is saved of a training, and loaded: tied weights, buffers, an object of the user's own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import DataLoader

from nbdist.checkpoint.rank import jobs
from nbdist.checkpoint.rank.save import begin
from nbdist.parallel.accelerator.accelerator import Accelerator
from tests.programs.rank import rank
from tests.programs.training import BATCH, Net, data, labels, make, tokens, use
from tests.support.torch_ranks import Program, run_ranks

CLOSE = 2e-6
Curves = dict[str, Any]
"""By strategy and kind of model: losses after what was saved, and this rank's random numbers."""


@functools.cache
def accelerator() -> Accelerator:
    """The user's."""
    return Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=True))


class Counter:
    def __init__(self):
        self.n = 0

    def state_dict(self):
        return {"n": self.n}

    def load_state_dict(self, state):
        self.n = state["n"]


class Tied(Net):
    """The head is the embedding, and a buffer is not saved."""

    def __init__(self):
        super().__init__()
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(2) * 3)
        self.register_buffer("spare", torch.ones(2), persistent=False)


KINDS = {"Net": Net, "Tied": Tied}


def made(seed: int, kind: Any) -> tuple[Any, ...]:
    """A model, its optimizer, scheduler and loader, all prepared, and a counter."""
    net, optimizer, scheduler = make(seed, kind)
    generator = torch.Generator().manual_seed(seed)
    loader = DataLoader(data, batch_size=BATCH, shuffle=True, generator=generator)
    counter = Counter()
    accelerator().register_for_checkpointing(counter)
    return (*accelerator().prepare(net, optimizer, scheduler, loader), counter)


def run(parts: Any, batches: Iterable[Any]) -> list[float]:
    model, optimizer, scheduler, _, counter = parts
    losses = []
    for x, y in batches:
        loss = model(x, labels=y)
        accelerator().backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        counter.n += 1
        losses.append(accelerator().reduce(loss.detach(), "mean").item())
    return losses


def steps(accelerator: Any, model: Any, optimizer: Any) -> list[float]:
    """Losses of two on the same batch."""
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(tokens[:BATCH], labels=labels[:BATCH])
        accelerator.backward(loss)
        optimizer.step(lambda loss=loss: loss)  # LBFGS asks for it
        losses.append(loss.item())
    return losses


def values(model: Any) -> dict[str, torch.Tensor]:
    """Whole, of all ranks."""
    return {k: v.clone() for k, v in accelerator().get_state_dict(model).items()}


def is_same(model: Any, before: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(value, before[name]) for name, value in values(model).items())


def save(path: str, *, is_async: bool = False, is_adapters: bool = False) -> Any:
    """A checkpoint; all ranks wait until rank 0 has put it in its place."""
    begun = begin(path, path, is_async, is_adapters)
    state = jobs.wait(path)
    dist.barrier()
    assert state.state == "done", state
    return begun


def llama_config(**options: Any) -> Any:
    """Of a Llama that transformers loads and saves."""
    from transformers import LlamaConfig

    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16}
    return LlamaConfig(**sizes, tie_word_embeddings=False, **options)


def logits(model: Any) -> torch.Tensor:
    """Of the same tokens, whatever the model of transformers."""
    ids = torch.randint(96, (2, 8), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model.eval()(ids).logits


def first(path: str, kind: Any, save: Callable[[str], object]) -> tuple[list[float], list[float]]:
    """Three steps, what is saved, and three more, with the random numbers that come after it."""
    parts = made(0, kind)
    loop = iter(parts[3])
    run(parts, (next(loop) for _ in range(3)))
    save(path)
    drawn = torch.rand(3).tolist()
    return run(parts, loop), drawn


def second(path: str, kind: Any, load: Callable[[str, Any], Any]) -> tuple[list[float], Any]:
    """Other weights, then what was saved, and the three steps that came after it."""
    parts = made(rank + 5, kind)

    def held() -> list[int]:
        return [*map(id, parts[1].optimizer.param_groups), *map(id, parts[0].parameters())]

    before = held()
    batches = load(path, parts[3])
    drawn = torch.rand(3).tolist()
    assert held() == before
    assert parts[4].n == 3
    return run(parts, batches), drawn


def goes_on(
    folder: str, saved: list[Any], loaded: list[Any], curves: Curves, save: Any, load: Any
) -> Curves:
    """What was loaded goes on as what was saved did, with the same random numbers on its ranks.

    Args:
        folder: Of what is saved.
        saved: Strategies with options and kinds.
        loaded: The same, and under what each was saved.
        curves: Of what other ranks have saved.
        save: To a path.
        load: From a path; of a loader it gives the batches that come then.
    """
    new: Curves = {}
    for name, options, kind in saved:
        use(name, **options)
        new[name + kind] = first(f"{folder}/{name}{kind}", KINDS[kind], save)
    for name, options, kind, source in loaded:
        use(name, **options)
        losses, drawn = second(f"{folder}/{source}{kind}", KINDS[kind], load)
        wanted = (curves | new)[source + kind]
        assert losses == pytest.approx(wanted[0], abs=CLOSE), (name, kind, source)
        assert source + kind not in new or drawn == wanted[1], (name, kind, source)
    return curves | new


def on(
    folder: Path, size: int, program: Program, *cases: list[Any],
    curves: Curves | None = None, **env: str,
) -> Curves:  # fmt: skip
    """Rank 0's curves, after what was saved and what was loaded."""
    saved, loaded = cases
    given = {"folder": str(folder), "saved": saved, "loaded": loaded, "curves": curves or {}}
    return run_ranks(folder / f"run{size}", size, program, arguments=given, **env)[0]
