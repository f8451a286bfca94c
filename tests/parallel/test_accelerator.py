"""Plain Accelerate code trains as one process does: any strategy, order of preparing, switch."""

import gc
import weakref
from typing import Any

import pytest
import torch
from accelerate.utils import DataLoaderConfiguration, GradScalerKwargs
from torch.utils.data import DataLoader

from nbdist.errors import OptionError
from nbdist.parallel.accelerator.accelerator import Accelerator
from nbdist.parallel.base.tensors import local_of
from nbdist.parallel.live import registry
from nbdist.strategy.choose import choose
from nbdist.switch.rank.switch import switch
from tests.programs.rank import n, rank, refusal
from tests.programs.training import BATCH, data, groups, labels, make, tokens, use
from tests.support.torch_ranks import on_ranks

Row = tuple[str, dict[str, Any]]


def step(accelerator, model, optimizer):
    loss = model(tokens[:BATCH], labels=labels[:BATCH])
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def before(accelerator):
    net, optimizer, _ = make(0)
    group = optimizer.param_groups[0]
    optimizer = accelerator.prepare(optimizer)
    model = accelerator.prepare(net)
    assert group is optimizer.optimizer.param_groups[0]
    return model, optimizer


def after(accelerator):
    net, optimizer, _ = make(0)
    model = accelerator.prepare(net)
    return model, accelerator.prepare(optimizer)


def made_after(accelerator):
    net, _, _ = make(0)
    model = accelerator.prepare(net)
    return model, accelerator.prepare(torch.optim.AdamW(groups(model), lr=1e-2))


def without(accelerator):
    net, _, _ = make(0)
    model = accelerator.prepare(net)
    return model, torch.optim.AdamW(groups(model), lr=1e-2)


def twice(accelerator):
    net, optimizer, _ = make(0)
    model, first = accelerator.prepare(net, optimizer)
    again, two = accelerator.prepare(net, optimizer)
    third, three = accelerator.prepare(model, first)
    assert model is again is third
    assert first is two is three
    return model, first


def group_added(accelerator):
    net, _, _ = make(0)
    halves = groups(net)
    optimizer = torch.optim.AdamW([halves[0]], lr=1e-2)
    model, optimizer = accelerator.prepare(net, optimizer)
    optimizer.add_param_group(halves[1])
    return model, optimizer


def several(accelerator):
    """Two models with an optimizer each; and one optimizer for both."""
    nets = [make(0)[0] for _ in range(2)]
    both = torch.optim.AdamW([g for net in nets for g in groups(net)], lr=1e-2)
    model, two, optimizer = accelerator.prepare(*nets, both)
    step(accelerator, model, optimizer)
    assert [p.grad for p in two.parameters()].count(None) == len(list(two.parameters()))
    return two, optimizer


@pytest.mark.parametrize(
    "rows", [["ddp", "fsdp"], pytest.param(["zero1", "pp", "tp"], marks=pytest.mark.parity)]
)
@on_ranks(2, BLOCKS="2")
def test_any_order_gives_the_same_training(rows: list[str]) -> None:
    """And the same object for what is prepared already; nothing of it stays once it is dropped."""
    accelerator = Accelerator()

    def losses_of(way: Any) -> tuple[list[float], Any]:
        model, optimizer = way(accelerator)
        losses = torch.tensor([step(accelerator, model, optimizer) for _ in range(3)])
        base = accelerator.unwrap_model(model)
        assert base is accelerator.unwrap_model(base)
        assert type(base).__name__ in ("Net", "FSDPNet")  # the class that fully_shard makes
        return accelerator.reduce(losses, "mean").tolist(), weakref.ref(base)

    use("ddp")
    reference, _ = losses_of(after)
    for name in rows:
        use(name)
        for way in (before, after, made_after, without, twice, group_added, several):
            losses, alive = losses_of(way)
            assert losses == pytest.approx(reference, abs=2e-6, rel=0), (name, way)
            gc.collect()
            assert alive() is None, (name, way)
            assert not [*accelerator._models, *accelerator._optimizers]


def loop_with_switches(accelerator: Accelerator, path: list[Row]) -> list[float]:
    """One loop over the data; each step but the first begins with a switch."""
    use("ddp")
    torch.manual_seed(rank + 1)
    order = torch.Generator().manual_seed(5)
    loader = DataLoader(data, batch_size=BATCH, shuffle=True, generator=order)
    net, optimizer, scheduler = make(0)
    model, optimizer, scheduler, loader = accelerator.prepare(net, optimizer, scheduler, loader)
    same = [id(item) for item in (optimizer, optimizer.optimizer, scheduler, loader)]
    losses, loop, drawn = [], iter(loader), torch.get_rng_state()
    for at, (x, y) in enumerate(loop):
        with accelerator.accumulate(model):
            loss = model(x, labels=y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
        if at % 2 and at // 2 < len(path):
            name, options = path[at // 2]
            switch(choose(name, options, n))
            # A variable of a cell is rebound by the switch; this one is a function's.
            model = registry.prepared_of(net).outer
    assert same == [id(item) for item in (optimizer, optimizer.optimizer, scheduler, loader)]
    assert torch.equal(drawn, torch.get_rng_state())
    return losses + scheduler.get_last_lr()


SHORT = [[("fsdp", {}), ("zero1", {})], [("pp", {}), ("tp", {})]]
LONG = [
    [("fsdp", {}), ("ddp", {})],
    [("zero1", {}), ("pp", {})],
    [("tp", {}), ("fsdp", {"shard": "grad-op"})],
]


@pytest.mark.parametrize("paths", [SHORT, pytest.param(LONG, marks=pytest.mark.parity)])
@on_ranks(2, BLOCKS="2")
def test_a_loop_goes_on_with_all_that_belongs_to_it(paths: list[list[Row]]) -> None:
    """Each path's losses and rates are those of the loop without a switch; so is the generator."""
    config = DataLoaderConfiguration(split_batches=True)
    accelerator = Accelerator(gradient_accumulation_steps=2, dataloader_config=config)
    alone = loop_with_switches(accelerator, [])
    for path in paths:
        assert loop_with_switches(accelerator, path) == pytest.approx(alone, abs=2e-6), path


@on_ranks(2, BLOCKS="2")
def test_scaler_and_accumulation_follow_the_options() -> None:
    """fp16's scale is kept, also while another precision counts; it doubles with each step."""
    use("ddp", precision="fp16", accumulate=4)
    other = Accelerator(kwargs_handlers=[GradScalerKwargs(init_scale=64.0, growth_interval=1)])
    net = make(0)[0]
    model = other.prepare(net)
    optimizer = other.prepare(torch.optim.SGD(net.parameters(), lr=0.1))
    assert (other.mixed_precision, other.gradient_accumulation_steps) == ("fp16", 4)
    scaler = other.scaler

    def backwards(count: int) -> list[bool]:
        """Which of them ended a step."""
        synced = []
        for _ in range(count):
            with other.accumulate(model):
                other.backward(model(tokens[:4], labels=labels[:4]))
                optimizer.step()
                optimizer.zero_grad()
            synced.append(other.sync_gradients)
        return synced

    backwards(4)
    assert scaler.get_scale() == 128.0
    for precision, accumulate, is_kept, scale in (
        ("fp16", 4, True, 256.0),
        ("bf16", 1, False, 256.0),
        ("fp16", 1, True, 4096.0),
    ):
        if other.gradient_accumulation_steps > 1:
            backwards(1)  # of an accumulation that the switch ends
        switch(choose("fsdp", {"precision": precision, "accumulate": accumulate}, n))
        # Gradients were cleared, so an accumulation begins anew, with its first backward.
        assert other.sync_gradients
        model = registry.prepared_of(net).outer
        assert (other.mixed_precision, other.gradient_accumulation_steps) == (precision, accumulate)
        assert (other.scaler is scaler) == is_kept
        assert optimizer.scaler is other.scaler
        assert backwards(4) == ([False] * 3 + [True] if accumulate == 4 else [True] * 4)
        assert scaler.get_scale() == scale
    what_has_no_fused_step_is_refused(other, net)


def what_has_no_fused_step_is_refused(other: Accelerator, net: torch.nn.Module) -> None:
    """While nothing has changed."""
    rmsprop = other.prepare(torch.optim.RMSprop(net.parameters(), lr=0.1))
    before_ids = [id(p) for p in rmsprop.param_groups[0]["params"]]
    assert "RMSprop" in refusal(lambda: switch(choose("ddp", {"fused": True}, n)), OptionError)
    assert registry.current().name == "fsdp"
    assert [id(p) for p in rmsprop.param_groups[0]["params"]] == before_ids


def values(optimizer):
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return [local_of(p).detach().clone() for p in parameters if not p.is_meta]


def overflow(accelerator: Accelerator, clip: str) -> list[float]:
    """The losses of some steps; in the second one a gradient of the last rank is infinite."""
    loader = DataLoader(data, batch_size=BATCH)
    model, optimizer, scheduler, loader = accelerator.prepare(*make(0), loader)
    losses = []
    for at, (x, y) in enumerate(loader):
        with accelerator.autocast():
            loss = model(x, labels=y)
        accelerator.backward(loss)
        if at == 1 and rank == n - 1:
            next(p for p in model.parameters() if p.grad is not None).grad.mul_(float("inf"))
        if clip == "norm":
            accelerator.clip_grad_norm_(model.parameters(), 1e9)
        elif clip == "value":
            accelerator.clip_grad_value_(model.parameters(), 1e9)
        old = values(optimizer)
        optimizer.step()
        scheduler.step()
        assert accelerator.optimizer_step_was_skipped == (at == 1)
        optimizer.zero_grad()
        assert all(map(torch.equal, old, values(optimizer))) == (at == 1)
        assert accelerator.scaler.get_scale() == (512.0 if at else 1024.0)
        losses.append(accelerator.reduce(loss.detach().float(), "mean").item())
    assert scheduler.scheduler.last_epoch == 5
    assert accelerator.mixed_precision == "fp16"
    return losses


@on_ranks(2, BLOCKS="2")
def test_an_overflow_on_one_rank_is_one_on_all() -> None:
    """The step and the rate's step are left out, the scale halves; clipping may come before."""
    accelerator = Accelerator(
        mixed_precision="fp16",
        kwargs_handlers=[GradScalerKwargs(init_scale=1024.0)],
        dataloader_config=DataLoaderConfiguration(split_batches=True),
    )
    curves = []
    for name, clip in (("ddp", "norm"), ("zero1", ""), ("fsdp", "value"), ("pp", "")):
        accelerator._own_scaler = None
        use(name, precision="fp16")
        accelerator._follow(registry.current())
        curves.append(overflow(accelerator, clip))
        # Losses of the first steps in fp32, which a run in fp16 must come near to.
        assert curves[-1] == pytest.approx(curves[0], abs=5e-3), name
    two_models_and_a_fused_optimizer(accelerator)


def two_models_and_a_fused_optimizer(accelerator: Accelerator) -> None:
    use("ddp", precision="fp16")
    nets = [make(0)[0] for _ in range(2)]
    models = accelerator.prepare(*nets)
    pair = accelerator.prepare(*[torch.optim.SGD(net.parameters(), lr=0.1) for net in models])
    before = [values(twin) for twin in pair]
    total = sum(model(tokens[:BATCH], labels=labels[:BATCH]) for model in models)
    accelerator.backward(total)
    for model in models:  # twice, as the seeds do; Accelerate's own raises
        accelerator.clip_grad_norm_(model.parameters(), 1e9)
    for twin in pair:
        twin.step()
    first, second = (
        [(a - b).abs().max().item() for a, b in zip(old, values(twin), strict=True)]
        for old, twin in zip(before, pair, strict=True)
    )
    assert first == second
    assert max(first) > 0
    assert "closure" in refusal(lambda: pair[0].step(lambda: 1))

    fused = accelerator.prepare(torch.optim.AdamW(nets[0].parameters(), lr=0.1, fused=True))
    accelerator.backward(models[0](tokens[:BATCH], labels=labels[:BATCH]))
    if rank == 1:
        nets[0].head.bias.grad.fill_(float("nan"))
    old = values(fused)
    fused.step()
    assert fused.step_was_skipped
    assert all(map(torch.equal, old, values(fused)))


def searched(strategy: str) -> tuple[float, torch.Tensor]:
    """The weights after a step of LBFGS, whose line search goes by the loss; each rank's data."""
    torch.manual_seed(0)
    net: Any = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    net = net.double()
    x = torch.randn(8, 4, dtype=torch.float64)
    optimizer: Any = torch.optim.LBFGS(net.parameters(), 0.5, 5, line_search_fn="strong_wolfe")
    if strategy:
        use(strategy)
        net, optimizer = Accelerator().prepare(net, optimizer)
        x = x.chunk(n)[rank]

    def closure():
        optimizer.zero_grad()
        loss = (net(x) - x.sum(1, keepdim=True).sin()).square().mean()
        loss.backward()
        return loss

    losses = [optimizer.step(closure) for _ in range(2)]
    return losses[1].item(), torch.cat([p.detach().flatten() for p in net.parameters()])


@on_ranks(2)
def test_an_optimizer_that_goes_by_the_loss_gets_that_of_all_data() -> None:
    """LBFGS with a line search takes the same steps on all ranks: those of one process."""
    (alone, weights), (loss, others) = searched(""), searched("ddp")
    assert abs(loss - alone) < 1e-9
    assert (weights - others).abs().max() < 1e-9
