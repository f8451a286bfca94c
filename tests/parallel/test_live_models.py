"""Models are found by name, compared by bits, and made equal from one rank."""

import gc
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest
import torch

from nbdist.errors import NbdistError
from nbdist.hang.rank import reset_models
from nbdist.parallel import live_models
from nbdist.parallel.reshard import sync_model
from nbdist.planner.rank import describe_model
from nbdist.rpc.rank import namespace
from tests.support.torch_ranks import TorchRanks, run_ranks

COMMON = """
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
    calls = []
    def hook(group, bucket):
        calls.append(1)
        return allreduce_hook(group, bucket)
    def net():
        return torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5),
                                   torch.nn.Linear(5, 3))
    def step(m, o, s=None):
        loss = m(torch.ones(4, 6) * (rank + 1) + torch.arange(4.0)[:, None]).pow(2).mean()
        o.zero_grad()
        loss.backward()
        o.step()
        if s:
            s.step()
        return loss.item()
    def state(o):
        return [{k: v.tolist() if torch.is_tensor(v) else v for k, v in o.state[p].items()}
                for g in o.param_groups for p in g["params"]]
"""

SYNC = (
    COMMON
    + """
    torch.manual_seed(3)
    model = DDP(net(), bucket_cap_mb=7, find_unused_parameters=True)
    model.register_comm_hook(dist.group.WORLD, hook)
    opt = torch.optim.AdamW([{"params": model.module[0].parameters(), "lr": 0.02},
                             {"params": model.module[1:].parameters()}], 0.01)
    plan = torch.optim.lr_scheduler.StepLR(opt, 2, 0.5)
    holder = [model, opt]
    for _ in range(3):
        step(model, opt, plan)
    ids = [id(p) for p in model.parameters()]
    # Rank 1 alone goes on: by hand, without its peers.
    if rank == 1:
        for p in model.parameters():
            p.data.add_(0.5)
        for slot in opt.state.values():
            slot["exp_avg"].mul_(2)
            slot["step"].add_(1)
        opt.param_groups[0]["lr"] = 9.0
        plan.last_epoch = 40
        model.module[1].running_mean.add_(1)
    apart, moments = reset_models.checksums()["model"], state(opt)
    names = sync.sync_model(int(os.environ["SOURCE"]))
    equal, after = reset_models.checksums()["model"], state(opt)
    rate = [g["lr"] for g in opt.param_groups]
    same = ids == [id(p) for p in model.parameters()]
    losses = [step(model, opt, plan) for _ in range(2)]
    ended = reset_models.checksums()["model"].split("/")[0]
    done(apart=apart, equal=equal, own=moments, after=after, names=names, rate=rate, same=same,
         epoch=plan.last_epoch, losses=losses, ended=ended)
"""
)


@pytest.mark.parametrize("source", [0, 1])
def test_values_optimizer_and_scheduler_of_one_rank_are_everyones(
    tmp_path: Path, source: int
) -> None:
    """Bits are equal afterwards, the source's are untouched, and training goes on in step."""
    results = run_ranks(tmp_path, 2, SYNC, SOURCE=str(source))

    theirs = results[source]
    assert results[0]["apart"] != results[1]["apart"]
    assert [result["equal"] for result in results] == [theirs["apart"]] * 2
    assert [result["after"] for result in results] == [theirs["own"]] * 2
    assert [result["rate"] for result in results] == [[9.0 if source else 0.01, 0.005]] * 2
    assert [result["epoch"] for result in results] == [(40 if source else 3) + 2] * 2
    assert [result["names"] for result in results] == [["model"]] * 2
    assert all(result["same"] for result in results)
    assert results[0]["ended"] == results[1]["ended"]


REFUSED = (
    COMMON
    + """
    kind = os.environ["KIND"]
    if kind == "none":
        pass
    elif kind == "sharded":
        model = fully_shard(net())
    else:
        live_models.catching_up(True)
        name = "other" if rank == 1 and kind == "name" else "model"
        globals()[name] = DDP(net() if rank == 0 or kind != "shape" else torch.nn.Linear(6, 3))
        if rank == 0 or kind != "optimizer":
            opt = torch.optim.SGD(globals()[name].parameters(), 0.1)
    before, text = reset_models.checksums(), ""
    try:
        sync.sync_model(0)
    except NbdistError as error:
        text = str(error)
    done(text=text, same=before == reset_models.checksums(), total=total())
"""
)


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
def test_what_does_not_fit_is_named_on_every_rank(tmp_path: Path, kind: str, says: str) -> None:
    """The same error everywhere, nothing changed, and the group still works."""
    results = run_ranks(tmp_path, 2, REFUSED, KIND=kind)

    for result in results:
        assert says in result["text"]
        assert result["same"]
        assert result["total"] == 3.0


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
    assert describe_model.optimizer_of(model, None) is optimizer
    assert list(namespace.values_of(torch.optim.Optimizer)) == ["optimizer"]


FORGOTTEN = (
    COMMON
    + """
    import gc
    gc.disable()  # Python lets go when it likes, on each rank at another time
    first = DDP(net())
    first.register_forward_pre_hook(lambda *_, in_circle=first: None)  # in a circle
    model = DDP(net())
    del first
    model_names = [model.name for model in live_models.find()]
    done(found=model_names)
"""
)


def test_a_model_that_a_cell_has_replaced_is_not_found(tmp_path: Path) -> None:
    """What nobody holds any more is not compared with what another rank's Python still has."""
    result = run_ranks(tmp_path, 1, FORGOTTEN)[0]

    assert result["found"] == ["model"]


REPLACED = (
    COMMON
    + """
    import pickle
    def build():
        torch.manual_seed(7 + is_new)
        m = DDP(net(), static_graph=os.environ["STATIC"] == "1")
        m.register_comm_hook(dist.group.WORLD, hook)
        return m, torch.optim.AdamW(m.parameters(), 1e-2)
    if is_new:
        live_models.catching_up(True)
        model, opt = build()
    else:
        model, opt = build()
        keep = model
        early = [step(model, opt) for _ in range(3)]
        if os.environ["DIES"] == "1":
            say("made", pickle.dumps((this_rank().topology, process_groups.created_groups())))
            wait_for("dead", [1])
            back = process_groups.recover(1)
            assert model is keep
    if os.environ["DIES"] == "1":
        sync.sync_model(0)
    calls.clear()
    late = [step(model, opt) for _ in range(4)]
    done(late=late, calls=len(calls), sum=reset_models.checksums()["model"].split("/")[0])
"""
)


@pytest.mark.parametrize("static", ["0", "1"])
def test_a_replaced_rank_trains_on_as_if_none_had_died(tmp_path: Path, static: str) -> None:
    """Its model is built alone, takes the others' values, and losses equal a run without death."""
    folder = tmp_path
    calm = run_ranks(folder / "calm", 2, REPLACED, DIES="0", STATIC=static)
    with TorchRanks(folder / "died", 2, REPLACED, DIES="1", STATIC=static) as ranks:
        plan, groups = pickle.loads(ranks.wait_for("made", 0))
        ranks.wait_for("made", 1)
        ranks.kill(1)
        (folder / "died" / "dead.1").touch()
        ranks.replace(1, 1, plan, groups)
        died = ranks.results()

    assert [result["late"] for result in died] == [result["late"] for result in calm]
    assert all(result["calls"] >= 4 for result in died)
    assert len({result["sum"] for result in (*died, *calm)}) == 1


HALF = (
    COMMON
    + """
    torch.manual_seed(0)
    model = DDP(net())
    opt = torch.optim.SGD(model.parameters(), 0.1)
    step(model, opt)
    model(torch.ones(4, 6))  # a forward without a backward
    back = process_groups.recover(1)
    cleared = [p.grad is None for p in model.parameters()]
    done(gradients=back.gradients, cleared=cleared, loss=step(model, opt))
"""
)


def test_gradients_are_cleared_and_counted(tmp_path: Path) -> None:
    """Six parameters of one model, by the name that the user gave it; the next step works."""
    results = run_ranks(tmp_path, 2, HALF)

    for result in results:
        assert result["gradients"] == {"model": 6}
        assert result["cleared"] == [True] * 6


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
