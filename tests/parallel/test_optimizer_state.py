"""An optimizer's state goes with its parameters: against the same steps in one process."""

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import optim
from torch.distributed.tensor import DTensor, Partial, Replicate

from nbdist.errors import OptionError
from nbdist.parallel.base.tensors import local_of
from nbdist.parallel.reshard import optimizer_state as states
from nbdist.parallel.reshard.redistribute import Reshard, redistribute
from nbdist.strategy.choice import Degrees
from nbdist.strategy.tensor_layout import Placement, TensorLayout
from tests.programs import sides as ways
from tests.programs.rank import everyone, n, rank, refusal
from tests.programs.sides import (
    CPU,
    flat,
    fsdp_side,
    owned_side,
    parameter,
    part,
    placed,
    whole_side,
)
from tests.support.torch_ranks import on_ranks

# The last but one never gets a gradient, the last one is frozen.
SHAPES = {
    "a.weight": (7, 6),
    "a.bias": (3,),
    "b.weight": (4, 8),
    "scale": (),
    "b.bias": (5,),
    "unused": (2, 2),
    "frozen": (3, 4),
}
SETTINGS = {
    "AdamW": lambda g: optim.AdamW(g, lr=0.1),
    "Adam amsgrad": lambda g: optim.Adam(g, lr=0.1, amsgrad=True),
    "AdamW fused": lambda g: optim.AdamW(g, lr=0.1, fused=True),
    "AdamW one by one": lambda g: optim.AdamW(g, lr=0.1, foreach=False),
    "SGD": lambda g: optim.SGD(g, lr=0.1),
    "SGD momentum": lambda g: optim.SGD(g, lr=0.1, momentum=0.9, nesterov=True),
    "RMSprop": lambda g: optim.RMSprop(g, lr=0.1, momentum=0.5, centered=True),
    "Adagrad": lambda g: optim.Adagrad(g, lr=0.1),
    "NAdam": lambda g: optim.NAdam(g, lr=0.1),
    "ASGD": lambda g: optim.ASGD(g, lr=0.1),
}


def value(name, seed):
    generator = torch.Generator().manual_seed(1000 * seed + list(SHAPES).index(name))
    return torch.randn(SHAPES[name], generator=generator)


def sides_of(side_of):
    return {name: side_of(shape, i) for i, (name, shape) in enumerate(SHAPES.items())}


def groups(parameters):
    matrices = [p for name, p in parameters.items() if p.ndim > 1]
    rest = [p for name, p in parameters.items() if p.ndim < 2]
    return [{"params": matrices}, {"params": rest, "weight_decay": 0.3}]


def step(optimizer, parameters, sides, owners, seed):
    """One step with the gradients that this rank has; under zero1 the owners' values go to all."""
    for name, p in parameters.items():
        p.grad = None
        owned = owners is None or part(p, owners[name]) is not None
        if name not in ("unused", "frozen") and not p.is_meta and owned:
            p.grad = placed(part(value(name, seed), sides[name]), sides[name])
    optimizer.step()
    for name in owners or ():
        dist.broadcast(parameters[name].data, next(iter(owners[name].layout.ranks)))


def move(optimizer, before, old, new, old_owners=None, new_owners=None):
    """Parameters and state to new sides, as a switch does it."""
    local = states.read(optimizer, before)
    [agreed] = states.merge_across_ranks([local])
    moves = states.plan(agreed, old_owners or old, new_owners or new)
    values = [Reshard(name, torch.float32, old[name], new[name]) for name in before]
    held = {name: local_of(p.detach()) for name, p in before.items() if not p.is_meta}
    tensors = redistribute([*values, *moves], {**held, **local.tensors}, CPU)
    after = {}
    for name, p in before.items():
        is_here, meta = name in tensors, torch.empty(SHAPES[name], device="meta")
        tensor = placed(tensors[name], new[name]) if is_here else meta
        after[name] = torch.nn.Parameter(tensor, p.requires_grad)
    replaced = {id(before[name]): after[name] for name in before}
    for group in optimizer.param_groups:
        group["params"][:] = [replaced[id(p)] for p in group["params"]]
    states.write(optimizer, agreed, tensors, before, after, new_owners or new)
    return after


def check(optimizer, parameters, sides, reference, whole):
    """This rank's state and values are its parts of the reference's."""
    for name, p in parameters.items():
        mine = {**optimizer.state.get(p, {})}
        if part(whole[name].detach(), sides[name]) is None:
            assert not mine, f"{name}: state of a foreign parameter"
            continue
        theirs = {**reference.state.get(whole[name], {})}
        assert list(mine) == list(theirs), name
        for key, got in mine.items():
            assert type(got) is (type(p.data) if getattr(got, "ndim", 0) else type(theirs[key]))
            if getattr(got, "ndim", 0) and isinstance(p, DTensor):
                assert (got.placements, got.stride()) == (p.placements, p.stride()), name
        mine["value"], theirs["value"] = p.detach(), whole[name].detach()
        for key, got in mine.items():
            check_part(got, theirs[key], sides[name], (name, key))


def check_part(got, whole, side, title):
    if not isinstance(whole, torch.Tensor):
        assert got == whole, title
        return
    own = got.to_local() if isinstance(got, DTensor) else got
    expected = part(whole, side) if whole.ndim else whole
    assert own.dtype == expected.dtype, title
    assert torch.allclose(own, expected, 1e-5, 1e-6), (title, own, expected)


JOURNEY = {
    "fsdp": fsdp_side, "tp": ways.tp_side, "pp": ways.pp_side, "both": ways.both_side,
    "zero1": owned_side, "hsdp": ways.hsdp_side, "pp again": ways.pp_side,
    "zero1 again": owned_side, "whole": whole_side,
}  # fmt: skip
SHORT = {stop: JOURNEY[stop] for stop in ("fsdp", "pp", "zero1", "whole")}


def travel(make, journey):
    sides, owners = sides_of(whole_side), None
    parameters = {name: parameter(value(name, 0), sides[name]) for name in SHAPES}
    whole = {name: torch.nn.Parameter(value(name, 0)) for name in SHAPES}
    for some in (parameters, whole):
        some["frozen"].requires_grad_(requires_grad=False)
    optimizer, reference = make(groups(parameters)), make(groups(whole))
    stranger = torch.nn.Parameter(torch.ones(2))
    optimizer.state[stranger]["key"] = kept = torch.ones(2)
    table, lists = optimizer.state, [id(g["params"]) for g in optimizer.param_groups]
    seeds = itertools.count(1)
    for number, side_of in enumerate((whole_side, *journey.values())):
        if number:
            new_owners = sides_of(side_of) if side_of is owned_side else None
            new = sides_of(whole_side if new_owners else side_of)
            parameters = move(optimizer, parameters, sides, new, owners, new_owners)
            sides, owners = new, new_owners
        check(optimizer, parameters, owners or sides, reference, whole)
        for seed in itertools.islice(seeds, 1 if number > 1 else 2):
            step(optimizer, parameters, sides, owners, seed)
            for key, p in whole.items():
                p.grad = None if key in ("unused", "frozen") else value(key, seed)
            reference.step()
        check(optimizer, parameters, owners or sides, reference, whole)
    assert optimizer.state is table
    assert table[stranger]["key"] is kept
    assert lists == [id(g["params"]) for g in optimizer.param_groups]


def stepped(make, count=1, gradient=lambda: torch.ones(4, 6)):
    p = torch.nn.Parameter(torch.ones(4, 6))
    optimizer = make([p])
    for _ in range(count):
        p.grad = gradient()
        optimizer.step()
    return optimizer, {"w": p}


def agreed_of(optimizer, parameters):
    return states.merge_across_ranks([states.read(optimizer, parameters)])[0]


ADAMW = optim.AdamW
WHOLE, ROWS = whole_side((4, 6), 0), fsdp_side((4, 6), 0)


@on_ranks(4)
def test_state_travels_with_its_parameters() -> None:
    """Ten optimizers, up to ten layouts, steps between: as the same steps in one process, 1e-6."""
    flat()
    ways.square()
    for name, make in SETTINGS.items():
        travel(make, JOURNEY if name == "AdamW" else SHORT)
    for refuse in (other_steps, other_optimizers, a_part_that_nobody_has):
        refuse()
    p = torch.nn.Parameter(torch.ones(4, 6))
    lbfgs = optim.LBFGS([p])
    lbfgs.step(lambda: closure(lbfgs, p))
    stays_or_is_refused("Adafactor", "row_var", *stepped(optim.Adafactor))
    stays_or_is_refused("LBFGS", "al", lbfgs, {"w": p})
    momentum_of_partial_sums_is_summed()


def refused(text: str, call: Any) -> None:
    """The same sentence everywhere."""
    sentence = refusal(call)
    assert text in sentence
    assert everyone(sentence) == [sentence] * n


def other_steps() -> None:
    text = "AdamW's 'step' of w differs: 1.0 of torch.float32 on rank 0, 2.0"
    refused(text, lambda: agreed_of(*stepped(ADAMW, 1 + (rank == 2))))


def other_optimizers() -> None:
    text = "rank 0 has SGD of 1 parameters, rank 1 has AdamW"
    refused(text, lambda: agreed_of(*stepped(ADAMW if rank else optim.SGD)))


def a_part_that_nobody_has() -> None:
    """Where each rank has all, those that have the state give it to the others."""
    agreed = agreed_of(*stepped(ADAMW, int(rank < 2)))
    text = "AdamW has 'exp_avg' of w only on rank 0-1"
    refused(text, lambda: states.plan(agreed, {"w": ROWS}, {"w": WHOLE}))
    assert len(states.plan(agreed, {"w": WHOLE}, {"w": ROWS})) == 2


def closure(optimizer, p):
    optimizer.zero_grad()
    loss = (p - 2).pow(2).sum()
    loss.backward()
    return loss


def stays_or_is_refused(name: str, key: str, optimizer: Any, parameters: dict[str, Any]) -> None:
    """Named by optimizer, key and parameter where the layout changes; the same objects else."""
    agreed = agreed_of(optimizer, parameters)
    before = optimizer.state[parameters["w"]]
    sentence = refusal(lambda: states.plan(agreed, {"w": WHOLE}, {"w": ROWS}), OptionError)
    assert sentence.startswith(f"{name} keeps {key!r} of w in its own form")
    assert "optimizer.state.clear()" in sentence
    moves = states.plan(agreed, {"w": WHOLE}, {"w": WHOLE})
    local = states.read(optimizer, parameters)
    fresh = {"w": torch.nn.Parameter(torch.ones(4, 6))}
    tensors = redistribute(moves, local.tensors, CPU)
    states.write(optimizer, agreed, tensors, parameters, fresh, {"w": WHOLE})
    after = optimizer.state[fresh["w"]]
    assert list(after) == list(before)
    for of_key, each in after.items():
        if isinstance(each, list) or getattr(each, "ndim", 0):
            assert each is before[of_key], of_key


def momentum_of_partial_sums_is_summed() -> None:
    """It begins as the gradient, which tp may have left as partial sums: 0 + 1 + 2 + 3."""
    p = torch.nn.Parameter(DTensor.from_local(torch.ones(3), flat(), [Replicate()]))
    sgd = optim.SGD([p], lr=0.1, momentum=0.9)
    p.grad = DTensor.from_local(torch.full((3,), float(rank)), flat(), [Partial()])
    sgd.step()
    assert [t.tolist() for t in states.read(sgd, {"p": p}).tensors.values()] == [[6.0] * 3]


@pytest.mark.parametrize("option", ["fused", "capturable", ""])
def test_the_step_lies_where_the_group_wants_it(option: str) -> None:
    """On the parameter's device for fused and capturable groups, whatever it was; else the CPU."""
    before, after = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2).to("meta"))
    optimizer = torch.optim.AdamW([before])
    before.grad = torch.ones(2)
    optimizer.step()
    if option:
        optimizer.param_groups[0][option] = True
    (agreed,) = states.merge_across_ranks([states.read(optimizer, {"w": before})])
    side = {"w": Placement(TensorLayout((2,)), Degrees())}
    moments = {move.name: torch.ones(2, device="meta") for move in states.plan(agreed, side, side)}
    states.write(optimizer, agreed, moments, {"w": before}, {"w": after}, side)

    assert list(optimizer.state) == [after]
    step = optimizer.state[after]["step"]
    assert (step.device.type, step.dtype) == ("meta" if option else "cpu", torch.float32)
    assert optimizer.state[after]["exp_avg"] is moments["0:w [exp_avg]"]
