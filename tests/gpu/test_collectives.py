"""Collectives and DDP: NCCL where each rank has a GPU of its own, Gloo where two share one."""

import pytest

from nbdist.notebook.session import Session
from tests.gpu.places import on

# Each collective with tensors on the rank's device, and the result that every rank must print.
# `one` is rank + 1, so with two ranks the sum is 3.
COLLECTIVES = {
    "all_reduce": ("x = one.clone(); dist.all_reduce(x); print(x.item())", "3.0"),
    "all_reduce max": (
        "x = one.clone(); dist.all_reduce(x, dist.ReduceOp.MAX); print(x.item())",
        "2.0",
    ),
    "broadcast": ("x = one.clone(); dist.broadcast(x, 1); print(x.item())", "2.0"),
    "reduce": ("x = one.clone(); dist.reduce(x, 0); print(x.item() if rank == 0 else 3.0)", "3.0"),
    "all_gather": (
        """xs = [torch.zeros_like(one) for _ in range(2)]; dist.all_gather(xs, one)
print([x.item() for x in xs])""",
        "[1.0, 2.0]",
    ),
    "all_gather_into_tensor": (
        "x = torch.zeros(2, device=device); dist.all_gather_into_tensor(x, one); print(x.tolist())",
        "[1.0, 2.0]",
    ),
    "gather": (
        """xs = [torch.zeros_like(one) for _ in range(2)] if rank == 0 else None
dist.gather(one, xs, 0); print([1.0, 2.0] if xs is None else [x.item() for x in xs])""",
        "[1.0, 2.0]",
    ),
    "scatter": (
        """x = torch.zeros_like(one); dist.scatter(x, [one, one * 2] if rank == 0 else None, 0)
print(x.item() == rank + 1)""",
        "True",
    ),
    "reduce_scatter_tensor": (
        """x = torch.zeros(1, device=device)
dist.reduce_scatter_tensor(x, torch.arange(2.0, device=device) * one)
print(x.item() == 3.0 * rank)""",
        "True",
    ),
    "all_to_all_single": (
        """x = torch.zeros(2, device=device)
dist.all_to_all_single(x, torch.arange(2.0, device=device) + 10 * rank)
print(x.tolist() == [float(rank), 10.0 + rank])""",
        "True",
    ),
    "all_gather_object": (
        "xs = [None, None]; dist.all_gather_object(xs, {'rank': rank}); print(xs)",
        "[{'rank': 0}, {'rank': 1}]",
    ),
    "send and recv": (
        """x = torch.zeros_like(one)
dist.send(one, 1) if rank == 0 else dist.recv(x, 0)
dist.recv(x, 1) if rank == 0 else dist.send(one, 0)
print(x.item() == 2.0 - rank, x.device == device)""",
        "True True",
    ),
    "batch_isend_irecv": (
        """xs = [torch.zeros(3, device=device), torch.zeros(2, 2, device=device).bfloat16()]
calls = [dist.P2POp(dist.irecv, x, 1 - rank) for x in xs]
calls += [dist.P2POp(dist.isend, torch.full_like(x, rank + 1), 1 - rank) for x in xs]
for work in dist.batch_isend_irecv(calls):
    work.wait()
print([(x == 2 - rank).all().item() for x in xs])""",
        "[True, True]",
    ),
    "coalesced": (
        """xs, ys = [one.clone(), one.repeat(3)], torch.zeros(2, device=device)
with dist.distributed_c10d._coalescing_manager():
    [dist.all_reduce(x) for x in xs]
with dist.distributed_c10d._coalescing_manager():
    dist.all_gather_into_tensor(ys, one)
print([x.tolist() for x in xs], ys.tolist())""",
        "[[3.0], [3.0, 3.0, 3.0]] [1.0, 2.0]",
    ),
    "functional": (
        """import torch.distributed._functional_collectives as functional
world, ones = dist.group.WORLD, one.repeat(2, 3)
whole = functional.all_gather_tensor(ones, 0, world)
parts = functional.all_gather_into_tensor_coalesced([one, ones], world)
sums = functional.all_reduce_coalesced([one, ones], "sum", world)
print(whole[:, 0].tolist(), parts[0].tolist(), [x.sum().item() for x in sums])""",
        "[1.0, 1.0, 2.0, 2.0] [1.0, 2.0] [3.0, 18.0]",
    ),
    "DTensor": (
        """from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.device_mesh import init_device_mesh
mesh = init_device_mesh(device.type, (2,))
rows = distribute_tensor(torch.arange(12.0, device=device).view(3, 4), mesh, [Shard(0)])
columns = rows.redistribute(placements=[Shard(1)]).to_local()
print(rows.full_tensor().sum().item(), list(columns.shape), columns.device == device)""",
        "66.0 [3, 2] True",
    ),
    "Accelerate's gather": (
        """padded = accelerator.pad_across_processes(one.repeat(rank + 1))
print(accelerator.gather(padded).tolist(), accelerator.state.backend == dist.get_backend())""",
        "[1.0, 0.0, 2.0, 2.0] True",
    ),
    "barrier": ("dist.barrier(); print('passed')", "passed"),
    "barrier on LOCAL_RANK": (
        """dist.barrier(device_ids=[local_rank]); accelerator.wait_for_everyone()
with accelerator.main_process_first():
    print('passed')""",
        "passed",
    ),
}

# Gradients of DDP over two halves of a batch against those of the whole batch, in double.
DDP = """
torch.manual_seed(0)
plain = torch.nn.Linear(8, 4).double().to(device)
torch.manual_seed(0)
model = torch.nn.Linear(8, 4).double()
torch.manual_seed(1)
batch = torch.randn(4 * world_size, 8).double().to(device)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
part = batch[4 * rank : 4 * (rank + 1)]
accelerator.backward(model(part).pow(2).mean())
plain(batch).pow(2).mean().backward()
gradient = accelerator.unwrap_model(model).weight.grad
print(torch.allclose(gradient, plain.weight.grad, atol=1e-12), gradient.device == device)
"""


@on("one")
def test_one_rank_on_its_own_gpu_uses_nccl(ranks: Session) -> None:
    """One rank and one GPU give NCCL, with a group for tensors on the CPU as well."""
    printed = _printed(
        ranks,
        "a, b = torch.ones(2, device=device), torch.ones(2)\n"
        "dist.all_reduce(a); dist.all_reduce(b); print(a.tolist(), b.tolist(), device)",
    )

    assert ranks.topology.backend == "nccl"
    assert ranks.topology.is_scaling
    assert printed == {"[1.0, 1.0] [1.0, 1.0] cuda:0"}


@on("shared")
def test_two_ranks_on_one_gpu_use_gloo(ranks: Session) -> None:
    """NCCL refuses two ranks on a GPU; Gloo takes them, and the table says no scaling numbers."""
    topology = ranks.topology

    assert topology.backend == "gloo"
    assert not topology.is_scaling
    assert {place.device for place in topology.ranks} == {"cuda:0"}


@on("own", "all")
def test_a_gpu_for_each_rank_uses_nccl(ranks: Session) -> None:
    """With a GPU for each rank NCCL is chosen, and every rank has its own."""
    topology = ranks.topology

    assert topology.backend == "nccl"
    assert len({place.device_uuid for place in topology.ranks}) == topology.world_size


@pytest.mark.parametrize("name", COLLECTIVES)
@on("cpu", "shared", "own")
def test_a_collective(ranks: Session, name: str) -> None:
    """The collective gives the right result with tensors on the rank's device."""
    code, expected = COLLECTIVES[name]

    printed = _printed(ranks, f"one = torch.tensor([rank + 1.0], device=device)\n{code}")

    assert printed == {expected}


@on("cpu", "shared", "one", "own", "all")
def test_ddp(ranks: Session) -> None:
    """DDP's gradients are those of the whole batch."""
    assert _printed(ranks, DDP) == {"True True"}


def _printed(session: Session, code: str) -> set[str]:
    return {result.text.strip() for result in session.run(code).ranks}
