"""DDP's options give the gradients of a single process, exactly or as closely as they can."""

import copy
import itertools
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import nn

from nbdist.parallel.accelerator import prepare as live
from nbdist.parallel.base.mesh import build_mesh
from nbdist.parallel.live import registry
from nbdist.switch.rank import switch
from tests.programs.rank import n, rank
from tests.programs.switching import pick
from tests.support.torch_ranks import on_ranks


def net() -> nn.Module:
    torch.manual_seed(3)
    layers = nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8)
    return nn.Sequential(*layers)


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.chunk(n)[rank]


def curve(model: nn.Module, part: Any) -> torch.Tensor:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    values = []
    for step in range(6):
        inputs = part(torch.randn(16, 8, generator=torch.Generator().manual_seed(step)))
        value = (model(inputs) - inputs.flip(-1)).square().mean()
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        values.append(value.detach())
    return torch.stack(values)


def apart(alone: torch.Tensor, **options: Any) -> tuple[float, int]:
    """How far losses are from those of one process; how many buckets there are."""
    registry.set_choice(pick("ddp", **options))
    model = live.prepare_model(net())
    values = curve(model, own_part)
    dist.all_reduce(values)
    logged = model._get_ddp_logging_data()
    sizes = logged.get("rebuilt_bucket_sizes") or logged["bucket_sizes"]
    return (values / n - alone).abs().max().item(), len(str(sizes).split(","))


@on_ranks(2, 4)
def test_options_of_ddp() -> None:
    """Buckets, static graph and unused parameters change nothing; compression changes little."""
    alone = curve(net(), lambda inputs: inputs)
    plain, bucket = apart(alone), apart(alone, bucket=0.005)
    assert bucket[1] > plain[1]
    for off, _ in (plain, bucket, apart(alone, static_graph=True), apart(alone, find_unused=True)):
        assert off < 2e-6
    assert 0 < apart(alone, hook="fp16")[0] < 1e-4
    assert 0 < apart(alone, hook="bf16")[0] < 1e-3
    off, n_buckets = apart(alone, hook="powersgd")
    assert 0 < off < 2e-2  # steps 0 and 1 are exact; then gradients of rank 4
    assert n_buckets == 1  # more than one ends the process with Gloo
    # A model that trains nothing is not wrapped: DDP would refuse it.
    frozen = nn.Linear(2, 2).requires_grad_(requires_grad=False)
    assert live.prepare_model(frozen) is frozen


@on_ranks(2)
def test_a_mesh_of_all_ranks_makes_no_group() -> None:
    """Torch's own would where Gloo and a GPU are there; a replaced rank waited in it for ever."""
    # With Gloo: the ranks share a GPU.
    with mock.patch.object(torch.cuda, "is_available", return_value=True):
        before = c10d._world.group_count
        ddp, fsdp, tp = (build_mesh(pick(name), "cpu") for name in ("ddp", "fsdp", "tp"))
        assert c10d._world.group_count == before
    groups = ddp.group("dp_replicate"), fsdp.device_mesh.get_group(), tp.submesh("tp").get_group()
    assert all(group is dist.group.WORLD for group in groups)
    assert tp.device_mesh.mesh.tolist() == [0, 1]


def conv() -> nn.Module:
    torch.manual_seed(3 + rank)  # rank 0's values are to win
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.Tanh(), nn.Conv2d(8, 4, 3),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 6),
    )  # fmt: skip
    model[5].weight = nn.Parameter(torch.randn(16, 6).t())
    return model


def strides(model: nn.Module) -> list[tuple[int, ...]]:
    return [p.stride() for p in model.parameters()]


def train(model: nn.Module, optimizer: Any, steps: range, share: Any = lambda t: t) -> None:
    for step in steps:
        drawn = torch.Generator().manual_seed(step)
        x = torch.randn(8, 3, 9, 9, generator=drawn)
        y = torch.randint(6, (8,), generator=drawn)
        nn.functional.cross_entropy(model(share(x)), share(y)).backward()
        optimizer.step()
        optimizer.zero_grad()


@on_ranks(2)
def test_channels_last_and_transposed_parameters() -> None:
    """Each rank keeps the order in memory that the user chose, before prepare or after it.

    DDP adds buckets up as they lie: with another order on another rank gradients are wrong.
    """
    for moment, name in itertools.product(("before", "after", "never"), ("ddp", "zero1")):
        keeps_its_order(moment, name)


def keeps_its_order(when: str, name: str) -> None:
    model = conv()
    if when == "before":
        model = model.to(memory_format=torch.channels_last)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    switch.switch(pick(name))
    model = live.prepare_model(model)
    live.bind(optimizer)
    if when == "after":
        model = model.to(memory_format=torch.channels_last)
    base = registry.prepared_of(model).base
    alone = copy.deepcopy(base)
    single = torch.optim.Adam(alone.parameters(), lr=1e-2)
    train(alone, single, range(4))
    train(model, optimizer, range(2), own_part)
    for other in ("fsdp", name):
        switch.switch(pick(other))
    model = registry.prepared_of(base).outer
    train(model, optimizer, range(2, 4), own_part)
    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    assert max((p - q).abs().max().item() for p, q in pairs) < 1e-5, (when, name)
    assert all(state["exp_avg"].stride() == p.stride() for p, state in optimizer.state.items())
    # Switches bring back what prepare saw.
    assert (strides(model) == strides(alone)) == (when != "after"), (when, name)
    assert strides(alone)[0] == ((27, 9, 3, 1) if when == "never" else (27, 1, 9, 3))
