"""Plain processes that are ranks: they join over a file as engines do, and run a given text.

They are forks of a process that has imported torch, which costs a rank two seconds or more.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

import pytest

from tests.support.forks import Forked, ForkServer
from tests.support.kernel import notebook_env

# Asked without an import of it, which takes seconds in each process that collects tests.
NEEDS_PEFT = pytest.mark.skipif(find_spec("peft") is None, reason="needs PEFT")

# Ranks end by themselves after LIMIT_S, with all threads' stacks; the test waits a little longer.
LIMIT_S = 200.0
MORE_S = 10.0
POLL_S = 0.01
# What forks have imported: most texts need it, torch imports torch._dynamo for DDP, and models of
# libraries cost each rank half as much as torch.
_OF_LIBRARIES = (
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "peft",
)
IMPORTED = (
    "nbdist.parallel.accelerator.accelerator",
    "nbdist.parallel.reshard.sync_model",
    "nbdist.switch.rank.switch",
    "nbdist.verification.rank.verify",
    "torch._dynamo",
    *(name for name in _OF_LIBRARIES if find_spec(name.partition(".")[0])),
)
ENV = {"GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}

# What every text finds: its place, the modules, and the ways to hang, wait and answer.
PRELUDE = """
import ctypes, faulthandler, json, os, pickle, signal, socket, sys, threading, time
from pathlib import Path
faulthandler.dump_traceback_later(float(os.environ["TEST_LIMIT_S"]), exit=True)
rank, n = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
run_dir = Path(os.environ["TEST_RUN_DIR"])
import torch, torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
dist.set_debug_level_from_env()
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel as DDP
from nbdist.hang.recovery import merge_groups
from nbdist.engine import join as runtime
from nbdist.core import topology
from nbdist.hang.rank import common_store, gloo_abort, process_groups, reset_models
from nbdist.parallel import live_models
from nbdist.parallel.reshard import sync_model as sync
from nbdist.core.rank import this_rank
from nbdist.errors import NbdistError

def done(**result):
    (run_dir / f"result.{rank}.tmp").write_text(json.dumps(result))
    os.rename(run_dir / f"result.{rank}.tmp", run_dir / f"result.{rank}")
    sys.stdout.flush()
    os._exit(0)

def say(name, data=b""):
    (run_dir / f"{name}.{rank}.tmp").write_bytes(data)
    os.rename(run_dir / f"{name}.{rank}.tmp", run_dir / f"{name}.{rank}")

def wait_for(name, ranks=range(n)):
    paths = [run_dir / f"{name}.{other_rank}" for other_rank in ranks]
    until = time.monotonic() + 40
    while not all(path.exists() for path in paths):
        assert time.monotonic() < until, [path.name for path in paths if not path.exists()]
        time.sleep(0.005)
    return [path.read_bytes() for path in paths]

def wait_asleep():
    "Until the main thread waits inside the system, without using the processor."
    stat = Path(f"/proc/self/task/{os.getpid()}/stat")
    last, same = None, 0
    until = time.monotonic() + 40
    while same < 10:
        assert time.monotonic() < until
        fields = stat.read_text().rpartition(")")[2].split()
        now = (fields[0], fields[11], fields[12])
        same = same + 1 if now == last and fields[0] == "S" else 0
        last = now
        time.sleep(0.01)

def broken_off(call, after=lambda: None):
    "Run a call that waits in vain, abort it from a thread, and return its error's class."
    count = []
    def watch():
        after()
        wait_asleep()
        count.append(gloo_abort.abort())
    thread = threading.Thread(target=watch)
    thread.start()
    try:
        call()
    except RuntimeError as error:
        thread.join()
        return type(error).__name__, count[0]
    thread.join()
    return "", count[0]

def refusal(call, *kinds):
    "What the error says with which a call ends: one of nbdist's, or of these kinds."
    try:
        call()
    except kinds or NbdistError as error:
        return str(error)
    return ""

def counts():
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

def total(group=None):
    tensor = torch.tensor([rank + 1.0])
    dist.all_reduce(tensor, group=group)
    return tensor.item()

def join_over_a_port(address):
    plan = topology.plan(topology.local_reports(n, hostname="here", gpus=(), cores=2), "gloo")
    if rank == 0:
        say("port", str(common_store.open_store(address, n)).encode())
    runtime.join_by_plan(plan, rank, ("", address, int(wait_for("port", [0])[0])))

if "TEST_NETWORKS" in os.environ:
    with open(os.environ["TEST_NETWORKS"].split()[rank]) as network:
        assert ctypes.CDLL(None).setns(network.fileno(), 0x40000000) == 0
is_new = "TEST_REJOIN" in os.environ
if is_new:
    generation, plan, made, *at = pickle.loads(Path(os.environ["TEST_REJOIN"]).read_bytes())
    at = at[0] if at else (str(run_dir / "store"), "", 0)
    runtime.rejoin(plan, rank, at, generation, made)
elif "TEST_ADDRESS" in os.environ:
    join_over_a_port(os.environ["TEST_ADDRESS"])
else:
    runtime.join_at_start(run_dir, json.loads((run_dir / "start.json").read_text()))
"""


class TorchRanks:
    """Ranks 0 to n-1, each running the same text after `PRELUDE`. A context manager.

    The text calls `done(key=value, ...)` at its end, `limit_s` after its start at the latest. They
    join over a file; with TEST_ADDRESS over a port there. TEST_NETWORKS has a network namespace
    for each, as a file below /proc.
    """

    def __init__(
        self,
        folder: Path,
        size: int,
        text: str,
        limit_s: float = LIMIT_S,
        *,
        is_new: bool = False,
        **env: str,
    ) -> None:
        """Start the ranks.

        Args:
            folder: For their files.
            size: How many.
            text: What each runs.
            limit_s: After which they end by themselves.
            is_new: Processes that have imported nothing. So too where an environment variable of
                torch's is given, which may be read by the import; TORCH_DISTRIBUTED_DEBUG can be
                read again.
            env: Variables beside those of a rank.
        """
        self.folder = folder
        self.size = size
        self.limit_s = limit_s
        self._text = PRELUDE + textwrap.dedent(text)
        self._env = env
        self._is_new = is_new or any(
            name.startswith("TORCH") and name != "TORCH_DISTRIBUTED_DEBUG" for name in env
        )
        self._processes: dict[int, subprocess.Popen[bytes] | Forked] = {}
        folder.mkdir(parents=True, exist_ok=True)
        start = {"world_size": size, "backend": "auto", "deadline_s": 60.0, "gpus": []}
        (folder / "start.json").write_text(json.dumps(start))
        if not self._is_new:
            [_server(rank) for rank in range(size)]  # they import side by side
        for rank in range(size):
            self._start(rank)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()

    def wait_for(self, name: str, rank: int) -> bytes:
        """What a rank said under a name."""
        path = self.folder / f"{name}.{rank}"
        until_s = time.monotonic() + self.limit_s + MORE_S
        while not path.exists():
            if self._processes[rank].poll() is not None or time.monotonic() > until_s:
                raise AssertionError(self.report())
            time.sleep(POLL_S)
        return path.read_bytes()

    def replace(self, rank: int, *rejoin: Any, **env: str) -> None:
        """Kill a rank and start a process in its place, which joins with the arguments."""
        self.kill(rank)
        path = self.folder / f"rejoin.{rank}.pickle"
        path.write_bytes(pickle.dumps(rejoin))
        self._start(rank, TEST_REJOIN=str(path), **env)

    def interrupt(self, rank: int) -> None:
        self._processes[rank].send_signal(signal.SIGINT)

    def kill(self, rank: int) -> None:
        self._processes[rank].kill()
        self._processes[rank].wait()

    def results(self, *ranks: int) -> list[dict[str, Any]]:
        """What the ranks ended with; of all ranks if none is named."""
        results = []
        for rank in ranks or range(self.size):
            try:
                self._processes[rank].wait(self.limit_s + MORE_S)
            except subprocess.TimeoutExpired:
                raise AssertionError(f"rank {rank} did not end\n{self.report()}") from None
            path = self.folder / f"result.{rank}"
            if not path.exists():
                raise AssertionError(f"rank {rank} ended without a result\n{self.report()}")
            results.append(json.loads(path.read_text()))
        return results

    def report(self) -> str:
        """What all ranks have printed, and how they ended."""
        return "\n".join(
            f"--- rank {rank}, {process.poll()}:\n"
            + (self.folder / f"log.{rank}").read_text(errors="replace")[-3000:]
            for rank, process in self._processes.items()
        )

    def _start(self, rank: int, **env: str) -> None:
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(self.size)}
        run = {"TEST_RUN_DIR": str(self.folder), "TEST_LIMIT_S": str(self.limit_s)}
        environment = notebook_env({**place, **run, **ENV, **self._env, **env})
        path = self.folder / f"log.{rank}"
        if not self._is_new:
            self._processes[rank] = _server(rank).fork(self._text, environment, path)
            return
        with path.open("ab") as log:
            self._processes[rank] = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-c", self._text],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )


def run_ranks(
    folder: Path, size: int, text: str, limit_s: float = LIMIT_S, **env: str
) -> list[dict[str, Any]]:
    """What ranks have ended with that ran a text, as `TorchRanks` has it."""
    with TorchRanks(folder, size, text, limit_s=limit_s, **env) as ranks:
        return ranks.results()


def _server(rank: int) -> ForkServer:
    """Strings hash differently in two ranks whose numbers differ in one bit, neighbours in a mesh.

    As in ranks that are started; two servers are enough for that.
    """
    return _one_of_two(rank.bit_count() % 2)


@functools.cache
def _one_of_two(number: int) -> ForkServer:
    # pytest's processes of one run (-n 2) share it.
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", os.getpid())
    server = ForkServer(IMPORTED, notebook_env(ENV), f"{run}-{number}")
    atexit.register(server.stop)
    return server
