"""Strategies change under a live model, and the loss curve is that of a single process."""

import copy
import dataclasses
import os
import re
import signal
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nbdist.parallel import registry
from nbdist.parallel.accelerator.accelerator import Accelerator
from nbdist.parallel.dp import fsdp
from nbdist.parallel.tp import tp
from nbdist.switch.rank import switch
from tests.parity.cases import circuit
from tests.programs.rank import n, rank, user
from tests.programs.switching import (
    CLOSE,
    begin,
    fresh,
    identities,
    pick,
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
        told = switch.switch(pick(name, **given))
        assert told.stale == (), told
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
    """A switch whose step fails, by default on rank 1 alone, changes nothing; what is told."""
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


# What the user holds: names, lists, closures, attributes; memory, generators, notes. A text, as a
# cell is: a function's frame would hold what the user has let go.
NAMES = """
    import copy, gc, random, weakref
    from nbdist.switch.rank import switch
    from tests.programs.switching import *
    fresh()
    class Trainer:
        def __init__(self):
            self.net = model
            self.parts = list(model.parameters())
    begin("ddp")
    net = base
    train(1)
    trainer = Trainer()
    params = list(model.parameters())
    nested = {"decay": [p for p in params if p.dim() > 1], "model": model}
    pair = (model, 1)
    first_weight = params[0]
    def step_with(model, params):
        def step():
            return model, params[0]
        return step
    stepper = step_with(model, params[:2])
    def evaluate(inputs, network=model):
        return network(inputs)
    old = weakref.ref(params[-1])
    state_before = copy.deepcopy(scheduler.state_dict())
    random_before = (random.getstate(), torch.get_rng_state().tolist())
    told = switch.switch(pick("fsdp"))
    random_same = random_before == (random.getstate(), torch.get_rng_state().tolist())
    result = dict(
        rebound=told.rebound, lists=sorted(told.lists), stale=sorted(told.stale),
        notes=told.notes, is_base=model is base and net is base,
        is_new=all(a is b for a, b in zip(params, base.parameters(), strict=True)),
        is_nested=nested["model"] is base and nested["decay"][0] is params[0],
        is_first=first_weight is params[0],
        is_closure=stepper()[1] is params[0],
        is_trainer=trainer.parts[0] is params[0],
        random_same=random_same, scheduler_same=state_before == scheduler.state_dict(),
    )
    try:
        pair[0](tokens(0))
    except NbdistError as error:
        result["old_outer"] = str(error)
    again = switch.switch(pick("fsdp"))
    result["again"] = [again.notes, again.models, again.before == again.after]
    # Memory: nothing holds what was, as the user let go.
    del trainer, pair, stepper, evaluate, step_with
    train(2)
    parts = [weakref.ref(p._local_tensor) for p in base.parameters()]
    parts += [weakref.ref(s["exp_avg"]._local_tensor) for s in optimizer.state.values()]
    sharded = weakref.ref(base.blocks[0]._get_fsdp_state())
    told = switch.switch(pick("ddp"))
    result["back"] = [told.rebound, told.stale, net is base, model is not base]
    result["released"] = [sharded() is None, old() is None, all(part() is None for part in parts)]
    train(2)
    model(tokens(0)).backward()
    result["graded"] = switch.switch(pick("zero1")).notes
    train(2)
    # The cell is run again: the old model goes, and is switched no more.
    ghost = weakref.ref(base)
    model = Net()
    base = net = model
    del optimizer, scheduler, params, nested, first_weight
    begin("zero1")
    gc.collect()
    result["ghost"] = ghost() is None
    result["models"] = switch.switch(pick("fsdp")).models
    # One that nobody holds is in no way, though Python has not collected it yet.
    base.itself = base
    del model, base, net, optimizer, scheduler
    result["gone"] = switch.switch(choose("fsdp1", {}, n)).models
    done(**result, worst=worst())
"""


def test_names_lists_and_memory(tmp_path: Path) -> None:
    """The user's names and lists are put right, the rest is named, and the old parts are freed."""
    results = run_ranks(tmp_path, 2, NAMES)

    for result in results:
        assert result["rebound"] == ["model", "first_weight"]
        assert result["lists"] == [
            "nested",
            "nested['decay']",
            "params",
            "the closure of step_with.<locals>.step",
            "trainer.parts",
        ]
        assert result["stale"] == [
            "a default argument of evaluate (model)",
            "pair[0] (model)",
            "the closure of step_with.<locals>.step (model)",
            "trainer.net (model)",
        ]
        holds = [key for key in result if key.startswith("is_")] + ["random_same", "scheduler_same"]
        assert {key: result[key] for key in holds} == dict.fromkeys(holds, True)
        assert "from before the switch away from ddp" in result["old_outer"]
        assert result["again"] == [[SAME], [], True]
        assert result["back"] == [["model", "first_weight"], [], True, True]
        assert result["released"] == [True, True, True]
        assert [note.partition(": ")[2].partition(".")[0] for note in result["notes"]] == ["first"]
        assert result["graded"] == [CLEARED]
        assert result["ghost"]
        assert result["models"] == ["model"]
        assert result["gone"] == []
        assert result["worst"] < CLOSE


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


def copies_follow(told: str, states: list[list[torch.Tensor]]) -> None:
    """What is told lets the first follow; the other likewise."""
    exec(re.search("follow: (.*)", told)[1], vars(user))
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
