"""torch.optim.Muon under a strategy that splits matrices: each is stepped whole, on one rank."""

import copy
import functools
import gc
from collections.abc import Mapping
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from nbdist.parallel.accelerator.accelerator import Accelerator
from nbdist.parallel.live import registry
from nbdist.parallel.optimizers import muon
from nbdist.strategy.choice import Degrees
from nbdist.strategy.choose import choose
from nbdist.switch.rank.switch import switch
from tests.programs.optimizers import newton_schulz
from tests.programs.rank import n, rank, user
from tests.programs.training import BATCH, Net, labels, tokens
from tests.support.torch_ranks import on_ranks

STEPS = 4
MUON: Any = torch.optim.Muon
# Of what steps change. The Newton-Schulz steps are in fp32 here, or bf16 would round by 1e-3.
CLOSE = 3e-5


def make(dtype: torch.dtype = torch.float32) -> Net:
    torch.manual_seed(0)
    return Net(n_blocks=2).to(dtype)


def matrices(net: Any) -> list[torch.nn.Parameter]:
    """Of blocks, but one that is frozen."""
    net.blocks[0].mlp.up_proj.weight.requires_grad_(requires_grad=False)
    return [p for name, p in net.named_parameters() if p.ndim == 2 and "blocks" in name]


def step(model: Any, optimizer: Any, backward: Any, cut: Any, number: int) -> None:
    x, y = (cut(t[number * BATCH : (number + 1) * BATCH]) for t in (tokens, labels))
    optimizer.zero_grad()
    backward(model(x, labels=y))
    optimizer.step()


def part(batch: torch.Tensor, degrees: Degrees) -> torch.Tensor:
    place = degrees.coordinate(rank)
    return batch.chunk(degrees.dp)[place.dp_replicate * degrees.dp_shard + place.dp_shard]


def groups(net: Any, options: Mapping[str, Any]) -> Any:
    """Two, of which one has options of its own."""
    held = matrices(net)
    return MUON(
        [{"params": held[:3], "lr": 3e-3, "weight_decay": 0.3}, {"params": held[3:]}],
        **copy.deepcopy(options),
    )


def trained(names: list[str], options: Mapping[str, Any], given: Mapping[str, Any]) -> float:
    """How far a training under strategies in turn is from one process's, of what that changes."""
    alone = make()
    before = {key: value.clone() for key, value in alone.state_dict().items()}
    plain = groups(alone, options)
    schedule = torch.optim.lr_scheduler.ExponentialLR(plain, 0.7)
    for number in range(STEPS):
        step(alone, plain, torch.Tensor.backward, lambda tensor: tensor, number)
        schedule.step()
    registry.set_choice(choose(names[0], given, n))
    net = make()
    accelerator = Accelerator()
    user.model, user.optimizer = accelerator.prepare(net, groups(net, options))
    schedule = torch.optim.lr_scheduler.ExponentialLR(user.optimizer.optimizer, 0.7)
    for number in range(STEPS):
        if number and len(names) > 1:
            switch(choose(names[number % len(names)], given, n))
        cut = functools.partial(part, degrees=registry.current().degrees)
        step(user.model, user.optimizer, accelerator.backward, cut, number)
        schedule.step()
    after = accelerator.get_state_dict(user.model)
    user.model = user.optimizer = None
    gc.collect()
    values = alone.state_dict()
    off, change = (
        max((value - other[key]).abs().max().item() for key, value in values.items())
        for other in (after, before)
    )
    return off / change


in_fp32 = mock.patch("torch.optim._muon._zeropower_via_newtonschulz", newton_schulz)


@on_ranks(2)
@in_fp32
def test_it_is_one_processes_under_each_option() -> None:
    """Momentum, decay and rates of two groups and of a schedule; a frozen matrix stays."""
    for options in (
        {},
        {"nesterov": False, "momentum": 0.5},
        {"adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.0},
        {"lr": torch.tensor(2e-3), "ns_steps": 3, "ns_coefficients": (3.0, -4.0, 2.0), "eps": 1e-3},
    ):
        assert trained(["fsdp"], options, {}) < CLOSE, options
    assert trained(["tp"], {}, {}) < CLOSE
    muon._ELEMENTS_AT_ONCE = 200  # some matrices at a time, or one
    assert trained(["fsdp"], {}, {}) < CLOSE


@on_ranks(2)
@in_fp32
def test_its_momentum_goes_along_in_a_switch() -> None:
    """From and to strategies where torch's own step is taken."""
    assert trained(["fsdp", "ddp", "tp", "zero1"], {}, {}) < CLOSE


@on_ranks(4)
@in_fp32
def test_it_is_one_processes_on_a_mesh_of_two_axes() -> None:
    """Copies of shards, and shards of what tp has split."""
    assert trained(["fsdp"], {}, {"shard": "hybrid", "replicas": 2}) < CLOSE
    assert trained(["fsdp"], {}, {"tp": 2}) < CLOSE
    assert trained(["fsdp"], {}, {"pp": 2}) < CLOSE


def prepared(dtype: torch.dtype = torch.float32) -> tuple[Any, Any, Any]:
    registry.set_choice(choose("fsdp", {}, n))
    net, accelerator = make(dtype), Accelerator()
    return accelerator, *accelerator.prepare(net, MUON(matrices(net)))


@on_ranks(2)
def test_matrices_are_sent_twice_in_a_step() -> None:
    """To their owners and back, all together, and gradients are there as before."""
    accelerator, model, optimizer = prepared()
    accelerator.backward(model(tokens, labels=labels))
    gradients = [p.grad for p in model.parameters()]
    with CommDebugMode() as calls:
        optimizer.step()
    assert {str(call): count for call, count in calls.get_comm_counts().items()} == {
        "c10d.alltoall_base_": 2
    }
    assert [p.grad for p in model.parameters()] == gradients
    states = optimizer.optimizer.state
    assert {type(state["momentum_buffer"]) for state in states.values()} == {DTensor}
    assert {*states[next(iter(states))]} == {"momentum_buffer"}


@on_ranks(2)
def test_a_step_that_is_ended_while_ranks_meet_changes_nothing() -> None:
    """On its way back, the later one; the next step is the first."""
    accelerator, model, optimizer = prepared()
    accelerator.backward(model(tokens, labels=labels))
    before = [p.full_tensor().clone() for p in model.parameters()]
    ended = [muon.redistribute, RuntimeError("aborted")]

    def end(*given: Any) -> Any:
        if isinstance(function := ended.pop(0), RuntimeError):
            raise function
        return function(*given)

    with mock.patch.object(muon, "redistribute", end), pytest.raises(RuntimeError, match="aborted"):
        optimizer.step()
    after = [p.full_tensor() for p in model.parameters()]
    assert all(map(torch.equal, after, before))
    states = optimizer.optimizer.state.values()
    assert not any(state["momentum_buffer"].full_tensor().any() for state in states)
    assert any(p.grad is not None for p in matrices(model))


@on_ranks(2)
def test_a_closure_makes_gradients_before_the_step() -> None:
    """So torch steps by itself."""
    accelerator, model, optimizer = prepared()
    before = [p.full_tensor().clone() for p in matrices(model)]

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(tokens, labels=labels)
        accelerator.backward(loss)
        return loss

    assert optimizer.step(closure).item() > 0
    changed = [
        not torch.equal(p.full_tensor(), old)
        for p, old in zip(matrices(model), before, strict=True)
    ]
    assert changed == [p.requires_grad for p in matrices(model)]


@on_ranks(2)
def test_parameters_of_16_bits_round_as_in_one_process() -> None:
    """To one unit at most: torch rounds the rate on a CPU, and the change is not on its way."""
    accelerator, model, optimizer = prepared(torch.bfloat16)
    accelerator.backward(model(tokens, labels=labels))
    held = [p for p in matrices(model) if p.grad is not None]
    alone = [torch.nn.Parameter(p.full_tensor().clone()) for p in held]
    for p, split in zip(alone, held, strict=True):
        p.grad = split.grad.full_tensor().clone()
    optimizer.step()
    MUON(alone).step()
    for p, split in zip(alone, held, strict=True):
        assert ((p - split.full_tensor()).abs() <= 2**-7 * p.abs()).all()


@on_ranks(2)
def test_one_that_nobody_knows_steps_as_it_is() -> None:
    """A class that is derived from Muon, or a Muon of a later torch with other options."""
    kinds = [type("Mine", (MUON,), {}), functools.partial(MUON)]
    for kind, adds in zip(kinds, (False, True), strict=True):
        registry.set_choice(choose("fsdp", {}, n))
        net = make()
        optimizer = kind(matrices(net))
        if adds:
            optimizer.defaults["fused"] = True
        model, wrapped = Accelerator().prepare(net, optimizer)
        assert muon.attach(wrapped.optimizer) is None
        del net, model, optimizer, wrapped
        gc.collect()
