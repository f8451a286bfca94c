"""Models and optimizers under a strategy: prepared, bound, whole again, and taken off again."""

from pathlib import Path

from tests.support.torch_ranks import run_ranks
from tests.switch.test_rank import CLOSE, TRAINING

# After FSDP2, TP and a pipeline nothing of them is left on the user's module.
TRACES = """
    from torch.distributed._composable_state import _module_state_mapping as fsdp_table
    def look():
        return [
            (type(m), {k for k in vars(m) if k != "_nbdist_prepared"},
             {k: list(t) for k, t in vars(m).items() if isinstance(t, dict) and k != "_modules"},
             dict(m._modules), m in fsdp_table)
            for m in base.modules()
        ]
    before = look()
    result = {}
    begin("ddp")  # so that `base` means the module itself from now on
    switch.switch(pick("single"))
    for name, options in (("tp", {}), ("pp", {}), ("fsdp", {"checkpoint": "full"}),
                        ("fsdp", {"precision": "bf16"}), ("zero1", {})):
        switch.switch(pick(name, **options))
        value = model(tokens(0).chunk(n)[rank] if name not in ("tp", "pp") else tokens(0))
        value.backward()
        with torch.no_grad():
            model.eval(); model(tokens(0)); model.train()
        base.blocks[0].register_forward_hook(user_hook := lambda *_: None)
        switch.switch(pick("single"))
        base.blocks[0]._forward_hooks.popitem()
        result[name + str(options)] = look() == before and model is base
    copied = copy.deepcopy(base)
    result["plain"] = is_close(copied(tokens(0)).item(), base(tokens(0)).item())
    result["copy_is_free"] = registry.prepared_of(copied) is None
    result["types"] = {type(p).__name__ for p in base.parameters()} == {"Parameter"}
    result["state"] = list(base.state_dict()) == list(first)
    mesh = init_device_mesh("cpu", (n,))
    for block in copied.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(copied, mesh=mesh)
    copied(tokens(0)).backward()
    fully_shard(base.blocks[0], mesh=mesh)  # by hand, on the very module that was
    result["again"] = isinstance(base.blocks[0], FSDPModule)
    done(**result)
"""

# Whole states, foreign optimizers, closures, several models, LSTMs, norms with buffers.
STATES = """
    result = {}
    optimizer, scheduler = optimizer_for(model)  # before the model is prepared, as often
    plain = optimizer_for(reference)[0]
    registry.set_choice(pick("zero1"))
    model = live.prepare_model(model)
    live.bind(optimizer)
    result["is_rank_0s"] = all(
        torch.equal(first[k], v) for k, v in base.state_dict().items())
    train(3)
    share = sum(v.numel() for s in optimizer.state.values() for v in s.values())
    result["share"] = share
    def closure():
        optimizer.zero_grad()
        value = model(tokens(len(losses)).chunk(n)[rank])
        value.backward()
        return value
    value = optimizer.step(closure)
    scheduler.step()
    mean = value.detach().clone(); dist.all_reduce(mean); losses.append(mean.item() / n)
    expect(len(losses))
    prepared = registry.prepared_of(model)
    by_name = {}
    for name, options in (("zero1", {}), ("fsdp", {}), ("tp", {}), ("pp", {})):
        switch.switch(pick(name, **options))
        whole = copy.deepcopy(full_state.full_state(prepared))
        off = max((whole[k] - v).abs().max().item()
                  for k, v in reference.state_dict().items() if k in whole)
        state = copy.deepcopy(full_state.full_optimizer_state(optimizer))
        mine = {k: p for k, p in reference.named_parameters()}
        off_state = max(
            (state["state"][k][key] - alone.state[p][key]).abs().max().item()
            for k, p in mine.items() for key in ("exp_avg", "exp_avg_sq", "step"))
        # Into a model that has gone on: it stands where it was.
        train(1)
        full_state.load_full(prepared, whole)
        full_state.load_full_optimizer_state(optimizer, state)
        scheduler.last_epoch -= 1
        losses.pop()
        back = full_state.full_state(prepared)
        again = full_state.full_optimizer_state(optimizer)["state"]
        by_name[name] = [
            off, off_state, all(torch.equal(back[k], whole[k]) for k in whole),
            all(torch.equal(torch.as_tensor(again[k][key]), torch.as_tensor(v))
                for k, slots in state["state"].items() for key, v in slots.items()),
        ]
    result["by_name"] = by_name
    done(**result, worst=worst())
"""

OTHERS = """
    result = {}
    class Odd(torch.nn.Module):
        def __init__(self, seed):
            super().__init__()
            torch.manual_seed(seed)
            self.lstm = torch.nn.LSTM(4, 8, batch_first=True)
            self.norm = torch.nn.BatchNorm1d(8)
            self.blocks = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(2))
            self.frozen = torch.nn.Parameter(torch.ones(8), requires_grad=False)
        def forward(self, x):
            x, _ = self.lstm(x)
            x = self.norm(x[:, -1]) * self.frozen
            for block in self.blocks:
                x = torch.tanh(block(x))
            return x.square().mean()
    left, right = Odd(1), Odd(2)
    left.frozen.mark = "kept"
    twins = [copy.deepcopy(left), copy.deepcopy(right)]
    registry.set_choice(pick("single"))
    first_model, second_model = live.prepare_model(left), live.prepare_model(right)
    both = torch.optim.SGD([*left.parameters(), *right.parameters()], lr=0.1, momentum=0.9)
    of_twins = torch.optim.SGD([p for t in twins for p in t.parameters()], lr=0.1, momentum=0.9)
    apart = []  # nobody has bound `both`: it is found
    def batches(step):
        return torch.randn(8, 3, 4, generator=torch.Generator().manual_seed(step))
    for at, name in enumerate(("single", "fsdp", "ddp", "zero1", "single", "fsdp")):
        switched = switch.switch(pick(name))
        # Every rank has the same batch: its own norm's statistics are those of the twin.
        value = first_model(batches(at)) + second_model(batches(at))
        value.backward(); both.step(); both.zero_grad()
        twin = twins[0](batches(at)) + twins[1](batches(at))
        twin.backward(); of_twins.step(); of_twins.zero_grad()
        apart.append(abs(value.item() - twin.item()))
    result["apart"] = max(apart)
    result["models"] = switched.models
    result["marked"] = left.frozen.mark, left.frozen.requires_grad
    result["buffers"] = max(
        (a - b).abs().max().item() for a, b in zip(left.buffers(), twins[0].buffers()))

    # What is refused, and how.
    says = {}
    def refused(key, call):
        try:
            call()
            says[key] = "nothing"
        except Exception as error:
            says[key] = f"{type(error).__name__}: {error}"
    refused("fixed", lambda: switch.switch(pick("fsdp1")))
    left.extra = torch.nn.Linear(2, 2)
    refused("changed", lambda: switch.switch(pick("ddp")))
    del left.extra
    refused("other", lambda: live.prepare_model(torch.nn.Linear(2 + rank, 2)))
    refused("lazy", lambda: live.prepare_model(torch.nn.LazyLinear(2)))
    refused("meta", lambda: live.prepare_model(torch.nn.Linear(2, 2, device="meta")))
    over_all = init_device_mesh("cpu", (n,))
    refused("fully_shard", lambda: live.prepare_model(
        fully_shard(torch.nn.Sequential(torch.nn.Linear(8, 8)), mesh=over_all)))
    split = torch.nn.Linear(8, 8)
    split.weight = torch.nn.Parameter(distribute_tensor(split.weight, over_all, [Shard(0)]))
    refused("split", lambda: live.prepare_model(torch.nn.Sequential(split)))
    refused("wrapped", lambda: live.prepare_model(DDP(torch.nn.Linear(2, 2))))
    small = torch.nn.Linear(2, 2)
    lbfgs = torch.optim.LBFGS(live.prepare_model(small).parameters())
    refused("lbfgs", lambda: switch.switch(pick("zero1")))
    del small, lbfgs
    switch.switch(pick("ddp"))
    adafactor = torch.optim.Adafactor(left.parameters())
    first_model(batches(0)).backward(); adafactor.step(); adafactor.zero_grad()
    refused("adafactor", lambda: switch.switch(pick("fsdp")))
    del adafactor
    gc.collect()
    result["still"] = [registry.current().name, switch.switch(pick("fsdp")).models]

    # A rank that has replaced another builds by itself what the others have.
    if rank == 1:
        live_models.catching_up(True)
        refused("alone", lambda: live.prepare_model(torch.nn.Linear(2, 2)))
    dist.barrier()
    registry.set_choice(pick("ddp"))
    if rank == 1:
        by_itself = live.prepare_model(torch.nn.Linear(2, 2))
        says["alone_ddp"] = type(by_itself).__name__
        live_models.catching_up(False)
    done(**result, says=says)
"""

# A cell breaks between backward and step: its gradients go, and training goes on.
RESETS = """
    outcomes = {}
    begin("ddp")
    for name, options in (("ddp", {}), ("zero1", {}), ("fsdp", {}), ("tp", {}), ("pp", {})):
        switch.switch(pick(name, **options))
        degrees = registry.current().degrees
        model(tokens(99).chunk(degrees.dp)[rank % degrees.dp]).backward()
        models = live_models.find()
        cleared = reset_models.reset()
        left = sum(p.grad is not None for p in base.parameters())
        outcomes[name] = [[model.name for model in models], [model.is_sharded for model in models],
                       list(cleared), min(cleared.values()) > 0, left]
        train(2)
    done(found=outcomes, worst=worst())
"""


# What the user took from a model before prepare goes on acting on it, where parameters are whole.
KEPT = """
    import io
    from nbdist.parallel.accelerator import torch_clip
    torch_clip.install()
    errors, sys.stderr = sys.stderr, io.StringIO()
    result = {}
    for name in ("single", "ddp", "zero1", "fsdp"):
        registry.set_choice(pick(name))
        net = torch.nn.Module()
        torch.manual_seed(rank)  # rank 0's values count
        net.blocks = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))
        net.head = torch.nn.Linear(4, 1)
        net.forward = lambda x: net.head(net.blocks[1](net.blocks[0](x).tanh()).tanh()).mean()
        ran, taken, first = [], list(net.parameters()), net.head.weight.detach().clone()
        dist.broadcast(first, 0)
        net.head.weight.register_hook(lambda gradient: gradient * 0)
        net.head.bias.register_post_accumulate_grad_hook(lambda _: ran.append(1))
        penalty = net.head.weight
        optimizer = torch.optim.SGD(taken, 0.5, momentum=0.9)
        for parameter in taken:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()  # state and gradients from before
        first -= 0.5
        model = live.prepare_model(net)
        live.bind(optimizer)
        same = [a is b for a, b in zip(taken, net.parameters())]
        if name == "fsdp":
            result[name] = [any(same), [p.grad for p in net.parameters()] == [None] * len(same)]
            model(torch.ones(2, 4)).backward()
            result["clips"] = [
                refusal(lambda: clip(taken, 1.0), NbdistError)
                for clip in (torch.nn.utils.clip_grad_norm_, torch.nn.utils.clip_grad_value_)
            ]
            continue
        gradients = [p.grad is None for p in net.parameters()]
        (model(torch.ones(2, 4) * (rank + 1)) + 0 * penalty.sum()).backward()
        optimizer.step()
        moved = (net.head.weight - (first - 0.5 * 0.9)).abs().max().item()  # by momentum alone
        norm = torch.nn.utils.clip_grad_norm_(taken, 1e9).item()
        result[name] = [all(same), all(gradients), len(ran), moved < 1e-6, norm > 0]
    lines, sys.stderr = sys.stderr.getvalue().splitlines(), errors
    done(**result, lines=[line for line in lines if line.startswith("prepare:")])
"""


def test_parameters_that_stay_whole_stay_the_same_objects(tmp_path: Path) -> None:
    """Hooks, lists, penalties and optimizers from before prepare act on what is trained."""
    for end in run_ranks(tmp_path, 2, TRAINING + KEPT):
        for name in ("single", "ddp", "zero1"):
            assert end[name] == [True, True, 1, True, True], name
        assert end["fsdp"] == [False, True]
        (line,) = end["lines"]  # of fsdp alone
        assert line.startswith("prepare: head.weight, head.bias had hooks of yours")
        for text in end["clips"]:
            assert "got blocks.0.weight as it was before prepare() or a switch. fsdp" in text


def test_nothing_of_a_strategy_is_left(tmp_path: Path) -> None:
    """A module that was under FSDP2, TP or a pipeline can be copied, called and sharded again."""
    results = run_ranks(tmp_path, 2, TRAINING + TRACES)

    for result in results:
        assert result == dict.fromkeys(result, True)


def test_whole_states_under_each_strategy(tmp_path: Path) -> None:
    """Whole values are the single process's, and put back they are every rank's again."""
    results = run_ranks(tmp_path, 2, TRAINING + STATES)

    total = 2 * sum(result["share"] for result in results)
    for result in results:
        assert result["is_rank_0s"]
        assert result["share"] < 0.6 * total / 2
        for off, off_state, is_back, is_state_back in result["by_name"].values():
            assert off < CLOSE
            assert off_state < CLOSE
            assert is_back
            assert is_state_back
        assert result["worst"] < CLOSE


def test_other_models_and_refusals(tmp_path: Path) -> None:
    """Two models under one optimizer that nobody prepared; what cannot be is refused by name."""
    results = run_ranks(tmp_path, 2, TRAINING + OTHERS)

    for rank, result in enumerate(results):
        says = result["says"]
        assert result["apart"] < CLOSE
        assert result["buffers"] < CLOSE
        assert result["models"] == ["left", "right"]
        assert result["marked"] == ["kept", False]
        assert result["still"] == ["ddp", ["left", "right"]]
        assert says["fixed"].startswith("OptionError: Live models cannot be switched from fsdp")
        assert "accelerator.save_state(DIR)" in says["fixed"]
        assert "extra.bias, extra.weight of Odd changed after prepare()" in says["changed"]
        assert "rank 1 differs from rank 0's: weight (2, 3)" in says["other"]
        assert "has no shape before the model's first forward" in says["lazy"]
        assert "meta device and has no values" in says["meta"]
        assert "FSDPSequential is sharded already: 0.weight is a DTensor" in says["fully_shard"]
        assert "Sequential is sharded already: 0.weight is a DTensor" in says["split"]
        assert "DistributedDataParallel already, which does not go with fsdp" in says["wrapped"]
        assert "LBFGS looks at all gradients at once" in says["lbfgs"]
        assert "Adafactor" in says["adafactor"]
        if rank == 1:
            assert "under fsdp all ranks build a model together" in says["alone"]
            assert says["alone_ddp"] == "DistributedDataParallel"


def test_models_of_any_strategy_are_found_and_reset(tmp_path: Path) -> None:
    """After a broken cell gradients are cleared under every strategy; each model counts once."""
    results = run_ranks(tmp_path, 2, TRAINING + RESETS)

    for result in results:
        for name, outcome in result["found"].items():
            assert outcome == [["model"], [name not in ("ddp", "zero1")], ["model"], True, 0], name
        assert result["worst"] < CLOSE
