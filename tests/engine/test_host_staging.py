"""Calls of Gloo by way of the host: forced on real ranks without a GPU, and beside direct calls.

What asks whether a tensor is on the host answers no, so every staged path runs as on a GPU.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from nbdist.engine import host_staging
from nbdist.hang import call_log as layout
from nbdist.hang.rank import call_log, process_groups
from nbdist.parallel.cp import attention
from nbdist.parallel.cp.kernels import Problem
from nbdist.parallel.pp import tied_gradients
from tests.programs import parity, sequences
from tests.programs.rank import (
    broken_off_on_0,
    is_interrupted,
    rank,
    refusal,
    total,
    wait_for,
)
from tests.support.torch_ranks import on_ranks, run_ranks

KINDS: list[tuple[tuple[int, ...], torch.dtype]] = [
    ((3, 4), torch.float32), ((5,), torch.bfloat16), ((7,), torch.float8_e4m3fn),
    ((2, 3), torch.bool), ((), torch.int64), ((2,), torch.complex64), ((0,), torch.float32),
]  # fmt: skip
PEER = 1 - rank
staged: list[torch.Size] = []
"""What `forced` has staged on this rank."""


def stage() -> None:
    """Install staging as on a GPU's ranks: with the recorder around it."""
    call_log.uninstall()
    host_staging.install()
    call_log.install(call_log.open_log(None, rank))
    call_log.reset(0)


def forced(call: Callable[[], Any]) -> Any:
    """What a call returns whose transfers are all staged."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_staging, "_is_on_host", lambda tensor: staged.append(tensor.shape))
        return call()


def filled(*shape: int, dtype: torch.dtype = torch.float32, more: int = 0) -> torch.Tensor:
    values = torch.arange(torch.Size(shape).numel()) * 3 + 7 * rank + more
    return (values % 41).to(dtype).reshape(shape)


@functools.cache
def pair() -> Any:
    return dist.new_group([0, 1])


def both(sends: Callable[[], Any], receives: Callable[[], Any]) -> None:
    """Rank 0 sends first."""
    for call in (sends, receives) if rank == 0 else (receives, sends):
        call()


def blocking() -> list[Any]:
    boxes = [torch.zeros(shape, dtype=dtype) for shape, dtype in KINDS]
    for box in boxes:
        sent = functools.partial(filled, *box.shape, dtype=box.dtype)
        both(
            lambda sent=sent: dist.send(sent(), PEER, pair()),
            lambda box=box: dist.recv(box, PEER, pair()),
        )
    return boxes


def at_once() -> list[Any]:
    """Mixed shapes under way together, waited for in another order; into a part of a matrix."""
    boxes, whole = [torch.zeros(2, 3), torch.zeros(70_000)], torch.full((3, 4), 9.0)
    boxes.append(whole[1])
    sent = [filled(*box.shape, more=more) for more, box in enumerate(boxes)]
    received = [dist.P2POp(dist.irecv, box, PEER) for box in boxes]
    works = dist.batch_isend_irecv([*received, *(dist.P2POp(dist.isend, x, PEER) for x in sent)])
    if staged:
        assert not any(box.any() for box in boxes[:2])
        for tensor in sent:
            tensor.zero_()  # what was sent is copied by now
    for work in reversed(works):
        work.wait()
    return [*boxes, whole]


def from_any() -> list[Any]:
    box, later, objects = torch.zeros(3), torch.zeros(4), [None]
    if rank == 0:
        dist.send(filled(3), 1)
        dist.send(filled(4), 1, tag=5)
        dist.send_object_list([{"a": 1}], 1)
        return []
    source, work = dist.recv(box), dist.irecv(later, tag=5)
    ended = work.wait()
    dist.recv_object_list(objects, 0)
    return [box, later, source, ended, work._source_rank(), objects]


def leaf() -> list[Any]:
    """A tensor that autograd knows is written to as a backend writes."""
    box, sent = torch.zeros(3, requires_grad=True), torch.nn.Parameter(filled(3))
    both(lambda: dist.send(sent, PEER), lambda: dist.recv(box, PEER))
    return [box.detach(), box.is_leaf, box._version, box.grad_fn is None]


def coalesced() -> list[Any]:
    sums = [filled(3), filled(2, 2, more=1)]
    with c10d._coalescing_manager(pair()):
        for tensor in sums:
            dist.all_reduce(tensor, group=pair())
    parts = [torch.zeros(6), torch.zeros(4)]
    with c10d._coalescing_manager(pair(), async_ops=True) as calls:
        for part in parts:
            dist.all_gather_into_tensor(part, filled(part.numel() // 2), group=pair())
    calls.wait()
    lists = [[torch.zeros(2), torch.zeros(1)] for _ in range(2)]
    largest, most = [filled(4), filled(1, 5)], dist.ReduceOp.MAX
    gathering = dist.all_gather_coalesced(lists, [filled(2), filled(1)], pair(), async_op=True)
    reducing = dist.all_reduce_coalesced(largest, most, pair(), async_op=True)
    gathered, reduced = gathering.wait()[1], reducing.wait()[1]
    return [*sums, *parts, *lists[0], *lists[1], *largest, *shown(gathered), reduced.tolist()]


def refused() -> list[Any]:
    """torch's own words for what Gloo does not send."""
    apart = torch.ones(4, 4)[:, 0], torch.ones(6)[::2]
    kinds = RuntimeError, ValueError
    return [refusal(functools.partial(dist.send, tensor, PEER), *kinds) for tensor in apart]


def shown(values: list[Any]) -> list[Any]:
    return [
        [str(v.dtype), list(v.shape), str((v if v.is_complex() else v.double()).tolist())]
        if isinstance(v, torch.Tensor)
        else v
        for v in values
    ]


def recorded() -> list[Any]:
    box = layout.read(call_log.snapshot()[1])
    return [[c.op, c.detail, c.peer, c.state, str(c.place)] for c in box.calls]


def calls_twice() -> dict[str, Any]:
    """Direct and staged: results and black box."""
    stage()
    pair()
    logs, results = [], {}
    for is_forced in (False, True):
        before = len(recorded())
        for call in (blocking, at_once, from_any, leaf, coalesced, refused):
            values = shown(forced(call) if is_forced else call())
            results.setdefault(call.__name__, []).append(values)
        logs.append(recorded()[before:])
        assert is_forced == bool(staged)
    assert len(staged) > 20
    assert not host_staging._arrivals
    return {"results": results, "logs": logs}


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Of two ranks: results and black boxes of the same calls, direct and staged."""
    return run_ranks(tmp_path_factory.mktemp("ranks"), 2, calls_twice)


def test_staged_calls_give_what_direct_ones_give(calls: list[dict[str, Any]]) -> None:
    """To the last bit: all dtypes, mixed shapes, any source, leaves, coalesced ones, refusals."""
    for number, end in enumerate(calls):
        for name, (direct, staged) in end["results"].items():
            assert staged == direct, name
        sent = (torch.arange(12) * 3 + 7 * (1 - number)) % 41
        expected = str(sent.reshape(3, 4).double().tolist())
        assert end["results"]["blocking"][1][0] == ["torch.float32", [3, 4], expected]
        assert all("contiguous" in message for message in end["results"]["refused"][1])
    assert calls[1]["results"]["from_any"][1][2:] == [0, True, 0, [{"a": 1}]]


def test_the_black_box_has_the_same_calls(calls: list[dict[str, Any]]) -> None:
    """Operation, tensor, peer, state and the user's line; a wait belongs to its call."""
    for end in calls:
        direct, staged = end["logs"]
        assert len(direct) > 20
        assert staged == direct
        assert {"send", "isend", "irecv", "all_gather_coalesced"} <= {op for op, *_ in staged}


@pytest.mark.skipif(not Path("/proc/self/fdinfo").is_dir(), reason="needs /proc")
@on_ranks(2)
def test_a_staged_receive_is_aborted_and_the_next_one_is_right() -> None:
    """Its tensor stays as it was; an interrupt takes no message away."""
    stage()
    old = torch.full((3,), 7.0)
    both = [dist.P2POp(dist.isend, old, 1), dist.P2POp(dist.irecv, old, 1)]
    waits = {
        "recv": lambda: dist.recv(old, 1),
        "irecv": lambda: dist.irecv(old, 1, tag=3).wait(),
        "any": lambda: dist.recv(old),
        "pipelined": lambda: [work.wait() for work in dist.batch_isend_irecv(both)],
    }
    for generation, (kind, wait) in enumerate(waits.items(), 1):
        name, _ = broken_off_on_0(functools.partial(forced, wait), generation)
        assert name == ("" if rank else "RuntimeError"), kind
        process_groups.recover(generation)
        fresh = torch.full((3,), float(rank))
        call = functools.partial(dist.send if rank else dist.recv, fresh, 1 - rank)
        forced(call)
        assert total() == 3.0
        assert fresh.tolist() == [1.0] * 3
    assert old.tolist() == [7.0] * 3
    if rank == 1:
        wait_for("pressed", [0])
        for value in (1.0, 2.0):
            dist.send(torch.full((3,), value), 0)
        return
    first, second = torch.zeros(3), torch.zeros(3)
    assert is_interrupted(lambda: forced(lambda: dist.recv(first, 1)))
    forced(lambda: dist.recv(second, 1))
    assert [first.tolist(), second.tolist()] == [[1.0] * 3, [2.0] * 3]


def functional_results(mesh: DeviceMesh) -> list[Any]:
    """Of torch's functional collectives, and of DTensors that use them."""
    world, both = dist.group.WORLD, [filled(2, 2), filled(3)]
    cases = [
        ((3, 4), torch.float32), ((2,), torch.bfloat16), ((1,), torch.int64),
        ((2, 3), torch.complex64), ((0, 2), torch.float32),
    ]  # fmt: skip
    results = [functional.all_gather_tensor(filled(*s, dtype=d), 0, world) for s, d in cases]
    results += [
        functional.all_gather_tensor(filled(4, 2).t().contiguous(), 1, world),
        *functional.all_gather_into_tensor_coalesced(both, world),
        *functional.all_reduce_coalesced(both, "avg", world),
        *functional.all_reduce_coalesced([filled(5)], "max", world),
    ]
    whole = distribute_tensor(torch.arange(12.0).view(4, 3), mesh, [Shard(0)])
    uneven = distribute_tensor(torch.arange(15.0).view(5, 3), mesh, [Shard(0)])
    trained = torch.nn.Parameter(whole)
    trained.full_tensor().square().sum().backward()
    results += [whole.redistribute(placements=[Shard(1)]).to_local()]
    results += [tensor.full_tensor() for tensor in (whole, uneven, trained.grad)]
    return [[str(x.dtype), list(x.shape), str(x.tolist())] for x in results]


@on_ranks(2)
def test_functional_collectives_give_what_torchs_own_give() -> None:
    """One tensor at a time: all dtypes, DTensors and their gradients, to the last bit."""
    stage()
    mesh = init_device_mesh("cpu", (2,))
    direct = functional_results(mesh)
    with mock.patch.object(host_staging, "_gather", wraps=host_staging._gather) as gather:
        host_staging.replace_functional_collectives("CPU")
        assert functional_results(mesh) == direct
    assert gather.call_count >= 10
    assert direct[0][1] == [6, 4]


def attended(*, is_causal: bool) -> list[Any]:
    generator = torch.Generator().manual_seed(rank)
    pieces = [torch.randn(2, 4, 16, 8, generator=generator).requires_grad_() for _ in range(3)]
    problem = Problem(*pieces, is_causal, 8**-0.5)
    out = attention.CONTEXTS["ring"](problem, dist.group.WORLD)
    out.square().sum().backward()
    return [out.tolist(), *(piece.grad.tolist() for piece in pieces)]


def ring() -> list[Any]:
    return [attended(is_causal=True), attended(is_causal=False), sequences.apart(sequences.Model)]


def tied() -> list[float]:
    """A sum over two of three stages."""
    torch.manual_seed(rank)
    parameter = torch.nn.Parameter(torch.zeros(5))
    share = tied_gradients.GradientShare(parameter, frozenset({0, 2}), torch.randn(5))
    tied_gradients.all_reduce_tied([share] if rank != 1 else [], dist.group.WORLD)
    return share.gradient.tolist()


def pipeline() -> list[Any]:
    untied = functools.partial(parity.make, depth=6, is_tied=False)
    interleaved = parity.compare("pp", schedule="interleaved", build=untied)
    return [tied(), parity.compare("pp"), interleaved]


@pytest.mark.parametrize("kind", [pytest.param("ring", marks=pytest.mark.parity), "pipeline"])
@on_ranks(3)
def test_strategies_that_send_train_alike(kind: str) -> None:
    """The same losses, gradients and parameters to the last bit, on three ranks."""
    stage()
    train_all = {"ring": ring, "pipeline": pipeline}[kind]
    direct = train_all()
    assert forced(train_all) == direct
    assert len(staged) > 20
    assert "nan" not in str(direct)
