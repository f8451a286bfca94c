"""Usage of the host and the GPU by this rank, told by the control thread."""

from __future__ import annotations

import os
import time
from dataclasses import replace

import psutil
import torch

from nbdist.core.gpus import GpuReadings, GpuWatch
from nbdist.core.rank import this_rank
from nbdist.hang.rank import main_thread, nccl_abort
from nbdist.monitor.process_usage import Usages
from nbdist.monitor.samples import Allocator, Answer
from nbdist.parallel.ep import tokens

GPU_PERIOD_S = 1.0
# A collective and a main thread that do not get on for so long are taken to wait. torch notes the
# end of a collective every 0.1 s.
STUCK_S = 0.15

_usages = Usages(psutil)
# The driver is read in a thread of its own: one that hangs must not hold up the one that answers.
_watch = GpuWatch(GPU_PERIOD_S)


def usage(is_remote: bool) -> Answer:
    """Measure this process's use now. From any thread but the main one; needs no other rank.

    A notebook on another host wants host and GPU as well, which it reads itself otherwise.
    """
    place = this_rank().place
    is_gpu = place.device != "cpu"
    allocator, allocator_s = _newest_allocator(place.device) if is_gpu else (None, 0.0)
    now_s = time.monotonic()
    allocator_age_s = 0.0 if allocator is None else now_s - allocator_s
    answer = Answer(
        now_s,
        allocator=allocator,
        allocator_age_s=allocator_age_s,
        expert_load=tokens.load(),
    )
    if not is_remote:
        return answer
    pid = os.getpid()
    readings, read_s = (_watch.newest() if is_gpu else None) or (GpuReadings(), now_s)
    return replace(
        answer,
        usage=_usages.read([pid]).get(pid),
        gpu=readings.of(place.device_uuid),
        gpu_age_s=time.monotonic() - read_s,
        problems=readings.problems,
    )


# Device -> what its allocator said last, and when.
_newest: dict[str, tuple[Allocator, float]] = {}


def _newest_allocator(device: str) -> tuple[Allocator | None, float]:
    """(torch's numbers of this device, when they were read by the monotonic clock).

    torch takes the allocator's lock with the GIL held. A main thread that frees memory holds that
    lock, and CUDA lets it wait for whatever runs on the GPU: behind a collective that hangs the
    whole process would stand still, and no abort could reach it. So a rank that waits is not asked.
    """
    if torch.cuda.is_initialized() and not _waits():  # type: ignore[no-untyped-call]
        stats = torch.cuda.memory_stats(device)
        newest = Allocator(
            allocated_bytes=int(stats.get("allocated_bytes.all.current", 0)),
            reserved_bytes=int(stats.get("reserved_bytes.all.current", 0)),
            peak_bytes=int(stats.get("allocated_bytes.all.peak", 0)),
        )
        _newest[device] = newest, time.monotonic()
    return _newest.get(device, (None, 0.0))


def _waits() -> bool:
    """Whether a cell's main thread does not get on, nor any of the collectives that are pending."""
    before, place = _pending(), main_thread.position()
    if not before or not nccl_abort.in_cell():
        return False
    time.sleep(STUCK_S)
    return main_thread.position() == place and bool(before & _pending())


def _pending() -> set[object]:
    newest = main_thread.newest_collectives()
    return {(group, call.number) for group, call in newest.items() if call.is_pending}
