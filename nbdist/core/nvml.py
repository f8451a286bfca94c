"""What a GPU says of itself, by NVML."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

MIB = 2**20
# Bits of NVML's reasons for a clock below its most, those that slow a program down. Idle clocks
# and clocks that somebody has set are no throttling.
THROTTLING = {
    0x04: "power limit",
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
# NVML's numbers of errors that mean "this device has no such number", not that something failed.
_LACKING = frozenset({3, 4})  # NOT_SUPPORTED, NO_PERMISSION


@dataclass(frozen=True, slots=True)
class GpuReading:
    """One GPU, or one MIG instance of a GPU, at one moment; None is what it does not tell.

    Attributes:
        index: On the machine, as in nvidia-smi; a MIG instance has its GPU's.
        uuid: As NVML writes it: "GPU-..." or "MIG-...".
        name: "NVIDIA H200".
        used_bytes: Of device memory, by all processes.
        busy_percent: Of the last sample period (under a second), the part in which at least one
            kernel ran. It says nothing of how many of the GPU's cores worked.
        memory_busy_percent: The part in which device memory was read or written. nvidia-smi calls
            it "utilization.memory"; it is not how full the memory is.
        temperature_c: Of the chip.
        power_limit_w: Above which clocks are lowered.
        throttled: Why clocks are lower than they could be, by THROTTLING; None where not told.
    """

    index: int
    uuid: str
    name: str
    used_bytes: int | None = None
    total_bytes: int | None = None
    busy_percent: float | None = None
    memory_busy_percent: float | None = None
    temperature_c: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    throttled: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class GpuReadings:
    """All GPUs of a host at one moment in the driver's order, and what could not be read."""

    gpus: tuple[GpuReading, ...] = ()
    problems: tuple[str, ...] = ()

    def of(self, uuid: str) -> GpuReading | None:
        """The GPU with this UUID; torch writes it without NVML's "GPU-" before it."""
        wanted = _plain(uuid)
        return next((gpu for gpu in self.gpus if wanted and _plain(gpu.uuid) == wanted), None)


def _plain(uuid: str) -> str:
    return uuid.lower().removeprefix("gpu-").removeprefix("mig-")


def reasons(bits: int) -> tuple[str, ...]:
    """NVML's bits of clock reasons as words; those that do not slow a program down left out."""
    return tuple(text for bit, text in THROTTLING.items() if bits & bit)


class Nvml:
    """The GPUs of this host by NVML: the module pynvml, handed over by whoever has imported it.

    Raises:
        Exception: NVML's own error where there is no driver.
    """

    def __init__(self, nvml: Any):
        self._nvml = nvml
        nvml.nvmlInit()
        self._devices: dict[int, tuple[tuple[Any, GpuReading], ...]] = {}

    def read(self) -> GpuReadings:
        """All GPUs, MIG instances in place of the GPU that is cut up. One that fails is named."""
        readings: list[GpuReading] = []
        problems: list[str] = []
        for index in range(int(self._nvml.nvmlDeviceGetCount())):
            try:
                if index not in self._devices:
                    self._devices[index] = tuple(self._parts(index))
                whole = self._nvml.nvmlDeviceGetHandleByIndex(index)
                parts = self._devices[index]
                readings += [self._reading(whole, part, fixed) for part, fixed in parts]
            except Exception as error:  # noqa: BLE001  # NVML's errors have no public base class
                self._devices.pop(index, None)
                problems.append(f"GPU {index} cannot be read: {error}")
        return GpuReadings(tuple(readings), tuple(problems))

    def close(self) -> None:
        """Let go of the driver."""
        self._nvml.nvmlShutdown()

    def _parts(self, index: int) -> Iterator[tuple[Any, GpuReading]]:
        """The GPU itself, or its MIG instances, with what never changes of them."""
        nvml = self._nvml
        whole = nvml.nvmlDeviceGetHandleByIndex(index)
        handles = list(self._mig_handles(whole)) or [whole]
        for handle in handles:
            uuid, name = nvml.nvmlDeviceGetUUID(handle), nvml.nvmlDeviceGetName(handle)
            yield handle, GpuReading(index, uuid, name)

    def _mig_handles(self, whole: Any) -> Iterator[Any]:
        nvml = self._nvml
        mode = self._ask(lambda: nvml.nvmlDeviceGetMigMode(whole))
        if mode is None or not mode[0]:
            return
        for number in range(int(nvml.nvmlDeviceGetMaxMigDeviceCount(whole))):
            try:
                yield nvml.nvmlDeviceGetMigDeviceHandleByIndex(whole, number)
            except Exception as error:
                if getattr(error, "value", None) != 6:  # NOT_FOUND: this slot has no instance
                    raise

    def _reading(self, whole: Any, part: Any, fixed: GpuReading) -> GpuReading:
        nvml, ask = self._nvml, self._ask
        # The second version leaves out what the driver keeps for itself, as nvidia-smi does.
        version = nvml.nvmlMemory_v2
        memory = ask(lambda: nvml.nvmlDeviceGetMemoryInfo(part, version=version))
        # Of a MIG instance the driver tells memory alone; heat and power are the whole GPU's.
        rates = ask(lambda: nvml.nvmlDeviceGetUtilizationRates(part))
        power_mw = ask(lambda: nvml.nvmlDeviceGetPowerUsage(whole))
        limit_mw = ask(lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(whole))
        bits = ask(lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(whole))
        return replace(
            fixed,
            used_bytes=None if memory is None else int(memory.used),
            total_bytes=None if memory is None else int(memory.total),
            busy_percent=None if rates is None else float(rates.gpu),
            memory_busy_percent=None if rates is None else float(rates.memory),
            temperature_c=ask(
                lambda: float(nvml.nvmlDeviceGetTemperature(whole, nvml.NVML_TEMPERATURE_GPU))
            ),
            power_w=None if power_mw is None else power_mw / 1000,
            power_limit_w=None if limit_mw is None else limit_mw / 1000,
            throttled=None if bits is None else reasons(int(bits)),
        )

    def _ask(self, query: Callable[[], Any]) -> Any:
        """What NVML answers; None where this GPU has no such number."""
        try:
            return query()
        except Exception as error:
            if getattr(error, "value", None) in _LACKING:
                return None
            raise


Open = Callable[[], Callable[[], GpuReadings]]


class GpuWatch:
    """Reads GPUs in a thread of its own: a driver that hangs holds up nobody who asks.

    The thread ends when nobody has asked for `idle_s`.
    """

    def __init__(self, open_driver: Open, period_s: float, idle_s: float = 10.0):
        """Read nothing yet; the first `newest` begins.

        Args:
            open_driver: Gives what reads all GPUs once. What either raises becomes a problem, and
                the driver is opened again.
            period_s: Between two readings.
            idle_s: Without a question for so long the thread ends.
        """
        self._open = open_driver
        self._period_s = period_s
        self._idle_s = idle_s
        self._newest: tuple[GpuReadings, float] | None = None
        self._asked_s = 0.0
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def newest(self) -> tuple[GpuReadings, float] | None:
        """(what was read last, when by the monotonic clock); None before the first reading."""
        with self._lock:
            self._asked_s = time.monotonic()
            if self._thread is None:
                self._stop = threading.Event()
                self._thread = threading.Thread(
                    target=self._watch, args=(self._stop,), name="nbdist-gpus", daemon=True
                )
                self._thread.start()
        return self._newest

    def close(self, deadline_s: float = 1.0) -> None:
        """End the thread; one that hangs in the driver is left to itself after the deadline."""
        with self._lock:
            thread, self._thread = self._thread, None
            self._stop.set()
        if thread is not None:
            thread.join(deadline_s)

    def _watch(self, stop: threading.Event) -> None:
        read: Callable[[], GpuReadings] | None = None
        while not stop.is_set():
            try:
                read = read or self._open()
                readings = read()
            except Exception as error:  # noqa: BLE001  # told as a problem, and tried again
                read = None
                readings = GpuReadings(problems=(f"no GPU can be read: {error}",))
            self._newest = readings, time.monotonic()
            stop.wait(self._period_s)
            with self._lock:
                if time.monotonic() > self._asked_s + self._idle_s and not stop.is_set():
                    self._thread = None
                    return
