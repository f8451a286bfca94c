"""What a rank tells of itself to a notebook on another host."""

import os
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import psutil
import pytest
import torch

from nbdist.core.nvml import GpuWatch
from nbdist.monitor import rank as monitor_rank
from nbdist.monitor.samples import Allocator, Answer
from tests.support.gpus import Driver, DriverError

pytestmark = pytest.mark.engine

STATS = {
    "allocated_bytes.all.current": 10,
    "reserved_bytes.all.current": 20,
    "allocated_bytes.all.peak": 30,
}


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process as a rank on GPU 8c2a1f, CUDA in use."""
    place = SimpleNamespace(device="cuda:1", device_uuid="8c2a1f", pid=1)
    monkeypatch.setattr(monitor_rank, "this_rank", lambda: SimpleNamespace(place=place))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_stats", {"cuda:1": STATS}.__getitem__)
    watch = GpuWatch(monitor_rank._open, 0.01)
    monkeypatch.setattr(monitor_rank, "_watch", watch)
    yield
    watch.close()


def test_a_rank_of_the_notebooks_host_tells_torchs_numbers_alone(on_gpu: None) -> None:
    """All else is read without asking."""
    answer = monitor_rank.usage(is_remote=False)

    assert answer == Answer(answer.now_s, allocator=Allocator(10, 20, 30))


def test_before_cuda_is_used_there_is_no_allocator(
    on_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asking must not bring CUDA up."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)

    assert monitor_rank.usage(is_remote=False).allocator is None


def answered(seconds: float = 10.0) -> Answer:
    """The first answer that has a GPU or a problem in it."""
    waited = threading.Event()
    for _ in range(int(seconds / 0.01)):
        answer = monitor_rank.usage(is_remote=True)
        if answer.gpu is not None or answer.problems:
            return answer
        waited.wait(0.01)
    raise AssertionError(answer)


def test_a_rank_of_another_host_tells_all(on_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own process, by its own number, its GPU by NVML, and how old that is."""
    monkeypatch.setitem(sys.modules, "pynvml", Driver(2, uuids=("missing", "8c2a1f")))  # type: ignore[arg-type]
    answer = answered()

    assert answer.gpu is not None
    assert (answer.gpu.index, answer.gpu.busy_percent) == (1, 90.0)
    assert 0 <= answer.gpu_age_s < 10
    assert answer.allocator == Allocator(10, 20, 30)
    assert answer.usage is not None
    own = psutil.Process(os.getpid())
    all_bytes = sum(one.memory_info().rss for one in (own, *own.children(recursive=True)))
    apart = abs(answer.usage.rss_bytes - all_bytes)
    assert apart < 100_000_000


def test_a_driver_that_fails_is_told(on_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest is told all the same."""
    driver = Driver(0)
    driver.failing["nvmlInit"] = DriverError(9, "Driver Not Loaded")
    monkeypatch.setitem(sys.modules, "pynvml", driver)  # type: ignore[arg-type]
    answer = answered()

    assert answer.gpu is None
    assert answer.usage is not None
    assert answer.problems == ("no GPU can be read: Driver Not Loaded",)
