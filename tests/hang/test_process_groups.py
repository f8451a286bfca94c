"""Process groups come back after hangs and deaths, as the same objects."""

import pickle
from pathlib import Path

import pytest
import torch.distributed as dist

from nbdist.errors import NbdistError
from nbdist.hang.rank import debug_checks
from nbdist.hang.recovery import merge_groups
from tests.support.torch_ranks import TorchRanks, run_ranks

# DDP and FSDP2 train; between steps rank 0 hangs in each way, is broken off, and all go on.
HANGS = """
    torch.manual_seed(0)
    L = torch.nn.Linear
    def net():
        return torch.nn.Sequential(L(8, 16), torch.nn.ReLU(), L(16, 8))
    sub = dist.new_group([0, 1])
    mesh = init_device_mesh("cpu", (n,))
    flat = init_device_mesh("cpu", (2, n // 2), mesh_dim_names=("a", "b"))
    ddp, fs = DDP(net()), net()
    for layer in (fs[0], fs[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(fs, mesh=mesh)
    optimizers = [torch.optim.AdamW(m.parameters(), 1e-2) for m in (ddp, fs)]
    data = torch.ones(4, 8) * (rank + 1)
    sheet = distribute_tensor(torch.arange(16.0).reshape(4, 4), flat, [Shard(0), Shard(1)])

    def steps():
        losses = []
        for m, o in zip((ddp, fs), optimizers):
            loss = m(data).pow(2).mean()
            loss.backward()
            o.step()
            o.zero_grad()
            losses.append(loss.item())
        return losses

    hangs = {
        "ddp": lambda: ddp(data).sum().backward(),
        "fsdp forward": lambda: fs(data),
        "fsdp backward": lambda: fs(data).pow(2).mean().backward(),
        "all_reduce": lambda: dist.all_reduce(torch.ones(3)),
        "barrier": dist.barrier,
        "subgroup": lambda: dist.all_reduce(torch.ones(3), group=sub),
        "object": lambda: dist.all_gather_object([None] * n, {"a": 1}),
        "recv": lambda: dist.recv(torch.ones(3), 1),
    }
    curve, errors, right, spent = [steps(), steps()], {}, [], []
    fds = []
    for generation, (kind, hang) in enumerate(hangs.items(), 1):
        if os.environ["FAULT"] == "1":
            if rank == 0:
                errors[kind], _ = broken_off(hang)
                say(f"out{generation}")
            else:
                if kind == "fsdp backward":
                    fs(data)
                wait_for(f"out{generation}", [0])
            began = time.monotonic()
            back = process_groups.recover(generation)
            spent.append(time.monotonic() - began)
            later = dist.new_group([0, 1])
            right.append([total(), total(sub) if rank < 2 else 3.0,
                          total(later) if rank < 2 else 3.0,
                          sheet.full_tensor().sum().item(),
                          sheet.redistribute(placements=[Replicate()] * 2).to_local().sum().item()])
            gathered = [None] * n
            dist.all_gather_object(gathered, rank)
            right[-1].append(sum(gathered))
            dist.barrier()
            dist.monitored_barrier()
            fds.append(counts()[0])
        curve.append(steps())
    done(curve=curve, errors=errors, right=right, spent=spent, fds=fds,
         checksums=reset_models.checksums(), names=[model.name for model in live_models.find()])
"""


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.faults)])
def test_eight_ways_to_hang_leave_the_loss_curve_as_it_was(tmp_path: Path, size: int) -> None:
    """After each, groups made before and after it, meshes and DTensors give right numbers."""
    calm = run_ranks(tmp_path / "calm", size, HANGS, FAULT="0")
    storm = run_ranks(tmp_path / "storm", size, HANGS, FAULT="1")

    assert [result["curve"] for result in storm] == [result["curve"] for result in calm]
    assert len(set(map(str, calm[0]["curve"]))) == 10
    assert list(storm[0]["errors"].values()) == ["RuntimeError"] * 8
    everyone = size * (size + 1) / 2
    for result in storm:
        assert result["right"] == [[everyone, 3.0, 3.0, 120.0, 120.0, sum(range(size))]] * 8
        assert result["names"] == ["ddp", "fs"]
        assert result["checksums"]["fs"] == "sharded"
        assert max(result["spent"]) < 10
    assert len({result["checksums"]["ddp"] for result in storm}) == 1
    # Each round makes one more group, with a connection per peer that the aborted ones give back.
    assert storm[0]["fds"][-1] - storm[0]["fds"][0] <= 7 * 2 + 2


MANY = """
    pair = dist.new_group([0, 1])
    ddp = DDP(torch.nn.Linear(4, 4))
    rows, right = [], True
    for generation in range(1, int(os.environ["TIMES"]) + 1):
        process_groups.recover(generation)
        right = right and total() == 3.0 and total(pair) == 3.0
        ddp(torch.ones(2, 4)).sum().backward()
        rows.append(counts())
    used = Path("/proc/self/status").read_text()
    done(right=right, rows=rows, rss=used.split("VmRSS:")[1].split()[0])
"""


@pytest.mark.parametrize("times", [8, pytest.param(100, marks=pytest.mark.faults)])
def test_recoveries_in_a_row_leave_no_descriptor(tmp_path: Path, times: int) -> None:
    """Sums stay right; descriptors do not grow, threads by the workers of each new backend."""
    results = run_ranks(tmp_path, 2, MANY, TIMES=str(times))

    for result in results:
        fds, threads = zip(*result["rows"], strict=True)
        assert result["right"]
        assert max(fds) - fds[0] <= 2
        # Two groups; torch keeps a group's old backends, with their two sleeping threads each.
        assert threads[-1] - threads[0] == (times - 1) * 2 * 2


REPLACED = """
    if is_new:
        groups = {str(name): pg for pg, name in c10d._world.pg_names.items()}
        first = groups.get("1")
        local = next((pg for name, pg in groups.items() if len(name) > 3), None)
    else:
        from datetime import timedelta
        # First of all: torch names it by how many groups the members are in.
        local = dist.new_group([1, n - 1], use_local_synchronization=True) if n > 2 else None
        first = dist.new_group([0, 1], timeout=timedelta(seconds=77), group_desc="mine")
        closed = dist.new_group([0, 1])
        dist.new_group([0])
        dist.destroy_process_group(closed) if rank < 2 else None
        assert total() == n * (n + 1) / 2
        say("made", pickle.dumps((this_rank().topology, process_groups.created_groups())))
        wait_for("dead", [1])
        broken = process_groups.recover(1, (1,))
        alone = [str(name) for name in broken.skipped]
        say("again")
        back = process_groups.recover(2)
    later = dist.new_group(list(range(n)))
    result = {"world": total(), "later": total(later), "name": later.group_name}
    if rank < 2:
        result["first"] = total(first)
        result["desc"] = first.group_desc
        result["timeout"] = first._get_backend(torch.device("cpu")).options._timeout.total_seconds()
    if n > 2 and rank in (1, n - 1):
        result["local"] = total(local)
    dist.barrier()
    if not is_new:
        result.update(skipped=alone, still_skipped=back.skipped)
    done(**result, made=len(process_groups.created_groups()))
"""


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.faults), 4])
def test_a_new_process_takes_a_dead_ranks_place(tmp_path: Path, size: int) -> None:
    """Its world, the user's groups with their timeouts, and names of groups made later all fit."""
    with TorchRanks(tmp_path, size, REPLACED) as ranks:
        said = {r: pickle.loads(ranks.wait_for("made", r)) for r in range(size) if r != 1}
        ranks.wait_for("made", 1)
        ranks.kill(1)
        (tmp_path / "dead.1").touch()
        for rank in said:
            ranks.wait_for("again", rank)
        specs = merge_groups(groups for _, groups in said.values())
        ranks.replace(1, 2, said[0][0], specs)
        results = ranks.results()

    everyone = size * (size + 1) / 2
    assert [(result["world"], result["later"]) for result in results] == [
        (everyone, everyone)
    ] * size
    assert len({result["name"] for result in results}) == 1
    for result in results[:2]:
        assert (result["first"], result["desc"], result["timeout"]) == (3.0, "mine", 77.0)
    if size > 2:
        assert [results[r]["local"] for r in (1, size - 1)] == [2.0 + size] * 2
    assert set(results[0]["skipped"]) >= {"0", "1"}
    assert not {"0", "1"} & set(results[0]["still_skipped"])


ALONE = """
    def local():
        return dist.new_group([1, 2], use_local_synchronization=True) if rank else None

    groups = [local(), local()]
    pair = dist.new_group([0, 1])
    process_groups.recover(1)
    groups += [local(), local()]
    later = dist.new_group([0, 1])
    done(
        names=[group.group_name for group in groups if group],
        sums=[total(group) for group in groups if group],
        pairs=[total(pair), total(later)] if rank < 2 else [],
    )
"""


def test_groups_that_their_members_make_alone_leave_the_others_names(tmp_path: Path) -> None:
    """Torch names them, and in 2.15 others too, by counts that differ from rank to rank."""
    results = run_ranks(tmp_path, 3, ALONE)

    assert [result["sums"] for result in results] == [[], [5.0] * 4, [5.0] * 4]
    assert [result["pairs"] for result in results] == [[3.0] * 2, [3.0] * 2, []]
    assert results[1]["names"] == results[2]["names"]
    assert len(set(results[1]["names"])) == 4


MISSING = """
    process_groups.DEADLINE_S = 1.0
    text = ""
    if rank == 0:
        text = refusal(lambda: process_groups.recover(1))
        say("tried")
    else:
        wait_for("tried", [0])
    process_groups.DEADLINE_S = 30.0
    process_groups.recover(2)
    done(text=text, total=total())
"""


def test_a_rank_that_does_not_come_is_named_and_all_can_try_again(tmp_path: Path) -> None:
    """After its deadline, not after half an hour; the next generation works."""
    results = run_ranks(tmp_path, 2, MISSING)

    assert "rank 0 waited 1 s" in results[0]["text"]
    assert "rank(s) 1 did not come" in results[0]["text"]
    assert [result["total"] for result in results] == [3.0, 3.0]


SPLIT = """
    half = dist.split_group(split_ranks=[[0, 1], [2, 3]], group_desc="halves")
    pair = dist.split_group(parent_pg=half, split_ranks=[[1], [0]])
    odd = dist.split_group(split_ranks=[[1, 3]])
    specs = [(list(spec.ranks), spec.description) for spec in process_groups.created_groups()]
    wrong = refusal(lambda: dist.split_group(split_ranks=[]), ValueError)
    process_groups.recover(1)
    done(half=dist.get_process_group_ranks(half), pair=dist.get_process_group_ranks(pair),
         odd=odd is not None, sums=[total(), total(half)], specs=specs, wrong=wrong,
         source=str(c10d._get_split_source(dist.group.WORLD)))
"""


def test_a_split_makes_groups_that_a_recovery_knows(tmp_path: Path) -> None:
    """By new_group, also of a part of all ranks, and never by NCCL's split."""
    with TorchRanks(tmp_path, 4, SPLIT) as ranks:
        results = ranks.results()

    for rank, result in enumerate(results):
        assert result["half"] == ([0, 1] if rank < 2 else [2, 3])
        assert result["pair"] == [rank]
        assert result["odd"] == (rank in {1, 3})
        assert result["sums"] == [10.0, 3.0 if rank < 2 else 7.0]
        assert [[0, 1], "halves"] in result["specs"]
        assert "empty" in result["wrong"]
        assert result["source"] == "None"


APART = """
    kept = dist.new_group([0, 1])
    closed = dist.new_group([0, 1])
    if rank == 0:
        dist.destroy_process_group(closed)
    # torch counts a group when it is begun, here on rank 1 alone.
    if rank == 1:
        c10d._process_group_name([0, 1], use_hashed_name=False)
    result = process_groups.recover(1)
    sums = [total(), total(kept)]
    if rank == 1:
        dist.destroy_process_group(closed)
    fresh = dist.new_group([0, 1])
    again = process_groups.recover(2)
    done(closed=result.closed, skipped=result.skipped, sums=[*sums, total(fresh), total()],
         again=again.closed)
"""


def test_a_group_that_only_some_members_have_is_left_out(tmp_path: Path) -> None:
    """And named; all others come back, and groups made later have one name on all ranks."""
    results = run_ranks(tmp_path, 2, APART)

    assert [result["closed"] for result in results] == [[], [[[0, 1], [0]]]]
    assert [result["skipped"] for result in results] == [{}, {}]
    assert [result["sums"] for result in results] == [[3.0] * 4] * 2
    assert [result["again"] for result in results] == [[], []]


BROKEN_GPU = """
    from nbdist.hang.rank import device_health
    device_health._find_problem = lambda _: "CUDA error: device-side assert" if rank == 1 else ""
    text = refusal(lambda: process_groups.recover(1), NbdistError)
    device_health._find_problem = lambda _: ""
    process_groups.recover(2)
    done(text=text, total=total())
"""


def test_a_broken_gpu_is_named_before_anybody_connects(tmp_path: Path) -> None:
    """On all ranks, with its error; where all GPUs compute the recovery goes on."""
    with TorchRanks(tmp_path, 2, BROKEN_GPU) as ranks:
        results = ranks.results()

    for result in results:
        assert "the GPU of rank(s) 1 cannot be used" in result["text"]
        assert "device-side assert. Its variables there are lost. %dist_restart 1" in result["text"]
    assert [result["total"] for result in results] == [3.0, 3.0]


DETAIL = """
    pair = dist.new_group([0, 1])
    name = ""
    if rank == 0:
        name, _ = broken_off(lambda: dist.all_reduce(torch.ones(3)))
        say("out")
    else:
        wait_for("out", [0])
    process_groups.recover(1)
    sums = [total(), total(pair)]
    wrong = refusal(lambda: dist.all_reduce(torch.ones(3 + rank)), RuntimeError)
    done(name=name, sums=sums, wrong=wrong)
"""


def test_torchs_own_checks_go_on_after_a_recovery(tmp_path: Path) -> None:
    """With TORCH_DISTRIBUTED_DEBUG=DETAIL two different shapes are refused before and after."""
    results = run_ranks(tmp_path, 2, DETAIL, TORCH_DISTRIBUTED_DEBUG="DETAIL")

    assert results[0]["name"] == "RuntimeError"
    assert [result["sums"] for result in results] == [[3.0, 3.0]] * 2
    assert all("mismatch" in result["wrong"] for result in results)


def test_a_group_that_has_used_every_number_says_how_to_go_on() -> None:
    """torch binds each of 249 numbers to one backend for good."""

    class Spent:
        group_name = "3"

        def _backend_id(self, kind: dist.ProcessGroup.BackendType) -> int:
            return 1

    with pytest.raises(NbdistError, match=r"group 3 cannot.* 249 new backends.*%dist_reset"):
        debug_checks.unused_type(Spent())
