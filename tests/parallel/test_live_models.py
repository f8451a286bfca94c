"""Models are found by name, compared by bits, and made equal from one rank."""

import gc
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from nbdist.core.rank import this_rank
from nbdist.errors import NbdistError
from nbdist.hang.rank import process_groups, reset_models
from nbdist.parallel.live import live_models, training_step
from nbdist.parallel.reshard import sync_model
from nbdist.rpc.rank import namespace
from tests.programs.rank import everyone, is_new, rank, refusal, say, total, user, wait_for
from tests.support.torch_ranks import TorchRanks, on_ranks, run_ranks

calls = []


def hook(group, bucket):
    calls.append(1)
    return allreduce_hook(group, bucket)


def net():
    return torch.nn.Sequential(
        torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 3)
    )


def step(m, o, s=None):
    loss = m(torch.ones(4, 6) * (rank + 1) + torch.arange(4.0)[:, None]).pow(2).mean()
    o.zero_grad()
    loss.backward()
    o.step()
    if s:
        s.step()
    return loss.item()


def state(o):
    return [
        {k: v.tolist() if torch.is_tensor(v) else v for k, v in o.state[p].items()}
        for g in o.param_groups
        for p in g["params"]
    ]


@pytest.mark.parametrize("source", [0, 1])
@on_ranks(2)
def test_values_optimizer_and_scheduler_of_one_rank_are_everyones(source: int) -> None:
    """Bits are equal afterwards, the source's are untouched, and training goes on in step."""
    torch.manual_seed(3)
    model = DistributedDataParallel(net(), bucket_cap_mb=7, find_unused_parameters=True)
    model.register_comm_hook(dist.group.WORLD, hook)
    first = {"params": model.module[0].parameters(), "lr": 0.02}
    opt = torch.optim.AdamW([first, {"params": model.module[1:].parameters()}], 0.01)
    plan = torch.optim.lr_scheduler.StepLR(opt, 2, 0.5)
    user.model, user.opt, user.plan = model, opt, plan
    for _ in range(3):
        step(model, opt, plan)
    ids = [id(p) for p in model.parameters()]
    if rank == 1:
        goes_on_by_hand(model, opt, plan)
    apart, moments = everyone(reset_models.checksums()["model"]), everyone(state(opt))
    assert apart[0] != apart[1]
    assert list(sync_model.sync_model(source)) == ["model"]
    assert reset_models.checksums()["model"] == apart[source]
    assert state(opt) == moments[source]
    assert [g["lr"] for g in opt.param_groups] == [9.0 if source else 0.01, 0.005]
    assert ids == [id(p) for p in model.parameters()]
    for _ in range(2):
        step(model, opt, plan)
    assert plan.last_epoch == (40 if source else 3) + 2
    assert len({*everyone(reset_models.checksums()["model"].split("/")[0])}) == 1


def goes_on_by_hand(model, opt, plan):
    """This rank alone, without its peers."""
    for p in model.parameters():
        p.data.add_(0.5)
    for slot in opt.state.values():
        slot["exp_avg"].mul_(2)
        slot["step"].add_(1)
    opt.param_groups[0]["lr"] = 9.0
    plan.last_epoch = 40
    model.module[1].running_mean.add_(1)


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("none", "rank 0 has no DDP model to send"),
        ("sharded", "model is sharded (FSDP)"),
        ("name", "rank 1: no DDP model named model"),
        ("shape", "rank 1: model: module.0.weight is missing, not torch.float32 [5, 6]"),
        ("optimizer", "rank 1: model: optimizer opt is missing, not SGD of 6 parameters"),
    ],
)
@on_ranks(2)
def test_what_does_not_fit_is_named_on_every_rank(kind: str, says: str) -> None:
    """The same error everywhere, nothing changed, and the group still works."""
    if kind == "sharded":
        user.model = fully_shard(net())
    elif kind != "none":
        live_models.catching_up(True)
        name = "other" if rank == 1 and kind == "name" else "model"
        odd = rank == 1 and kind == "shape"
        vars(user)[name] = DistributedDataParallel(torch.nn.Linear(6, 3) if odd else net())
        if rank == 0 or kind != "optimizer":
            user.opt = torch.optim.SGD(vars(user)[name].parameters(), 0.1)
    before = reset_models.checksums()
    assert says in refusal(lambda: sync_model.sync_model(0))
    assert before == reset_models.checksums()
    assert total() == 3.0


def test_a_leftover_that_no_variable_holds_is_left_out() -> None:
    """A failed cell's error holds its model on one rank alone; named models still have to fit."""
    sketch = sync_model._Sketch({"w": "torch.float32 [2]"}, (0, 1))
    ours = sync_model._Offer(
        {"model": sketch, "Linear": sketch}, (), frozenset({"Linear"}), is_new=False
    )
    theirs = sync_model._Offer({"model": sketch}, (), frozenset(), is_new=True)
    lacking = sync_model._Offer({"Linear": sketch}, (), frozenset({"Linear"}), is_new=True)

    assert list(sync_model._refuse([ours, theirs], 0)) == ["Linear"]
    with pytest.raises(NbdistError, match="rank 1: no DDP model named model"):
        sync_model._refuse([ours, lacking], 0)
    with pytest.raises(NbdistError, match="rank 0: no DDP model named Linear"):
        sync_model._refuse([theirs, lacking], 1)


@on_ranks(1)
def test_a_model_that_a_cell_has_replaced_is_not_found() -> None:
    """What nobody holds any more is not compared with what another rank's Python still has."""
    gc.disable()  # Python lets go when it likes, on each rank at another time
    first = DistributedDataParallel(net())
    first.register_forward_pre_hook(lambda *_, in_circle=first: None)  # in a circle
    user.model = DistributedDataParallel(net())
    del first
    assert [model.name for model in live_models.find()] == ["model"]


def replaced(dies: bool, static: bool) -> dict[str, Any]:
    """Trains; where rank 1 dies, with one in its place that has built its model by itself."""
    torch.manual_seed(7 + is_new)
    live_models.catching_up(is_new)
    user.model = model = DistributedDataParallel(net(), static_graph=static)
    model.register_comm_hook(dist.group.WORLD, hook)
    user.opt = opt = torch.optim.AdamW(model.parameters(), 1e-2)
    for _ in range(0 if is_new else 3):
        step(model, opt)
    if dies and not is_new:
        say("made", pickle.dumps((this_rank().topology, process_groups.created_groups())))
        wait_for("dead", [1])
        process_groups.recover(1)
        assert user.model is model
    if dies:
        sync_model.sync_model(0)
    calls.clear()
    late = [step(model, opt) for _ in range(4)]
    assert len(calls) >= 4 or not dies
    return {"late": late, "sum": reset_models.checksums()["model"].split("/")[0]}


@pytest.mark.parametrize("static", [False, True])
def test_a_replaced_rank_trains_on_as_if_none_had_died(tmp_path: Path, static: bool) -> None:
    """Its model is built alone, takes the others' values, and losses equal a run without death."""
    given = {"dies": False, "static": static}
    calm = run_ranks(tmp_path / "calm", 2, replaced, arguments=given)
    given["dies"] = True
    with TorchRanks(tmp_path / "died", 2, replaced, arguments=given) as ranks:
        plan, groups = pickle.loads(ranks.wait_for("made", 0))
        ranks.wait_for("made", 1)
        ranks.kill(1)
        ranks.replace(1, 1, plan, groups)
        died = ranks.results()

    assert [result["late"] for result in died] == [result["late"] for result in calm]
    assert len({result["sum"] for result in (*died, *calm)}) == 1


@on_ranks(2)
def test_gradients_are_cleared_and_counted() -> None:
    """Six parameters of one model, by the name that the user gave it; the next step works."""
    torch.manual_seed(0)
    user.model = model = DistributedDataParallel(net())
    user.opt = torch.optim.SGD(model.parameters(), 0.1)
    step(model, user.opt)
    model(torch.ones(4, 6))  # a forward without a backward
    back = process_groups.recover(1)
    assert back.gradients == {"model": 6}
    assert all(p.grad is None for p in model.parameters())
    step(model, user.opt)


class _Raises:
    """Whatever is asked of one raises, and so does its text."""

    def __getattribute__(self, name: str) -> object:
        raise ValueError(f"not yet: {name}")

    def __repr__(self) -> str:
        raise ValueError("no text")


class _LazyDict(dict[object, object]):
    def items(self) -> NoReturn:  # type: ignore[override]
        raise ValueError("not yet")

    values = __iter__ = __getitem__ = items  # type: ignore[assignment]


class _LazyList(list[object]):
    def __iter__(self) -> NoReturn:
        raise ValueError("not yet")

    __getitem__ = __iter__  # type: ignore[assignment]


class _HalfMade(torch.nn.Module):
    def __init__(self) -> None:
        """Torch's own constructor is not called."""

    def __getattr__(self, name: str) -> NoReturn:
        raise ValueError(f"not yet: {name}")


def test_odd_objects_in_variables_run_no_code_of_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is beside and inside them is named all the same."""
    kept, listed, model = torch.ones(1), torch.ones(2), torch.nn.Linear(1, 1)
    held = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    user = {
        "odd": _Raises(), "lazy": _LazyDict(a=kept), "few": _LazyList([1, listed]),
        "half": _HalfMade(), "keys": {_Raises(): held, 7: _Raises()}, "model": model,
        "optimizer": optimizer,
    }  # fmt: skip
    monkeypatch.setattr(namespace, "everything", lambda: user)

    titles = live_models.variables()
    assert [titles[id(obj)] for obj in (kept, listed, held)] == [
        "lazy['a']", "few[1]", "keys[_Raises]",
    ]  # fmt: skip
    assert list(live_models.user_modules()) == ["half", "model"]
    assert live_models.names([user["half"]]) == {id(user["half"]): "half"}
    assert training_step.optimizer_of(model, None) is optimizer
    assert list(namespace.values_of(torch.optim.Optimizer)) == ["optimizer"]


class TestNames:
    """What a model or optimizer is called."""

    @pytest.fixture(autouse=True)
    def _collected(self) -> Iterator[None]:
        yield
        gc.collect()

    def test_by_variable_item_attribute_or_class(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A variable that holds it wins over one that holds it inside."""

        class Trainer:
            def __init__(self, net: torch.nn.Module) -> None:
                self.net = net

        Trainer.__module__ = "__main__"
        a, b, c, d, e, f = (torch.nn.Linear(1, 1) for _ in range(6))
        space = {"held": [a], "a": a, "many": [b], "named": {"x": c}, "t": Trainer(d)}
        space["outer"] = torch.nn.Sequential(e)
        monkeypatch.setattr(live_models, "_namespace", lambda: space)

        names = live_models.names([a, b, c, d, e, f, torch.nn.Linear(1, 1)])

        expected = ["a", "many[0]", "named['x']", "t.net", "outer", "Linear", "Linear_2"]
        assert list(names.values()) == expected

    def test_checksums_see_one_bit_and_the_shape(self) -> None:
        """Also -0.0 for 0.0, and in types that NumPy does not know."""
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            tensor = torch.zeros(5, dtype=dtype)
            sums = {
                reset_models._digest([("w", tensor)]),
                reset_models._digest([("w", tensor.view(5, 1))]),
            }
            tensor[4] = 1
            sums.add(reset_models._digest([("w", tensor)]))
            assert len(sums) == 3
        assert reset_models._digest([("w", torch.tensor([0.0]))]) != reset_models._digest(
            [("w", torch.tensor([-0.0]))]
        )

    def test_a_tensor_in_pieces_has_the_same_sum(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """What is hashed does not depend on how it is cut; empty and 0-dimensional ones too."""
        tensors = [("a", torch.arange(100.0)), ("b", torch.tensor(3.0)), ("c", torch.empty(0))]
        whole = reset_models._digest(tensors)
        monkeypatch.setattr(reset_models, "_PIECE_BYTES", 48)

        assert reset_models._digest(tensors) == whole

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
    def test_a_sum_is_of_the_values_and_their_order(self, dtype: torch.dtype) -> None:
        """Not of where they lie; two words that have changed places are seen."""
        values = torch.arange(101).remainder(2).to(dtype)
        other = values.clone()
        other[8:24] = values[8:24].flip(0)

        assert reset_models.checksum(values[1:]) == reset_models.checksum(values[1:].clone())
        assert reset_models.checksum(values) != reset_models.checksum(other)

    def test_models_of_classes_made_from_ddp_are_found(self) -> None:
        """Of any depth, and nothing else."""

        class Child(dict[str, int]):
            pass

        class Grandchild(Child):
            pass

        models = [Child(), Grandchild()]

        assert {id(model) for model in live_models.live(Child)} == {id(model) for model in models}
