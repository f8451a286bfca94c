"""A kernel with ranks to try faults on, what is promised of it, and what has to be true of it."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import psutil

from nbdist.core.ranks import parse_ranks, rank_label
from tests.support import processes
from tests.support.cells import Cell, Handle
from tests.support.kernel import IMPORTED, Kernel
from tests.support.ranks import until

# What is promised, in seconds, and what a busy machine of two cores may add to each.
TOLD_S = 2.0  # from the begin of a wait until its line
LATE_TOLD_S = 5.0  # the same where the other rank is only late
DEATH_TOLD_S = 1.0  # from the end, or stop, of a rank until its line
ABORT_S = 2.0  # from the abort until the cell has ended, everything recovered
BACK_S = 5.0  # from an interrupt until the notebook is back
GONE_S = 5.0  # from the kernel's end until nothing is left
LOAD_S = 1.5  # times the ranks that share a core
GRACE_S = 1.0  # as the ranks here are started

LOG = "NBDIST_FAULTS_LOG"
"""Names the JSON lines file that every measured case is added to."""

# What the cells of the faults use. The weights start at 0, and a step subtracts the mean of the
# ranks' inputs, (n + 1) / 2, from each: exact in float32, so equal means right. Gradients are
# cleared after a step and not before it, so that half made ones would show.
TOOLS = """%%distributed
import json, os, signal, sys, threading, time
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset

def go():
    print('go', time.monotonic(), flush=True)

def until_end():
    while not os.path.exists('end'):
        time.sleep(0.01)

def zeros():
    net = nn.Linear(4, 4, bias=False, device=device)
    nn.init.zeros_(net.weight)
    return net

def step():
    for net in nets:
        net(data).sum(1).mean().backward()
        with torch.no_grad():
            for weight in net.parameters():
                weight -= weight.grad
                weight.grad = None

def check():
    total = torch.full((3,), rank + 1.0, device=device)
    dist.all_reduce(total)
    step()
    whole = [getattr(net, 'module', net).weight for net in nets]
    whole = [w.full_tensor() if isinstance(w, DTensor) else w for w in whole]
    return {'total': total.tolist(), 'weights': [w.cpu().unique().tolist() for w in whole]}

x = torch.ones(3, device=device)
data = torch.full((2, 4), rank + 1.0, device=device)
ddp, other = DDP(zeros()), DDP(zeros())
nets = [ddp]
if device.type == 'cpu':
    sharded = fully_shard(zeros())
    nets.append(sharded)
pair = dist.new_group([0, 1])
rest = dist.new_group([r for r in range(world_size) if r != 1])
"""
_BEGAN = re.compile(r"\bgo ([\d.]+)")
_VALUE = re.compile(r"^\[([\d,-]+)\] value (.*)$", re.MULTILINE)
_LOOK = """
import json, nbdist
cluster = nbdist.session().cluster
processes = cluster.processes
print(json.dumps([str(cluster.run_dir), processes.pids(), processes.controller_pid(),
                  cluster._guard.pid]))
"""
_case_numbers = itertools.count(1)


@dataclass(slots=True)
class Ranks:
    """A kernel with ranks that faults are tried on, and the model of what it has to hold.

    Attributes:
        kernel: The kernel.
        n: How many ranks.
        folder: Its working folder; `tmp` in it holds the run's folder.
        is_whole: The last test left it as a next one may find it.
        steps: How often both models have been trained since they were made.
        kept: What the variable `kept` has to be, by rank.
        engines: The ranks' processes as the last case began.
    """

    kernel: Kernel
    n: int
    folder: Path
    is_whole: bool = True
    steps: int = 0
    kept: dict[int, list[int]] = field(default_factory=dict)
    engines: dict[int, psutil.Process] = field(default_factory=dict)
    _n_processes: int = 0

    @classmethod
    def start(
        cls, n: int, prepare: Callable[[Path], str] | None = None, *, queued: str = ""
    ) -> Self:
        """A kernel with n ranks, their tools defined.

        `prepare` gets the folder for temporary files and returns a cell to run before the start.
        `queued` is a class of tests/support/queued_device.py, whose device the ranks then have.
        """
        folder = Path(tempfile.mkdtemp(prefix="faults-"))
        (folder / "tmp").mkdir()
        env = {"TMPDIR": str(folder / "tmp"), "NBDIST_PRELOAD": "1"}  # for ranks that come back
        kernel = Kernel(cwd=folder, env=env)
        kernel.__enter__()
        ranks = cls(kernel, n, folder)
        try:
            ranks.ok(prepare(folder / "tmp") if prepare else "pass")
            ranks.ok("%load_ext nbdist")
            ranks.ok(IMPORTED)
            ranks.ok(f"%dist_init -n {n} --grace {GRACE_S:g}", 120)
            ranks.ok("%%distributed\nimport torch._dynamo")
            if queued:
                ranks.ok(_queue_device(folder, queued))
            ranks.make()
        except BaseException:
            kernel.shutdown(now=True)
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return ranks

    def end(self) -> list[str]:
        """Shut the kernel down; what is left of it after GONE_S, as lines."""
        everything = self.everything() if self.kernel.is_alive() else []
        self.kernel.shutdown()
        remaining = processes.wait_gone(everything, GONE_S + self.load_s)
        leftovers = [processes.describe(process) for process in remaining]
        leftovers += [str(path) for path in (self.folder / "tmp").glob("nbdist-*/*")]
        shutil.rmtree(self.folder, ignore_errors=True)
        return leftovers

    def ok(self, code: str, timeout_s: float = 60.0) -> Cell:
        cell = self.kernel.run(code, timeout_s)
        assert cell.status == "ok", cell.visible
        return cell

    def make(self) -> None:
        """Define tools and models on all ranks, the models untrained."""
        self.ok(TOOLS, 30)
        self.steps = 0

    def values(self, expression: str, ranks: Iterable[int] | None = None) -> dict[int, Any]:
        """What an expression is on ranks, by rank; the cell has to pass."""
        label = rank_label(range(self.n) if ranks is None else ranks)
        code = f"%%rank[{label}]\nimport json\nprint('value', json.dumps({expression}))"
        return self.printed(self.ok(code, 30))

    def printed(self, cell: Cell) -> dict[int, Any]:
        return {
            rank: json.loads(text)
            for label, text in _VALUE.findall(cell.text)
            for rank in parse_ranks(label, self.n)
        }

    def set_kept(self) -> None:
        """Give every rank a value that it has had in no case before."""
        number = next(_case_numbers)
        (self.folder / "end").unlink(missing_ok=True)
        self.kept = {rank: [rank, number] for rank in range(self.n)}
        self.ok(f"%%distributed\nkept = [rank, {number}]\nkept_tensor = torch.arange(5) + {number}")
        self.note_processes()

    def note_processes(self) -> None:
        """Take what runs now as what has to run later."""
        self.engines = self.look()[1]
        self._n_processes = len(self.processes())

    def are_kept(self, ranks: Iterable[int]) -> bool:
        """Whether these ranks still have their variables."""
        chosen = list(ranks)
        values = self.values("[kept, kept_tensor.tolist()]", chosen)
        return values == {
            rank: [self.kept[rank], [i + self.kept[rank][1] for i in range(5)]] for rank in chosen
        }

    def is_right(self) -> bool:
        """Whether an all_reduce, and a step of the old DDP and FSDP2 objects, come out right."""
        self.steps += 1
        weight = -self.steps * (self.n + 1) / 2
        total = [self.n * (self.n + 1) / 2] * 3
        return all(
            state["total"] == total and all(weights == [weight] for weights in state["weights"])
            for state in self.values("check()").values()
        )

    @property
    def load_s(self) -> float:
        """What a busy machine may add to a promise."""
        return LOAD_S * max(1.0, self.n / (os.cpu_count() or 1))

    def revive(self, dead: Iterable[int]) -> None:
        """Bring dead ranks back as a user does; the others keep all, before and after."""
        survivors = sorted(set(range(self.n)) - set(dead))
        assert not survivors or self.are_kept(survivors)
        self.ok(f"%dist_restart {rank_label(dead)}", 60)
        assert not survivors or self.are_kept(survivors)
        self.make()
        self.kept |= self.values("[rank, 0]", dead)
        self.ok(f"%%rank[{rank_label(dead)}]\nkept, kept_tensor = [rank, 0], torch.arange(5)")

    def conclude(self, case: str, kind: str, told_s: float | None, back_s: float | None) -> None:
        """Check that all is whole, record the case, and leave the ranks for the next one."""
        is_kept, is_right, n_left = self.are_kept(range(self.n)), self.is_right(), self.n_left()
        record(Measured(case, kind, self.n, told_s, back_s, is_kept, is_right, n_left))
        assert is_kept
        assert is_right
        assert n_left == 0
        self.is_whole = True

    def look(self) -> tuple[Path, dict[int, psutil.Process], list[psutil.Process]]:
        """The run's folder, the ranks' processes, and controller and guardian."""
        run_dir, pids, *others = json.loads(self.ok(_LOOK).text)
        ranks = {int(rank): psutil.Process(pid) for rank, pid in pids.items()}
        return Path(run_dir), ranks, [psutil.Process(pid) for pid in others]

    def processes(self) -> list[psutil.Process]:
        """Every living process of this run."""
        base = str(self.folder / "tmp")
        marked = processes.processes_of_run()
        runs = [processes.environment(p).get("NBDIST_RUN", "") for p in marked]
        return [p for p, run in zip(marked, runs, strict=True) if run.startswith(base)]

    def everything(self) -> list[psutil.Process]:
        """Every living process below the kernel, or of its run."""
        return list({*self.processes(), *processes.descendants(self.kernel.pid)})

    def n_left(self) -> int:
        """How many more processes the run has than before the case, after waiting for them.

        As in any notebook the last error holds its frames, and so the workers of a loader that
        was interrupted; another error lets them go.
        """

        def is_back() -> bool:
            return len(self.processes()) <= self._n_processes

        if not until(is_back, 1.0):
            self.kernel.run("%%distributed\nraise ValueError('another error')")
            self.ok("%%distributed\nimport gc\ngc.collect();")
            until(is_back, GONE_S)
        return max(len(self.processes()) - self._n_processes, 0)

    def finish(self, handle: Handle, timeout_s: float = 40.0) -> Cell:
        return self.kernel.finish(handle, timeout_s)

    def run_fault(self, code: str, n_blocked: int = 1) -> tuple[Cell, float]:
        """A cell at its end, and how long after the fault's begin that was, in seconds."""
        handle = self.kernel.start(code)
        began_s = self.begin_s(handle, n_blocked)
        return self.finish(handle), time.monotonic() - began_s

    def begin_s(self, handle: Handle, n_blocked: int = 1, timeout_s: float = 20.0) -> float:
        """When the last of the ranks that say so went into the fault; the host's clock."""
        self.kernel.wait_output(handle, "go ", timeout_s)
        end_s = time.monotonic() + timeout_s
        while len(times := _BEGAN.findall(self.kernel.so_far(handle).text)) < n_blocked:
            assert time.monotonic() < end_s, f"{len(times)} of {n_blocked} ranks began"
            time.sleep(0.01)
        return max(map(float, times))


def _queue_device(folder: Path, kind: str) -> str:
    """A cell that gives ranks a queued device; as a package's, whose lines are not the user's."""
    packages = folder / "site-packages"
    packages.mkdir()
    (packages / "queued_device.py").symlink_to(Path(__file__).with_name("queued_device.py"))
    return (
        f"%%distributed\nimport sys; sys.path.insert(0, {str(packages)!r})\n"
        f"import queued_device\ndevice = queued_device.install(queued_device.{kind})"
    )


def shm_files(owners: Iterable[psutil.Process]) -> list[Path]:
    """What these processes' torch has left in /dev/shm; its files are named after the process."""
    return [path for p in owners for path in Path("/dev/shm").glob(f"torch_{p.pid}_*")]


@dataclass(frozen=True, slots=True)
class Measured:
    """A row of the table in docs/reliability.md; None where there is nothing to measure.

    Attributes:
        case: Its name.
        kind: The class of faults that it belongs to.
        n: Ranks.
        told_s: From the fault until the line that tells of it.
        back_s: From the fault (the press, for an interrupt) until the notebook was back.
        is_kept: Every rank that lives still had its variables.
        is_right: The next all_reduce, and a training step of the old models, came out right.
        n_left: Processes that were left over.
    """

    case: str
    kind: str
    n: int
    told_s: float | None = None
    back_s: float | None = None
    is_kept: bool | None = None
    is_right: bool | None = None
    n_left: int = 0


def record(measured: Measured) -> None:
    """Add a measured case to the file that NBDIST_FAULTS_LOG names, if it names one."""
    path = os.environ.get(LOG)
    if path:
        with Path(path).open("a") as file:
            file.write(json.dumps(asdict(measured)) + "\n")
