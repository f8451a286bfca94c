"""Models are compared where ranks hold the same, under each strategy, and NaN is found."""

from pathlib import Path

import pytest

from tests.support.torch_ranks import TorchRanks
from tests.switch.test_rank import PRODUCTS, TRAINING

LOOKS = """
    from nbdist.lints.replicas import compare
    from nbdist.lints.rank import replicas, check_every as checkup_every, watch as lints
    def check():
        everyone = [None] * n
        dist.all_gather_object(everyone, replicas.look())
        result = compare(dict(enumerate(everyone)))
        sizes = dict(zip(result.to_measure, replicas.spread(result.to_measure)))
        return result.measured(sizes)
    def summary(result):
        model = result.models[0]
        return [result.is_healthy, dict(model.compared), dict(model.tensors)]
    def local(name):
        value = registry.prepared_of(model).parameters[name]
        return value.to_local() if hasattr(value, "to_local") else value
    def step():  # with gradients left in place
        degrees = registry.current().degrees
        place = degrees.coordinate(rank)
        shard = place.dp_replicate * degrees.dp_shard + place.dp_shard
        model(tokens(0).chunk(degrees.dp)[shard]).backward()
    def odd(result):
        return [[d.kind, d.name, d.groups, d.largest] for d in result.differences]
"""

EACH = """
    begin("ddp")
    result = {}
    for name, (row, options) in STRATEGIES.items():
        switch.switch(pick(row, **options))
        train(1)
        step()
        clean = summary(check())
        # A norm's weight is on every rank but those of other stages, and fsdp's other parts.
        holds = not registry.prepared_of(model).parameters["blocks.0.norm.weight"].is_meta
        first = rank == int(os.environ["ODD"])
        if holds and first:
            with torch.no_grad():
                local("blocks.0.norm.weight")[0] += 0.5
        apart = odd(check())
        if holds and first:
            with torch.no_grad():
                local("blocks.0.norm.weight")[0] -= 0.5
                local("blocks.0.norm.weight")[1] = float("nan")
        bad = [[bad.kind, bad.first, bad.ranks] for bad in check().not_finite]
        result[name] = [clean, apart, bad]
        if holds and first:
            with torch.no_grad():
                local("blocks.0.norm.weight")[1] = 1.0
        switch.switch(pick("ddp"))
        sync.sync_model(0)
        optimizer.zero_grad()
    done(result=result)
"""
TWO = """
    STRATEGIES = {"zero1": ("zero1", {}), "fsdp": ("fsdp", {}), "tp": ("tp", {})}
"""
NAME = "blocks.0.norm.weight"


def test_what_ranks_hold_alike_is_compared_under_each_strategy(tmp_path: Path) -> None:
    """All of it under zero1, norms under tp, nothing under fsdp; NaN is found anywhere."""
    with TorchRanks(tmp_path, 2, TRAINING + LOOKS + TWO + EACH, ODD="0") as ranks:
        result = ranks.results()[0]["result"]
    compared = {name: clean[1]["parameter"] for name, (clean, _, _) in result.items()}
    apart = {name: bool(odd) for name, (_, odd, _) in result.items()}

    assert all(clean[0] for clean, _, _ in result.values()), result
    assert compared["zero1"] == result["zero1"][0][2]["parameter"] == 27
    assert 0 < compared["tp"] < 27
    assert compared["fsdp"] == 0
    assert apart == {"zero1": True, "fsdp": False, "tp": True}
    assert result["zero1"][1] == [["parameter", NAME, [[0], [1]], pytest.approx(0.5)]]
    assert all(bad[0][:2] == ["parameter", NAME] for _, _, bad in result.values())
    assert result["fsdp"][2][0][2] == [0]


@pytest.mark.parity
@pytest.mark.parametrize(
    ("name", "groups"),
    [
        ("zero1", [[0, 1, 2], [3]]),
        ("hybrid", [[1], [3]]),  # of two copies, each in two parts; rank 3 has a copy of rank 1's
        ("pp x tp", None),
        ("fsdp x tp", None),
    ],
)
def test_products_on_four_ranks(tmp_path: Path, name: str, groups: list[list[int]] | None) -> None:
    """Of two axes only the one that replicates is compared; the ranks that agree are named."""
    strategies = {name: PRODUCTS[name]}
    text = TRAINING + LOOKS + f"    STRATEGIES = {strategies}\n" + EACH
    with TorchRanks(tmp_path, 4, text, ODD="3") as ranks:
        clean, apart, bad = ranks.results()[0]["result"][name]

    assert clean[0], clean
    if groups:
        assert apart == [["parameter", NAME, groups, pytest.approx(0.5)]]
        assert bad == [["parameter", NAME, [3]]]


OWN = (
    TRAINING
    + LOOKS
    + """
    torch.manual_seed(0)
    ddp = DDP(torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5)))
    shards = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    for layer in shards:
        fully_shard(layer, mesh=mesh)
    fully_shard(shards, mesh=mesh)
    alone = torch.nn.Linear(2, 2)
    ddp(torch.ones(4, 6) * rank + torch.arange(4.0)[:, None]).square().mean().backward()
    clean = check()
    names = [[m.name, m.strategy, dict(m.compared)] for m in clean.models]
    buffers = odd(clean)
    ddp.module[0].weight.grad[0, 0] += rank
    gradient = odd(check())
    done(names=names, healthy=clean.is_healthy, buffers=buffers, gradient=gradient)
"""
)


def test_models_that_nobody_has_prepared(tmp_path: Path) -> None:
    """The user's DDP and FSDP2: the first compared, running means without blame."""
    with TorchRanks(tmp_path, 2, OWN) as ranks:
        result = ranks.results()[0]
    names = {name: (under, compared) for name, under, compared in result["names"]}

    assert names["ddp"] == ("DDP", {"parameter": 4, "buffer": 3, "gradient": 4})
    assert names["shards"] == ("FSDP2", {"parameter": 0, "buffer": 0, "gradient": 0})
    assert result["healthy"]
    assert [row[1] for row in result["buffers"]] == ["1.running_mean", "1.running_var"]
    assert result["gradient"][-1] == ["gradient", "0.weight", [[0], [1]], pytest.approx(1.0)]


ADDED = (
    TRAINING
    + LOOKS
    + """
    begin("ddp")
    result = {}
    block = base.blocks[0]
    for name in ("ddp", "zero1", "fsdp", "tp"):
        switch.switch(pick(name))
        block.adapter, norm = torch.nn.Linear(2, 2), block.norm
        with torch.no_grad():
            for parameter in block.adapter.parameters():
                parameter.fill_(0.5)
        clean = check()
        block.adapter.weight.data += rank
        result[name] = [clean.is_healthy, clean.models[0].notes, odd(check())]
        del block.adapter
        if name in ("ddp", "tp"):
            block.norm = torch.nn.LayerNorm(norm.weight.shape)
            block.norm.bias.data += rank
            result[name + " replaced"] = odd(check())
            block.norm = norm
    done(result=result)
"""
)


def test_what_was_added_after_prepare_is_compared(tmp_path: Path) -> None:
    """An adapter, or a layer in another's place: what differs is listed, and why it will."""
    with TorchRanks(tmp_path, 2, ADDED) as ranks:
        result = ranks.results()[0]["result"]

    for name in ("ddp", "zero1", "fsdp", "tp"):
        is_healthy, notes, differences = result[name]
        assert is_healthy, name
        assert "added after prepare (2, such as blocks.0.adapter.weight)" in notes[0]
        assert differences == [["parameter", "blocks.0.adapter.weight", [[0], [1]], 1.0]], name
    for name in ("ddp", "tp"):
        assert result[f"{name} replaced"] == [
            ["parameter", "blocks.0.norm.bias", [[0], [1]], 1.0]
        ]  # fmt: skip


EVERY = (
    TRAINING
    + LOOKS
    + """
    from nbdist.lints.rules import evaluate
    lints.install()
    begin("ddp")
    def cell(steps, before=lambda number: None):
        lints.begin()
        for number in range(steps):
            before(number)
            train(1)
        observations = [None] * n
        dist.all_gather_object(observations, lints.collect())
        return [[d.lint, d.hit.found] for d in evaluate(dict(enumerate(observations)), is_ok=True)]
    cell(1)  # without looks
    checkup_every.set_every(2)
    result = {"clean": cell(6)}
    def nudge(number):
        if number == 3:
            with torch.no_grad():
                local("head.weight" if "head.weight" in registry.prepared_of(model).parameters
                      else "embed.weight")[3, 3] += rank * 0.1
    result["apart"] = cell(6, nudge)
    result["after"] = cell(2)
    sync.sync_model(0)
    switch.switch(pick("tp"))
    result["tp"] = cell(4)
    def odd_norm(number):
        if number == 1:
            with torch.no_grad():
                local("norm.weight")[0] += rank * 0.1
    result["tp apart"] = cell(4, odd_norm)
    switch.switch(pick("fsdp"))
    result["fsdp"] = cell(4)
    checkup_every.set_every(0)
    result["off"] = cell(2)
    lints.uninstall()
    result["gone"] = [torch.Tensor.backward.__module__, torch.amp.GradScaler.scale.__module__]
    done(**result)
"""
)


def test_every_so_many_steps(tmp_path: Path) -> None:
    """The first look that differs is named, under ddp and tp; nothing where all is well."""
    with TorchRanks(tmp_path, 2, EVERY) as ranks:
        result = ranks.results()[0]

    assert result["clean"] == []
    ((lint, sentence),) = result["apart"]
    assert lint == "apart-since"
    assert sentence == (
        "before step 10 of its optimizer, the parameters of model differed between rank 0 and "
        "rank 1 (checked every 2 steps)"
    )
    assert [row[0] for row in result["after"]] == ["apart-since"]
    assert (result["tp"], result["fsdp"], result["off"]) == ([], [], [])
    assert [row[0] for row in result["tp apart"]] == ["apart-since"]
    assert result["gone"] == ["torch._tensor", "torch.amp.grad_scaler"]
