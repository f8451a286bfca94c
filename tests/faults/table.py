"""Every fault that happens in a cell, as a table: hangs, interrupts and deaths."""

from typing import Any

from tests.faults.fault import Fault
from tests.support.faults import DEATH_TOLD_S, LATE_TOLD_S

_MISSING = "if rank != 1:\n    go()\n    {}"
_ALONE = "if rank == 0:\n    go()\n    {}"
_P2P, _IN_RECV = "point to point", "{waiting} in recv(float32[3]"
_LOOP = "go()\nwhile True:\n    {}"
_COLLECTIVES = "go()\nwhile True:\n    dist.all_reduce(x)"
_TRAIN = """go()
while True:
    for batch in DataLoader(range(64), batch_size=8, num_workers=1):
        other(batch.float()[:, None].expand(-1, 4)).mean().backward()
        other.zero_grad()"""
_STUCK = """class Stuck(Dataset):
    def __len__(self): return 8
    def __getitem__(self, i): time.sleep(3600 if rank == 1 else 0); return i
for batch in DataLoader(Stuck(), batch_size=4, num_workers=1):
    go()
    dist.all_reduce(x)
"""


def _missing(  # a fault has many fields
    name: str,
    kind: str,
    source: str,
    line: str = "{waiting} in",
    *,
    before: str = "",
    blamed: str = "rank 1",
    **fields: Any,
) -> Fault:
    """Every rank but rank 1 runs a line that waits for it; rank 0 alone where only that waits."""
    code = before + (_ALONE if "waiting" in fields else _MISSING).format(source)
    return Fault(name, kind, code, (line, "{place}", blamed), source, **fields)


_ZERO: dict[str, Any] = {"waiting": (0,), "unnamed": (2, 3)}
HANGS = (
    _missing(
        "missing call",
        "collective",
        "dist.all_reduce(x)",
        "{waiting} in all_reduce(float32[3])",
        is_short=True,
    ),
    Fault(
        "wrong order",
        "collective",
        "go()\nif rank == 1:\n    dist.broadcast(x, src=0)\nelse:\n    dist.all_reduce(x)",
        on_stderr=("wait", "all_reduce(float32[3]", "broadcast(float32[3]", "rank 1"),
        is_short=True,
    ),
    _missing("barrier", "collective", "dist.barrier()", "{waiting} in barrier"),
    _missing(
        "all_gather_object",
        "collective",
        "dist.all_gather_object([None] * world_size, rank)",
        "{waiting} in all_gather_object",
    ),
    Fault(
        "async wait",
        "collective",
        "if rank != 1:\n    work = dist.all_reduce(x, async_op=True)\n    go()\n    work.wait()",
        on_stderr=("{waiting} in all_reduce(float32[3])", "rank 1"),
    ),
    _missing(
        "hang in a subgroup", "group", "dist.all_reduce(x, group=pair)", is_short=True, **_ZERO
    ),
    _missing(
        "new_group on one rank only",
        "group",
        "dist.new_group(list(range(world_size)))",
        "{waiting} in new_group",
    ),
    _missing(
        "send without recv",
        _P2P,
        "dist.send(x, 1)",
        "{waiting} in send(float32[3]",
        is_short=True,
        **_ZERO,
    ),
    _missing("recv without send", _P2P, "dist.recv(x, 1)", _IN_RECV, **_ZERO),
    _missing(
        "recv from any rank",
        _P2P,
        "dist.recv(x)",
        _IN_RECV,
        blamed="rank",
        waiting=(0,),
    ),
    _missing(
        "backward on one rank, DDP",
        "model",
        "loss.backward()",
        before="loss = ddp(data).sum()\n",
        said="gradients of ddp were cleared",
        is_short=True,
    ),
    _missing("forward on one rank, FSDP2", "model", "sharded(data)"),
    _missing(
        "backward on one rank, FSDP2",
        "model",
        "loss.backward()",
        before="loss = sharded(data).sum()\n",
    ),
    _missing("accelerator.prepare", "model", "accelerator.prepare(nn.Linear(4, 4))"),
    Fault(
        "a rank raises while others wait",
        "error",
        "if rank == 1:\n    raise ValueError('boom')\ngo()\ndist.all_reduce(x)",
        source="dist.all_reduce(x)",
        ename="DistributedError",
        error=("rank 1 raised ValueError: boom", "variables kept"),
        is_short=True,
    ),
)


def _pressed(name: str, code: str, *on_stderr: str, act: str = "press", **fields: Any) -> Fault:
    """What is told of at all before the press is only late; the error is as that of a hang."""
    expected: dict[str, Any] = {"ename": "KeyboardInterrupt", "promise_s": LATE_TOLD_S}
    return Fault(name, "interrupt", code, on_stderr, act=act, **expected, **fields)


_HANG = _MISSING.format("dist.all_reduce(x)")
INTERRUPTS = (
    _pressed("interrupt in sleep", "go()\ntime.sleep(3600)"),
    _pressed("interrupt in a loop", _LOOP.format("pass")),
    _pressed("interrupt in matmul", f"big = torch.ones(2000, 2000)\n{_LOOP.format('big @ big')}"),
    _pressed("interrupt in a collective", _HANG, is_short=True),
    _pressed("interrupt between collectives", _COLLECTIVES),
    # torch itself leaks a worker when the press comes as it forks one: not for every run.
    _pressed("interrupt in a DataLoader loop", _TRAIN),
    _pressed("interrupt twice", _HANG, act="press twice"),
    _pressed("interrupt during a recovery", _HANG, act="press on", is_short=True),
    _pressed("DataLoader worker stuck", _STUCK, "{waiting} in all_reduce"),
)


def _death(name: str, code: str, how: str, **fields: Any) -> Fault:
    expected: dict[str, Any] = dict.fromkeys(("on_stderr", "error"), (f"rank 1 ended ({how}",))
    expected |= {"ename": "DistributedError", "dead": (1,), "promise_s": DEATH_TOLD_S}
    return Fault(name, "death", code, **expected, **fields)


_BUSY = "go()\nuntil_end()"
# Nothing is on its way between ranks when rank 1 ends: Gloo frees nobody from half a message
# (docs/limits.md has how often a random moment meets one).
_WAITED_FOR = "go()\nif rank == 1:\n    until_end()\ndist.all_reduce(x)"
_WAITS = "go()\nif rank != 1:\n    until_end()\ndist.all_reduce(x)"
_EXITS = "if rank == 1:\n    threading.Timer(0.5, os._exit, (3,)).start()\n"
DEATHS = (
    _death("SIGKILL mid-cell", _BUSY, "signal SIGKILL", act="SIGKILL"),
    _death("SIGSEGV mid-cell", _BUSY, "signal SIGSEGV", act="SIGSEGV"),
    _death("os._exit mid-cell", "go()\nif rank == 1: os._exit(3)\nuntil_end()", "exit code 3",
           act="nothing"),
    _death("SIGKILL while others wait", _WAITED_FOR, "signal SIGKILL", act="SIGKILL"),
    _death("SIGKILL in a collective", _WAITS, "signal SIGKILL", act="SIGKILL", is_short=True),
    _death("SIGSEGV in a collective", _WAITS, "signal SIGSEGV", act="SIGSEGV"),
    _death("os._exit in a collective", _EXITS + _WAITS, "exit code 3", act="nothing"),
)  # fmt: skip

FAULTS = (*HANGS, *INTERRUPTS, *DEATHS)

# Of ranks whose device works off a queue, as GPUs do (tests/support/queued_device.py).
# A call returns at once; it is this line that waits, in C and on a core.
_WAIT = "x.sum().item()"
_AND_WAIT = "if rank != 1:\n    go()\n    {}\n    {}"
_REDUCE = "dist.all_reduce(x)"
_QUEUED_HANG = _AND_WAIT.format(_REDUCE, _WAIT)
_GRADIENT = "ddp.module.weight.grad.sum().item()"


def _queued(name: str, source: str, wait: str = _WAIT, line: str = "", **fields: Any) -> Fault:
    code = _AND_WAIT.format(source, wait)
    if fields.get("waiting") == (0,):
        code = code.replace("rank != 1", "rank == 0")
    on_stderr = (line or "{waiting} in all_reduce(float32[3])", "{place}", "rank 1")
    fields = {"on_stderr": on_stderr, "source": source} | fields
    return Fault(f"queued, {name}", "queued", code, **fields)


QUEUED = (
    _queued("missing call", _REDUCE, is_short=True),
    _queued("the oldest call of several", _REDUCE, f"dist.broadcast(x, 0)\n    {_WAIT}"),
    _queued("synchronize", _REDUCE, "torch.cuda.synchronize()"),
    _queued("copy to the host", _REDUCE, "host = x.cpu()"),
    _queued("print", _REDUCE, "print(x)"),
    _queued("nobody waits before the cell's end", _REDUCE, "pass", is_short=True),
    _queued("async wait", "dist.all_reduce(x, async_op=True).wait()"),
    Fault(
        "queued, wrong order",
        "queued",
        f"go()\nif rank == 1:\n    dist.broadcast(x, src=0)\nelse:\n    {_REDUCE}\n{_WAIT}",
        ("wait", "all_reduce(float32[3]", "broadcast(float32[3]", "rank 1"),
    ),
    _queued("hang in a subgroup", "dist.all_reduce(x, group=pair)", **_ZERO),
    _queued("send without recv", "dist.send(x, 1)", line="{waiting} in send(float32[3]", **_ZERO),
    _queued("recv without send", "dist.recv(x, 1)", line="{waiting} in recv(float32[3]", **_ZERO),
    Fault(
        "queued, backward on one rank, DDP",
        "queued",
        "loss = ddp(data).sum()\n" + _AND_WAIT.format("loss.backward()", _GRADIENT),
        ("{waiting} in all_reduce(float32[16]) inside", "{place}", "rank 1"),
        _GRADIENT,
        said="gradients of ddp were cleared",
    ),
    Fault(
        "queued, a rank raises while others wait",
        "queued",
        f"if rank == 1:\n    raise ValueError('boom')\ngo()\n{_REDUCE}\n{_WAIT}",
        source=_REDUCE,
        ename="DistributedError",
        error=("rank 1 raised ValueError: boom", "variables kept"),
    ),
    _pressed("queued, interrupt in a wait", _QUEUED_HANG, is_short=True),
    _pressed("queued, interrupt at the cell's end", _AND_WAIT.format(_REDUCE, "pass")),
    _pressed("queued, interrupt during a recovery", _QUEUED_HANG, act="press on"),
)
_QUEUED_LOOP = f"go()\nwhile True:\n    {_REDUCE}\n    {_WAIT}"
QUEUED_DEATHS = (
    _death("queued, SIGKILL in a wait", _QUEUED_LOOP, "signal SIGKILL", act="SIGKILL"),
    _death("queued, os._exit in a wait", _EXITS + _QUEUED_LOOP, "exit code 3"),
)
