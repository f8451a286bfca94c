"""An optimizer's state goes with its parameters: against the same steps in one process."""

from typing import Any

import pytest
import torch

from nbdist.parallel.reshard import optimizer_state
from nbdist.strategy.choice import Degrees
from nbdist.strategy.tensor_layout import Placement, TensorLayout
from tests.support.sides import SIDES
from tests.support.torch_ranks import run_ranks

TRAVELS = (
    SIDES
    + """
    import math, traceback
    from nbdist.parallel.reshard import optimizer_state as states
    from nbdist.parallel.reshard.redistribute import Reshard, redistribute
    from nbdist.errors import OptionError
    O = torch.optim

    # The last but one never gets a gradient, the last one is frozen.
    SHAPES = {"a.weight": (7, 6), "a.bias": (3,), "b.weight": (4, 8), "scale": (),
              "b.bias": (5,), "unused": (2, 2), "frozen": (3, 4)}
    SETTINGS = {
        "AdamW": lambda g: O.AdamW(g, lr=0.1),
        "Adam amsgrad": lambda g: O.Adam(g, lr=0.1, amsgrad=True),
        "AdamW fused": lambda g: O.AdamW(g, lr=0.1, fused=True),
        "AdamW one by one": lambda g: O.AdamW(g, lr=0.1, foreach=False),
        "SGD": lambda g: O.SGD(g, lr=0.1),
        "SGD momentum": lambda g: O.SGD(g, lr=0.1, momentum=0.9, nesterov=True),
        "RMSprop": lambda g: O.RMSprop(g, lr=0.1, momentum=0.5, centered=True),
        "Adagrad": lambda g: O.Adagrad(g, lr=0.1),
        "NAdam": lambda g: O.NAdam(g, lr=0.1),
        "ASGD": lambda g: O.ASGD(g, lr=0.1),
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
        "One step with the gradients that this rank has; under zero1 the owners' values go to all."
        for name, p in parameters.items():
            p.grad = None
            owned = owners is None or part(p, owners[name]) is not None
            if name not in ("unused", "frozen") and not p.is_meta and owned:
                p.grad = placed(part(value(name, seed), sides[name]), sides[name])
        optimizer.step()
        for name in owners or ():
            dist.broadcast(parameters[name].data, next(iter(owners[name].layout.ranks)))

    def move(optimizer, before, old, new, old_owners=None, new_owners=None):
        "Parameters and state to new sides, as a switch does it."
        local = states.read(optimizer, before)
        [agreed] = states.merge_across_ranks([local])
        moves = states.plan(agreed, old_owners or old, new_owners or new)
        values = [Reshard(name, torch.float32, old[name], new[name]) for name in before]
        held = {n: p.detach().to_local() if isinstance(p, DTensor) else p.detach()
                for n, p in before.items() if not p.is_meta}
        tensors = redistribute([*values, *moves], {**held, **local.tensors}, cpu)
        after = {}
        for name, p in before.items():
            local_part = tensors.get(name)
            if local_part is None:
                after[name] = torch.nn.Parameter(torch.empty(SHAPES[name], device="meta"))
            else:
                after[name] = torch.nn.Parameter(placed(local_part, new[name]))
            after[name].requires_grad_(p.requires_grad)
        replaced = {id(before[name]): after[name] for name in before}
        for group in optimizer.param_groups:
            group["params"][:] = [replaced[id(p)] for p in group["params"]]
        states.write(optimizer, agreed, tensors, before, after, new_owners or new)
        return after

    def off(optimizer, parameters, sides, owners, reference, whole):
        "Where this rank's state and values are not its parts of the reference's."
        found = []
        for name, p in parameters.items():
            mine = optimizer.state.get(p, {})
            theirs = reference.state.get(whole[name], {})
            side = (owners or sides)[name]
            if part(whole[name].detach(), side) is None:
                found += [f"{name}: state of a foreign parameter"] if mine else []
                continue
            if list(mine) != list(theirs):
                found.append(f"{name}: {list(mine)} instead of {list(theirs)}")
                continue
            pairs = [(key, mine[key], theirs[key]) for key in theirs]
            for key, got, expected in [*pairs, ("value", p.detach(), whole[name].detach())]:
                if type(got) is not (type(p.data) if getattr(got, "ndim", 0) else type(expected)):
                    found.append(f"{name} {key}: {type(got)}")
                if isinstance(expected, torch.Tensor):
                    if getattr(got, "ndim", 0) and key != "value" and isinstance(p, DTensor):
                        assert got.placements == p.placements and got.stride() == p.stride()
                    got = got.to_local() if isinstance(got, DTensor) else got
                    expected = part(expected, side) if expected.ndim else expected
                    if got.dtype != expected.dtype or not torch.allclose(got, expected, 1e-5, 1e-6):
                        found.append(f"{name} {key}: {got} instead of {expected}")
                elif got != expected:
                    found.append(f"{name} {key}: {got} instead of {expected}")
        return found

    JOURNEY = {"fsdp": fsdp_side, "tp": tp_side, "pp": pp_side, "both": both_side,
               "zero1": owned_side, "hsdp": hsdp_side, "pp again": pp_side,
               "zero1 again": owned_side, "whole": whole_side}
    SHORT = {stop: JOURNEY[stop] for stop in ("fsdp", "pp", "zero1", "whole")}

    def travel(make, journey):
        sides, owners = sides_of(whole_side), None
        parameters = {name: parameter(value(name, 0), sides[name]) for name in SHAPES}
        whole = {name: torch.nn.Parameter(value(name, 0)) for name in SHAPES}
        for some in (parameters, whole):
            some["frozen"].requires_grad_(False)
        optimizer, reference = make(groups(parameters)), make(groups(whole))
        stranger = torch.nn.Parameter(torch.ones(2))
        optimizer.state[stranger]["key"] = kept = torch.ones(2)
        table, lists = optimizer.state, [id(g["params"]) for g in optimizer.param_groups]
        found, seed = [], 1
        for name, side_of in [("begin", whole_side), *journey.items()]:
            if name != "begin":
                new_owners = sides_of(side_of) if side_of is owned_side else None
                new = sides_of(whole_side if new_owners else side_of)
                parameters = move(optimizer, parameters, sides, new, owners, new_owners)
                sides, owners = new, new_owners
            found += [f"{name}, moved: {one}" for one in
                      off(optimizer, parameters, sides, owners, reference, whole)]
            for _ in range(1 if seed > 2 else 2):
                step(optimizer, parameters, sides, owners, seed)
                for key, p in whole.items():
                    p.grad = None if key in ("unused", "frozen") else value(key, seed)
                reference.step()
                seed += 1
            found += [f"{name}, stepped: {one}" for one in
                      off(optimizer, parameters, sides, owners, reference, whole)]
        assert optimizer.state is table and table[stranger]["key"] is kept
        assert lists == [id(g["params"]) for g in optimizer.param_groups]
        return found[:6]

    travels = {}
    for name, make in SETTINGS.items():
        try:
            travels[name] = travel(make, JOURNEY if name == "AdamW" else SHORT)
        except Exception:
            travels[name] = traceback.format_exc()[-1500:]
            break

    def stepped(make, count=1, gradient=lambda: torch.ones(4, 6)):
        p = torch.nn.Parameter(torch.ones(4, 6))
        optimizer = make([p])
        for _ in range(count):
            p.grad = gradient()
            optimizer.step()
        return optimizer, {"w": p}

    def agreed_of(optimizer, parameters):
        return states.merge_across_ranks([states.read(optimizer, parameters)])[0]

    whole, rows = whole_side((4, 6), 0), fsdp_side((4, 6), 0)
    adam = lambda p: O.AdamW(p)
    refused = {
        "step": refusal(lambda: agreed_of(*stepped(adam, 1 + (rank == 2)))),
        "class": refusal(lambda: agreed_of(*stepped(adam if rank else O.SGD))),
    }
    some = stepped(adam, int(rank < 2))
    agreed = agreed_of(*some)
    refused["nowhere"] = refusal(lambda: states.plan(agreed, {"w": rows}, {"w": whole}))
    # Where each rank has all, those that have the state give it to the others.
    given = len(states.plan(agreed, {"w": whole}, {"w": rows}))

    def closure(optimizer, p):
        optimizer.zero_grad()
        loss = (p - 2).pow(2).sum()
        loss.backward()
        return loss
    odd = {}
    p = torch.nn.Parameter(torch.ones(4, 6))
    lbfgs = O.LBFGS([p])
    lbfgs.step(lambda: closure(lbfgs, p))
    for optimizer, parameters in (stepped(O.Adafactor), (lbfgs, {"w": p})):
        agreed = agreed_of(optimizer, parameters)
        before = {key: id(one) for key, one in optimizer.state[parameters["w"]].items()}
        told = refusal(lambda: states.plan(agreed, {"w": whole}, {"w": rows}), OptionError)
        moves = states.plan(agreed, {"w": whole}, {"w": whole})
        local = states.read(optimizer, parameters)
        fresh = {"w": torch.nn.Parameter(torch.ones(4, 6))}
        states.write(optimizer, agreed, redistribute(moves, local.tensors, cpu), parameters, fresh,
                     {"w": whole})
        after = {key: id(one) for key, one in optimizer.state[fresh["w"]].items()}
        kept = [k for k, one in optimizer.state[fresh["w"]].items()
                if isinstance(one, list) or getattr(one, "ndim", 0)]
        odd[agreed.optimizer] = [told, list(after) == list(before),
                                 all(after[key] == before[key] for key in kept)]

    # SGD's momentum begins as the gradient, which tp may have left as partial sums.
    p = torch.nn.Parameter(DTensor.from_local(torch.ones(3), flat, [Replicate()]))
    sgd = O.SGD([p], lr=0.1, momentum=0.9)
    p.grad = DTensor.from_local(torch.full((3,), float(rank)), flat, [Partial()])
    sgd.step()
    partial = [t.tolist() for t in states.read(sgd, {"p": p}).tensors.values()]
    done(travels=travels, refused=refused, given=given, odd=odd, partial=partial)
"""
)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Four ranks' results of all cases."""
    return run_ranks(tmp_path_factory.mktemp("states") / "run", 4, TRAVELS)


def test_state_travels_with_its_parameters(ranks: list[dict[str, Any]]) -> None:
    """Ten optimizers, up to ten layouts, steps between: as the same steps in one process, 1e-6."""
    for result in ranks:
        assert len(result["travels"]) == 10
        for name, wrong in result["travels"].items():
            assert wrong == [], name


def test_ranks_that_differ_are_refused_on_all(ranks: list[dict[str, Any]]) -> None:
    """Other steps, other optimizers, or a part that nobody has: the same sentence everywhere."""
    messages = ranks[0]["refused"]

    assert [result["refused"] for result in ranks] == [messages] * 4
    assert "AdamW's 'step' of w differs: 1.0 of torch.float32 on rank 0, 2.0" in messages["step"]
    assert "rank 0 has SGD of 1 parameters, rank 1 has AdamW" in messages["class"]
    assert "AdamW has 'exp_avg' of w only on rank 0-1" in messages["nowhere"]
    assert [result["given"] for result in ranks] == [2] * 4


@pytest.mark.parametrize(("name", "key"), [("Adafactor", "row_var"), ("LBFGS", "al")])
def test_state_of_its_own_form_stays_or_is_refused(
    ranks: list[dict[str, Any]], name: str, key: str
) -> None:
    """Named by optimizer, key and parameter where the layout changes; the same objects else."""
    for result in ranks:
        message, has_same_keys, has_same_objects = result["odd"][name]
        assert message.startswith(f"{name} keeps {key!r} of w in its own form")
        assert "optimizer.state.clear()" in message
        assert has_same_keys
        assert has_same_objects


def test_momentum_of_partial_sums_is_summed(ranks: list[dict[str, Any]]) -> None:
    """It is read as its parameter lies: 0 + 1 + 2 + 3 on every rank."""
    assert [result["partial"] for result in ranks] == [[[6.0, 6.0, 6.0]]] * 4


@pytest.mark.parametrize("option", ["fused", "capturable", ""])
def test_the_step_lies_where_the_group_wants_it(option: str) -> None:
    """On the parameter's device for fused and capturable groups, whatever it was; else the CPU."""
    before, after = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2).to("meta"))
    optimizer = torch.optim.AdamW([before])
    before.grad = torch.ones(2)
    optimizer.step()
    if option:
        optimizer.param_groups[0][option] = True
    (agreed,) = optimizer_state.merge_across_ranks([optimizer_state.read(optimizer, {"w": before})])
    side = {"w": Placement(TensorLayout((2,)), Degrees())}
    moments = {
        move.name: torch.ones(2, device="meta") for move in optimizer_state.plan(agreed, side, side)
    }
    optimizer_state.write(optimizer, agreed, moments, {"w": before}, {"w": after}, side)

    assert list(optimizer.state) == [after]
    step = optimizer.state[after]["step"]
    assert (step.device.type, step.dtype) == ("meta" if option else "cpu", torch.float32)
    assert optimizer.state[after]["exp_avg"] is moments["0:w [exp_avg]"]
