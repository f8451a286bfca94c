"""Measures how long a collective takes: what `%dist_bench` calls on every rank."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module

import torch
import torch.distributed as dist

from nbdist.bandwidth.results import LEAST_RUNS, Timing
from nbdist.bandwidth.sizes import ITEM_BYTES
from nbdist.core import procfs
from nbdist.core.rank import this_rank
from nbdist.parallel.accelerator import lazy
from nbdist.parallel.consensus import interrupts_held

MAX_RUNS = 100
# Values repeat after a prime, so that parts of equal length differ; sums of them are exact.
PERIOD = 251
BLOCK = 1 << 20
# How torch says that a backend has no such operation. It does before anything is sent.
_LACKING = re.compile(r"not support|unsupported|not implemented|no backend", re.IGNORECASE)

Values = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class _Case:
    """One operation on tensors of one size.

    Attributes:
        run: Does it, to its end as far as the host waits for it.
        source: What it reads.
        result: What it writes; the same tensor where it works in place.
        values: Place in `source` -> what stands there before.
        right: Place in `result` -> what has to stand there; None where it is left open.
    """

    run: Callable[[], object]
    source: torch.Tensor
    result: torch.Tensor
    values: Values
    right: Values | None


def measure(op: str, size_bytes: int, limit_s: float) -> Timing:
    """Time one operation at one size, in the group of all ranks, after checking its result.

    Collective: every rank, with the same arguments. Ranks meet before each run, and a run ends on
    a rank when its result is there. Nothing of the tensors stays.

    Args:
        op: A name of bandwidth.results.OPS.
        size_bytes: A multiple of 4 bytes times the number of ranks.
        limit_s: How long all runs may take together; there are 3 of them at least.
    """
    place = this_rank().place
    device = torch.device(place.device)
    if problem := _refusal(op, device):
        return Timing(problem=problem)
    try:
        return _measured(op, size_bytes // ITEM_BYTES, device, limit_s)
    except RuntimeError as error:
        message = str(error).strip().splitlines() or [""]
        if not isinstance(error, NotImplementedError) and not _LACKING.search(message[0]):
            raise
        return Timing(problem=f"the backend does not support this operation here ({message[0]})")
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()  # another rank may share the GPU


def _refusal(op: str, device: torch.device) -> str:
    uses_nccl = this_rank().topology.backend == "nccl"
    if op == "send_recv" and device.type == "cuda" and not uses_nccl:
        return "Gloo sends no GPU's tensors from one rank to another"
    return ""


def _measured(op: str, count: int, device: torch.device, limit_s: float) -> Timing:
    began_s = time.perf_counter()
    case = _allocated(op, count, device)
    if not _all_agree(case is not None, device):
        return Timing(problem="a rank has not enough memory for the tensors")
    assert case is not None
    _fill(case)
    case.run()  # makes connections as well
    _finish(device)
    is_right = case.right is None or _has(case.result, case.right)
    if case.source is case.result:
        case.source.zero_()  # sums of sums would grow without end
    beside_s = time.perf_counter() - began_s
    _timed(case, device)
    turn_s = _largest(time.perf_counter() - began_s - beside_s, device)
    runs = max(LEAST_RUNS, min(MAX_RUNS, int(limit_s / turn_s)))
    return Timing(tuple(_timed(case, device) for _ in range(runs)), beside_s, is_right)


def _timed(case: _Case, device: torch.device) -> float:
    """Seconds that one run took on this rank. Collective: every rank."""
    dist.barrier()
    _finish(device)
    began_s = time.perf_counter()
    case.run()
    _finish(device)
    return time.perf_counter() - began_s


def _finish(device: torch.device) -> None:
    """Wait for what has been queued on the GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _all_agree(is_fine: bool, device: torch.device) -> bool:
    return _largest(0.0 if is_fine else 1.0, device) == 0


def _largest(value: float, device: torch.device) -> float:
    """The largest of all ranks' values. Collective: every rank."""
    tensor = torch.tensor([value], dtype=torch.float64, device=device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return float(tensor.item())


def _allocated(op: str, count: int, device: torch.device) -> _Case | None:
    """The operation with its tensors; None where there is no memory for them."""
    n, rank = dist.get_world_size(), dist.get_rank()

    def empty(length: int) -> torch.Tensor:
        return torch.empty(length, dtype=torch.float32, device=device)  # whatever the default is

    try:
        return _CASES[op](empty, count, n, rank)
    except RuntimeError as error:  # torch's on the CPU has no class of its own
        if isinstance(error, torch.OutOfMemoryError) or "allocate" in str(error):
            return None
        raise


def _fill(case: _Case) -> None:
    for block, places in _blocks(case.source):
        block.copy_(case.values(places))
    if case.result is not case.source:
        case.result.fill_(-1)


def _has(result: torch.Tensor, right: Values) -> bool:
    return all(torch.equal(block, right(places)) for block, places in _blocks(result))


def _blocks(tensor: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Parts of a tensor with the places of their elements: all at once would take much memory."""
    for begin in range(0, tensor.numel(), BLOCK):
        block = tensor[begin : begin + BLOCK]
        yield block, torch.arange(begin, begin + block.numel(), device=tensor.device)


def _of(rank: int) -> Values:
    """What a rank has at each place of its tensor."""
    return lambda places: (places % PERIOD + rank).float()


def _sum(n: int, begin: int = 0) -> Values:
    """The sum of all ranks' values, from a place on."""
    return lambda places: ((places + begin) % PERIOD * n + n * (n - 1) // 2).float()


Empty = Callable[[int], torch.Tensor]


def _all_reduce(empty: Empty, count: int, n: int, rank: int) -> _Case:
    x = empty(count)
    return _Case(lambda: dist.all_reduce(x), x, x, _of(rank), _sum(n))


def _reduce(empty: Empty, count: int, n: int, rank: int) -> _Case:
    x = empty(count)
    right = None if rank else _sum(n)
    return _Case(lambda: dist.reduce(x, 0), x, x, _of(rank), right)


def _broadcast(empty: Empty, count: int, _n: int, rank: int) -> _Case:
    x = empty(count)
    return _Case(lambda: dist.broadcast(x, 0), x, x, _of(rank), _of(0))


def _all_gather(empty: Empty, count: int, n: int, rank: int) -> _Case:
    part = count // n
    source, result = empty(part), empty(count)

    def right(places: torch.Tensor) -> torch.Tensor:
        return (places % part % PERIOD + places // part).float()

    def run() -> object:
        return dist.all_gather_into_tensor(result, source)

    return _Case(run, source, result, _of(rank), right)


def _reduce_scatter(empty: Empty, count: int, n: int, rank: int) -> _Case:
    part = count // n
    source, result = empty(count), empty(part)

    def run() -> object:
        return dist.reduce_scatter_tensor(result, source)

    return _Case(run, source, result, _of(rank), _sum(n, rank * part))


def _all_to_all(empty: Empty, count: int, n: int, rank: int) -> _Case:
    part = count // n
    source, result = empty(count), empty(count)

    def right(places: torch.Tensor) -> torch.Tensor:
        return ((places % part + rank * part) % PERIOD + places // part).float()

    def run() -> object:
        return dist.all_to_all_single(result, source)

    return _Case(run, source, result, _of(rank), right)


def _send_recv(empty: Empty, count: int, n: int, rank: int) -> _Case:
    """To the next rank, from the one before, at the same time."""
    source, result = empty(count), empty(count)
    before, after = (rank - 1) % n, (rank + 1) % n

    def run() -> None:
        calls = [dist.P2POp(dist.isend, source, after), dist.P2POp(dist.irecv, result, before)]
        for work in dist.batch_isend_irecv(calls):
            work.wait()

    return _Case(run, source, result, _of(rank), _of(before))


_CASES: dict[str, Callable[[Empty, int, int, int], _Case]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "reduce": _reduce,
    "send_recv": _send_recv,
}


def begin() -> dict[str, int]:
    """Get ready for `measure`: bytes of memory that are free, of the host and of this rank's GPU.

    Other ranks may be on the same.
    """
    import psutil

    for module in lazy.MODULES:  # else they would be imported between the runs
        with interrupts_held():  # an import that is broken off leaves half a package
            import_module(module)
    free = {"host": min(int(psutil.virtual_memory().available), *_below_limits())}
    device = this_rank().place.device
    if device != "cpu":
        free["device"] = int(torch.cuda.mem_get_info(device)[0])
    return free


def _below_limits() -> list[int]:
    """How far this process's control groups are below their limits (a container has such)."""
    free = [1 << 62]
    for group in procfs.memory_groups("self"):
        limit, used = group.limit_bytes(), group.used_bytes()
        if limit is not None and used is not None:
            free.append(max(0, limit - used))
    return free
