"""What the monitor says of real GPUs, beside what the driver and torch say."""

import time

import pynvml
import pytest

from nbdist.core.gpus import Nvml, read_by_smi
from nbdist.monitor.samples import Sample
from nbdist.notebook.session import Session
from tests.gpu.places import on

GIB = 2**30


@on("cpu", "one")
def test_the_monitor_reads_a_ranks_own_device(ranks: Session) -> None:
    """The reading is that of the rank's own GPU; the allocator's numbers are the rank's alone.

    A CPU rank has neither, and its process' memory in their place.
    """
    (rank, *_) = ranks.run(
        "held = torch.ones(2**28, device=device) if device.type == 'cuda' else None  # 1 GiB\n"
        "print(torch.cuda.memory_allocated())"  # with cuBLAS's workspaces, where it was used
    ).ranks
    monitor = ranks.monitor
    has_gpu = ranks.topology.ranks[0].device != "cpu"

    def is_complete(sample: Sample) -> bool:
        device = (sample.gpu, sample.allocator) if has_gpu else ()
        return None not in (sample.usage, *device)

    end_s = time.monotonic() + 30
    sample = monitor.wait(time.monotonic(), 10)[0]
    while not is_complete(sample) and time.monotonic() < end_s:
        sample = monitor.wait(sample.time_s, 10)[0]

    assert monitor.problems == ()
    assert is_complete(sample)
    if not has_gpu:
        assert (sample.gpu, sample.allocator) == (None, None)
        return
    assert sample.gpu is not None
    assert sample.allocator is not None
    assert sample.allocator.allocated_bytes == int(rank.text) >= GIB
    assert sample.allocator.peak_bytes >= sample.allocator.allocated_bytes
    assert sample.allocator.reserved_bytes >= GIB
    assert sample.gpu.used_bytes is not None
    assert sample.gpu.total_bytes is not None
    assert GIB < sample.gpu.used_bytes <= sample.gpu.total_bytes


@pytest.mark.gpu(1)
def test_both_ways_to_read_the_driver_agree() -> None:
    """NVML and nvidia-smi name the same GPUs with the same memory."""
    by_nvml, by_smi = Nvml(pynvml).read(), read_by_smi()

    assert by_nvml.problems == by_smi.problems == ()
    assert [gpu.uuid for gpu in by_nvml.gpus] == [gpu.uuid for gpu in by_smi.gpus]
    for gpu, other in zip(by_nvml.gpus, by_smi.gpus, strict=True):
        assert (gpu.name, gpu.compute_mode) == (other.name, other.compute_mode)
        assert gpu.power_limit_w == pytest.approx(other.power_limit_w, abs=0.01)
        assert gpu.total_bytes is not None
        assert other.total_bytes is not None
        assert abs(gpu.total_bytes - other.total_bytes) <= 2**20
