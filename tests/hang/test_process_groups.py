"""Process groups come back after hangs and deaths, as the same objects."""

import pickle
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from nbdist.core.rank import this_rank
from nbdist.errors import NbdistError
from nbdist.hang.rank import debug_checks, device_health, process_groups, reset_models
from nbdist.hang.recovery import merge_groups
from nbdist.parallel.live import live_models
from tests.programs.rank import (
    broken_off_on_0,
    counts,
    everyone,
    is_new,
    n,
    rank,
    refusal,
    say,
    total,
    user,
    wait_for,
)
from tests.support.torch_ranks import TorchRanks, on_ranks, run_ranks

ALL = n * (n + 1) / 2  # the sum over all ranks


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))


def trainings() -> list[tuple[nn.Module, torch.optim.Optimizer]]:
    """DDP and FSDP2, as the user's names."""
    torch.manual_seed(0)
    user.ddp, user.fs = DistributedDataParallel(net()), net()
    mesh = init_device_mesh("cpu", (n,))
    for layers in (user.fs[0], user.fs[2], user.fs):
        fully_shard(layers, mesh=mesh)
    return [(model, torch.optim.AdamW(model.parameters(), 1e-2)) for model in (user.ddp, user.fs)]


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    loss = model(inputs()).pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def inputs() -> torch.Tensor:
    return torch.ones(4, 8) * (rank + 1)


def ways_to_hang(pair: Any) -> dict[str, Callable[[], Any]]:
    return {
        "ddp": lambda: user.ddp(inputs()).sum().backward(),
        "fsdp forward": lambda: user.fs(inputs()),
        "fsdp backward": lambda: user.fs(inputs()).pow(2).mean().backward(),
        "all_reduce": lambda: dist.all_reduce(torch.ones(3)),
        "barrier": dist.barrier,
        "subgroup": lambda: dist.all_reduce(torch.ones(3), group=pair),
        "object": lambda: dist.all_gather_object([None] * n, {"a": 1}),
        "recv": lambda: dist.recv(torch.ones(3), 1),
    }


def assert_right(pair: Any, sheet: DTensor) -> None:
    """Of groups that were made before and after a recovery, of meshes and DTensors."""
    later = dist.new_group([0, 1])
    assert total() == ALL
    assert rank > 1 or total(pair) == total(later) == 3.0
    assert sheet.full_tensor().sum() == 120.0
    assert sheet.redistribute(placements=[Replicate()] * 2).to_local().sum() == 120.0
    assert everyone(rank) == list(range(n))
    dist.barrier()
    dist.monitored_barrier()


def trains(hangs: bool) -> dict[str, Any]:
    """Between steps rank 0 hangs in each way, is broken off, and all go on."""
    pair = dist.new_group([0, 1])
    flat = init_device_mesh("cpu", (2, n // 2), mesh_dim_names=("a", "b"))
    sheet = distribute_tensor(torch.arange(16.0).reshape(4, 4), flat, [Shard(0), Shard(1)])
    both, fds = trainings(), []
    curve = [[step(*training) for training in both] for _ in range(2)]
    for generation, (kind, hang) in enumerate(ways_to_hang(pair).items(), 1):
        if hangs:
            if rank and kind == "fsdp backward":
                user.fs(inputs())
            name, _ = broken_off_on_0(hang, generation)
            assert name == ("" if rank else "RuntimeError"), kind
            began_s = time.monotonic()
            process_groups.recover(generation)
            assert time.monotonic() - began_s < 10
            assert_right(pair, sheet)
            fds.append(counts()[0])
        curve.append([step(*training) for training in both])
    assert [model.name for model in live_models.find()] == ["ddp", "fs"]
    sums = reset_models.checksums()
    assert sums["fs"] == "sharded"
    assert len(set(everyone(sums["ddp"]))) == 1
    # Each round makes one more group, with a connection per peer that the aborted ones give back.
    assert not fds or fds[-1] - fds[0] <= 7 * 2 + 2
    return {"curve": curve}


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.faults)])
def test_eight_ways_to_hang_leave_the_loss_curve_as_it_was(tmp_path: Path, size: int) -> None:
    """After each, groups made before and after it, meshes and DTensors give right numbers."""
    calm, storm = (
        run_ranks(tmp_path / str(hangs), size, trains, arguments={"hangs": hangs})
        for hangs in (False, True)
    )

    assert storm == calm
    assert len(set(map(str, calm[0]["curve"]))) == 10


@pytest.mark.parametrize("times", [8, pytest.param(100, marks=pytest.mark.faults)])
@on_ranks(2)
def test_recoveries_in_a_row_leave_no_descriptor(times: int) -> None:
    """Sums stay right; descriptors do not grow, threads by the workers of each new backend."""
    pair = dist.new_group([0, 1])
    user.ddp = DistributedDataParallel(nn.Linear(4, 4))
    rows = []
    for generation in range(1, times + 1):
        process_groups.recover(generation)
        assert total() == total(pair) == 3.0
        user.ddp(torch.ones(2, 4)).sum().backward()
        rows.append(counts())
    fds, threads = zip(*rows, strict=True)
    assert max(fds) - fds[0] <= 2
    # Two groups; torch keeps a group's old backends, with their two sleeping threads each.
    assert threads[-1] - threads[0] == (times - 1) * 2 * 2


def groups_of_survivors() -> tuple[Any, Any]:
    """The users' groups of ranks 0 and 1 and of 1 and the last, once rank 1 is replaced."""
    # First of all: torch names it by how many groups the members are in.
    local = dist.new_group([1, n - 1], use_local_synchronization=True) if n > 2 else None
    first = dist.new_group([0, 1], timeout=timedelta(seconds=77), group_desc="mine")
    closed = dist.new_group([0, 1])
    dist.new_group([0])
    if rank < 2:
        dist.destroy_process_group(closed)
    assert total() == ALL
    say("made", pickle.dumps((this_rank().topology, process_groups.created_groups())))
    wait_for("dead", [1])
    skipped = process_groups.recover(1, (1,)).skipped
    assert rank or {"0", "1"} <= set(map(str, skipped))
    say("again")
    skipped = process_groups.recover(2).skipped
    assert rank or not {"0", "1"} & set(map(str, skipped))
    return first, local


def replaced() -> None:
    if is_new:
        groups = {str(name): group for group, name in c10d._world.pg_names.items()}
        first = groups.get("1")
        local = next((group for name, group in groups.items() if len(name) > 3), None)
    else:
        first, local = groups_of_survivors()
    later = dist.new_group(list(range(n)))
    assert total() == total(later) == ALL
    assert len(set(everyone(later.group_name))) == 1
    if rank < 2:
        options = first._get_backend(torch.device("cpu")).options
        assert (total(first), first.group_desc) == (3.0, "mine")
        assert options._timeout == timedelta(seconds=77)
    assert n == 2 or rank not in {1, n - 1} or total(local) == 2.0 + n
    dist.barrier()


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.faults), 4])
def test_a_new_process_takes_a_dead_ranks_place(tmp_path: Path, size: int) -> None:
    """Its world, the user's groups with their timeouts, and names of groups made later all fit."""
    with TorchRanks(tmp_path, size, replaced) as ranks:
        said = {r: pickle.loads(ranks.wait_for("made", r)) for r in range(size)}
        del said[1]
        ranks.kill(1)
        for rank in said:
            ranks.wait_for("again", rank)
        ranks.replace(1, 2, said[0][0], merge_groups(groups for _, groups in said.values()))
        ranks.results()


@on_ranks(3)
def test_groups_that_their_members_make_alone_leave_the_others_names() -> None:
    """Torch names them, and in 2.15 others too, by counts that differ from rank to rank."""

    def locals_() -> list[Any]:
        ranks = [1, 2] if rank else []
        return [dist.new_group(ranks, use_local_synchronization=True) for _ in ranks]

    groups = locals_()
    pair = dist.new_group([0, 1])
    process_groups.recover(1)
    groups += locals_()
    later = dist.new_group([0, 1])
    assert [total(group) for group in groups] == [5.0] * (4 if rank else 0)
    assert rank > 1 or total(pair) == total(later) == 3.0
    none, *names = everyone([group.group_name for group in groups])
    assert names[0] == names[1]
    assert len({*none, *names[0]}) == 4


@on_ranks(2)
def test_a_rank_that_does_not_come_is_named_and_all_can_try_again() -> None:
    """After its deadline, not after half an hour; the next generation works."""
    process_groups.DEADLINE_S = 1.0
    if rank == 0:
        text = refusal(lambda: process_groups.recover(1))
        assert "rank 0 waited 1 s" in text
        assert "rank(s) 1 did not come" in text
        say("tried")
    else:
        wait_for("tried", [0])
    process_groups.DEADLINE_S = 30.0
    process_groups.recover(2)
    assert total() == 3.0


@on_ranks(4)
def test_a_split_makes_groups_that_a_recovery_knows() -> None:
    """By new_group, also of a part of all ranks, and never by NCCL's split."""
    half = dist.split_group(split_ranks=[[0, 1], [2, 3]], group_desc="halves")
    pair = dist.split_group(parent_pg=half, split_ranks=[[1], [0]])
    odd = dist.split_group(split_ranks=[[1, 3]])
    specs = [(list(spec.ranks), spec.description) for spec in process_groups.created_groups()]
    assert ([0, 1], "halves") in specs
    assert "empty" in refusal(lambda: dist.split_group(split_ranks=[]), ValueError)
    process_groups.recover(1)
    assert dist.get_process_group_ranks(half) == ([0, 1] if rank < 2 else [2, 3])
    assert dist.get_process_group_ranks(pair) == [rank]
    assert (odd is not None) == (rank in {1, 3})
    assert (total(), total(half)) == (10.0, 3.0 if rank < 2 else 7.0)
    assert c10d._get_split_source(dist.group.WORLD) is None


@on_ranks(2)
def test_a_group_that_only_some_members_have_is_left_out() -> None:
    """And named; all others come back, and groups made later have one name on all ranks."""
    kept = dist.new_group([0, 1])
    closed = dist.new_group([0, 1])
    if rank == 0:
        dist.destroy_process_group(closed)
    # torch counts a group when it is begun, here on rank 1 alone.
    if rank == 1:
        c10d._process_group_name([0, 1], use_hashed_name=False)
    result = process_groups.recover(1)
    assert list(result.closed) == ([((0, 1), (0,))] if rank else [])
    assert result.skipped == {}
    assert total() == total(kept) == 3.0
    if rank == 1:
        dist.destroy_process_group(closed)
    fresh = dist.new_group([0, 1])
    assert list(process_groups.recover(2).closed) == []
    assert total(fresh) == total() == 3.0


@on_ranks(2)
def test_a_broken_gpu_is_named_before_anybody_connects() -> None:
    """On all ranks, with its error; where all GPUs compute the recovery goes on."""
    problem = "CUDA error: device-side assert" if rank == 1 else ""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_health, "_find_problem", lambda _: problem)
        text = refusal(lambda: process_groups.recover(1))
        assert "the GPU of rank(s) 1 cannot be used" in text
        assert "device-side assert. Its variables there are lost. %dist_restart 1" in text
        patch.setattr(device_health, "_find_problem", lambda _: "")
        process_groups.recover(2)
    assert total() == 3.0


@on_ranks(2, TORCH_DISTRIBUTED_DEBUG="DETAIL")
def test_torchs_own_checks_go_on_after_a_recovery() -> None:
    """With TORCH_DISTRIBUTED_DEBUG=DETAIL two different shapes are refused before and after."""
    pair = dist.new_group([0, 1])
    name, _ = broken_off_on_0(lambda: dist.all_reduce(torch.ones(3)))
    assert name == ("" if rank else "RuntimeError")
    process_groups.recover(1)
    assert total() == total(pair) == 3.0
    assert "mismatch" in refusal(lambda: dist.all_reduce(torch.ones(3 + rank)), RuntimeError)


def test_a_group_that_has_used_every_number_says_how_to_go_on() -> None:
    """torch binds each of 249 numbers to one backend for good."""

    class Spent:
        group_name = "3"

        def _backend_id(self, kind: dist.ProcessGroup.BackendType) -> int:
            return 1

    with pytest.raises(NbdistError, match=r"group 3 cannot.* 249 new backends.*%dist_reset"):
        debug_checks.unused_type(Spent())
