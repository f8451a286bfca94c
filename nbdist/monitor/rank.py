"""What this rank uses of its host and its GPU, told by the control thread."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable

import psutil
import torch

from nbdist.core.nvml import GpuReadings, GpuWatch, Nvml
from nbdist.core.rank import this_rank
from nbdist.monitor.process_usage import Usages
from nbdist.monitor.samples import Allocator, Answer

GPU_PERIOD_S = 1.0

_usages = Usages(psutil)


def usage(is_remote: bool) -> Answer:
    """What this process uses now. From any thread; it needs no other rank.

    A notebook on another host wants host and GPU as well, which it reads itself otherwise.
    """
    place = this_rank().place
    is_gpu = place.device != "cpu"
    allocator = None
    if is_gpu and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        stats = torch.cuda.memory_stats(place.device)
        allocator = Allocator(
            allocated_bytes=int(stats.get("allocated_bytes.all.current", 0)),
            reserved_bytes=int(stats.get("reserved_bytes.all.current", 0)),
            peak_bytes=int(stats.get("allocated_bytes.all.peak", 0)),
        )
    if not is_remote:
        return Answer(time.monotonic(), allocator=allocator)
    pid = os.getpid()
    process_usage = _usages.read([pid]).get(pid)
    newest = _watch.newest() if is_gpu else None
    now_s = time.monotonic()
    readings, read_s = newest or (GpuReadings(), now_s)
    gpu = readings.of(place.device_uuid)
    return Answer(now_s, process_usage, gpu, now_s - read_s, allocator, readings.problems)


def _open() -> Callable[[], GpuReadings]:
    return Nvml(importlib.import_module("pynvml")).read  # late: it takes 0.1 s


# In a thread of its own: a driver that hangs must not hold up the one that answers.
_watch = GpuWatch(_open, GPU_PERIOD_S)
