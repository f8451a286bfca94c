"""How a device and its collective calls behave, seen from outside: `python FILE queued|cuda`.

Prints one JSON object, name -> what was seen. tests/hang/test_queued_device.py asks the stand-in,
tests/gpu a GPU: both have to answer alike, or the stand-in proves nothing.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d

from nbdist.core import procfs, rank
from nbdist.core.topology import RankPlace, Topology

# How long a kernel keeps the device busy.
BUSY_S = 0.5


class Device:
    """A device of one rank with a group on it, real or not."""

    def __init__(self, kind: str) -> None:
        store = dist.HashStore()
        name = "cpu" if kind == "queued" else "cuda:0"
        place = RankPlace(0, 0, 0, 1, 0, "", os.getpid(), name, "", "", 1)
        topology = Topology((place,), kind, "", is_scaling=False, n_hosts=1)
        rank.joined(rank.Rank(place, topology, dist.PrefixStore("run", store)))
        self.kernel: Callable[[float], Any]
        self.dump: Callable[[], bytes]
        if kind == "queued":
            from tests.support import queued_device

            dist.init_process_group("gloo", store=store, rank=0, world_size=1)
            self.device = queued_device.install()
            self.kernel, self.fail = queued_device.kernel, queued_device.device_assert
            self.dump = lambda: queued_device._dump(include_collectives=True)
        else:
            self.device = torch.device("cuda:0")
            kinds, device = "cpu:gloo,cuda:nccl", self.device
            dist.init_process_group(kinds, store=store, rank=0, world_size=1, device_id=device)
            self.kernel, self.fail = _cuda_kernel(), _cuda_assert
            self.dump = lambda: _distributed_c10d._dump_nccl_trace(True, False, False)
        self.tensor = torch.ones(3, device=self.device)
        dist.all_reduce(self.tensor)
        self.tensor.sum().item()
        self.await_retired()

    def await_retired(self) -> None:
        """Wait until a thread of the backend's has noted that all calls have ended."""
        end_s = time.monotonic() + 10
        while self.pending() and time.monotonic() < end_s:
            time.sleep(0.02)

    def pending(self) -> list[str]:
        """The calls that the recorder has not seen end."""
        entries = pickle.loads(self.dump())["entries"]
        return [entry["profiling_name"] for entry in entries if not entry["retired"]]


def _cuda_kernel() -> Callable[[float], None]:
    torch.cuda._sleep(1_000_000)  # there is no public kernel that only lasts
    torch.cuda.synchronize()
    began_s = time.monotonic()
    torch.cuda._sleep(100_000_000)
    torch.cuda.synchronize()
    cycles_per_s = 100_000_000 / (time.monotonic() - began_s)
    return lambda seconds: torch.cuda._sleep(int(seconds * cycles_per_s))


def _cuda_assert() -> None:
    torch.ones(3, device="cuda")[torch.tensor([7], device="cuda")]


def calls_return_at_once(device: Device) -> dict[str, Any]:
    """A collective behind a long kernel: what the recorder says when its call has returned."""
    device.kernel(BUSY_S)
    dist.all_reduce(device.tensor)
    pending = device.pending()
    device.tensor.sum().item()
    device.await_retired()
    return {"then": pending, "at_last": device.pending()}


def waits_are_on_a_core(device: Device) -> dict[str, Any]:
    """`.item()` behind a long kernel: the main thread's state, its time, and others' Python."""
    states: list[str] = []
    counts = [0]
    is_over = threading.Event()

    stat = procfs.PROC / f"self/task/{os.getpid()}/stat"

    def look() -> None:
        while not is_over.is_set():
            counts[0] += 1
            states.append(procfs.parse_stat(procfs.text(stat))[0])
            time.sleep(0.01)

    device.kernel(BUSY_S)
    other = threading.Thread(target=look)
    other.start()
    cpu_s = time.thread_time()
    device.tensor.sum().item()
    cpu_s = time.thread_time() - cpu_s
    is_over.set()
    other.join()
    return {
        "runs": states.count("R") > len(states) / 2,
        "uses_a_core": cpu_s > BUSY_S / 10,
        "gil_is_free": counts[0] > 10,
    }


def interrupts_come_afterwards(device: Device) -> dict[str, Any]:
    """A signal during `.item()`: how long after it its handler runs."""
    handled_s: list[float] = []
    before = signal.signal(signal.SIGUSR1, lambda *_: handled_s.append(time.monotonic()))
    device.kernel(BUSY_S)
    began_s = time.monotonic()
    timer = threading.Timer(BUSY_S / 5, os.kill, (os.getpid(), signal.SIGUSR1))
    timer.start()
    device.tensor.sum().item()
    waited_s = time.monotonic() - began_s
    timer.join()
    signal.signal(signal.SIGUSR1, before)
    return {"is_late": handled_s[0] - began_s > 0.8 * waited_s, "lasted": waited_s > BUSY_S / 2}


def groups_are_aborted_together(device: Device) -> dict[str, Any]:
    """Two communicators behind a long kernel, aborted at once: whether both come back."""
    from nbdist.hang.rank import nccl_abort

    group = dist.new_group([0])
    device.kernel(BUSY_S)
    dist.all_reduce(device.tensor)
    dist.all_reduce(device.tensor, group=group)
    began_s = time.monotonic()
    n_aborted = nccl_abort.abort(20.0)
    return {"n": n_aborted, "is_soon": time.monotonic() - began_s < BUSY_S + 5}


def errors_stay(device: Device) -> dict[str, Any]:
    """After a kernel has failed: whether each later use raises, of other tensors too."""
    raised = []
    device.fail()
    for use in (torch.cuda.synchronize, lambda: torch.ones(2, device=device.device).sum().item()):
        try:
            use()
            raised.append("")
        except RuntimeError as error:
            raised.append("CUDA error" if "CUDA error" in str(error) else str(error))
    return {"raised": raised}


# In this order: nothing works after the last.
MANNERS = (
    calls_return_at_once,
    waits_are_on_a_core,
    interrupts_come_afterwards,
    groups_are_aborted_together,
    errors_stay,
)
EXPECTED: dict[str, dict[str, Any]] = {
    "calls_return_at_once": {"then": ["nccl:all_reduce"], "at_last": []},
    "waits_are_on_a_core": {"runs": True, "uses_a_core": True, "gil_is_free": True},
    "interrupts_come_afterwards": {"is_late": True, "lasted": True},
    "groups_are_aborted_together": {"n": 2, "is_soon": True},
    "errors_stay": {"raised": ["CUDA error", "CUDA error"]},
}


def main(kind: str) -> None:
    """Show each manner, print what was seen, and end without tidying up a broken device."""
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        device = Device(kind)
        seen = {manner.__name__: manner(device) for manner in MANNERS}
        sys.stdout.write(f"{json.dumps(seen)}\n")
        sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
