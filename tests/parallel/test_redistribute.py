"""Local parts of tensors move between ranks: against slices of the whole, and DTensor's shards."""

import sys
from pathlib import Path

import psutil
import pytest
import torch

from nbdist.parallel.reshard.redistribute import Reshard, _routes, redistribute, room_for
from nbdist.strategy.choice import Degrees
from nbdist.strategy.tensor_layout import Placement, TensorLayout
from tests.support.sides import SIDES
from tests.support.torch_ranks import run_ranks

MOVES = (
    SIDES
    + """
    import itertools, random
    from torch.distributed.tensor.parallel import (
        ColwiseParallel, RowwiseParallel, parallelize_module)
    from torch.utils._python_dispatch import TorchDispatchMode
    from nbdist.parallel.reshard import redistribute as ex

    meshes = [Degrees(*s) for s in itertools.product((1, 2, 4), repeat=5)]
    meshes = [d for d in meshes if d.product in (1, n)]
    dtypes = [torch.float32, torch.bfloat16, torch.float64, torch.bool, torch.int16, torch.uint8]

    def some_side(draw, shape, source=False):
        degrees = draw.choice(meshes)
        dims = [None, *range(len(shape))]
        tp = draw.choice(dims)
        parts = [k for k in (1, 3) if tp is not None and shape[tp] % k == 0] or [1]
        stages = draw.choice([None, frozenset({0}), frozenset({0, degrees.pp - 1})])
        layout = TensorLayout(shape, stages, tp, draw.choice(parts), draw.choice(dims))
        return Placement(layout, degrees)

    def moves_and_values(count, seed):
        draw = random.Random(seed)
        moves, values = [], {}
        for number in range(count):
            shape = tuple(draw.choice((0, 1, 3, 5, 8, 12)) for _ in range(draw.randrange(4)))
            dtype = draw.choice(dtypes)
            name = f"t{number}"
            torch.manual_seed(number)
            values[name] = (torch.randn(shape) * 50).to(dtype)
            moves.append(ex.Reshard(name, dtype, some_side(draw, shape), some_side(draw, shape)))
        return moves, values

    def wrong(bucket_bytes, direct_bytes, seed):
        "Names of tensors that are not the new side's part of the whole, and rounds made."
        before = ex.BUCKET_BYTES, ex.DIRECT_BYTES
        ex.BUCKET_BYTES, ex.DIRECT_BYTES = bucket_bytes, direct_bytes
        moves, values = moves_and_values(50, seed)
        held = {m.name: part(values[m.name], m.old) for m in moves}
        held = {name: t for name, t in held.items() if t is not None}
        copies = {name: t.clone() for name, t in held.items()}
        sizes = []
        send = dist.all_to_all_single
        def counted(inbox, outbox, *splits):
            sizes.append(max(inbox.numel(), outbox.numel()))
            return send(inbox, outbox, *splits)
        dist.all_to_all_single = counted
        new = ex.redistribute(moves, held, cpu)
        dist.all_to_all_single = send
        ex.BUCKET_BYTES, ex.DIRECT_BYTES = before
        bad = []
        for m in moves:
            expected = part(values[m.name], m.new)
            got = new.get(m.name)
            before, after = (local_runs(s.layout, s.degrees, rank) for s in (m.old, m.new))
            if got is None or expected is None:
                bad += [m.name] if got is not expected else []
                continue
            if not torch.equal(got, expected):
                bad.append(m.name)
            if (got is held.get(m.name)) != (before == after):
                bad.append(f"{m.name}: the same object, or not")
        bad += [f"{name}: changed" for name in held if not torch.equal(held[name], copies[name])]
        return bad, len(sizes), max(sizes), bucket_bytes
    # All in buckets: one, some, one element each; then what can goes by itself, in two batches.
    random_moves = [wrong(1 << 20, 1 << 20, 0), wrong(256, 1 << 20, 1), wrong(16, 1 << 20, 2)]
    ex._DIRECT_COUNT, ex._CALL_BYTES = 25, 40
    random_moves.append(wrong(1 << 20, 1, 3))

    # What lies the same on both sides meets nobody: here only rank 0 calls.
    whole = Placement(TensorLayout((8, 2)), Degrees(dp_replicate=n))
    owned = Placement(TensorLayout((8, 2), ranks=frozenset({1})), Degrees(dp_replicate=n))
    tensor, alone = torch.ones(8, 2), None
    if rank == 0:
        shard = Placement(TensorLayout((8, 2), shard_dim=0), Degrees(dp_shard=n))
        got = ex.redistribute([ex.Reshard("a", torch.float32, whole, whole),
                           ex.Reshard("b", torch.float32, whole, owned),
                           ex.Reshard("c", torch.float32, whole, shard)],
                          {"a": tensor, "b": tensor, "c": tensor}, cpu)
        alone = [sorted(got), got["a"] is tensor, tuple(got["c"].shape)]

    # The largest piece of memory that any step of a sharded move asks for.
    class Largest(TorchDispatchMode):
        bytes = 0
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for one in out if isinstance(out, (list, tuple)) else [out]:
                if isinstance(one, torch.Tensor) and one.untyped_storage().data_ptr() not in known:
                    Largest.bytes = max(Largest.bytes, one.untyped_storage().nbytes())
            return out
    big = TensorLayout((512, 512))
    sides = [Placement(replace(big, shard_dim=0), Degrees(dp_shard=n)),
             Placement(replace(big, tp_dim=1), Degrees(tp=n))]
    value = torch.arange(512.0 * 512).reshape(512, 512)
    held = {"w": part(value, sides[0])}
    known = {held["w"].untyped_storage().data_ptr()}
    ex.BUCKET_BYTES, before = 1 << 16, ex.BUCKET_BYTES
    with Largest():
        new = ex.redistribute([ex.Reshard("w", torch.float32, *sides)], held, cpu)
    ex.BUCKET_BYTES = before
    sharded = [torch.equal(new["w"], part(value, sides[1])), Largest.bytes, value.nbytes // n]

    # DTensor's own shards, of tp, of FSDP2, and of both, are what the layouts say.
    unlike = []
    def compare(local, whole, layout, degrees):
        expected = part(whole, Placement(layout, degrees))
        if not torch.equal(local, expected):
            unlike.append([str(layout), list(local.shape), list(expected.shape)])
    for shape in [(4, 4), (7, 3), (5, 1), (3, 6), (1, 9), (2, 0), (8,), (3,)]:
        whole_ = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
        for dim in range(len(shape)):
            shard = distribute_tensor(whole_, flat, [Shard(dim)])
            compare(shard.to_local(), whole_, TensorLayout(shape, tp_dim=dim), Degrees(tp=n))
    def net():
        torch.manual_seed(0)
        L = torch.nn.Linear
        return torch.nn.Sequential(L(6, 7), L(7, 5), L(5, 3, bias=False), L(3, 1))
    whole_ = {name: p.detach().clone() for name, p in net().named_parameters()}
    alone_ = fully_shard(net(), mesh=flat)
    for name, p in alone_.named_parameters():
        layout = TensorLayout(tuple(p.shape), shard_dim=0)
        compare(p.to_local(), whole_[name], layout, Degrees(dp_shard=n))
    plan = {"0": ColwiseParallel(), "1": RowwiseParallel(), "2": ColwiseParallel()}
    split = parallelize_module(net(), square["tp"], plan)
    fully_shard(split, mesh=square["dp"])
    tp_dims = {"0.weight": 0, "0.bias": 0, "1.weight": 1, "2.weight": 0}
    for name, p in split.named_parameters():
        layout = TensorLayout(tuple(p.shape), tp_dim=tp_dims.get(name), shard_dim=0)
        compare(p.to_local(), whole_[name], layout, Degrees(dp_shard=2, tp=2))
    done(random_moves=random_moves, alone=alone, sharded=sharded, unlike=unlike)
"""
)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, object]]:
    """Four ranks' results of all cases."""
    folder: Path = tmp_path_factory.mktemp("exchange")
    return run_ranks(folder / "run", 4, MOVES)


def test_random_moves_end_as_slices_of_the_whole(ranks: list[dict[str, object]]) -> None:
    """200 random moves of six dtypes; unchanged parts are the same objects, sources unchanged."""
    for result in ranks:
        for bad, rounds, largest, limit in result["random_moves"]:  # type: ignore[attr-defined]
            assert bad == []
            assert largest <= limit
            assert rounds == 1 if limit > 1000 else rounds > 20


def test_what_stays_meets_nobody(ranks: list[dict[str, object]]) -> None:
    """Copies that stay, go, or are cut down need no other rank."""
    assert ranks[0]["alone"] == [["a", "c"], True, [2, 2]]


def test_no_rank_has_a_whole_copy(ranks: list[dict[str, object]]) -> None:
    """From rows to columns of a 1 MiB matrix nothing larger than a quarter is allocated."""
    for result in ranks:
        is_right, largest, quarter = result["sharded"]  # type: ignore[misc]
        assert is_right
        assert largest == quarter


def test_layouts_are_those_of_dtensor(ranks: list[dict[str, object]]) -> None:
    """Uneven and empty shards of tp, of FSDP2, and of FSDP2 on tp's, element by element."""
    assert [result["unlike"] for result in ranks] == [[]] * 4


def test_holders_share_the_sending() -> None:
    """Two copies of each half: four ranks send the same number of bytes for whole copies."""
    half = Placement(TensorLayout((64, 8), shard_dim=0), Degrees(dp_replicate=2, dp_shard=2))
    whole = Placement(TensorLayout((64, 8)), Degrees(dp_replicate=4))
    moves = [Reshard(f"w{i}", torch.float32, half, whole) for i in range(4)]

    sent = [0] * 4
    for route in _routes(moves, 4):
        if route.source != route.transfer.target:
            sent[route.source] += route.size_bytes
    assert sent == [4 * 32 * 8 * 4] * 4


def test_one_process_needs_no_group() -> None:
    """Without ranks a tensor stays the same object, and one that is cut down is a copy."""
    whole = Placement(TensorLayout((3,)), Degrees())
    value = torch.arange(3.0)

    assert redistribute(
        [Reshard("w", torch.float32, whole, whole)], {"w": value}, value.device
    ) == {"w": value}


@pytest.mark.parametrize("shape", [(), (0,), (3, 5), (257, 1031), (1024, 1025)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_a_tensor_of_the_shape(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Contiguous, writable, of any size and dtype."""
    tensor = room_for(shape, dtype, torch.device("cpu"))

    assert (tensor.shape, tensor.dtype) == (torch.Size(shape), dtype)
    assert tensor.is_contiguous()
    assert tensor.fill_(3).sum().item() == pytest.approx(3 * tensor.numel(), rel=1e-2)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems give pages as they are written")
def test_its_pages_are_there_before_it_is_written() -> None:
    """64 MiB more are resident; torch.empty's are not."""
    before = _resident_mib()
    lazy = torch.empty(16 << 20)
    between = _resident_mib()
    tensor = room_for((16 << 20,), torch.float32, torch.device("cpu"))

    assert between - before < 8
    assert _resident_mib() - between > 60
    assert lazy.shape == tensor.shape


def _resident_mib() -> float:
    return float(psutil.Process().memory_info().rss) / 2**20
