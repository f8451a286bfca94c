"""What ranks run to be compared with one process: one cell for all, a walk, and checkpoints.

Their lines are those that a user could have typed.
"""

from __future__ import annotations

import copy
import functools
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import DataLoaderConfiguration, GradScalerKwargs
from torch import nn
from torch.utils.data import DataLoader

from nbdist.checkpoint.rank import jobs, load, save
from nbdist.checkpoint.results import DONE
from nbdist.parallel.accelerator.accelerator import Accelerator
from nbdist.parallel.live import registry
from nbdist.switch.rank import switch
from tests.parity.models import (
    GLOBAL,
    LIMIT,
    MODELS,
    far,
    loss_of,
    made,
    mixtral,
    moments_of,
    moments_off,
    plain,
    rate,
    read,
    samples,
    step_alone,
    whole_gradients,
)
from tests.programs.rank import n, rank, user
from tests.programs.training import tried, use

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
Differences = dict[str, float | None]


def split(**options: Any) -> Accelerator:
    """An Accelerator that splits each batch over the ranks."""
    return Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=True), **options)


def each(call: Callable[..., Any], cases: Sequence[Sequence[Any]]) -> dict[str, list[Any]]:
    """The differences of each case, up to one that fails, of which there is the error's text."""
    differences: list[Any] = []
    for case in cases:
        began_s = time.perf_counter()
        differences.append(tried(call, *case))
        print(*case, differences[-1], f"{time.perf_counter() - began_s:.2f} s", flush=True)  # noqa: T201
        if isinstance(differences[-1], str):
            break
    return {"differences": differences}


# Every case is the same cell. Whatever it does is in `Trained`, and compared step by step.


@dataclass(slots=True)
class Trained:
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    gradients: list[dict[str, torch.Tensor]] = field(default_factory=list)
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)

    def apart(self, wanted: Trained) -> Differences:
        """The largest difference of each."""
        loss, norm, rate = (
            max(abs(a - b) for a, b in zip(x, y, strict=True))
            for x, y in (
                (self.losses, wanted.losses), (self.norms, wanted.norms), (self.rates, wanted.rates)
            )
        )  # fmt: skip
        assert self.parameters.keys() <= wanted.parameters.keys()
        pairs = zip(self.gradients, wanted.gradients, strict=True)
        gradients = max((far(a, b) for a, b in pairs if a), default=None)
        parameters = far(self.parameters, wanted.parameters)
        return {
            "loss": loss, "norm": norm, "rate": rate, "gradients": gradients,
            "parameters": parameters,
        }  # fmt: skip


@functools.cache
def alone(model: str, steps: int, k: int, precision: str) -> Trained:
    """Plain torch: whole batches, k of them for a step."""
    device = registry.device()
    net, optimizer, scheduler = made(model, 0, is_alone=True)
    scaler = torch.amp.GradScaler(device.type, init_scale=1024.0, enabled=precision == "fp16")
    half = torch.autocast(device.type, DTYPES.get(precision), enabled=precision in DTYPES)
    trained = Trained()
    for at, (x, y) in enumerate(DataLoader(samples(steps * k), batch_size=GLOBAL)):
        with half:
            loss = loss_of(net(x.to(device), labels=y.to(device)))
        scaler.scale(loss / k).backward()
        trained.losses.append(loss.item())
        if (at + 1) % k == 0:
            scaler.unscale_(optimizer)
            trained.norms.append(nn.utils.clip_grad_norm_(net.parameters(), LIMIT).item())
            trained.gradients.append(
                {m: p.grad.clone() for m, p in net.named_parameters() if p.requires_grad}
            )
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            optimizer.zero_grad()
            trained.rates.append(scheduler.get_last_lr()[0])
    trained.parameters = {m: t.detach().clone() for m, t in net.state_dict().items()}
    return trained


def cell(accelerator: Accelerator, kind: str, steps: int) -> Trained:
    """Plain Accelerate, the same under every strategy."""
    trained = Trained()
    loader = DataLoader(samples(steps), batch_size=GLOBAL)
    model, optimizer, scheduler, loader = accelerator.prepare(
        *made(kind, rank + 1 if rank else 0), loader
    )
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = loss_of(model(x, labels=y))
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), LIMIT)
                trained.norms.append(norm.item())
                trained.gradients.append(whole_gradients(model))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if accelerator.sync_gradients:
                trained.rates.append(scheduler.get_last_lr()[0])
        trained.losses.append(accelerator.reduce(loss.detach(), "mean").item())
    trained.parameters = accelerator.get_state_dict(model)
    return trained


def rows(cases: list[list[str]], steps: int, blocks: int = 0) -> dict[str, Any]:
    """What is typed, and a model: how far the cell is from one process."""

    def compare(typed: str, kind: str) -> Differences:
        options = read(typed).options
        switch.switch(read(typed))
        trained = cell(accelerator, kind, steps * options.accumulate)
        return trained.apart(alone(kind, steps, options.accumulate, options.precision))

    def compare_and_forget(typed: str, kind: str) -> Differences:
        differences = compare(typed, kind)
        gc.collect()
        assert registry.prepared() == []
        return differences

    if blocks:
        MODELS["plain"] = functools.partial(plain, blocks)
    use("ddp")
    accelerator = split(kwargs_handlers=[GradScalerKwargs(init_scale=1024.0)])
    results = each(compare_and_forget, cases)
    left = [
        *accelerator._models, *accelerator._optimizers, *accelerator._schedulers,
        *accelerator._dataloaders,
    ]  # fmt: skip
    # DeepSpeed's engines live on by themselves.
    assert cases[-1][0].startswith("deepspeed") or not left, (left, results)
    return results


# One loop over the data, its strategy changed under it again and again.


STRETCH = 3


@dataclass(slots=True)
class Walk:
    """Trains the user's model, beside one process: net, optimizer, scheduler, batches."""

    accelerator: Accelerator
    alone: tuple[Any, Any, Any, Iterator[Any]]
    step: Callable[[], None]
    kept: list[int] = field(default_factory=list)

    def train(self) -> tuple[float, list[float]]:
        x, y = next(user.batches)
        with self.accelerator.accumulate(user.model):
            loss = loss_of(user.model(x, labels=y))
            self.accelerator.backward(loss)
            self.accelerator.clip_grad_norm_(user.model.parameters(), LIMIT)
            self.step()
        mean = self.accelerator.reduce(loss.detach(), "mean").item()
        return mean, user.scheduler.get_last_lr()

    def compare(self) -> Differences:
        loss = 0.0
        for _ in range(STRETCH):
            (value, rates), (wanted, wanted_rates) = self.train(), step_alone(*self.alone)
            assert rates == wanted_rates, (rates, wanted_rates)
            loss = max(loss, abs(value - wanted))
        net, optimizer, *_ = self.alone
        moments = moments_off(user.optimizer, moments_of(net, optimizer))
        parameters = far(self.accelerator.get_state_dict(user.model), net.state_dict())
        return {"loss": loss, "moments": moments, "parameters": parameters}

    def go(self, after: str) -> Differences:
        report = switch.switch(read(after))
        assert not report.stale, report
        assert self.kept == identities(), report
        return self.compare()


def identities() -> list[int]:
    raw = user.optimizer.optimizer
    groups = raw.param_groups
    objects = [user.optimizer, raw, groups, *groups, *(group["params"] for group in groups)]
    return [id(each) for each in (*objects, user.scheduler, user.loader, user.batches)]


def switches(path: list[str], kind: str = "plain") -> dict[str, Any]:
    """How far each stretch of a walk is from one process; what is prepared are the user's names."""
    data = samples(STRETCH * len(path))
    alone = *made(kind, 0, rate, is_alone=True), iter(DataLoader(data, batch_size=GLOBAL))

    switch.switch(read(path[0]))
    user.accelerator = split()
    user.model, *others = made(kind, rank + 1 if rank else 0, rate)
    user.model, optimizer, scheduler, user.loader = user.accelerator.prepare(
        user.model, *others, DataLoader(data, batch_size=GLOBAL)
    )
    user.optimizer, user.scheduler, user.batches = optimizer, scheduler, iter(user.loader)
    del others

    def step() -> None:  # a closure, made once, over what keeps its identity
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()

    walk = Walk(user.accelerator, alone, step)
    walk.compare()
    walk.kept = identities()
    return each(walk.go, [[after] for after in path[1:]])


# A checkpoint in the middle of training. Losses are those of one process, never interrupted.
EPOCH, BEFORE, AFTER = 2, 3, 3


def shuffled(seed: int) -> DataLoader:
    order = torch.Generator().manual_seed(seed)
    return DataLoader(samples(EPOCH), batch_size=GLOBAL, shuffle=True, generator=order)


def endless(loader: Any) -> Iterator[Any]:
    """The batches of one epoch after the other."""
    while True:
        yield from loader


@functools.cache
def uninterrupted(kind: str) -> tuple[Any, Any, list[Any]]:
    """One process from beginning to end: losses, rates, and what there is after each part."""
    net, optimizer, scheduler = made(kind, 0, rate, is_alone=True)
    batches, steps, kept = endless(shuffled(0)), [], []
    for at in range(1, BEFORE + AFTER + 1):
        steps.append(step_alone(net, optimizer, scheduler, batches))
        if at in (BEFORE, BEFORE + AFTER):
            kept.append(copy.deepcopy((net.state_dict(), moments_of(net, optimizer))))
    losses, rates = zip(*steps, strict=True)
    return losses, rates, kept


@dataclass(slots=True)
class Checkpoints:
    """Trains a kind of model, saves it, and goes on from what is saved."""

    folder: Path
    kind: str
    is_async: bool
    accelerator: Accelerator

    def train(self, parts: Any, batches: Iterator[Any], first: int, count: int) -> Differences:
        """Steps, compared with those of one process; then parameters and moments."""
        model, optimizer, scheduler, _ = parts
        losses, rates, kept = uninterrupted(self.kind)
        far_off = 0.0
        for at in range(first, first + count):
            x, y = next(batches)
            loss = loss_of(model(x, labels=y))
            self.accelerator.backward(loss)
            self.accelerator.clip_grad_norm_(model.parameters(), LIMIT)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            value = self.accelerator.reduce(loss.detach(), "mean").item()
            far_off = max(far_off, abs(value - losses[at]))
            assert scheduler.get_last_lr() == rates[at], (at, scheduler.get_last_lr(), rates[at])
        return {"loss": far_off, **self.compared(parts, kept[0 if first == 0 else 1])}

    def compared(self, parts: Any, kept: Any) -> Differences:
        wanted, moments = kept
        return {
            "parameters": far(self.accelerator.get_state_dict(parts[0]), wanted),
            "moments": moments_off(parts[1], moments),
        }

    def prepared(self, typed: str, seed: int) -> Any:
        switch.switch(read(typed))
        return self.accelerator.prepare(*made(self.kind, seed, rate), shuffled(seed))

    def where(self, typed: str, size: int) -> str:
        return str(self.folder / f"{size}-{typed.replace(' ', '')}")

    def saved(self, typed: str) -> Differences:
        """Train, save, and go on: a save changes nothing."""
        parts, name = self.prepared(typed, 0 if rank == 0 else rank + 1), f"{typed} {n}"
        batches = endless(parts[3])
        before = self.train(parts, batches, 0, BEFORE)
        save.begin(self.where(typed, n), name, self.is_async)
        if not self.is_async:
            state = jobs.wait(name)
            assert not state.failure, state
        after = self.train(parts, batches, BEFORE, AFTER)
        state = jobs.wait(name)
        assert state.state == DONE, state
        return {key: max(before[key], after[key]) for key in after}

    def loaded(self, typed: str, source: str, size: int) -> Differences:
        """Other values, another order of the data, the checkpoint, and the steps after it."""
        parts = self.prepared(typed, rank + 5)
        kept = [id(each) for each in (*parts, *parts[1].optimizer.param_groups)]
        report = load.load(self.where(source, size))
        assert kept == [id(each) for each in (*parts, *parts[1].optimizer.param_groups)]
        assert report.step == BEFORE, report
        at_once = self.compared(parts, uninterrupted(self.kind)[2][0])
        later = self.train(parts, endless(parts[3]), BEFORE, AFTER)
        return {key: max(at_once.get(key, 0.0), later[key]) for key in later}

    def do(self, job: str, *given: Any) -> Differences:
        """A job by its name; nothing is left of it."""
        differences = getattr(self, job)(*given)
        gc.collect()
        assert registry.prepared() == []
        return differences


def checkpoints(
    folder: str, todo: list[list[Any]], kind: str = "plain", blocks: int = 4, *, is_async: bool
) -> dict[str, Any]:
    """How far training is from one process that saves, or goes on from what is saved."""
    # The same on any number of ranks: other programs' models grow with them.
    MODELS["plain"] = functools.partial(plain, blocks)
    MODELS["mixtral"] = lambda: mixtral(n_blocks=2, n_heads=2)
    use("ddp")
    return each(Checkpoints(Path(folder), kind, is_async, split()).do, todo)
