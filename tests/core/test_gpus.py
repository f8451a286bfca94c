"""GPUs as the driver reports them: by a module pynvml and an nvidia-smi that are played."""

import contextlib
import itertools
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pynvml
import pytest

from nbdist.core import gpus
from nbdist.core.gpus import (
    MIB,
    GpuReading,
    GpuReadings,
    GpuWatch,
    Nvml,
    open_driver,
    read_once,
    reasons,
)
from nbdist.core.topology import Gpu
from tests.support.gpus import LAPTOP, VERSION, Card, Driver, play, smi_text

CARDS = (Card(), LAPTOP)


def test_nvml_and_nvidia_smi_give_the_same_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes, percent, watts; None for what a laptop's GPU does not tell; a name may have commas."""
    for name in ("nvml", "smi"):
        (tmp_path / name).mkdir()
    driver = Driver(*CARDS)
    play(monkeypatch, tmp_path / "nvml", driver, None)
    by_nvml = read_once()
    play(monkeypatch, tmp_path / "smi", None, smi_text(CARDS))
    by_smi = read_once()

    assert by_nvml.gpus == (
        GpuReading(
            0, "GPU-8c2a1f", "NVIDIA H100 80GB HBM3", 1024 * MIB, 81559 * MIB, 97.0, 41.0, 61.0,
            512.33, 700.0, ("software thermal slowdown", "hardware thermal slowdown"), "Default",
        ),
        GpuReading(
            1, "GPU-11aa22", "Odd, Name", 12 * MIB, 2048 * MIB, temperature_c=44.0,
            compute_mode="Exclusive_Process",
        ),
    )  # fmt: skip
    # nvidia-smi is not asked why clocks are low, nor for links.
    assert by_smi.gpus == tuple(replace(gpu, throttled=None) for gpu in by_nvml.gpus)
    assert by_smi.driver == by_nvml.driver == VERSION
    assert by_smi.problems == by_nvml.problems == ()
    assert by_nvml.links == ((0, 1, "SYS"),)
    assert by_nvml.devices[0] == Gpu(0, "GPU-8c2a1f", "NVIDIA H100 80GB HBM3")
    assert driver.opened == 0  # nothing holds the driver in a notebook that has looked once


# Which driver, which answer of nvidia-smi, the files in /dev -> GPUs, and what is told.
_BROKEN = Driver(Card())
_BROKEN.failing["nvmlInit"] = pynvml.NVML_ERROR_DRIVER_NOT_LOADED
_NO_LIBRARY = Driver(Card())
_NO_LIBRARY.failing["nvmlInit"] = pynvml.NVML_ERROR_LIBRARY_NOT_FOUND


@pytest.mark.parametrize(
    ("driver", "smi", "uuids", "problem_text"),
    [
        (None, None, [], ""),
        (Driver(), None, [], ""),
        (None, "", [], ""),
        (None, "No devices were found\n", [], ""),
        (None, "\n0, 1\n", [], ""),
        # A container without the driver's utilities.
        (_NO_LIBRARY, None, ["dev/nvidia0"], ""),
        (_BROKEN, None, [], "no GPU can be read: Driver Not Loaded"),
        (_BROKEN, smi_text(CARDS), ["GPU-8c2a1f", "GPU-11aa22"], ""),
        (_BROKEN, "gone",  [], "NVML: Driver Not Loaded; nvidia-smi: driver gone"),
    ],
)  # fmt: skip
def test_where_nvml_does_not_answer_nvidia_smi_is_asked(
    driver: Driver | None,
    smi: str | None,
    uuids: list[str],
    problem_text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And where both fail, or NVML fails otherwise than by not being there, that is a problem."""
    answer = play(monkeypatch, tmp_path, driver, smi)
    if smi == "gone":
        answer.unlink()
    readings = read_once()

    assert [gpu.uuid.removeprefix(f"{tmp_path}/") for gpu in readings.gpus] == uuids
    assert [problem_text in problem for problem in readings.problems] == [True] * bool(problem_text)


def test_a_driver_that_hangs_is_told_after_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel goes on, whatever becomes of the call."""
    is_released = threading.Event()
    play(monkeypatch, tmp_path, Driver(Card()), None)
    monkeypatch.setattr(Driver, "_handle", lambda _driver, _index: is_released.wait(30))
    readings = read_once(0.05)
    is_released.set()

    assert readings.problems == ("no GPU can be read: the driver has not answered for 0.05 s",)


def test_slices_stand_for_the_gpu_that_is_cut_up() -> None:
    """Of a MIG slice memory is told; heat and power are the whole GPU's."""
    readings = Nvml(Driver(Card(slices=2), LAPTOP)).read()
    first, second, other = readings.gpus

    assert [gpu.uuid for gpu in readings.gpus] == ["MIG-8c2a1f-0", "MIG-8c2a1f-1", "GPU-11aa22"]
    assert [gpu.index for gpu in readings.gpus] == [0, 0, 1]
    assert (first.used_bytes, first.busy_percent, first.temperature_c) == (1024 * MIB, None, 61.0)
    assert [gpu.is_slice for gpu in readings.devices] == [True, True, False]
    assert second.name.endswith(" MIG 1g.10gb")
    assert other.name == "Odd, Name"


def test_gpus_that_fail_are_named_and_read_again() -> None:
    """The others are read all the same; somebody else's is no failure, unless there is no other."""
    driver = Driver(Card(), Card("GPU-bb"), Card("GPU-cc", slices=0))
    nvml = Nvml(driver)
    driver.lost.add(0)
    lost = nvml.read()
    driver.lost.clear()
    back = nvml.read()
    driver.failing["nvmlDeviceGetUUID"] = pynvml.NVML_ERROR_NO_PERMISSION
    somebodys = Nvml(driver).read()

    assert [gpu.index for gpu in lost.gpus] == [1]
    no_slices = (
        "GPU 2 cannot be read: it is in MIG mode and has no instances, so no process can use it"
    )
    assert lost.problems == ("GPU 0 cannot be read: GPU is lost", no_slices)
    assert [gpu.index for gpu in back.gpus] == [0, 1]
    assert back.problems == (no_slices,)
    assert somebodys.gpus == ()
    assert somebodys.problems[1] == "GPU 0 cannot be read: Insufficient Permissions"


@pytest.mark.parametrize(
    ("function", "fields"),
    [
        ("nvmlDeviceGetMemoryInfo", ("used_bytes", "total_bytes")),
        ("nvmlDeviceGetUtilizationRates", ("busy_percent", "memory_busy_percent")),
        ("nvmlDeviceGetTemperature", ("temperature_c",)),
        ("nvmlDeviceGetPowerUsage", ("power_w",)),
        ("nvmlDeviceGetEnforcedPowerLimit", ("power_limit_w",)),
        ("nvmlDeviceGetCurrentClocksThrottleReasons", ("throttled",)),
        ("nvmlDeviceGetComputeMode", ("compute_mode",)),
    ],
)
def test_a_number_that_nobody_has_leaves_out_itself(function: str, fields: tuple[str, ...]) -> None:
    """A function that this GPU, driver or nvidia-ml-py lacks. Other errors are the GPU's."""
    driver = Driver(Card())
    whole = Nvml(driver).read().gpus[0]
    older = {"nvmlDeviceGetTemperatureV", "nvmlDeviceGetCurrentClocksEventReasons"}
    driver.absent = older
    by_older_names = Nvml(driver).read().gpus[0]
    lacking = []
    for error in ("NOT_SUPPORTED", "NO_PERMISSION", "FUNCTION_NOT_FOUND", "DEPRECATED"):
        driver.failing[function] = getattr(pynvml, f"NVML_ERROR_{error}")
        lacking.append(Nvml(driver).read())
    driver.failing.clear()
    driver.absent = older | {function}
    lacking.append(Nvml(driver).read())
    driver.absent = older
    driver.failing[function] = pynvml.NVML_ERROR_UNKNOWN
    failed = Nvml(driver).read()

    assert None not in {getattr(whole, field) for field in fields}
    assert by_older_names == whole
    without: Any = dict.fromkeys(fields)
    assert [readings.gpus for readings in lacking] == [(replace(whole, **without),)] * 5
    assert [readings.problems for readings in lacking] == [()] * 5
    assert failed.problems == ("GPU 0 cannot be read: Unknown Error",)


def test_links_are_those_of_pairs_that_can_be_read() -> None:
    """NVLink where it works, else what lies between; a link that fails costs no reading."""
    driver = Driver(Card(), Card("GPU-bb"), Card("GPU-cc"))
    driver.nvlinks = {frozenset("01")}
    links = Nvml(driver).read().links
    driver.failing["nvmlDeviceGetTopologyCommonAncestor"] = pynvml.NVML_ERROR_UNKNOWN
    broken = Nvml(driver).read()

    assert links == ((0, 1, "NV"), (0, 2, "SYS"), (1, 2, "SYS"))
    assert (len(broken.gpus), broken.links, broken.problems) == (3, (), ())


def test_torchs_uuid_finds_nvmls_gpu() -> None:
    """torch writes a UUID without the prefix, nvidia-smi with it."""
    readings = GpuReadings((GpuReading(0, "GPU-8C2A", "a"), GpuReading(1, "MIG-77", "b")))

    assert readings.of("8c2a") is readings.of("GPU-8c2a") is readings.gpus[0]
    assert readings.of("MIG-77") is readings.of("77") is readings.gpus[1]
    assert readings.of("") is None
    assert readings.of("GPU-8c") is None
    assert readings.driver_uuid("8c2a", "NVIDIA H100") == "GPU-8C2A"
    assert readings.driver_uuid("77", "NVIDIA A100 MIG 1g.5gb") == "MIG-77"
    # Where the driver does not tell, by the name.
    assert readings.driver_uuid("88", "NVIDIA A100 MIG 1g.5gb") == "MIG-88"
    assert readings.driver_uuid("88", "NVIDIA H100") == "GPU-88"


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
            raise pynvml.NVMLError(pynvml.NVML_ERROR_UNINITIALIZED)
        if number == 3:
            is_read.set()
        return GpuReadings((GpuReading(number, f"GPU-{number}", "a"),))

    @contextlib.contextmanager
    def driver() -> Iterator[Any]:
        opened.append(1)
        yield read

    watch = GpuWatch(0.001, 30.0, driver)
    first = watch.newest()
    is_released.set()
    assert is_read.wait(10)
    newest = watch.newest()
    watch.close(10)

    assert first is None
    assert newest is not None
    assert newest[0].gpus[0].index >= 2
    assert len(opened) == 2
    assert "nbdist-gpus" not in [thread.name for thread in threading.enumerate()]


def test_a_watch_that_nobody_asks_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It lets go of the driver; the next who asks begins again."""
    driver = Driver(Card())
    play(monkeypatch, tmp_path, driver, None)
    watch = GpuWatch(0.001, idle_s=0.0)
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
    assert driver.opened == 0
    newest = watch.newest()
    watch.close(10)
    assert newest is not None
    assert newest[0].gpus[0].uuid == "GPU-8c2a1f"


def test_a_machine_without_a_driver_is_known_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pynvml, which takes a tenth of a second, is not imported for it."""
    play(monkeypatch, tmp_path, None, None)
    monkeypatch.delitem(sys.modules, "pynvml")
    with open_driver() as read:
        readings = read()

    assert readings == GpuReadings()
    assert "pynvml" not in sys.modules
    assert tmp_path / "dev" == gpus.DEVICES
