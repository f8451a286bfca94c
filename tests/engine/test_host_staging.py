"""Calls of Gloo by way of the host: forced on real ranks without a GPU, and beside direct calls.

What asks whether a tensor is on the host answers no, so every staged path runs as on a GPU.
"""

import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.torch_ranks import run_ranks

# Behind torch_ranks.PRELUDE.
STAGING = """
from nbdist.engine import host_staging
from nbdist.hang.rank import call_log
# As on a GPU's ranks: the recorder around it.
call_log.uninstall()
host_staging.install()
call_log.install(call_log.open_box(None, rank))
call_log.reset(0)
staged, is_on_host = [], host_staging._is_on_host

def forced(call):
    "What a call returns whose transfers are all staged."
    host_staging._is_on_host = lambda tensor: staged.append(tensor.shape)
    try:
        return call()
    finally:
        host_staging._is_on_host = is_on_host
"""

CALLS = (
    STAGING
    + """
from nbdist.hang import call_log as layout
peer = 1 - rank
pair = dist.new_group([0, 1])

def filled(*shape, dtype=torch.float32, more=0):
    count = torch.Size(shape).numel()
    values = (torch.arange(count) * 3 + 7 * rank + more) % 5
    return values.to(dtype).reshape(shape)

def both(sends, receives):
    "Rank 0 sends first."
    for call in (sends, receives) if rank == 0 else (receives, sends):
        call()

def blocking():
    dtypes = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.int64,
              torch.complex64)
    shapes = [(3, 4), (5,), (7,), (2, 3), (), (2,)]
    received = []
    for shape, dtype in [*zip(shapes, dtypes), ((0,), torch.float32)]:
        box = torch.zeros(shape, dtype=dtype)
        both(lambda: dist.send(filled(*shape, dtype=dtype), peer, pair),
             lambda: dist.recv(box, peer, pair))
        received.append(box)
    return received

def at_once():
    "Mixed shapes under way together, waited for in another order; into a part of a matrix."
    boxes, whole = [torch.zeros(2, 3), torch.zeros(70_000)], torch.full((3, 4), 9.0)
    boxes.append(whole[1])
    sent = [filled(*box.shape, more=more) for more, box in enumerate(boxes)]
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.irecv, box, peer) for box in boxes]
        + [dist.P2POp(dist.isend, x, peer) for x in sent])
    kept = [tensor.zero_() for tensor in sent if staged]  # what was sent is copied by now
    is_untouched = [not box.any().item() for box in boxes[:2]] if staged else [True, True]
    for work in reversed(works):
        work.wait()
    return [*boxes, whole, is_untouched]

def from_any():
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

def leaf():
    "A tensor that autograd knows is written to as a backend writes."
    box = torch.zeros(3, requires_grad=True)
    both(lambda: dist.send(torch.nn.Parameter(filled(3)), peer), lambda: dist.recv(box, peer))
    return [box.detach(), box.is_leaf, box._version, box.grad_fn is None]

def coalesced():
    one, many = filled(3), filled(2, 2, more=1)
    with c10d._coalescing_manager(pair):
        dist.all_reduce(one, group=pair)
        dist.all_reduce(many, group=pair)
    parts = [torch.zeros(6), torch.zeros(4)]
    with c10d._coalescing_manager(pair, async_ops=True) as calls:
        for part in parts:
            dist.all_gather_into_tensor(part, filled(part.numel() // 2), group=pair)
    calls.wait()
    lists = [[torch.zeros(2), torch.zeros(1)] for _ in range(2)]
    largest = [filled(4), filled(1, 5)]
    futures = [dist.all_gather_coalesced(lists, [filled(2), filled(1)], pair, async_op=True),
               dist.all_reduce_coalesced(largest, dist.ReduceOp.MAX, pair, async_op=True)]
    values = [future.wait() for future in futures]
    return [one, many, *parts, *lists[0], *lists[1], *largest,
            [part.tolist() for part in values[0][1]], values[1][1].tolist()]

def refused():
    "torch's own words for what Gloo does not send."
    return [refusal(lambda: dist.send(torch.ones(shape)[where], peer), RuntimeError, ValueError)
            for shape, where in (((4, 4), (slice(None), 0)), ((6,), slice(None, None, 2)))]

def shown(values):
    return [[str(v.dtype), v.shape, str((v if v.is_complex() else v.double()).tolist())]
            if isinstance(v, torch.Tensor) else v for v in values]

def recorded():
    box = layout.read(call_log.snapshot()[1])
    return [[c.op, c.detail, c.peer, c.state, str(c.place)] for c in box.calls]

results, logs = {}, []
for is_forced in (False, True):
    before = len(recorded())
    for call in (blocking, at_once, from_any, leaf, coalesced, refused):
        found = shown(forced(call) if is_forced else call())
        results.setdefault(call.__name__, []).append(found)
    logs.append(recorded()[before:])
    assert is_forced == bool(staged)
done(results=results, logs=logs, staged=len(staged), left=len(host_staging._arrivals))
"""
)


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Of two ranks: results and black boxes of the same calls, direct and staged."""
    return run_ranks(tmp_path_factory.mktemp("ranks"), 2, CALLS)


def test_staged_calls_give_what_direct_ones_give(calls: list[dict[str, Any]]) -> None:
    """To the last bit: all dtypes, mixed shapes, any source, leaves, coalesced ones, refusals."""
    for rank, end in enumerate(calls):
        assert end["staged"] > 20
        assert end["left"] == 0
        for name, (direct, staged) in end["results"].items():
            assert staged == direct, name
        sent = (torch.arange(12) * 3 + 7 * (1 - rank)) % 5
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


ABORTED = (
    STAGING
    + """
old = torch.full((3,), 7.0)
waits = {
    "recv": lambda: dist.recv(old, 1),
    "irecv": lambda: dist.irecv(old, 1, tag=3).wait(),
    "any": lambda: dist.recv(old),
    "pipelined": lambda: [work.wait() for work in dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, old, 1), dist.P2POp(dist.irecv, old, 1)])],
}
errors, right = {}, []
for generation, (kind, wait) in enumerate(waits.items(), 1):
    if rank == 0:
        errors[kind] = broken_off(lambda: forced(wait))[0]
        say(f"out{generation}")
    else:
        wait_for(f"out{generation}", [0])
    process_groups.recover(generation)
    fresh = torch.full((3,), float(rank))
    forced(lambda: dist.send(fresh, 0) if rank == 1 else dist.recv(fresh, 1))
    right.append([total(), fresh.tolist()])

def press():
    wait_asleep()
    signal.raise_signal(signal.SIGINT)
    say("pressed")
first, second = torch.zeros(3), torch.zeros(3)
if rank == 1:
    wait_for("pressed", [0])
    for value in (1.0, 2.0):
        dist.send(torch.full((3,), value), 0)
else:
    threading.Thread(target=press).start()
    try:
        forced(lambda: dist.recv(first, 1))
    except KeyboardInterrupt:
        errors["pressed"] = "KeyboardInterrupt"
    forced(lambda: dist.recv(second, 1))
done(errors=errors, right=right, old=old.tolist(), pressed=[first.tolist(), second.tolist()])
"""
)


@pytest.mark.skipif(not Path("/proc/self/fdinfo").is_dir(), reason="needs /proc")
def test_a_staged_receive_is_aborted_and_the_next_one_is_right(tmp_path: Path) -> None:
    """Its tensor stays as it was; an interrupt takes no message away."""
    zero, second = run_ranks(tmp_path, 2, ABORTED)

    kinds = ("recv", "irecv", "any", "pipelined")
    assert [zero["errors"][kind] for kind in kinds] == ["RuntimeError"] * 4
    assert zero["right"] == second["right"] == [[3.0, [1.0] * 3]] * 4
    assert zero["old"] == [7.0] * 3
    assert zero["errors"]["pressed"] == "KeyboardInterrupt"
    assert zero["pressed"] == [[1.0] * 3, [2.0] * 3]


FUNCTIONAL = (
    STAGING
    + """
import torch.distributed._functional_collectives as functional
mesh = init_device_mesh("cpu", (2,))
world = dist.group.WORLD

def values(*shape, dtype=torch.float32):
    count = torch.Size(shape).numel()
    return (torch.arange(count) * 3 + 7 * rank).to(dtype).reshape(shape)

def made():
    gathered = [
        functional.all_gather_tensor(values(*shape, dtype=dtype), 0, world)
        for shape, dtype in [((3, 4), torch.float32), ((2,), torch.bfloat16), ((1,), torch.int64),
                             ((2, 3), torch.complex64), ((0, 2), torch.float32)]
    ]
    turned = functional.all_gather_tensor(values(4, 2).t().contiguous(), 1, world)
    together = functional.all_gather_into_tensor_coalesced([values(2, 2), values(3)], world)
    sums = functional.all_reduce_coalesced([values(2, 2), values(3)], "avg", world)
    largest = functional.all_reduce_coalesced([values(5)], "max", world)
    whole = distribute_tensor(torch.arange(12.0).view(4, 3), mesh, [Shard(0)])
    uneven = distribute_tensor(torch.arange(15.0).view(5, 3), mesh, [Shard(0)])
    trained = torch.nn.Parameter(whole)
    trained.full_tensor().square().sum().backward()
    columns = whole.redistribute(placements=[Shard(1)]).to_local()
    results = [*gathered, turned, *together, *sums, *largest,
               whole.full_tensor(), uneven.full_tensor(), trained.grad.full_tensor(), columns]
    return [[str(x.dtype), list(x.shape), str(x.tolist())] for x in results]

direct = made()
gathers, gather = [], host_staging._gather
host_staging._gather = lambda *args: gathers.append(args) or gather(*args)
host_staging.replace_functional_collectives("CPU")
again = made()
done(direct=direct, again=again, gathers=len(gathers))
"""
)


def test_functional_collectives_give_what_torchs_own_give(tmp_path: Path) -> None:
    """One tensor at a time: all dtypes, DTensors and their gradients, to the last bit."""
    for end in run_ranks(tmp_path, 2, FUNCTIONAL):
        assert end["again"] == end["direct"]
        assert end["gathers"] >= 10
        assert end["direct"][0][1] == [6, 4]


RING = """
from nbdist.parallel.cp import attention
from nbdist.parallel.cp.kernels import Problem
from tests.programs.sequences import Model, apart

def attended(causal):
    generator = torch.Generator().manual_seed(rank)
    pieces = [torch.randn(2, 4, 16, 8, generator=generator).requires_grad_() for _ in range(3)]
    out = attention.CONTEXTS["ring"](Problem(*pieces, causal, 8 ** -0.5), dist.group.WORLD)
    out.square().sum().backward()
    return [out.tolist(), *(piece.grad.tolist() for piece in pieces)]

def train_all():
    return [attended(True), attended(False), apart(Model)]
"""
PIPELINE = """
from nbdist.parallel.pp import tied_gradients
from tests.programs.parity import compare, make

def tied():
    "A sum over two of three stages."
    torch.manual_seed(rank)
    parameter = torch.nn.Parameter(torch.zeros(5))
    share = tied_gradients.GradientShare(parameter, frozenset({0, 2}), torch.randn(5))
    tied_gradients.all_reduce_tied([share] if rank != 1 else [], dist.group.WORLD)
    return share.gradient.tolist()

def train_all():
    untied = lambda: make(depth=6, is_tied=False)
    return [tied(), compare("pp"), compare("pp", schedule="interleaved", build=untied)]
"""
TWICE = """
direct = train_all()
again = forced(train_all)
done(is_same=again == direct, staged=len(staged), direct=str(direct))
"""


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(RING, id="ring", marks=pytest.mark.parity),
        pytest.param(PIPELINE, id="pipeline"),
    ],
)
def test_strategies_that_send_train_alike(tmp_path: Path, text: str) -> None:
    """The same losses, gradients and parameters to the last bit, on three ranks."""
    for end in run_ranks(tmp_path, 3, textwrap.dedent(text) + STAGING + TWICE):
        assert end["is_same"]
        assert end["staged"] > 20
        assert "nan" not in end["direct"]
