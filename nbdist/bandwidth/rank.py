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
from nbdist.parallel.base.consensus import interrupts_held

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
        source: What it reads; `_of` says what stands there before.
        result: What it writes; the same tensor where it works in place.
        right: Place in `result` -> what has to stand there; None where it is left open.
    """

    run: Callable[[], object]
    source: torch.Tensor
    result: torch.Tensor
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
    device = torch.device(this_rank().place.device)
    try:
        return _time_runs(op, size_bytes // ITEM_BYTES, device, limit_s)
    except RuntimeError as error:
        message = str(error).strip().splitlines() or [""]
        if not isinstance(error, NotImplementedError) and not _LACKING.search(message[0]):
            raise
        return Timing(problem=f"the backend does not support this operation here ({message[0]})")
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()  # another rank may share the GPU


def _time_runs(op: str, count: int, device: torch.device, limit_s: float) -> Timing:
    began_s = time.perf_counter()
    case = None
    try:
        case = _case(op, count, device)
    except RuntimeError as error:  # torch's on the CPU has no class of its own
        if not isinstance(error, torch.OutOfMemoryError) and "allocate" not in str(error):
            raise
    if _largest(float(case is None), device) or case is None:
        return Timing(problem="a rank has not enough memory for the tensors")
    for block, places in _blocks(case.source):
        block.copy_(_of(dist.get_rank())(places))
    if case.result is not case.source:
        case.result.fill_(-1)
    case.run()  # makes connections as well
    _finish(device)
    right = case.right
    is_right = right is None or all(
        torch.equal(block, right(places)) for block, places in _blocks(case.result)
    )
    if case.source is case.result:
        case.source.zero_()  # sums of sums would grow without end
    beside_s = time.perf_counter() - began_s
    _time(case, device)
    turn_s = _largest(time.perf_counter() - began_s - beside_s, device)
    runs = max(LEAST_RUNS, min(MAX_RUNS, int(limit_s / turn_s)))
    return Timing(tuple(_time(case, device) for _ in range(runs)), beside_s, is_right)


def _time(case: _Case, device: torch.device) -> float:
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


def _largest(value: float, device: torch.device) -> float:
    """The largest of all ranks' values. Collective: every rank."""
    tensor = torch.tensor([value], dtype=torch.float64, device=device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return float(tensor.item())


def _blocks(tensor: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Parts of a tensor with the places of their elements: all at once would take much memory."""
    for begin in range(0, tensor.numel(), BLOCK):
        block = tensor[begin : begin + BLOCK]
        yield block, torch.arange(begin, begin + block.numel(), device=tensor.device)


def _of(rank: int) -> Values:
    """Function from places of a rank's tensor to the values there."""
    return lambda places: (places % PERIOD + rank).float()


def _sum(n: int, begin: int = 0) -> Values:
    """The sum of all ranks' values, from a place on."""
    return lambda places: ((places + begin) % PERIOD * n + n * (n - 1) // 2).float()


def _parts(part: int, begin: int = 0) -> Values:
    """A part of each rank, behind each other; from a place of theirs on."""
    return lambda places: ((places % part + begin) % PERIOD + places // part).float()


def _case(op: str, count: int, device: torch.device) -> _Case:
    n, rank = dist.get_world_size(), dist.get_rank()
    part, before, after = count // n, (rank - 1) % n, (rank + 1) % n

    def empty(length: int) -> torch.Tensor:
        return torch.empty(length, dtype=torch.float32, device=device)  # whatever the default is

    source = empty(part if op == "all_gather" else count)
    result = source
    if op not in {"all_reduce", "reduce", "broadcast"}:
        result = empty(part if op == "reduce_scatter" else count)

    def send_recv() -> None:
        """To the next rank, from the one before, at the same time."""
        calls = [dist.P2POp(dist.isend, source, after), dist.P2POp(dist.irecv, result, before)]
        for work in dist.batch_isend_irecv(calls):
            work.wait()

    cases: dict[str, tuple[Callable[[], object], Values | None]] = {
        "all_reduce": (lambda: dist.all_reduce(source), _sum(n)),
        "all_gather": (lambda: dist.all_gather_into_tensor(result, source), _parts(part)),
        "reduce_scatter": (
            lambda: dist.reduce_scatter_tensor(result, source), _sum(n, rank * part),
        ),
        "all_to_all": (lambda: dist.all_to_all_single(result, source), _parts(part, rank * part)),
        "broadcast": (lambda: dist.broadcast(source, 0), _of(0)),
        "reduce": (lambda: dist.reduce(source, 0), None if rank else _sum(n)),
        "send_recv": (send_recv, _of(before)),
    }  # fmt: skip
    run, right = cases[op]
    return _Case(run, source, result, right)


def begin() -> dict[str, int]:
    """Get ready for `measure`: bytes of memory that are free, of the host and of this rank's GPU.

    Other ranks may be on the same.
    """
    import psutil

    for module in lazy.MODULES:  # else they would be imported between the runs
        with interrupts_held():  # an import that is broken off leaves half a package
            import_module(module)
    free = {"host": min([int(psutil.virtual_memory().available), *procfs.below_limits("self")])}
    device = this_rank().place.device
    if device != "cpu":
        free["device"] = int(torch.cuda.mem_get_info(device)[0])
    return free
