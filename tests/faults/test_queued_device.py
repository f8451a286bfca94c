"""The faults of ranks whose device works off a queue, as GPUs do, with NCCL's manners."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.faults.fault import Fault, cases, happen
from tests.faults.test_matrix import assert_error, assert_told
from tests.support.faults import ABORT_S, BACK_S, DEATH_TOLD_S, GRACE_S, LATE_TOLD_S, TOLD_S, Ranks

pytestmark = [pytest.mark.cluster, pytest.mark.engine]

# A call returns at once; it is this line that waits, in C and on a core.
_WAIT = "x.sum().item()"
_ELSE = "if rank != 1:\n    go()\n    {}\n    {}"
_REDUCE = "dist.all_reduce(x)"
_GRADIENT = "ddp.module.weight.grad.sum().item()"


def _hang(name: str, source: str, wait: str = _WAIT, line: str = "", **fields: Any) -> Fault:
    code = _ELSE.format(source, wait)
    if fields.get("waiting") == (0,):
        code = code.replace("rank != 1", "rank == 0")
    told = (line or "{waiting} in all_reduce(float32[3])", "{place}", "rank 1")
    fields = {"on_stderr": told, "source": source} | fields
    return Fault(f"queued, {name}", "queued", code, **fields)


_ZERO = {"waiting": (0,), "unnamed": (2, 3)}
_DEAD: dict[str, Any] = {
    "on_stderr": ("rank 1 ended (",),
    "ename": "DistributedError",
    "error": ("rank 1 ended (",),
    "dead": (1,),
    "promise_s": DEATH_TOLD_S,
}
_PRESSED = {"ename": "KeyboardInterrupt", "on_stderr": (), "promise_s": LATE_TOLD_S}
FAULTS = (
    _hang("missing call", _REDUCE, is_short=True),
    _hang("the oldest call of several", _REDUCE, f"dist.broadcast(x, 0)\n    {_WAIT}"),
    _hang("synchronize", _REDUCE, "torch.cuda.synchronize()"),
    _hang("copy to the host", _REDUCE, "host = x.cpu()"),
    _hang("print", _REDUCE, "print(x)"),
    _hang("nobody waits before the cell's end", _REDUCE, "pass", is_short=True),
    _hang("async wait", "dist.all_reduce(x, async_op=True).wait()"),
    Fault(
        "queued, wrong order",
        "queued",
        f"go()\nif rank == 1:\n    dist.broadcast(x, src=0)\nelse:\n    {_REDUCE}\n{_WAIT}",
        ("wait", "all_reduce(float32[3]", "broadcast(float32[3]", "rank 1"),
        is_short=True,
    ),
    _hang("hang in a subgroup", "dist.all_reduce(x, group=pair)", **_ZERO),
    _hang("send without recv", "dist.send(x, 1)", line="{waiting} in send(float32[3]", **_ZERO),
    _hang("recv without send", "dist.recv(x, 1)", line="{waiting} in recv(float32[3]", **_ZERO),
    Fault(
        "queued, backward on one rank, DDP",
        "queued",
        "loss = ddp(data).sum()\n" + _ELSE.format("loss.backward()", _GRADIENT),
        ("{waiting} in all_reduce(float32[16]) inside", "{place}", "rank 1"),
        _GRADIENT,
        said="gradients of ddp were cleared",
        is_short=True,
    ),
    Fault(
        "queued, a rank raises while others wait",
        "queued",
        f"if rank == 1:\n    raise ValueError('boom')\ngo()\n{_REDUCE}\n{_WAIT}",
        source=_REDUCE,
        ename="DistributedError",
        error=("rank 1 raised ValueError: boom", "variables kept"),
    ),
    _hang("interrupt in a wait", _REDUCE, act="press", is_short=True, **_PRESSED),
    _hang("interrupt at the cell's end", _REDUCE, "pass", act="press", **_PRESSED),
    _hang("interrupt during a recovery", _REDUCE, act="press on", **_PRESSED),
)


def _cases() -> Iterator[object]:
    for n in (2, 4):
        for fault in FAULTS:
            marks = () if fault.is_short and n == 2 else (pytest.mark.faults,)
            yield pytest.param(n, fault, id=f"{n}-{fault.name}", marks=marks)


@pytest.mark.parametrize(("n", "fault"), list(_cases()))
def test_a_fault(n: int, fault: Fault, queued_ranks: Ranks) -> None:
    """As on Gloo: it is told once, in time, aborted, and ranks and models go on."""
    outcome = happen(queued_ranks, fault)

    assert outcome.cell.status == "error"
    assert_told(queued_ranks, fault, outcome)
    assert_error(fault, outcome)
    allowed_s = BACK_S if fault.act.startswith("press") else TOLD_S + GRACE_S + ABORT_S
    assert outcome.back_s < allowed_s + queued_ranks.load_s
    queued_ranks.conclude(fault.name, fault.kind, outcome.told_s, outcome.back_s)


@pytest.mark.parametrize("n", [2])
def test_a_busy_device_is_no_hang(n: int, queued_ranks: Ranks) -> None:
    """Every rank waits long for work that all have called; one leaves a call that nobody awaits."""
    cell = queued_ranks.ok(
        "%%distributed\n"
        "queued_device.kernel(4.0)\ndist.all_reduce(total := torch.ones(1, device=device))\n"
        "print(total.item())\n"
        "work = dist.all_reduce(total, async_op=True)"
    )
    later = queued_ranks.ok("%%distributed\nwork.wait()\nprint(total.item())")

    assert (cell.text.strip(), cell.stderr) == (f"[0-1] {n}.0", "")
    assert later.text.strip() == f"[0-1] {n * n}.0"
    queued_ranks.conclude("queued, busy device", "queued", None, None)


@pytest.mark.parametrize("n", [2])
def test_a_device_that_has_failed_is_named(n: int, queued_ranks: Ranks) -> None:
    """Its rank cannot recover, and says so before anybody connects; the others keep everything."""
    broken = "the GPU of rank(s) 1 cannot be used any more by its process: CUDA error: device-side"
    cell = queued_ranks.kernel.run(
        f"%%distributed\nif rank == 1:\n    queued_device.device_assert()\n    {_WAIT}\n"
        f"{_REDUCE}\n{_WAIT}",
        60,
    )
    next_cell = queued_ranks.kernel.run("%%distributed\npass")

    assert cell.failure.ename == "DistributedError"
    assert "rank 1 raised DeviceError: CUDA error: device-side assert" in cell.failure.evalue
    for message in (cell.failure.evalue, next_cell.failure.evalue):
        assert broken in message
        assert "%dist_restart 1 replaces it; the other ranks keep theirs" in message
        assert "%dist_reset" not in message


_LOOP = f"go()\nwhile True:\n    {_REDUCE}\n    {_WAIT}"
_DEATHS = (
    Fault("queued, SIGKILL in a wait", "queued", _LOOP, act="SIGKILL", **_DEAD),
    Fault("queued, os._exit in a wait", "queued",
          "if rank == 1:\n    threading.Timer(0.5, os._exit, (3,)).start()\n" + _LOOP, **_DEAD),
)  # fmt: skip


@pytest.mark.parametrize(("n", "fault"), cases((), (2, 4), _DEATHS))
def test_a_death(n: int, fault: Fault, queued_ranks: Ranks) -> None:
    """It is told as on Gloo; who waits for the dead rank on a core is back, with its variables.

    No new rank takes its place here: a process that begins has no such device.
    """
    outcome = happen(queued_ranks, fault)

    assert_told(queued_ranks, fault, outcome)
    assert_error(fault, outcome)
    assert outcome.back_s < TOLD_S + GRACE_S + ABORT_S + queued_ranks.load_s
    survivors = [rank for rank in range(n) if rank not in fault.dead]
    assert queued_ranks.are_kept(survivors)
