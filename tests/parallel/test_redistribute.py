"""Local parts of tensors move between ranks: against slices of the whole, and DTensor's shards."""

import itertools
import random
import sys
from dataclasses import replace
from typing import Any
from unittest import mock

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

from nbdist.parallel.reshard import redistribute as moving
from nbdist.parallel.reshard.redistribute import Reshard, _routes, redistribute, room_for
from nbdist.strategy.choice import Degrees
from nbdist.strategy.tensor_layout import Placement, TensorLayout, local_runs
from tests.programs.rank import n, rank
from tests.programs.sides import CPU, flat, part, square
from tests.support.torch_ranks import on_ranks

SPLITS = [Degrees(*s) for s in itertools.product((1, 2, 4), repeat=5)]
MESHES = [degrees for degrees in SPLITS if degrees.product in (1, n)]
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.bool, torch.int16, torch.uint8]


def some_side(draw, shape):
    degrees = draw.choice(MESHES)
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
        dtype = draw.choice(DTYPES)
        name = f"t{number}"
        torch.manual_seed(number)
        values[name] = (torch.randn(shape) * 50).to(dtype)
        moves.append(Reshard(name, dtype, some_side(draw, shape), some_side(draw, shape)))
    return moves, values


def check_moves(bucket_bytes: int, direct_bytes: int, seed: int) -> None:
    """50 random moves end as the new side's part of the whole, in rounds of that size."""
    moves, values = moves_and_values(50, seed)
    held = {m.name: part(values[m.name], m.old) for m in moves}
    held = {name: t for name, t in held.items() if t is not None}
    copies = {name: t.clone() for name, t in held.items()}
    with (
        mock.patch.multiple(moving, BUCKET_BYTES=bucket_bytes, DIRECT_BYTES=direct_bytes),
        mock.patch.object(dist, "all_to_all_single", wraps=dist.all_to_all_single) as send,
    ):
        new = redistribute(moves, held, CPU)
    for m in moves:
        expected, got = part(values[m.name], m.new), new.get(m.name)
        if got is None or expected is None:
            assert got is expected, m
            continue
        assert torch.equal(got, expected), m
        before, after = (local_runs(s.layout, s.degrees, rank) for s in (m.old, m.new))
        assert (got is held.get(m.name)) == (before == after), m
    assert all(torch.equal(held[name], copies[name]) for name in held)
    sizes = [max(call.args[0].numel(), call.args[1].numel()) for call in send.call_args_list]
    assert max(sizes) <= bucket_bytes
    assert len(sizes) == 1 if bucket_bytes > 1000 else len(sizes) > 20


@on_ranks(4)
def test_random_moves_end_as_slices_of_the_whole() -> None:
    """200 random moves of six dtypes; unchanged parts are the same objects, sources unchanged."""
    # All in buckets: one, some, one element each; then what can goes by itself, in two batches.
    check_moves(1 << 20, 1 << 20, 0)
    check_moves(256, 1 << 20, 1)
    check_moves(16, 1 << 20, 2)
    with mock.patch.multiple(moving, _DIRECT_COUNT=25, _CALL_BYTES=40):
        check_moves(1 << 20, 1, 3)
    if rank == 0:
        what_stays_meets_nobody()
    no_rank_has_a_whole_copy()
    layouts_are_those_of_dtensor()


def what_stays_meets_nobody() -> None:
    """Copies that stay, go, or are cut down: here only rank 0 calls."""
    whole = Placement(TensorLayout((8, 2)), Degrees(dp_replicate=n))
    owned = Placement(TensorLayout((8, 2), ranks=frozenset({1})), Degrees(dp_replicate=n))
    shard = Placement(TensorLayout((8, 2), shard_dim=0), Degrees(dp_shard=n))
    after = {"a": whole, "b": owned, "c": shard}
    tensor = torch.ones(8, 2)
    moves = [Reshard(name, torch.float32, whole, side) for name, side in after.items()]
    got = redistribute(moves, dict.fromkeys(after, tensor), CPU)
    assert sorted(got) == ["a", "c"]
    assert got["a"] is tensor
    assert got["c"].shape == (2, 2)


class Largest(TorchDispatchMode):
    """The largest piece of memory that any step asks for."""

    def __init__(self, known: torch.Tensor) -> None:
        super().__init__()
        self.known, self.bytes = known.untyped_storage().data_ptr(), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (list, tuple)) else [out]:
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.bytes = max(self.bytes, storage.nbytes() * (storage.data_ptr() != self.known))
        return out


def no_rank_has_a_whole_copy() -> None:
    """From rows to columns of a 1 MiB matrix nothing larger than a quarter is allocated."""
    big = TensorLayout((512, 512))
    rows = Placement(replace(big, shard_dim=0), Degrees(dp_shard=n))
    columns = Placement(replace(big, tp_dim=1), Degrees(tp=n))
    value = torch.arange(512.0 * 512).reshape(512, 512)
    held = part(value, rows)
    with mock.patch.object(moving, "BUCKET_BYTES", 1 << 16), Largest(held) as seen:
        new = redistribute([Reshard("w", torch.float32, rows, columns)], {"w": held}, CPU)
    assert torch.equal(new["w"], part(value, columns))
    assert seen.bytes == value.nbytes // n


def alike(local: torch.Tensor, whole: torch.Tensor, degrees: Degrees, **dims: Any) -> None:
    layout = TensorLayout(tuple(whole.shape), **dims)
    assert torch.equal(local, part(whole, Placement(layout, degrees))), layout


def net() -> torch.nn.Sequential:
    torch.manual_seed(0)
    linear = torch.nn.Linear
    return torch.nn.Sequential(linear(6, 7), linear(7, 5), linear(5, 3, bias=False), linear(3, 1))


def layouts_are_those_of_dtensor() -> None:
    """Uneven and empty shards of tp, of FSDP2, and of FSDP2 on tp's, element by element."""
    for shape in [(4, 4), (7, 3), (5, 1), (3, 6), (1, 9), (2, 0), (8,), (3,)]:
        whole = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
        for dim in range(len(shape)):
            shard = distribute_tensor(whole, flat(), [Shard(dim)]).to_local()
            alike(shard, whole, Degrees(tp=n), tp_dim=dim)
    values = {name: p.detach().clone() for name, p in net().named_parameters()}
    for name, p in fully_shard(net(), mesh=flat()).named_parameters():
        alike(p.to_local(), values[name], Degrees(dp_shard=n), shard_dim=0)
    plan = {"0": ColwiseParallel(), "1": RowwiseParallel(), "2": ColwiseParallel()}
    split = parallelize_module(net(), square()["tp"], plan)
    fully_shard(split, mesh=square()["dp"])
    tp_dims = {"0.weight": 0, "0.bias": 0, "1.weight": 1, "2.weight": 0}
    for name, p in split.named_parameters():
        both = Degrees(dp_shard=2, tp=2)
        alike(p.to_local(), values[name], both, tp_dim=tp_dims.get(name), shard_dim=0)


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
