"""Models and optimizers under a strategy: prepared, bound, whole again, and taken off again."""

import contextlib
import copy
import gc
import io
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable_state import _module_state_mapping as fsdp_table
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from nbdist.hang.rank import reset_models
from nbdist.parallel.accelerator import prepare as live
from nbdist.parallel.accelerator import torch_clip
from nbdist.parallel.live import live_models, registry
from nbdist.parallel.reshard import full_state
from nbdist.switch.rank import switch
from tests.programs.rank import everyone, n, rank, refusal, user
from tests.programs.switching import (
    CLOSE,
    begin,
    expect,
    fresh,
    optimizer_for,
    own_part,
    pick,
    tokens,
    train,
    worst,
)
from tests.support.torch_ranks import on_ranks


def head_of(where: Any) -> nn.Module:
    """A model whose parameters the user takes before prepare."""
    torch.manual_seed(where)
    net = nn.Module()
    net.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
    net.head = nn.Linear(4, 1)
    net.forward = lambda x: net.head(net.blocks[1](net.blocks[0](x).tanh()).tanh()).mean()
    return net


def what_was_taken_acts(name: str) -> None:
    """Hooks, lists, penalties and optimizers, where parameters are whole."""
    registry.set_choice(pick(name))
    net = head_of(rank)  # rank 0's values count
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
    same = [a is b for a, b in zip(taken, net.parameters(), strict=True)]
    assert all(p.grad is None for p in net.parameters())
    if name == "fsdp":
        assert not any(same)
        model(torch.ones(2, 4)).backward()
        for clip in (nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_):
            text = refusal(lambda clip=clip: clip(taken, 1.0))
            assert "got blocks.0.weight as it was before prepare() or a switch. fsdp" in text
        return
    assert all(same)
    (model(torch.ones(2, 4) * (rank + 1)) + 0 * penalty.sum()).backward()
    optimizer.step()
    assert len(ran) == 1
    assert (net.head.weight - (first - 0.5 * 0.9)).abs().max() < 1e-6  # by momentum alone
    assert nn.utils.clip_grad_norm_(taken, 1e9) > 0


@on_ranks(2)
def test_parameters_that_stay_whole_stay_the_same_objects() -> None:
    """Hooks, lists, penalties and optimizers from before prepare act on what is trained."""
    torch_clip.install()
    text = io.StringIO()
    with contextlib.redirect_stderr(text):
        for name in ("single", "ddp", "zero1", "fsdp"):
            what_was_taken_acts(name)
    (line,) = (line for line in text.getvalue().splitlines() if line.startswith("prepare:"))
    assert line.startswith("prepare: head.weight, head.bias had hooks of yours")  # of fsdp alone


def look() -> list[Any]:
    """All that a strategy could leave on a module."""
    return [
        (
            type(m),
            {k for k in vars(m) if k != "_nbdist_prepared"},
            {k: list(t) for k, t in vars(m).items() if isinstance(t, dict) and k != "_modules"},
            dict(m._modules),
            m in fsdp_table,
        )
        for m in user.base.modules()
    ]


@on_ranks(2)
def test_nothing_of_a_strategy_is_left() -> None:
    """A module that was under FSDP2, TP or a pipeline can be copied, called and sharded again."""
    fresh()
    base, before = user.base, look()
    begin("ddp")  # so that `base` means the module itself from now on
    switch.switch(pick("single"))
    for name, options in (
        ("tp", {}), ("pp", {}), ("fsdp", {"checkpoint": "full"}),
        ("fsdp", {"precision": "bf16"}), ("zero1", {}),
    ):  # fmt: skip
        switch.switch(pick(name, **options))
        user.model(own_part(tokens(0))).backward()
        with torch.no_grad():
            user.model.eval()
            user.model(tokens(0))
            user.model.train()
        base.blocks[0].register_forward_hook(lambda *_: None)
        switch.switch(pick("single"))
        base.blocks[0]._forward_hooks.popitem()
        assert look() == before, (name, options)
        assert user.model is base
    copied = copy.deepcopy(base)
    assert abs(copied(tokens(0)) - base(tokens(0))) <= CLOSE
    assert registry.prepared_of(copied) is None
    assert {type(p).__name__ for p in base.parameters()} == {"Parameter"}
    assert list(base.state_dict()) == list(user.first)
    mesh = init_device_mesh("cpu", (n,))
    for block in copied.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(copied, mesh=mesh)
    copied(tokens(0)).backward()
    fully_shard(base.blocks[0], mesh=mesh)  # by hand, on the very module that was
    assert isinstance(base.blocks[0], FSDPModule)


@on_ranks(2)
def test_whole_states_under_each_strategy() -> None:
    """Whole values are the single process's, and put back they are every rank's again."""
    fresh()
    user.optimizer, user.scheduler = optimizer_for(user.model)  # before prepare, as often
    registry.set_choice(pick("zero1"))
    user.model = live.prepare_model(user.model)
    live.bind(user.optimizer)
    assert all(torch.equal(user.first[k], v) for k, v in user.base.state_dict().items())
    train(3)
    held = sum(v.numel() for s in user.optimizer.state.values() for v in s.values())
    assert held < 0.6 * sum(everyone(held))

    def closure():
        user.optimizer.zero_grad()
        value = user.model(tokens(len(user.losses)).chunk(n)[rank])
        value.backward()
        return value

    mean = user.optimizer.step(closure).detach().clone()
    user.scheduler.step()
    dist.all_reduce(mean)
    user.losses.append(mean.item() / n)
    expect(len(user.losses))
    for name in ("zero1", "fsdp", "tp", "pp"):
        switch.switch(pick(name))
        whole_state_goes_and_comes()
    assert worst() < CLOSE


def whole_state_goes_and_comes() -> None:
    """As that of one process; into a model that has gone on: it stands where it was."""
    prepared, optimizer, reference = (
        registry.prepared_of(user.model),
        user.optimizer,
        user.reference,
    )
    whole = copy.deepcopy(full_state.full_state(prepared))
    state = copy.deepcopy(full_state.full_optimizer_state(optimizer))["state"]
    for name, value in reference.state_dict().items():
        assert name not in whole or (whole[name] - value).abs().max() < CLOSE, name
    for name, p in reference.named_parameters():
        for key in ("exp_avg", "exp_avg_sq", "step"):
            assert (state[name][key] - user.alone.state[p][key]).abs().max() < CLOSE, name
    given = copy.deepcopy(full_state.full_optimizer_state(optimizer))
    train(1)
    full_state.load_full(prepared, whole)
    full_state.load_full_optimizer_state(optimizer, given)
    user.scheduler.last_epoch -= 1
    user.losses.pop()
    back = full_state.full_state(prepared)
    assert all(torch.equal(back[name], whole[name]) for name in whole)
    again = full_state.full_optimizer_state(optimizer)["state"]
    for name, slots in state.items():
        for key, value in slots.items():
            assert torch.equal(torch.as_tensor(again[name][key]), torch.as_tensor(value)), name


class Odd(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.lstm = nn.LSTM(4, 8, batch_first=True)
        self.norm = nn.BatchNorm1d(8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.frozen = nn.Parameter(torch.ones(8), requires_grad=False)

    def forward(self, x):
        x, _ = self.lstm(x)
        x = self.norm(x[:, -1]) * self.frozen
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x.square().mean()


def odd_batch(step: int) -> torch.Tensor:
    return torch.randn(8, 3, 4, generator=torch.Generator().manual_seed(step))


@on_ranks(2)
def test_other_models_and_refusals() -> None:
    """Two models under one optimizer that nobody prepared; what cannot be is refused by name."""
    user.left, user.right = left, right = Odd(1), Odd(2)
    left.frozen.mark = "kept"
    twins = [copy.deepcopy(left), copy.deepcopy(right)]
    registry.set_choice(pick("single"))
    user.first_model, user.second_model = live.prepare_model(left), live.prepare_model(right)
    both, of_twins = (
        torch.optim.SGD([p for m in models for p in m.parameters()], lr=0.1, momentum=0.9)
        for models in ((left, right), twins)
    )
    user.both = both  # nobody has bound it: it is found
    for at, name in enumerate(("single", "fsdp", "ddp", "zero1", "single", "fsdp")):
        switched = switch.switch(pick(name))
        # Every rank has the same batch: its own norm's statistics are those of the twin.
        value = user.first_model(odd_batch(at)) + user.second_model(odd_batch(at))
        twin = twins[0](odd_batch(at)) + twins[1](odd_batch(at))
        assert abs(value - twin) < CLOSE, (at, name)
        for loss, optimizer in ((value, both), (twin, of_twins)):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert list(switched.models) == ["left", "right"]
    assert (left.frozen.mark, left.frozen.requires_grad) == ("kept", False)
    for a, b in zip(left.buffers(), twins[0].buffers(), strict=True):
        assert (a - b).abs().max() < CLOSE
    refuses_models()
    refuses_switches()
    a_rank_in_anothers_place_builds_by_itself()


def refused(call: Any, *words: str) -> None:
    text = refusal(call)
    assert all(word in text for word in words), text


def refuses_models() -> None:
    """Under fsdp."""
    refused(
        lambda: live.prepare_model(nn.Linear(2 + rank, 2)),
        "rank 1 differs from rank 0's: weight (2, 3)",
    )
    refused(
        lambda: live.prepare_model(nn.LazyLinear(2)),
        "has no shape before the model's first forward",
    )
    refused(
        lambda: live.prepare_model(nn.Linear(2, 2, device="meta")), "meta device and has no values"
    )
    over_all = init_device_mesh("cpu", (n,))
    sharded = fully_shard(nn.Sequential(nn.Linear(8, 8)), mesh=over_all)
    is_sharded = "is sharded already: 0.weight is a DTensor"
    refused(lambda: live.prepare_model(sharded), f"FSDPSequential {is_sharded}")
    split = nn.Linear(8, 8)
    split.weight = nn.Parameter(distribute_tensor(split.weight, over_all, [Shard(0)]))
    refused(lambda: live.prepare_model(nn.Sequential(split)), f"Sequential {is_sharded}")
    wrapped = DistributedDataParallel(nn.Linear(2, 2))
    refused(
        lambda: live.prepare_model(wrapped),
        "DistributedDataParallel already, which does not go with fsdp",
    )


def refuses_switches() -> None:
    refused(
        lambda: switch.switch(pick("fsdp1")),
        "Live models cannot be switched from fsdp",
        "accelerator.save_state(DIR)",
    )
    user.left.extra = nn.Linear(2, 2)
    changed = "extra.bias, extra.weight of Odd changed after prepare()"
    refused(lambda: switch.switch(pick("ddp")), changed)
    del user.left.extra
    user.small = nn.Linear(2, 2)
    user.lbfgs = torch.optim.LBFGS(live.prepare_model(user.small).parameters())
    refused(lambda: switch.switch(pick("zero1")), "LBFGS looks at all gradients together")
    del user.small, user.lbfgs
    switch.switch(pick("ddp"))
    user.adafactor = torch.optim.Adafactor(user.left.parameters())
    user.first_model(odd_batch(0)).backward()
    user.adafactor.step()
    user.adafactor.zero_grad()
    refused(lambda: switch.switch(pick("fsdp")), "Adafactor")
    del user.adafactor
    gc.collect()
    assert registry.current().name == "ddp"
    assert list(switch.switch(pick("fsdp")).models) == ["left", "right"]


def a_rank_in_anothers_place_builds_by_itself() -> None:
    """What the others have."""
    if rank == 1:
        live_models.catching_up(True)
        alone = "under fsdp all ranks build a model together"
        refused(lambda: live.prepare_model(nn.Linear(2, 2)), alone)
    dist.barrier()
    registry.set_choice(pick("ddp"))
    if rank == 1:
        by_itself = live.prepare_model(nn.Linear(2, 2))
        assert type(by_itself).__name__ == "DistributedDataParallel"
        live_models.catching_up(False)


@on_ranks(2)
def test_models_of_any_strategy_are_found_and_reset() -> None:
    """After a broken cell gradients are cleared under every strategy; each model counts once."""
    fresh()
    begin("ddp")
    for name in ("ddp", "zero1", "fsdp", "tp", "pp"):
        switch.switch(pick(name))
        user.model(own_part(tokens(99))).backward()
        (model,) = live_models.find()
        assert (model.name, model.is_sharded) == ("model", name not in ("ddp", "zero1"))
        del model
        ((cleared, count),) = reset_models.reset().items()
        assert cleared == "model"
        assert count > 0
        assert all(p.grad is None for p in user.base.parameters())
        train(2)
    assert worst() < CLOSE
