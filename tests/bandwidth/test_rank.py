"""Measuring on two real ranks: results are checked, wrong ones found, nothing stays."""

import gc
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from nbdist.bandwidth import rank as bandwidth_rank
from nbdist.bandwidth.rank import measure
from nbdist.bandwidth.results import LEAST_RUNS, OPS
from tests.programs.rank import everyone, n, rank, total
from tests.support.torch_ranks import on_ranks

LACKING = "the backend does not support this operation here"


def check_all() -> None:
    """Every operation is right at both sizes, and measured equally often on all ranks."""
    torch.set_default_dtype(torch.float64)  # a user's own choice changes nothing
    results = [measure(op, size, 0.05) for op in OPS for size in (8 * n, 3 * n * 2**20 + 4 * n)]
    torch.set_default_dtype(torch.float32)
    for result in results:
        assert (result.is_right, result.problem) == (True, ""), result
        assert len(result.times_s) >= LEAST_RUNS
        assert min(result.beside_s, *result.times_s) > 0
    # Or they would not have met.
    assert len(set(map(str, everyone([len(result.times_s) for result in results])))) == 1


def is_right(name: str, spoil: Callable[[torch.Tensor], object], op: str) -> bool:
    """Whether a result is right after a backend's function was tampered with."""
    real = getattr(dist, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        work = real(*args, **kwargs)
        if args[0].numel() > 1:  # single numbers are how the ranks agree
            spoil(args[0])
        return work

    with mock.patch.object(dist, name, call):
        return measure(op, 4096 * n, 0.0).is_right


def add_on_rank_1(x: torch.Tensor) -> None:
    x[-1] += rank


def swap(x: torch.Tensor) -> None:
    x.copy_(x.view(n, -1).flip(0).reshape(-1))


def problem(error: Exception) -> str:
    with mock.patch.object(dist, "all_gather_into_tensor", side_effect=error):
        try:
            return measure("all_gather", 4096, 0.0).problem
        except RuntimeError as raised:
            return f"raised {raised}"


@on_ranks(2)
def test_measuring_on_two_ranks() -> None:
    """Every operation is right at both sizes; a wrong value and a swapped part are found."""
    check_all()
    assert len(measure("all_reduce", 4096, 0.0).times_s) == LEAST_RUNS
    assert len(measure("all_reduce", 4096, 3600.0).times_s) > LEAST_RUNS
    # A value that rank 1 alone has wrong is right on rank 0; a swapped part is on neither.
    assert is_right("all_reduce", add_on_rank_1, "all_reduce") == (rank == 0)
    assert not is_right("all_gather_into_tensor", swap, "all_gather")
    assert not is_right("all_to_all_single", swap, "all_to_all")
    assert is_right("reduce_scatter_tensor", add_on_rank_1, "reduce_scatter") == (rank == 0)
    assert is_right("broadcast", add_on_rank_1, "broadcast") == (rank == 0)

    of_gloo = "Backend gloo does not support alltoall"
    assert problem(RuntimeError(f"{of_gloo}\nat line 3")) == f"{LACKING} ({of_gloo})"
    assert problem(NotImplementedError("")) == f"{LACKING} ()"
    closed = "Connection closed by peer"
    assert problem(RuntimeError(closed)) == f"raised {closed}"
    # Rank 1 alone has no memory: both say so, and go on.
    error = RuntimeError("DefaultCPUAllocator: can't allocate memory") if rank == 1 else None
    with mock.patch.object(torch, "empty", side_effect=error, wraps=torch.empty):
        full = measure("all_reduce", 4096, 0.0)
    assert full.problem == "a rank has not enough memory for the tensors"

    assert sum(x.nbytes for x in gc.get_objects() if isinstance(x, torch.Tensor)) < 2**20
    free = bandwidth_rank.begin()
    assert free["host"] > 0
    assert "device" not in free
    assert "torch._dynamo" in sys.modules
    assert total() == 3.0
