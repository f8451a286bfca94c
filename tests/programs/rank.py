"""What programs of ranks share: their place, joining, and the ways to hang, wait and answer."""

from __future__ import annotations

import ctypes
import faulthandler
import json
import marshal
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nbdist.core import topology
from nbdist.engine import join as runtime
from nbdist.errors import NbdistError
from nbdist.hang.rank import common_store, gloo_abort

# Of the process that reads this; the test's own, which runs no program, has none.
rank, n = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
run_dir = Path(os.environ.get("TEST_RUN_DIR", "."))
is_new = "TEST_REJOIN" in os.environ
# The user's names, as a notebook has them.
user: Any = sys.modules["__main__"]
WAIT_S = 40.0


def run() -> None:
    """Be the file of a program as `__main__`, and end with what its function returns."""
    main = vars(sys.modules["__main__"])
    code, main["__file__"], name, arguments = pickle.loads((run_dir / "program").read_bytes())
    join()
    exec(marshal.loads(code), main)
    program = getattr(main[name], "__wrapped__", main[name])
    _end(program(**arguments) or {})


def join() -> None:
    """Join the other ranks as engines do."""
    faulthandler.dump_traceback_later(float(os.environ["TEST_LIMIT_S"]), exit=True)
    dist.set_debug_level_from_env()
    if "TEST_NETWORKS" in os.environ:
        with Path(os.environ["TEST_NETWORKS"].split()[rank]).open() as network:
            assert ctypes.CDLL(None).setns(network.fileno(), 0x40000000) == 0
    if is_new:
        generation, plan, made, *at = pickle.loads(Path(os.environ["TEST_REJOIN"]).read_bytes())
        runtime.rejoin(
            plan, rank, at[0] if at else (str(run_dir / "store"), "", 0), generation, made
        )
    elif "TEST_ADDRESS" in os.environ:
        join_over_a_port(os.environ["TEST_ADDRESS"])
    else:
        runtime.join_at_start(run_dir, json.loads((run_dir / "start.json").read_text()))


def join_over_a_port(address: str) -> None:
    plan = topology.plan(topology.local_reports(n, hostname="here", gpus=(), cores=2), "gloo")
    if rank == 0:
        say("port", str(common_store.open_store(address, n)).encode())
    runtime.join_by_plan(plan, rank, ("", address, int(wait_for("port", [0])[0])))


def _end(result: dict[str, Any]) -> None:
    """End this process with a result."""
    say("result", json.dumps(result).encode())
    sys.stdout.flush()
    os._exit(0)


def say(name: str, data: bytes = b"") -> None:
    """Tell the other ranks and the test, under a name."""
    (run_dir / f"{name}.{rank}.tmp").write_bytes(data)
    (run_dir / f"{name}.{rank}.tmp").rename(run_dir / f"{name}.{rank}")


def wait_for(name: str, ranks: Sequence[int] = range(n)) -> list[bytes]:
    """What ranks have said under a name."""
    paths = [run_dir / f"{name}.{other_rank}" for other_rank in ranks]
    until = time.monotonic() + WAIT_S
    while not all(path.exists() for path in paths):
        assert time.monotonic() < until, [path.name for path in paths if not path.exists()]
        time.sleep(0.005)
    return [path.read_bytes() for path in paths]


def everyone(value: Any) -> list[Any]:
    """What each rank gives, by rank. Collective."""
    values = [None] * n
    dist.all_gather_object(values, value)
    return values


def wait_asleep() -> None:
    """Until the main thread waits inside the system, without using the processor."""
    stat = Path(f"/proc/self/task/{os.getpid()}/stat")
    last, same = None, 0
    until = time.monotonic() + WAIT_S
    while same < 10:
        assert time.monotonic() < until
        fields = stat.read_text().rpartition(")")[2].split()
        now = (fields[0], fields[11], fields[12])
        same = same + 1 if now == last and fields[0] == "S" else 0
        last = now
        time.sleep(0.01)


def broken_off(call: Callable[[], Any], after: Callable[[], Any] = lambda: None) -> tuple[str, int]:
    """Run a call that waits in vain, abort it from a thread, and return its error's class."""
    count = []

    def watch() -> None:
        after()
        wait_asleep()
        count.append(gloo_abort.abort())

    thread = threading.Thread(target=watch)
    thread.start()
    name = ""
    try:
        call()
    except RuntimeError as error:
        name = type(error).__name__
    thread.join()
    return name, count[0]


def broken_off_on_0(call: Callable[[], Any], number: int = 1) -> tuple[str, int]:
    """Rank 0 makes the call of `broken_off` alone; the others wait until it is out."""
    if rank:
        wait_for(f"out{number}", [0])
        return "", 0
    end = broken_off(call)
    say(f"out{number}")
    return end


def is_interrupted(call: Callable[[], Any]) -> bool:
    """Whether a call ends by an interrupt that comes while it waits; all ranks learn `pressed`."""

    def press() -> None:
        wait_asleep()
        signal.raise_signal(signal.SIGINT)
        say("pressed")

    threading.Thread(target=press).start()
    try:
        call()
    except KeyboardInterrupt:
        return True
    return False


def refusal(call: Callable[[], Any], *kinds: type[BaseException]) -> str:
    """What the error says with which a call ends: one of nbdist's, or of these kinds."""
    try:
        call()
    except Exception as error:
        if not isinstance(error, kinds or NbdistError):
            raise
        return str(error)
    return ""


def counts() -> tuple[int, int]:
    """Open files and threads of this process."""
    fds, threads = (os.listdir(f"/proc/self/{what}") for what in ("fd", "task"))  # noqa: PTH208
    return len(fds), len(threads)


def total(group: dist.ProcessGroup | None = None) -> float:
    tensor = torch.tensor([rank + 1.0])
    dist.all_reduce(tensor, group=group)
    return tensor.item()
