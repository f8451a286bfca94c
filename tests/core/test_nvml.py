"""What GPUs say of themselves: by a driver that is played."""

import itertools
import threading
import time
from typing import Any

import pytest

from nbdist.core.nvml import GpuReading, GpuReadings, GpuWatch, Nvml, reasons
from tests.support.gpus import Driver, DriverError


def test_a_driver_is_read_once_for_all_its_gpus() -> None:
    """Watts, bytes, percent; the second memory query leaves out what the driver keeps."""
    driver = Driver(2)
    readings = Nvml(driver).read()

    assert readings.problems == ()
    assert readings.gpus[1] == GpuReading(
        1, "GPU-1", "NVIDIA H200", 5, 50, 90.0, 20.0, 55.0, 123.456, 700.0,
        ("software thermal slowdown", "hardware thermal slowdown"),
    )  # fmt: skip
    assert driver.begun == 1


def test_instances_stand_for_the_gpu_that_is_cut_up() -> None:
    """Of a MIG instance memory is told; heat and power are the whole GPU's."""
    gpus = Nvml(Driver(1, mig=2)).read().gpus

    assert [gpu.uuid for gpu in gpus] == ["MIG-0/0", "MIG-0/1"]
    assert [gpu.index for gpu in gpus] == [0, 0]
    assert gpus[0].used_bytes == 5
    assert gpus[0].busy_percent is None
    assert gpus[0].temperature_c == 55.0


def test_gpus_that_fail_are_named_and_read_again() -> None:
    """Halfway: the driver loses them. What a GPU only lacks is no failure."""
    driver = Driver(3)
    nvml = Nvml(driver)
    before = nvml.read()
    driver.failing["nvmlDeviceGetTemperature"] = DriverError(15, "GPU is lost")
    lost = nvml.read()
    driver.failing = {"nvmlDeviceGetTemperature": DriverError(3, "Not Supported")}
    lacking = nvml.read()

    assert len(before.gpus) == 3
    assert lost.gpus == ()
    assert lost.problems == tuple(f"GPU {n} cannot be read: GPU is lost" for n in range(3))
    assert [gpu.temperature_c for gpu in lacking.gpus] == [None] * 3
    assert lacking.problems == ()


def test_one_lost_gpu_leaves_the_rest() -> None:
    """The failure of one handle is its own."""
    driver = Driver(2)
    driver.lost.add(0)
    readings = Nvml(driver).read()

    assert [gpu.index for gpu in readings.gpus] == [1]
    assert readings.problems == ("GPU 0 cannot be read: GPU is lost",)


def test_torchs_uuid_finds_nvmls_gpu() -> None:
    """torch writes a UUID without the prefix, nvidia-smi with it."""
    readings = GpuReadings((GpuReading(0, "GPU-8C2A", "a"), GpuReading(1, "MIG-77", "b")))

    assert readings.of("8c2a") is readings.of("GPU-8c2a") is readings.gpus[0]
    assert readings.of("MIG-77") is readings.gpus[1]
    assert readings.of("") is None
    assert readings.of("GPU-8c") is None


@pytest.mark.parametrize(
    ("bits", "words"),
    [
        (0, ()),
        (1, ()),
        (2, ()),
        (4, ("power limit",)),
        (0x88, ("hardware slowdown", "power brake")),
    ],
)
def test_reasons_that_slow_nothing_down_are_left_out(bits: int, words: tuple[str, ...]) -> None:
    """An idle GPU and clocks that somebody has set are no throttling."""
    assert reasons(bits) == words


def test_a_watch_reads_in_a_thread_of_its_own_while_somebody_asks() -> None:
    """It never keeps the asker waiting, opens a driver that has failed anew, and ends by itself."""
    is_released, is_read = threading.Event(), threading.Event()
    numbers = itertools.count()
    opened: list[int] = []

    def read() -> GpuReadings:
        number = next(numbers)
        if number == 0:
            is_released.wait(10)  # the driver hangs
        if number == 1:
            raise DriverError(1, "Uninitialized")
        if number == 3:
            is_read.set()
        return GpuReadings((GpuReading(number, f"GPU-{number}", "a"),))

    def open_driver() -> Any:
        opened.append(1)
        return read

    watch = GpuWatch(open_driver, 0.001, idle_s=30.0)
    began_s = time.monotonic()
    first = watch.newest()
    took_s = time.monotonic() - began_s
    is_released.set()
    assert is_read.wait(10)
    newest = watch.newest()
    watch.close()

    assert first is None
    assert took_s < 5
    assert newest is not None
    assert newest[0].gpus[0].index >= 2
    assert len(opened) == 2
    assert "nbdist-gpus" not in [thread.name for thread in threading.enumerate()]


def test_a_watch_that_nobody_asks_ends() -> None:
    """And the next who asks begins again."""
    watch = GpuWatch(lambda: GpuReadings, 0.001, idle_s=0.0)
    threads = []
    for _ in range(2):
        watch.newest()
        thread = watch._thread
        if thread is not None:
            thread.join(10)
            threads.append(thread)

    assert len(threads) == 2
    assert threads[0] is not threads[1]
    assert not any(thread.is_alive() for thread in threads)
