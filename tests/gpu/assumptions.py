"""The probes themselves: what torch, CUDA, NCCL and Gloo do where nbdist depends on it.

Each returns what it has measured, and asserts what nbdist builds upon. Torch is imported inside of
them: this table is read by a process that has to outlive them. One GPU is enough.
"""

from __future__ import annotations

import concurrent.futures
import functools
import importlib
import json
import os
import pickle
import platform
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

from nbdist.core import gpus
from nbdist.core.topology import filter_visible
from tests.gpu import results

# A look from the control thread at what the main thread does, as the product's own.
LOOK_S = 0.1
# As long as an abort may take before nbdist gives it up.
ABORT_S = 10.0


@dataclass(frozen=True, slots=True)
class Probe:
    """A look at one assumption.

    Attributes:
        look: Returns what it has measured.
        limit_s: For its process.
        on_cpu: Whether it says something without a GPU, too.
    """

    look: Callable[[], dict[str, Any]]
    limit_s: float
    on_cpu: bool = False


@functools.cache
def gpu_count() -> int:
    """GPUs that the driver lists and CUDA_VISIBLE_DEVICES leaves visible; torch stays out of it."""
    listed = gpus.read_once().devices
    return len(filter_visible(listed, os.environ.get("CUDA_VISIBLE_DEVICES")))


def _text_of(*command: str) -> str:
    """What a program prints; empty where it cannot be run."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def machine() -> dict[str, Any]:
    """This machine and its versions; `gpus` is empty where torch can use none."""
    import psutil
    import torch

    query = ("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
    has_gpu = torch.cuda.is_available()
    assert has_gpu or results.ON_CPU in os.environ, (
        f"nvidia-smi lists GPUs, but torch {torch.__version__} can use none of them"
    )
    versions = {
        name: importlib.import_module(name).__version__ for name in ("accelerate", "ipyparallel")
    }
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if has_gpu else ""
    return {
        "gpus": "; ".join(_text_of(*query).splitlines()) if has_gpu else "",
        "torch": torch.__version__,
        **({"CUDA": torch.version.cuda, "NCCL": nccl} if has_gpu else {}),
        **versions,
        "Python": platform.python_version(),
        "system": f"{platform.system()}, {psutil.cpu_count()} cores, "
        f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
    }


def doctor() -> dict[str, Any]:
    """What `nbdist doctor` says of this machine; it must find nothing that keeps ranks from it."""
    done = subprocess.run(
        [sys.executable, "-m", "nbdist", "doctor"],
        capture_output=True, text=True, timeout=80, check=False,
    )  # fmt: skip
    print(done.stdout)
    assert done.returncode == 0, f"exit code {done.returncode}: {done.stdout}{done.stderr}"
    return {}


def _one_rank() -> tuple[Any, Any]:
    """(torch, torch.distributed), joined as nbdist joins: one rank, NCCL and Gloo, eagerly."""
    from nbdist.cluster import nccl_env

    os.environ.update(nccl_env.environment(os.environ))
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(0)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1,
        timeout=timedelta(days=1), device_id=torch.device("cuda:0"),
    )  # fmt: skip
    return torch, dist


def nccl_log() -> dict[str, Any]:
    """NCCL's log, caught in memory while a rank joins, names the network between hosts."""
    from nbdist.diagnostics.rank import captured_nccl_log, read_nccl_log

    with captured_nccl_log(is_wanted=True):
        _one_rank()
    log = read_nccl_log()
    assert log is not None, "NCCL_DEBUG is set, or there are no files in memory"
    assert log.network, log
    assert "NCCL_DEBUG" not in os.environ
    return {"network": log.network}


def _cycles(torch: Any, seconds: float) -> int:
    """How many cycles torch.cuda._sleep needs for so many seconds, measured."""
    torch.cuda.synchronize()
    began_s = time.monotonic()
    torch.cuda._sleep(200_000_000)
    torch.cuda.synchronize()
    return int(200_000_000 * seconds / (time.monotonic() - began_s))


def _entries(recorder: str = "_dump_nccl_trace") -> list[dict[str, Any]]:
    """What a flight recorder holds."""
    from torch._C import _distributed_c10d as c10d

    dump = getattr(c10d, recorder)(True, False, False)
    return list(pickle.loads(dump).get("entries", []))


def _pending() -> list[str]:
    """The calls that the GPU has not finished, by the recorder."""
    return [entry["profiling_name"] for entry in _entries() if not entry["retired"]]


def recorders() -> dict[str, Any]:
    """Gloo's recorder and NCCL's are two, and both call the default group by the same name."""
    began_s = time.monotonic()
    torch, dist = _one_rank()
    joined_s = time.monotonic() - began_s
    x = torch.ones(1, device="cuda")
    dist.all_reduce(x)
    dist.all_reduce(torch.ones(1))
    torch.cuda.synchronize()
    end_s = time.monotonic() + 5
    while _pending() and time.monotonic() < end_s:
        time.sleep(0.05)
    groups = {
        name: sorted({f"{e['profiling_name'].split(':')[0]} of group {e['process_group'][0]}"
                      for e in _entries(name)})
        for name in ("_dump_fr_trace", "_dump_nccl_trace")
    }  # fmt: skip
    assert not _pending(), f"calls are not retired 5 s after they have ended: {_pending()}"
    assert "nccl of group 0" in groups["_dump_nccl_trace"], groups
    return {
        "CUDA and NCCL joined, s": round(joined_s, 2),
        **{name: ", ".join(words) for name, words in groups.items()},
    }


def _processor_s(thread: int) -> tuple[str, float]:
    """(state, processor seconds) of a thread of this process, by /proc."""
    parts = Path(f"/proc/self/task/{thread}/stat").read_text().rpartition(")")[2].split()
    return parts[0], (int(parts[11]) + int(parts[12])) / os.sysconf("SC_CLK_TCK")


@dataclass(slots=True)
class _Watch:
    """Looks at the main thread from another one, as nbdist's control thread does."""

    way: str = ""
    seen: dict[str, list[dict[str, Any]]] | None = None

    def look(self, main: int, thread: int, stop: threading.Event) -> None:
        self.seen = {}
        while not stop.wait(LOOK_S):
            way = self.way
            if not way:
                continue
            state, before_s = _processor_s(thread)
            frame = sys._current_frames()[main]
            place = (Path(frame.f_code.co_filename).name, frame.f_code.co_name)
            del frame
            began_s = time.monotonic()
            pending = _pending()
            dump_s = time.monotonic() - began_s
            time.sleep(LOOK_S / 2)
            after, after_s = _processor_s(thread)
            if self.way == way:  # all of it is of one wait
                self.seen.setdefault(way, []).append(
                    {"states": state + after, "spent_s": after_s - before_s, "place": place,
                     "pending": pending, "dump_s": dump_s}
                )  # fmt: skip


def waits() -> dict[str, Any]:
    """Whatever a rank waits with for its GPU, the recorder has the call, and is quick to say so."""
    torch, dist = _one_rank()
    cycles = _cycles(torch, 1.5)
    cuda = torch.device("cuda")
    ways: dict[str, Callable[[Any], object]] = {
        "item": lambda x: x.item(),
        "cpu": lambda x: x.cpu(),
        "synchronize": lambda _: torch.cuda.synchronize(),
        "stream": lambda _: torch.cuda.current_stream().synchronize(),
        "barrier": lambda _: dist.barrier(),
        "print": str,
        "wait": lambda x: (dist.all_reduce(x, async_op=True).wait(), x.item()),
        "object": lambda _: dist.broadcast_object_list([1], 0, device=cuda),
    }
    watch, stop = _Watch(), threading.Event()
    looking = threading.Thread(
        target=watch.look, args=(threading.get_ident(), threading.get_native_id(), stop)
    )
    looking.start()
    for name, way in ways.items():
        x = torch.ones(1, device="cuda")
        torch.cuda.synchronize()
        torch.cuda._sleep(cycles)
        dist.all_reduce(x)
        watch.way = name
        way(x)
        watch.way = ""
        torch.cuda.synchronize()
    stop.set()
    looking.join()
    assert watch.seen is not None
    texts = {name: _wait_text(watch.seen.get(name, [])) for name in ways}
    blind = [name for name in ways if not any(look["pending"] for look in watch.seen.get(name, []))]
    assert not blind, f"no pending call is seen in {blind}: {texts}"
    slowest_s = max(look["dump_s"] for looks in watch.seen.values() for look in looks)
    assert slowest_s < LOOK_S, f"a dump of the recorder took {slowest_s:.3f} s"
    return {**texts, "slowest dump, s": round(slowest_s, 4)}


def _wait_text(looks: list[dict[str, Any]]) -> str:
    """What all looks at one way of waiting have seen: `R, spins in <module>: nccl:all_reduce`."""
    states = "".join(sorted({state for look in looks for state in look["states"]}))
    how = "spins" if any(look["spent_s"] > LOOK_S / 4 for look in looks) else "sleeps"
    places = "/".join(sorted({look["place"][1] for look in looks}))
    pending = ", ".join(sorted({name for look in looks for name in look["pending"]}))
    return f"{states}, {how} in {places}: {pending or 'nothing pending'}"


def aborts() -> dict[str, Any]:
    """Three communicators are aborted within nbdist's deadline behind a kernel of 6 s."""
    torch, dist = _one_rank()
    from nbdist.hang.rank import nccl_abort

    groups = [dist.group.WORLD, dist.new_group([0]), dist.new_group([0])]
    x = torch.ones(1, device="cuda")
    for group in groups:
        dist.all_reduce(x, group=group)
    torch.cuda._sleep(_cycles(torch, 6))  # stands for a call that hangs
    dist.all_reduce(x, group=groups[1])
    began_s = time.monotonic()
    count = nccl_abort.abort()
    took_s = time.monotonic() - began_s
    torch.cuda.synchronize()
    assert count == len(groups), f"{count} groups were aborted, not {len(groups)}"
    assert took_s < ABORT_S, f"the abort took {took_s:.1f} s"
    return {"groups": count, "took, s": round(took_s, 2)}


def renews() -> dict[str, Any]:
    """After an abort the same group adds up again, and so does a mesh; their calls end."""
    torch, dist = _one_rank()
    from torch.distributed.device_mesh import init_device_mesh

    from nbdist.hang.rank import main_thread, nccl_abort

    x = torch.ones(1, device="cuda")
    dist.all_reduce(x)
    nccl_abort.abort()
    main_thread.mark_recovered()  # what was aborted never ends
    began_s = time.monotonic()
    nccl_abort.renew(dist.group.WORLD, dist.HashStore(), timedelta(minutes=1))
    took_s = time.monotonic() - began_s
    dist.all_reduce(x)
    mesh = init_device_mesh("cuda", (1, 1), mesh_dim_names=("dp", "tp"))
    dist.all_reduce(x, group=mesh.get_group("tp"))
    assert x.item() == 1.0, f"one rank's sum of 1 is {x.item()}"
    end_s = time.monotonic() + 5
    while (calls := main_thread.device_calls()) and any(call.is_pending for call in calls):
        assert time.monotonic() < end_s, f"calls do not end by the recorder: {calls}"
        time.sleep(0.05)
    return {"took, s": round(took_s, 2), "calls seen": len(calls)}


def newer(look: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The same of torch 2.15's newer backend for NCCL; an older torch has one alone."""
    os.environ["TORCH_DIST_USE_NCCL2"] = "1"
    seen = look()
    from nbdist.hang.rank import nccl_abort

    return {"backends": sorted({nccl.name() for nccl in nccl_abort.backends()}), **seen}


def step_times() -> dict[str, Any]:
    """Steps that are cut by the device's clock are as long as CUDA's events say."""
    torch, dist = _one_rank()
    by_clock: dict[str, Any] = {}
    for name, is_synchronous in (("without a sync", False), ("with a sync", True)):
        by_clock[name] = _cut(torch, dist, is_synchronous=is_synchronous)
    for name, clocks in by_clock.items():
        events = sum(clocks["by CUDA's events, ms"])
        device = sum(clocks["by the device's marks, ms"])
        assert abs(device / events - 1) < 0.1, f"{name}: {clocks}"
    return {f"{name}, {clock}": times for name, clocks in by_clock.items()
            for clock, times in clocks.items()}  # fmt: skip


def _cut(torch: Any, dist: Any, *, is_synchronous: bool) -> dict[str, Any]:
    """Six steps of 20 products, by three clocks, in milliseconds."""
    from torch.profiler import ProfilerActivity, profile, record_function

    a, n_steps = torch.randn(4096, 4096, device="cuda"), 6
    (a @ a).sum().item()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(n_steps + 1)]
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        events[0].record()
        for step in range(n_steps):
            for _ in range(20):
                b = a @ a
            dist.all_reduce(b)
            with record_function("nbdist.step"):
                torch.cuda._sleep(1)
            events[step + 1].record()
            if is_synchronous:
                b[0, 0].item()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        marks = json.loads(path.read_text())["traceEvents"]

    def between(category: str) -> list[float]:
        times = sorted(
            mark["ts"] for mark in marks
            if mark.get("name") == "nbdist.step" and mark.get("cat") == category
        )  # fmt: skip
        return [round((b - a) / 1e3, 2) for a, b in pairwise(times)]

    kernels = {mark["name"][:60] for mark in marks if mark.get("cat") == "kernel"}
    # The first step has no mark before it.
    between_events = [a.elapsed_time(b) for a, b in pairwise(events[1:])]
    return {
        "by CUDA's events, ms": [round(ms, 2) for ms in between_events],
        "by the host's marks, ms": between("user_annotation"),
        "by the device's marks, ms": between("gpu_user_annotation"),
        "NCCL's kernels": sorted(name for name in kernels if "nccl" in name.lower()),
    }


def staging() -> dict[str, Any]:
    """How fast 2 GB come to the host: into pageable memory, into pinned, and with one wait."""
    import torch

    held = [torch.randn(4_000_000, device="cuda") for _ in range(125)]
    pageable = [torch.empty(tensor.shape) for tensor in held]
    pinned = [torch.empty(tensor.shape, pin_memory=True) for tensor in held]
    speeds = {}
    for name, rooms, is_deferred in (
        ("warm up", pageable, False), ("pageable", pageable, False),
        ("pinned", pinned, False), ("pinned, one wait", pinned, True),
    ):  # fmt: skip
        torch.cuda.synchronize()
        began_s = time.monotonic()
        for room, tensor in zip(rooms, held, strict=True):
            room.copy_(tensor, non_blocking=is_deferred)
        torch.cuda.synchronize()
        speeds[f"{name}, GB/s"] = round(2.0 / (time.monotonic() - began_s), 1)
    assert all(torch.equal(room, t.cpu()) for room, t in zip(pinned, held, strict=True))
    del speeds["warm up, GB/s"]
    return speeds


def allocator_lock() -> dict[str, Any]:
    """How long another thread's memory_stats takes while the main one frees behind a busy GPU."""
    import torch

    held = [torch.empty(64 << 20, device="cuda") for _ in range(8)]
    cycles = _cycles(torch, 3)
    times_s: list[float] = []

    def ask() -> None:
        for _ in range(40):
            began_s = time.monotonic()
            torch.cuda.memory_stats(0)
            times_s.append(time.monotonic() - began_s)
            time.sleep(LOOK_S)

    asking = threading.Thread(target=ask)
    asking.start()
    torch.cuda._sleep(cycles)
    held.clear()
    torch.cuda.empty_cache()
    asking.join()
    return {"slowest memory_stats, s": round(max(times_s), 3)}


def names() -> dict[str, Any]:
    """NVML, nvidia-smi and torch name the same GPU, and NVML answers all that nbdist asks."""
    import pynvml
    import torch

    by_nvml = gpus.Nvml(pynvml).read()
    by_smi = _text_of("nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader").split()
    properties = torch.cuda.get_device_properties(0)
    uuids = [gpu.uuid for gpu in by_nvml.gpus]
    assert by_nvml.problems == (), by_nvml.problems
    assert uuids == by_smi, (uuids, by_smi)
    assert any(str(properties.uuid) in uuid for uuid in uuids), (properties, uuids)
    return {"name": properties.name, "uuid": uuids[0][:8] + "..."}


# Calls of two ranks that share a GPU, and whether Gloo has them for a GPU's tensors. `x` has four
# times rank + 1; `r` is the rank, `d` the device.
_MESH = "from torch.distributed.device_mesh import init_device_mesh; m = init_device_mesh(t, (2,));"
CALLS = {
    "all_reduce": "dist.all_reduce(x); ok = x[0].item() == 3",
    "all_reduce of bf16": "y = x.bfloat16(); dist.all_reduce(y); ok = y[0].item() == 3",
    "all_reduce by AVG": "dist.all_reduce(x, dist.ReduceOp.AVG); ok = x[0].item() == 1.5",
    "broadcast": "dist.broadcast(x, 1); ok = x[0].item() == 2",
    "all_gather_into_tensor": "y = torch.empty(8, device=d); dist.all_gather_into_tensor(y, x); "
    "ok = y.tolist() == [1.]*4 + [2.]*4",
    "reduce_scatter_tensor": "y = torch.empty(2, device=d); dist.reduce_scatter_tensor(y, x); "
    "ok = y.tolist() == [3., 3.]",
    "reduce_scatter_tensor by AVG": "y = torch.empty(2, device=d); "
    "dist.reduce_scatter_tensor(y, x, dist.ReduceOp.AVG); ok = y.tolist() == [1.5, 1.5]",
    "gather": "y = [torch.empty(4, device=d) for _ in range(2)] if r == 0 else None; "
    "dist.gather(x, y, 0); ok = r or y[1][0].item() == 2",
    "scatter": "y = torch.empty(4, device=d); "
    "dist.scatter(y, [x, x + 1] if r == 0 else None, 0); ok = y[0].item() == r + 1",
    "all_to_all_single": "y = torch.empty(4, device=d); dist.all_to_all_single(y, x); "
    "ok = y.tolist() == [1., 1., 2., 2.]",
    "send and recv": "(dist.send(x, 1) if r == 0 else dist.recv(x, 0)); ok = x[0].item() == 1",
    "batch_isend_irecv": "y = torch.empty(4, device=d); P = dist.P2POp; "
    "[w.wait() for w in dist.batch_isend_irecv([P(dist.isend, x, 1 - r), P(dist.irecv, y, 1 - r)])]"
    "; ok = y[0].item() == 2 - r",
    "barrier": "dist.barrier(); ok = True",
    "barrier of device_ids": "dist.barrier(device_ids=[r] if t == 'cuda' else None); ok = True",
    "DDP": "m = torch.nn.Linear(4, 4).to(d); "
    "m = torch.nn.parallel.DistributedDataParallel(m); m(x).sum().backward(); ok = True",
    "FSDP2": f"{_MESH} from torch.distributed.fsdp import fully_shard; "
    "l = torch.nn.Linear(4, 4).to(d); fully_shard(l, mesh=m); l(x).sum().backward(); ok = True",
    "DTensor": f"{_MESH} from torch.distributed.tensor import distribute_tensor, Shard, Replicate; "
    "s = distribute_tensor(torch.ones(4, 4, device=d), m, [Shard(0)]); "
    "ok = s.redistribute(placements=[Replicate()]).to_local().shape[0] == 4",
}
# What Gloo refuses, or breaks on, with a GPU's tensors: nbdist goes around it.
GONE_AROUND = {"send and recv", "batch_isend_irecv", "barrier of device_ids", "DTensor"}
_CALL_S = 15
_RANK = f"""
import os, sys, torch, torch.distributed as dist
from datetime import timedelta
r, t = int(sys.argv[1]), "cuda" if torch.cuda.is_available() else "cpu"
d = "cuda:0" if t == "cuda" else "cpu"
if t == "cuda":
    torch.cuda.set_device(0)
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=r, world_size=2,
                        timeout=timedelta(seconds={_CALL_S}))
x = torch.full((4,), r + 1.0, device=d)
exec(sys.argv[3])
if t == "cuda":
    torch.cuda.synchronize()
print("right" if ok else "WRONG", flush=True)
os._exit(0)
"""


def gloo_calls() -> dict[str, Any]:
    """Every collective that nbdist needs is right where two ranks share a GPU; one pair each."""
    with concurrent.futures.ThreadPoolExecutor(max(1, (os.cpu_count() or 2) // 2)) as pool:
        answers = dict(zip(CALLS, pool.map(_pair, CALLS.values()), strict=True))
    wrong = {
        name: words for name, words in answers.items()
        if words != ["right", "right"] and name not in GONE_AROUND
    }  # fmt: skip
    assert not wrong, wrong
    return {
        "right": sum(words == ["right", "right"] for words in answers.values()),
        **{name: answers[name] for name in CALLS if answers[name] != ["right", "right"]},
    }


def _pair(code: str) -> list[str]:
    """What two ranks say at last of a call; each in a process of its own, as it may break it."""
    with tempfile.TemporaryDirectory() as folder:
        both = [
            subprocess.Popen(
                [sys.executable, "-c", _RANK, str(rank), f"{folder}/store", code],
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )
            for rank in range(2)
        ]  # fmt: skip
        return [_last_line(process) for process in both]


def _last_line(process: subprocess.Popen[str]) -> str:
    try:
        said = process.communicate(timeout=4 * _CALL_S)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        said = f"{process.communicate()[0]}\nHANGS"
    lines = said.strip().splitlines() or [f"exit code {process.returncode}"]
    return lines[-1][:200]


def manners() -> dict[str, Any]:
    """A GPU has the manners of the device that stands in for it in tests on the CPU."""
    from tests.support import device_manners

    device = device_manners.Device("cuda")
    seen = {manner.__name__: manner(device) for manner in device_manners.MANNERS}
    assert seen == device_manners.EXPECTED, seen
    return seen


PROBES = {
    "machine": Probe(machine, 60, on_cpu=True),
    "doctor": Probe(doctor, 90, on_cpu=True),
    "nccl_log": Probe(nccl_log, 60),
    "recorders": Probe(recorders, 60),
    "waits": Probe(waits, 90),
    "aborts": Probe(aborts, 60),
    "renews": Probe(renews, 60),
    "aborts, newer": Probe(functools.partial(newer, aborts), 60),
    "renews, newer": Probe(functools.partial(newer, renews), 60),
    "step_times": Probe(step_times, 60),
    "staging": Probe(staging, 60),
    "allocator_lock": Probe(allocator_lock, 60),
    "names": Probe(names, 40),
    "manners": Probe(manners, 60),
    "gloo_calls": Probe(gloo_calls, 150, on_cpu=True),
}
