"""Strategies change under a live model, and the loss curve is that of a single process."""

import json
from pathlib import Path

import pytest

from tests.parity.cases import circuit
from tests.support.torch_ranks import run_ranks

CLOSE = 2e-6
CLEARED = (
    "gradients of 27 parameters of model were cleared; run the backward again before the next step"
)
SAME = "fsdp with these options is the current strategy; nothing was done"

# A model, the same trained by one process, and the ranks' loop; no line of it names a strategy.
TRAINING = """
    import copy, gc, random, weakref
    from nbdist.strategy.choose import choose
    from nbdist.parallel import build, prepare as live, registry
    from nbdist.parallel.reshard import full_state
    from nbdist.switch.rank import switch
    gc.collect(); gc.freeze()  # what torch brings is not looked at again and again

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = torch.nn.LayerNorm(8)
            self.fc1 = torch.nn.Linear(8, 20)
            self.fc2 = torch.nn.Linear(20, 8)
        def forward(self, x):
            return x + self.fc2(torch.tanh(self.fc1(self.norm(x))))
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = torch.nn.Embedding(13, 8)
            self.blocks = torch.nn.ModuleList(Block() for _ in range(4))
            self.norm = torch.nn.LayerNorm(8)
            self.head = torch.nn.Linear(8, 13, bias=False)
            self.head.weight = self.embed.weight
            self.register_buffer("scale", torch.full((2,), 1.5))
        def forward(self, tokens):
            x = self.embed(tokens)
            for block in self.blocks:
                x = block(x)
            logits = self.head(self.norm(x)) * self.scale[0]
            return torch.nn.functional.cross_entropy(
                logits[:, :-1].reshape(-1, 13), tokens[:, 1:].reshape(-1))

    def tokens(step):
        return torch.randint(13, (16, 6), generator=torch.Generator().manual_seed(step))
    def optimizer_for(model):
        large = [p for p in model.parameters() if p.dim() > 1]
        small = [p for p in model.parameters() if p.dim() < 2]
        one = torch.optim.AdamW(
            [{"params": large, "weight_decay": 0.1}, {"params": small, "lr": 3e-3}], lr=1e-2)
        return one, torch.optim.lr_scheduler.CosineAnnealingLR(one, 150)
    def pick(name, **given):
        return choose(name, given, n, device_type="cpu", backend="gloo")
    def is_close(one, other):
        return abs(one - other) <= 2e-6

    torch.manual_seed(0)
    reference = Net()
    first = copy.deepcopy(reference.state_dict())
    alone, alone_scheduler = optimizer_for(reference)
    expected = []
    def expect(count):
        while len(expected) < count:
            value = reference(tokens(len(expected)))
            value.backward()
            alone.step(); alone_scheduler.step(); alone.zero_grad()
            expected.append(value.item())

    torch.manual_seed(rank)  # rank 0's values are to win
    model = Net()
    if rank == 0:
        model.load_state_dict(first)
    base = model
    losses = []
    def close_step():  # a closure over the optimizer and the scheduler, made once
        optimizer.step(); scheduler.step(); optimizer.zero_grad()
    def train(steps):
        for _ in range(steps):
            degrees = registry.current().degrees
            place = degrees.coordinate(rank)
            own = place.dp_replicate * degrees.dp_shard + place.dp_shard
            value = model(tokens(len(losses)).chunk(degrees.dp)[own])
            value.backward()
            close_step()
            mean = value.detach().clone()
            dist.all_reduce(mean)
            losses.append(mean.item() / n)
    def worst():
        expect(len(losses))
        return max(abs(a - b) for a, b in zip(losses, expected))
    def identities():
        groups = optimizer.param_groups
        return [id(optimizer), id(scheduler), id(optimizer.state),
                *map(id, groups), *(id(g["params"]) for g in groups)]
    def begin(name, **given):
        global model, optimizer, scheduler
        registry.set_choice(pick(name, **given))
        model = live.prepare_model(model)
        optimizer, scheduler = optimizer_for(model)
        live.bind(optimizer)
"""
# Each row of a complete graph, once: a walk over every ordered pair.
PAIRS = """
    STRATEGIES = json.loads(os.environ["STRATEGIES"])
    path = json.loads(os.environ["WALK"])
    name, given = STRATEGIES[path[0]]
    begin(name, **given)
    kept = identities()
    worst_pair = {}
    train(2)
    for before, after in zip(path, path[1:]):
        name, given = STRATEGIES[after]
        told = switch.switch(pick(name, **given))
        assert told.stale == (), told
        assert base.head.weight is base.embed.weight
        train(2)
        expect(len(losses))
        off = max(abs(a - b) for a, b in zip(losses[-2:], expected[-2:]))
        worst_pair[f"{before} > {after}"] = off
    done(
        pairs=len(worst_pair), worst=worst(), is_same=identities() == kept,
        bad={pair: off for pair, off in worst_pair.items() if off > 2e-6},
    )
"""
TWO = {
    "ddp": ("ddp", {}), "fsdp": ("fsdp", {}), "grad-op": ("fsdp", {"shard": "grad-op"}),
    "zero1": ("zero1", {}), "tp": ("tp", {}), "pp": ("pp", {}),
}  # fmt: skip
SHORT = {name: TWO[name] for name in ("ddp", "fsdp", "tp", "pp")}
PRODUCTS = {
    "zero1": ("zero1", {}), "fsdp x tp": ("fsdp", {"dp": 2, "tp": 2}),
    "pp x fsdp": ("pp", {"pp": 2, "dp": 2}), "pp x tp": ("pp", {"pp": 2, "tp": 2}),
    "hybrid": ("fsdp", {"shard": "hybrid", "replicas": 2}),
}  # fmt: skip


# Something fails in each half of a switch; training goes on as if nothing had been.
FAILURES = """
    import dataclasses
    from nbdist.parallel.dp import fsdp
    from nbdist.parallel.tp import tp
    says = []
    def broken(part, error, to="fsdp", on=(1,)):
        "A switch whose step fails, by default on rank 1 alone; what each rank is told."
        module = {"fsdp": fsdp, "tp": tp}[to]
        real = module.STEP
        def fail(job, *args):
            if rank in on:
                raise error
            return getattr(real, part)(job, *args)
        module.STEP = dataclasses.replace(real, **{part: fail})
        try:
            switch.switch(pick(to))
        except BaseException as caught:
            says.append(f"{type(caught).__name__}: {caught}")
        finally:
            module.STEP = real
    def everything():
        "All that a switch could have changed."
        tables = [
            (type(m), list(vars(m)), [list(t) for t in vars(m).values() if isinstance(t, dict)])
            for m in base.modules()
        ]
        return (tables, [*map(id, base.parameters())], [*map(id, optimizer.state)],
                [*map(id, model.parameters())], id(model), registry.current(), identities(),
                [id(p) for g in optimizer.param_groups for p in g["params"]],
                [id(v) for one in optimizer.state.values() for v in one.values()])

    same = []
    def unchanged(*args):
        before = everything()
        broken(*args)
        same.append(everything() == before)
        train(2)
    begin("ddp")
    train(2)
    unchanged("plan", ValueError("no memory"))
    unchanged("plan", KeyboardInterrupt())
    unchanged("lay_out", RuntimeError("lay_out fails"))
    unchanged("wrap", KeyboardInterrupt())
    switch.switch(pick("zero1"))  # its hooks are taken off, and come back
    train(2)
    unchanged("wrap", RuntimeError("wrap fails"))
    switch.switch(pick("tp"))
    train(2)
    unchanged("wrap", RuntimeError("tp stays"))
    switch.switch(pick("fsdp"))  # and now FSDP's own objects come back
    train(2)
    unchanged("wrap", RuntimeError("tp fails"), "tp", range(n))

    # An interrupt in the commit waits for its end.
    def pressed(job):
        os.kill(os.getpid(), signal.SIGINT)
        return real_fsdp.lay_out(job)
    switch.switch(pick("ddp"))
    real_fsdp = fsdp.STEP
    fsdp.STEP = dataclasses.replace(real_fsdp, lay_out=pressed)
    try:
        switch.switch(pick("fsdp"))
        held = "not raised"
    except KeyboardInterrupt:
        held = registry.current().name
    fsdp.STEP = real_fsdp
    train(2)
    done(says=says, same=same, held=held, worst=worst())
"""

# What the user holds: names, lists, closures, attributes; memory, generators, notes.
NAMES = """
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
    model = base = net = Net()
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

# Averages of the weights, one in each usual way, and what the switch says of them.
COPIES = """
    import re
    from nbdist.parallel.accelerator.accelerator import Accelerator
    accelerator = Accelerator()
    del first
    begin("ddp")
    train(1)
    class Shadow:
        def __init__(self, model):
            self.weights = {n: p.detach().clone() for n, p in model.named_parameters()}
        def update(self, model):
            for name, parameter in model.named_parameters():
                self.weights[name].lerp_(parameter.detach(), 0.5)
    def averaged():
        ema.update_parameters(model)
        with torch.no_grad():
            for mine, theirs in zip(best[0].parameters(), model.parameters(), strict=True):
                mine.lerp_(theirs, 0.5)
    def whole(module):
        module = getattr(module, "module", module)
        return [getattr(p, "full_tensor", lambda p=p: p)().detach().clone()
                for p in module.parameters()]
    def off(module, *states):
        return max(float((sum(each) / len(states) - mine).abs().max())
                   for mine, *each in zip(whole(module), *states, strict=True))
    ema = torch.optim.swa_utils.AveragedModel(model)
    best = [copy.deepcopy(model)]
    shadow, other = Shadow(model), torch.nn.Linear(8, 8)
    averaged()
    shadow.update(model)
    states = [whole(model)]
    notes = [switch.switch(pick(name)).notes for name in ("zero1", "ddp", "fsdp")]
    # What it says lets the first follow; the other likewise.
    exec(re.search("follow: (.*)", notes[-1][0])[1])
    ema.module = accelerator.prepare(ema.module.module)
    shadow = Shadow(model)
    for name in (None, "tp", "ddp"):
        if name:
            notes.append(switch.switch(pick(name)).notes)
            ema.module = registry.prepared_of(ema.module).outer
        train(1)
        averaged()
        states.append(whole(model))
        if name is None:
            shadow.update(model)
    weights = [1 / 8, 1 / 8, 1 / 4, 1 / 2]  # of each state in the second, as in the first a fourth
    done(notes=notes, worst=worst(), ema=off(ema.module, *states), best=max(
        float((sum(w * each for w, each in zip(weights, rest)) - mine).abs().max())
        for mine, *rest in zip(whole(best[0]), *states, strict=True)))
"""


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
    env = {"STRATEGIES": json.dumps(strategies), "WALK": json.dumps(circuit(list(strategies)))}
    results = run_ranks(tmp_path, n, TRAINING + PAIRS, **env)

    for result in results:
        assert result["bad"] == {}
        assert result["pairs"] == len(strategies) * (len(strategies) - 1)
        assert result["worst"] < CLOSE
        assert result["is_same"]


def test_a_switch_that_fails_changes_nothing(tmp_path: Path) -> None:
    """A failure or an interrupt on one rank, in either half, and training goes on as before."""
    first, second = run_ranks(tmp_path, 2, TRAINING + FAILURES)

    assert all(first["same"])
    assert all(second["same"])
    assert first["says"][0].endswith("There: ValueError: no memory")
    assert "rank 1" in first["says"][0]
    assert second["says"][0] == "ValueError: no memory"
    assert second["says"][1] == "KeyboardInterrupt: "
    assert first["says"][1].endswith("There: KeyboardInterrupt")
    assert first["says"][2].endswith("There: RuntimeError: lay_out fails")
    assert second["says"][3] == "KeyboardInterrupt: "
    assert first["says"][-1] == second["says"][-1] == "RuntimeError: tp fails"
    assert first["held"] == second["held"] == "fsdp"
    assert max(first["worst"], second["worst"]) < CLOSE


def test_names_lists_and_memory(tmp_path: Path) -> None:
    """The user's names and lists are put right, the rest is named, and the old parts are freed."""
    results = run_ranks(tmp_path, 2, TRAINING + NAMES)

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


def test_copies_of_a_model_are_named(tmp_path: Path) -> None:
    """By the switch that parts them from it, with what lets them follow the next ones."""
    for result in run_ranks(tmp_path, 2, TRAINING + COPIES):
        to_zero1, to_ddp, to_fsdp, to_tp, back = result["notes"]

        assert (to_zero1, to_ddp) == ([], [])
        assert to_fsdp[0] == (
            "Copies of model that are not prepared were not switched: best[0], ema. An update from "
            "model (EMA) fails now. To let one follow: best[0] = "
            "accelerator.prepare(best[0].module)"
        )
        assert to_fsdp[1:] == [
            (
                "Tensors by the names of model's parameters were not switched: shadow.weights. The "
                "parameters are named embed.weight, not module.embed.weight, now, and an update "
                "from them fails. Make the tensors again, or use a prepared copy of model"
            )
        ]
        assert [note.partition(": ")[2].partition(".")[0] for note in to_tp] == ["shadow"]
        assert "lie otherwise" in to_tp[0]
        assert back == []
        assert max(result["worst"], result["ema"], result["best"]) < CLOSE
