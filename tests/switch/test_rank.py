"""Strategies change under a live model, and the loss curve is that of a single process."""

import copy
import dataclasses
import gc
import os
import random
import re
import signal
import weakref
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nbdist.parallel.accelerator.accelerator import Accelerator
from nbdist.parallel.dp import fsdp
from nbdist.parallel.live import registry
from nbdist.parallel.tp import tp
from nbdist.strategy.choose import choose
from nbdist.switch.rank import switch
from tests.parity.cases import circuit
from tests.programs.rank import n, rank, refusal, user
from tests.programs.switching import (
    CLOSE,
    Net,
    begin,
    fresh,
    identities,
    pick,
    tokens,
    train,
    worst,
)
from tests.support.torch_ranks import on_ranks, run_ranks

CLEARED = (
    "gradients of 27 parameters of model were cleared; run the backward again before the next step"
)
SAME = "fsdp with these options is the current strategy; nothing was done"
TWO: dict[str, Any] = {
    "ddp": ("ddp", {}), "fsdp": ("fsdp", {}), "grad-op": ("fsdp", {"shard": "grad-op"}),
    "zero1": ("zero1", {}), "tp": ("tp", {}), "pp": ("pp", {}),
}  # fmt: skip
SHORT = {name: TWO[name] for name in ("ddp", "fsdp", "tp", "pp")}
PRODUCTS: dict[str, Any] = {
    "zero1": ("zero1", {}), "fsdp x tp": ("fsdp", {"dp": 2, "tp": 2}),
    "pp x fsdp": ("pp", {"pp": 2, "dp": 2}), "pp x tp": ("pp", {"pp": 2, "tp": 2}),
    "hybrid": ("fsdp", {"shard": "hybrid", "replicas": 2}),
}  # fmt: skip


def walk(strategies: dict[str, Any], path: list[str]) -> None:
    """Over every ordered pair, each once."""
    fresh()
    name, given = strategies[path[0]]
    begin(name, **given)
    kept = identities()
    train(2)
    for after in path[1:]:
        name, given = strategies[after]
        switched = switch.switch(pick(name, **given))
        assert switched.stale == (), switched
        assert user.base.head.weight is user.base.embed.weight
        train(2)
        assert worst() <= CLOSE, (path, after)
    assert identities() == kept


@pytest.mark.parametrize(
    ("n", "strategies"),
    [
        (2, SHORT),
        pytest.param(2, TWO, marks=pytest.mark.parity),
        pytest.param(4, PRODUCTS, marks=pytest.mark.parity),
    ],
    ids=["some", "one axis", "products"],
)
def test_every_pair(tmp_path: Path, n: int, strategies: dict[str, object]) -> None:
    """All switches between strategies leave the curve, and every object of the user."""
    path = circuit(list(strategies))
    run_ranks(tmp_path, n, walk, arguments={"strategies": strategies, "path": path})

    assert len({*pairwise(path)}) == len(strategies) * (len(strategies) - 1)


def everything() -> tuple[Any, ...]:
    """All that a switch could have changed."""
    base, optimizer = user.base, user.optimizer
    tables = [
        (type(m), list(vars(m)), [list(t) for t in vars(m).values() if isinstance(t, dict)])
        for m in base.modules()
    ]
    held = [*base.parameters(), *optimizer.state, *user.model.parameters(), user.model]
    held += [p for group in optimizer.param_groups for p in group["params"]]
    held += [value for slots in optimizer.state.values() for value in slots.values()]
    return tables, [*map(id, held)], registry.current(), identities()


def broken(part: str, error: BaseException, to: str = "fsdp", *, on: Any = (1,)) -> str:
    """A switch whose step fails, by default on rank 1 alone, changes nothing; its text."""
    module: Any = {"fsdp": fsdp, "tp": tp}[to]
    real, before, text = module.STEP, everything(), ""

    def fail(job, *args):
        if rank in on:
            raise error
        return getattr(real, part)(job, *args)

    module.STEP = dataclasses.replace(real, **{part: fail})
    try:
        switch.switch(pick(to))
    except BaseException as caught:  # noqa: BLE001
        text = f"{type(caught).__name__}: {caught}"
    module.STEP = real
    assert everything() == before
    train(2)
    return text


@on_ranks(2)
def test_a_switch_that_fails_changes_nothing() -> None:
    """A failure or an interrupt on one rank, in either half, and training goes on as before."""
    fresh()
    begin("ddp")
    train(2)
    for part, error, own in (
        ("plan", ValueError("no memory"), "ValueError: no memory"),
        ("plan", KeyboardInterrupt(), "KeyboardInterrupt: "),
        ("lay_out", RuntimeError("lay_out fails"), "RuntimeError: lay_out fails"),
        ("wrap", KeyboardInterrupt(), "KeyboardInterrupt: "),
    ):
        text = broken(part, error)
        if rank == 1:
            assert text == own
        else:
            assert "rank 1" in text
            assert text.endswith(f"There: {own.removesuffix(': ')}")
    switch.switch(pick("zero1"))  # its hooks are taken off, and come back
    train(2)
    broken("wrap", RuntimeError("wrap fails"))
    switch.switch(pick("tp"))
    train(2)
    broken("wrap", RuntimeError("tp stays"))
    switch.switch(pick("fsdp"))  # and now FSDP's own objects come back
    train(2)
    text = broken("wrap", RuntimeError("tp fails"), "tp", on=range(n))
    assert text == "RuntimeError: tp fails"
    an_interrupt_in_the_commit_waits_for_its_end()
    assert worst() < CLOSE


def an_interrupt_in_the_commit_waits_for_its_end() -> None:
    def pressed(job):
        os.kill(os.getpid(), signal.SIGINT)
        return real.lay_out(job)

    switch.switch(pick("ddp"))
    real = fsdp.STEP
    fsdp.STEP = dataclasses.replace(real, lay_out=pressed)
    with pytest.raises(KeyboardInterrupt):
        switch.switch(pick("fsdp"))
    assert registry.current().name == "fsdp"
    fsdp.STEP = real
    train(2)


class Trainer:
    """As people write one."""

    def __init__(self, model: nn.Module) -> None:
        self.net = model
        self.parts = list(model.parameters())


def step_with(model: nn.Module, params: list[nn.Parameter]) -> Any:
    def step() -> Any:
        return model, params[0]

    return step


def hold(model: nn.Module) -> None:
    """By names, lists, closures and attributes, all of them the user's: no frame holds any."""

    def evaluate(inputs: Any, network: nn.Module = model) -> Any:
        return network(inputs)

    user.net = user.base
    user.trainer, user.evaluate, user.pair = Trainer(model), evaluate, (model, 1)
    user.params = list(model.parameters())
    user.nested = {"decay": [p for p in user.params if p.dim() > 1], "model": model}
    user.first_weight = user.params[0]
    user.stepper = step_with(model, user.params[:2])


def is_put_right(switched: Any) -> None:
    """What can be is rebound, what cannot is named."""
    assert list(switched.rebound) == ["model", "first_weight"]
    assert sorted(switched.lists) == [
        "nested", "nested['decay']", "params", "the closure of step_with.<locals>.step",
        "trainer.parts",
    ]  # fmt: skip
    assert sorted(switched.stale) == [
        "a default argument of hold.<locals>.evaluate (model)",
        "pair[0] (model)",
        "the closure of step_with.<locals>.step (model)",
        "trainer.net (model)",
    ]
    assert [note.partition(": ")[2].partition(".")[0] for note in switched.notes] == ["first"]
    assert user.model is user.net is user.nested["model"] is user.base
    assert all(a is b for a, b in zip(user.params, user.base.parameters(), strict=True))
    firsts = user.nested["decay"], user.trainer.parts, user.stepper()[1:], [user.first_weight]
    assert all(parameters[0] is user.params[0] for parameters in firsts)


def nothing_holds_what_was(last_weight: Any) -> None:
    """As soon as the user has let go."""
    del user.trainer, user.pair, user.stepper, user.evaluate
    train(2)
    parts = [weakref.ref(p._local_tensor) for p in user.base.parameters()]
    parts += [weakref.ref(s["exp_avg"]._local_tensor) for s in user.optimizer.state.values()]
    sharded = weakref.ref(user.base.blocks[0]._get_fsdp_state())
    switched = switch.switch(pick("ddp"))
    assert (list(switched.rebound), switched.stale) == (["model", "first_weight"], ())
    assert user.net is user.base is not user.model
    held = [gone() for gone in (sharded, last_weight, *parts)]
    assert held == [None] * len(held)


@on_ranks(2)
def test_names_lists_and_memory() -> None:
    """The user's names and lists are put right, the rest is named, and the old parts are freed."""
    fresh()
    begin("ddp")
    train(1)
    hold(user.model)
    last_weight = weakref.ref(user.params[-1])
    state_before = copy.deepcopy(user.scheduler.state_dict())
    random_before = random.getstate(), torch.get_rng_state().tolist()
    switched = switch.switch(pick("fsdp"))
    assert random_before == (random.getstate(), torch.get_rng_state().tolist())
    assert state_before == user.scheduler.state_dict()
    is_put_right(switched)
    old_outer = refusal(lambda: user.pair[0](tokens(0)))
    assert "from before the switch away from ddp" in old_outer
    again = switch.switch(pick("fsdp"))
    assert (list(again.notes), list(again.models)) == ([SAME], [])
    assert again.before == again.after
    nothing_holds_what_was(last_weight)
    train(2)
    user.model(tokens(0)).backward()
    assert list(switch.switch(pick("zero1")).notes) == [CLEARED]
    train(2)
    a_cell_is_run_again()
    assert worst() < CLOSE


def a_cell_is_run_again() -> None:
    """The old model goes, and is switched no more; so does one that nobody holds."""
    ghost = weakref.ref(user.base)
    user.model = user.base = user.net = Net()
    del user.optimizer, user.scheduler, user.params, user.nested, user.first_weight
    begin("zero1")
    gc.collect()
    assert ghost() is None
    assert list(switch.switch(pick("fsdp")).models) == ["model"]
    user.base.itself = user.base  # Python has not collected it yet
    del user.model, user.base, user.net, user.optimizer, user.scheduler
    assert list(switch.switch(choose("fsdp1", {}, n)).models) == []


class Shadow:
    """An average by the names of parameters."""

    def __init__(self, model: nn.Module) -> None:
        self.weights = {n: p.detach().clone() for n, p in model.named_parameters()}

    def update(self, model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            self.weights[name].lerp_(parameter.detach(), 0.5)


def averaged() -> None:
    user.ema.update_parameters(user.model)
    with torch.no_grad():
        for mine, theirs in zip(user.best[0].parameters(), user.model.parameters(), strict=True):
            mine.lerp_(theirs, 0.5)


def whole(module: Any) -> list[torch.Tensor]:
    parameters = getattr(module, "module", module).parameters()
    return [getattr(p, "full_tensor", lambda p=p: p)().detach().clone() for p in parameters]


def notes_of(name: str) -> list[str]:
    return list(switch.switch(pick(name)).notes)


@on_ranks(2)
def test_copies_of_a_model_are_named() -> None:
    """By the switch that parts them from it, with what lets them follow the next ones."""
    user.accelerator = Accelerator()
    fresh()
    del user.first
    begin("ddp")
    train(1)
    user.ema = torch.optim.swa_utils.AveragedModel(user.model)
    user.best = [copy.deepcopy(user.model)]
    user.shadow, user.other = Shadow(user.model), nn.Linear(8, 8)
    averaged()
    user.shadow.update(user.model)
    states = [whole(user.model)]
    assert notes_of("zero1") == notes_of("ddp") == []
    to_fsdp = notes_of("fsdp")
    of_copies, of_names = to_fsdp
    assert of_copies == (
        "Copies of model that are not prepared were not switched: best[0], ema. An update from "
        "model (EMA) fails now. To let one follow: best[0] = "
        "accelerator.prepare(best[0].module)"
    )
    assert of_names == (
        "Tensors by the names of model's parameters were not switched: shadow.weights. The "
        "parameters are named embed.weight, not module.embed.weight, now, and an update "
        "from them fails. Make the tensors again, or use a prepared copy of model"
    )
    copies_follow(of_copies, states)


def copies_follow(note: str, states: list[list[torch.Tensor]]) -> None:
    """What the note says lets the first follow; the other likewise."""
    exec(re.search("follow: (.*)", note)[1], vars(user))
    user.ema.module = user.accelerator.prepare(user.ema.module.module)
    user.shadow = Shadow(user.model)
    notes = []
    for name in ("", "tp", "ddp"):
        if name:
            notes.append(notes_of(name))
            user.ema.module = registry.prepared_of(user.ema.module).outer
        train(1)
        averaged()
        states.append(whole(user.model))
        if not name:
            user.shadow.update(user.model)
    (to_tp,), back = notes
    assert to_tp.partition(": ")[2].partition(".")[0] == "shadow"
    assert "lie otherwise" in to_tp
    assert back == []
    assert worst() < CLOSE
    # Of each state a fourth in the first, and in the second by how long ago it was.
    is_average(user.ema.module, states, [1 / 4] * 4)
    is_average(user.best[0], states, [1 / 8, 1 / 8, 1 / 4, 1 / 2])


def is_average(module: Any, states: list[list[torch.Tensor]], weights: list[float]) -> None:
    for mine, *each in zip(whole(module), *states, strict=True):
        wanted = sum(w * state for w, state in zip(weights, each, strict=True))
        assert (wanted - mine).abs().max() < CLOSE
