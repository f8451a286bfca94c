"""What a rank tells of itself to a notebook on another host."""

import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pynvml
import pytest
import torch

from nbdist.core.gpus import GpuWatch
from nbdist.hang.rank import main_thread, nccl_abort
from nbdist.hang.records import FlightRecorderEntry
from nbdist.monitor import rank as monitor_rank
from nbdist.monitor.samples import Allocator, Answer
from nbdist.parallel.ep import tokens
from tests.support.gpus import Card, Driver, play

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
    monkeypatch.setattr(monitor_rank, "_newest", {})
    watch = GpuWatch(0.01)
    monkeypatch.setattr(monitor_rank, "_watch", watch)
    yield
    watch.close()


def test_a_rank_of_the_notebooks_host_tells_torchs_numbers_alone(on_gpu: None) -> None:
    """All else is read without asking."""
    answer = monitor_rank.usage(is_remote=False)

    expected = Answer(answer.now_s, allocator=Allocator(10, 20, 30))
    assert replace(answer, allocator_age_s=0.0) == expected


def test_a_rank_tells_how_much_its_experts_compute(
    on_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what it routed: three tokens came for its experts, and it had two for all."""
    experts = torch.nn.Linear(1, 1)
    tokens.forget()
    tokens.count(experts, [3, 0], 2)
    answer = monitor_rank.usage(is_remote=False)
    tokens.forget()

    assert answer.expert_load == 1.5
    assert monitor_rank.usage(is_remote=False).expert_load is None


def test_before_cuda_is_used_there_is_no_allocator(
    on_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asking must not bring CUDA up."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)

    assert monitor_rank.usage(is_remote=False).allocator is None


@pytest.mark.parametrize(
    ("numbers", "places", "in_cell", "is_asked"),
    [
        ((7, 7), (1, 1), True, False),
        ((7, 8), (1, 1), True, True),  # a loop that is ahead of its GPU: always something pending
        ((7, 7), (1, 2), True, True),
        ((7, 7), (1, 1), False, True),  # some calls of Gloo are pending for ever
        ((None,), (1,), True, True),
    ],
)
def test_a_rank_that_gets_on_is_asked_for_its_allocator(
    on_gpu: None,
    monkeypatch: pytest.MonkeyPatch,
    numbers: tuple[int | None, ...],
    places: tuple[int, ...],
    in_cell: bool,
    is_asked: bool,
) -> None:
    """With the number of the pending call and the main thread's place, each at two moments."""
    was = monitor_rank.usage(is_remote=False)
    calls = (
        {}
        if n is None
        else {("gloo", "0"): FlightRecorderEntry("all_reduce", "", n, is_pending=True)}
        for n in numbers
    )
    monkeypatch.setattr(main_thread, "newest_collectives", calls.__next__)
    monkeypatch.setattr(main_thread, "position", iter(places).__next__)
    monkeypatch.setattr(nccl_abort, "in_cell", lambda: in_cell)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda _device: {})
    answer = monitor_rank.usage(is_remote=False)

    assert answer.allocator == (Allocator(0, 0, 0) if is_asked else was.allocator)
    assert is_asked or answer.allocator_age_s > was.allocator_age_s


def answered(seconds: float = 10.0) -> Answer:
    """The first answer that has a GPU or a problem in it."""
    waited = threading.Event()
    for _ in range(int(seconds / 0.01)):
        answer = monitor_rank.usage(is_remote=True)
        if answer.gpu is not None or answer.problems:
            return answer
        waited.wait(0.01)
    raise AssertionError(answer)


def test_a_rank_of_another_host_tells_all(
    on_gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own process, by its own number, its GPU by NVML, and how old that is."""
    play(monkeypatch, tmp_path, Driver(Card("GPU-missing"), Card()), None)
    answer = answered()

    assert answer.gpu is not None
    assert (answer.gpu.index, answer.gpu.busy_percent) == (1, 97.0)
    assert 0 <= answer.gpu_age_s < 10
    assert answer.allocator == Allocator(10, 20, 30)
    assert answer.usage is not None
    this = psutil.Process(os.getpid())
    all_bytes = sum(process.memory_info().rss for process in (this, *this.children(recursive=True)))
    apart = abs(answer.usage.rss_bytes - all_bytes)
    assert apart < 100_000_000


def test_a_driver_that_fails_is_told(
    on_gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rest is told all the same."""
    driver = Driver(Card())
    driver.failing["nvmlInit"] = pynvml.NVML_ERROR_DRIVER_NOT_LOADED
    play(monkeypatch, tmp_path, driver, None)
    answer = answered()

    assert answer.gpu is None
    assert answer.usage is not None
    assert answer.problems == ("no GPU can be read: Driver Not Loaded",)
