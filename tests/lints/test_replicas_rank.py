"""Models are compared where ranks hold the same, under each strategy, and NaN is found."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from nbdist.lints.rank import check_every, replicas, watch
from nbdist.lints.replicas import compare
from nbdist.lints.rules import evaluate
from nbdist.parallel.base.tensors import local_of
from nbdist.parallel.live import registry
from nbdist.parallel.reshard import sync_model
from nbdist.switch.rank import switch
from tests.programs.rank import everyone, rank, user
from tests.programs.switching import begin, fresh, own_part, pick, tokens, train
from tests.support.torch_ranks import on_ranks
from tests.switch.test_rank import PRODUCTS

NAME = "blocks.0.norm.weight"


def check() -> Any:
    """What a comparison finds, with how far apart what differs is."""
    result = compare(dict(enumerate(everyone(replicas.look()))))
    spread = replicas.spread(result.to_measure)
    return result.measured(dict(zip(result.to_measure, spread, strict=True)))


def odd(result: Any) -> list[list[Any]]:
    return [[d.kind, d.name, d.groups, d.largest] for d in result.differences]


def differs(name: str, *groups: tuple[int, ...], by: float = 0.5) -> list[Any]:
    return ["parameter", name, groups, pytest.approx(by)]


def local(name: str) -> torch.Tensor:
    """This rank's part of a parameter, to be written to."""
    return local_of(registry.prepared_of(user.model).parameters[name].detach())


def looks(row: str, options: dict[str, Any], odd_rank: int) -> tuple[Any, Any, Any]:
    """At a model that is right, differs on a rank, and has NaN there, with gradients in place."""
    switch.switch(pick(row, **options))
    train(1)
    user.model(own_part(tokens(0))).backward()
    clean = check()
    assert clean.is_healthy, row
    # A norm's weight is on every rank but those of other stages, and fsdp's other parts.
    holds = rank == odd_rank and not registry.prepared_of(user.model).parameters[NAME].is_meta
    if holds:
        local(NAME)[0] += 0.5
    apart = odd(check())
    if holds:
        local(NAME)[0] -= 0.5
        local(NAME)[1] = float("nan")
    bad = [(bad.kind, bad.first, tuple(bad.ranks)) for bad in check().not_finite]
    if holds:
        local(NAME)[1] = 1.0
    switch.switch(pick("ddp"))
    sync_model.sync_model(0)
    user.optimizer.zero_grad()
    return clean.models[0], apart, bad


@on_ranks(2)
def test_what_ranks_hold_alike_is_compared_under_each_strategy() -> None:
    """All of it under zero1, norms under tp, nothing under fsdp; NaN is found anywhere."""
    fresh()
    begin("ddp")
    zero1, fsdp, tp = (looks(name, {}, 0) for name in ("zero1", "fsdp", "tp"))
    for _, _, bad in (zero1, fsdp, tp):
        assert bad[0][:2] == ("parameter", NAME)
    assert zero1[0].compared["parameter"] == zero1[0].tensors["parameter"] == 27
    assert zero1[1] == [differs(NAME, (0,), (1,))]
    assert fsdp[0].compared["parameter"] == 0
    assert fsdp[1] == []
    assert fsdp[2][0][2] == (0,)
    assert 0 < tp[0].compared["parameter"] < 27
    assert tp[1]


@pytest.mark.parity
@pytest.mark.parametrize(
    ("name", "groups"),
    [
        ("zero1", ((0, 1, 2), (3,))),
        ("hybrid", ((1,), (3,))),  # of two copies, each in two parts; rank 3 has a copy of rank 1's
        ("pp x tp", ()),
        ("fsdp x tp", ()),
    ],
)
@on_ranks(4)
def test_products_on_four_ranks(name: str, groups: tuple[tuple[int, ...], ...]) -> None:
    """Of two axes only the one that replicates is compared; the ranks that agree are named."""
    fresh()
    begin("ddp")
    _, apart, bad = looks(*PRODUCTS[name], 3)
    if groups:
        assert apart == [differs(NAME, *groups)]
        assert bad == [("parameter", NAME, (3,))]


@on_ranks(2)
def test_models_that_nobody_has_prepared() -> None:
    """The user's DDP and FSDP2: the first compared, running means without blame."""
    torch.manual_seed(0)
    user.ddp = ddp = DistributedDataParallel(nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5)))
    user.shards = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    for layer in (*user.shards, user.shards):
        fully_shard(layer, mesh=mesh)
    user.alone = nn.Linear(2, 2)
    ddp(torch.ones(4, 6) * rank + torch.arange(4.0)[:, None]).square().mean().backward()
    clean = check()
    assert clean.is_healthy
    names = {m.name: (m.strategy, dict(m.compared)) for m in clean.models}
    assert names["ddp"] == ("DDP", {"parameter": 4, "buffer": 3, "gradient": 4})
    assert names["shards"] == ("FSDP2", {"parameter": 0, "buffer": 0, "gradient": 0})
    assert [row[1] for row in odd(clean)] == ["1.running_mean", "1.running_var"]
    ddp.module[0].weight.grad[0, 0] += rank
    assert odd(check())[-1] == ["gradient", *differs("0.weight", (0,), (1,), by=1.0)[1:]]


@on_ranks(2)
def test_what_was_added_after_prepare_is_compared() -> None:
    """An adapter, or a layer in another's place: what differs is listed, and why it will."""
    fresh()
    begin("ddp")
    block = user.base.blocks[0]
    for name in ("ddp", "zero1", "fsdp", "tp"):
        switch.switch(pick(name))
        block.adapter, norm = nn.Linear(2, 2), block.norm
        for parameter in block.adapter.parameters():
            parameter.data.fill_(0.5)
        clean = check()
        assert clean.is_healthy, name
        text = "added after prepare (2, such as blocks.0.adapter.weight)"
        assert text in clean.models[0].notes[0]
        block.adapter.weight.data += rank
        assert odd(check()) == [differs("blocks.0.adapter.weight", (0,), (1,), by=1.0)], name
        del block.adapter
        if name in ("ddp", "tp"):
            block.norm = nn.LayerNorm(norm.weight.shape)
            block.norm.bias.data += rank
            assert odd(check()) == [differs("blocks.0.norm.bias", (0,), (1,), by=1.0)], name
            block.norm = norm


def cell(steps: int, name: str = "", place: int = 0, at: int = -1) -> list[tuple[str, str]]:
    """What lints say of a cell; before a step a number of a parameter is changed on rank 1."""
    watch.begin()
    for number in range(steps):
        if number == at:
            local(name).view(-1)[place] += rank * 0.1
        train(1)
    observations = dict(enumerate(everyone(watch.collect())))
    return [(d.lint, d.hit.found) for d in evaluate(observations, is_ok=True)]


@on_ranks(2)
def test_every_so_many_steps() -> None:
    """The first look that differs is named, under ddp and tp; nothing where all is well."""
    fresh()
    watch.install()
    begin("ddp")
    cell(1)  # without looks
    check_every.set_every(2)
    assert cell(6) == []
    sentence = (
        "before step 10 of its optimizer, the parameters of model differed between rank 0 and "
        "rank 1 (checked every 2 steps)"
    )
    head = {*registry.prepared_of(user.model).parameters} & {"head.weight", "embed.weight"}
    assert cell(6, min(head), 27, at=3) == [("apart-since", sentence)]
    assert [lint for lint, _ in cell(2)] == ["apart-since"]
    sync_model.sync_model(0)
    switch.switch(pick("tp"))
    assert cell(4) == []
    assert [lint for lint, _ in cell(4, "norm.weight", at=1)] == ["apart-since"]
    switch.switch(pick("fsdp"))
    assert cell(4) == []
    check_every.set_every(0)
    assert cell(2) == []
    watch.uninstall()
    assert torch.Tensor.backward.__module__ == "torch._tensor"
    assert torch.amp.GradScaler.scale.__module__ == "torch.amp.grad_scaler"
