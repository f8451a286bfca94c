"""The GPUs of this host as their driver reports them: by NVML, and by nvidia-smi where that fails.

The one reader of them, for the kernel and for ranks. It makes no CUDA context.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import queue
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nbdist.core.topology import Gpu

MIB = 2**20
# A driver that hangs answers never.
DEADLINE_S = 15.0
# The folder of device files.
DEVICES = Path("/dev")
# Bits of NVML's reasons for a clock below its most, those that slow a program down. Idle clocks
# and clocks that somebody has set are no throttling.
THROTTLING = {
    0x04: "power limit",
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
# NVML's numbers of errors that mean "there is no such number", not that something failed:
# NOT_SUPPORTED, NO_PERMISSION, FUNCTION_NOT_FOUND, ARGUMENT_VERSION_MISMATCH, DEPRECATED.
_LACKING = frozenset({3, 4, 13, 25, 26})
_NO_PERMISSION, _NOT_FOUND, _NO_LIBRARY = 4, 6, 12
# NVML's numbers -> nvidia-smi's words.
_COMPUTE_MODES = {0: "Default", 1: "Exclusive_Thread", 2: "Prohibited", 3: "Exclusive_Process"}
_LINKS = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
# What nvidia-smi is asked for. The name is last: it may have commas.
_FIELDS = (
    "index", "uuid", "memory.used", "memory.total", "utilization.gpu", "utilization.memory",
    "temperature.gpu", "power.draw", "enforced.power.limit", "compute_mode", "driver_version",
    "name",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class GpuReading:
    """One GPU, or one MIG slice of a GPU, at one moment; None is what it does not tell.

    Attributes:
        index: On the machine, as in nvidia-smi; a MIG slice has its GPU's.
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
        compute_mode: "Default", "Exclusive_Process" or "Prohibited".
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
    compute_mode: str | None = None


@dataclass(frozen=True, slots=True)
class GpuReadings:
    """All GPUs of a host at one moment in the driver's order, and what could not be read.

    Attributes:
        driver: Its version.
        links: (GPU, GPU, how they are connected as `nvidia-smi topo -m` calls it), NVLink as "NV".
    """

    gpus: tuple[GpuReading, ...] = ()
    problems: tuple[str, ...] = ()
    driver: str = ""
    links: tuple[tuple[int, int, str], ...] = ()

    @property
    def devices(self) -> tuple[Gpu, ...]:
        """GPUs that can be chosen for ranks."""
        return tuple(Gpu(gpu.index, gpu.uuid, gpu.name) for gpu in self.gpus)

    def of(self, uuid: str) -> GpuReading | None:
        """The GPU with this UUID; torch writes it without NVML's "GPU-" or "MIG-" before it."""
        wanted = _plain(uuid)
        return next((gpu for gpu in self.gpus if wanted and _plain(gpu.uuid) == wanted), None)

    def driver_uuid(self, uuid: str, name: str) -> str:
        """NVML's UUID of a device that torch sees under this UUID and name.

        Where NVML does not know it the name says whether it is a slice: "NVIDIA A100 MIG 1g.5gb".
        """
        reading = self.of(uuid)
        if reading is not None:
            return reading.uuid
        return f"{'MIG' if ' MIG ' in name else 'GPU'}-{uuid}"


def _plain(uuid: str) -> str:
    return uuid.lower().removeprefix("gpu-").removeprefix("mig-")


def reasons(bits: int) -> tuple[str, ...]:
    """NVML's bits of clock reasons as words; those that do not slow a program down left out."""
    return tuple(text for bit, text in THROTTLING.items() if bits & bit)


def read_once(deadline_s: float = DEADLINE_S) -> GpuReadings:
    """All GPUs of this host now. What fails, or does not answer by the deadline, is a problem."""
    answers: queue.SimpleQueue[GpuReadings] = queue.SimpleQueue()

    def read() -> None:
        try:
            with open_driver() as read_gpus:
                readings = read_gpus()
        except Exception as error:  # noqa: BLE001  # NVML's errors have no public base class
            readings = _unreadable(error)
        answers.put(readings)

    # In a thread of its own: a call into a driver that hangs does not return.
    threading.Thread(target=read, name="nbdist-gpus", daemon=True).start()
    try:
        return answers.get(timeout=deadline_s)
    except queue.Empty:
        return _unreadable(f"the driver has not answered for {deadline_s:g} s")


def _unreadable(why: object) -> GpuReadings:
    return GpuReadings(problems=(f"no GPU can be read: {why}",))


ReadGpus = Callable[[], GpuReadings]


@contextlib.contextmanager
def open_driver() -> Iterator[ReadGpus]:
    """Open a reader of all GPUs of this host, to be called any number of times while open.

    NVML, else nvidia-smi. Where there is neither, device files are counted.

    Raises:
        Exception: NVML's own error, where there is no nvidia-smi and the driver does not work.
    """
    has_smi = shutil.which("nvidia-smi") is not None
    # Without any trace of a driver there is no GPU, and the import of pynvml takes 0.1 s.
    nvml, error = _open_nvml() if has_smi or _device_files() else (None, None)
    if nvml is not None:
        try:
            yield nvml.read
        finally:
            nvml.close()
    elif has_smi:
        yield lambda: read_by_smi(str(error))
    elif error is None or getattr(error, "value", _NO_LIBRARY) == _NO_LIBRARY:
        yield read_device_files
    else:
        raise error


def _open_nvml() -> tuple[Nvml | None, Exception | None]:
    try:
        return Nvml(importlib.import_module("pynvml")), None
    except Exception as error:  # noqa: BLE001  # told, or raised, where nvidia-smi fails as well
        return None, error


class Nvml:
    """The GPUs of this host by NVML: the module pynvml of nvidia-ml-py.

    Raises:
        Exception: NVML's own error where there is no driver.
    """

    def __init__(self, nvml: Any):
        self._nvml = nvml
        nvml.nvmlInit()
        self._parts: dict[int, tuple[tuple[Any, GpuReading], ...]] = {}
        self._links: tuple[tuple[int, int, str], ...] | None = None

    def read(self) -> GpuReadings:
        """All GPUs, MIG slices in place of the GPU that is cut up. One that fails is named.

        GPUs that this user may not use are left out, unless there is no other.
        """
        readings: list[GpuReading] = []
        problems: list[str] = []
        closed: list[str] = []
        whole_gpus: dict[int, Any] = {}
        for index in range(int(self._nvml.nvmlDeviceGetCount())):
            try:
                whole = self._nvml.nvmlDeviceGetHandleByIndex(index)
                if index not in self._parts:
                    self._parts[index] = tuple(self._find_parts(index, whole))
                readings += [self._reading(whole, *part) for part in self._parts[index]]
                whole_gpus[index] = whole
            except Exception as error:  # noqa: BLE001  # NVML's errors have no public base class
                self._parts.pop(index, None)
                is_closed = getattr(error, "value", None) == _NO_PERMISSION
                (closed if is_closed else problems).append(f"GPU {index} cannot be read: {error}")
        if self._links is None:
            self._links = tuple(self._find_links(whole_gpus))
        driver = self._ask("nvmlSystemGetDriverVersion") or ""
        problems += [] if readings else closed
        return GpuReadings(tuple(readings), tuple(problems), driver, self._links)

    def close(self) -> None:
        """Let go of the driver."""
        self._nvml.nvmlShutdown()

    def _find_parts(self, index: int, whole: Any) -> Iterator[tuple[Any, GpuReading]]:
        """The GPU itself, or its MIG slices, with what never changes of them."""
        nvml = self._nvml
        mode = self._ask("nvmlDeviceGetMigMode", whole)
        is_cut = mode is not None and bool(mode[0])
        handles = list(self._slices(whole)) if is_cut else [whole]
        if not handles:
            raise LookupError("it is in MIG mode and has no instances, so no process can use it")
        number = self._ask("nvmlDeviceGetComputeMode", whole)
        for handle in handles:
            uuid, name = nvml.nvmlDeviceGetUUID(handle), nvml.nvmlDeviceGetName(handle)
            yield handle, GpuReading(index, uuid, name, compute_mode=_COMPUTE_MODES.get(number))

    def _slices(self, whole: Any) -> Iterator[Any]:
        nvml = self._nvml
        for number in range(int(nvml.nvmlDeviceGetMaxMigDeviceCount(whole))):
            try:
                yield nvml.nvmlDeviceGetMigDeviceHandleByIndex(whole, number)
            except Exception as error:
                if getattr(error, "value", None) != _NOT_FOUND:  # there is no such slice
                    raise

    def _reading(self, whole: Any, part: Any, fixed: GpuReading) -> GpuReading:
        nvml, ask = self._nvml, self._ask
        # The second version leaves out what the driver keeps for itself, as nvidia-smi does.
        memory = ask("nvmlDeviceGetMemoryInfo", part, version=nvml.nvmlMemory_v2)
        # Of a MIG slice the driver tells memory alone; heat and power are the whole GPU's.
        rates = ask("nvmlDeviceGetUtilizationRates", part)
        sensor = nvml.NVML_TEMPERATURE_GPU
        degrees = ask("nvmlDeviceGetTemperatureV nvmlDeviceGetTemperature", whole, sensor)
        power_mw = ask("nvmlDeviceGetPowerUsage", whole)
        limit_mw = ask("nvmlDeviceGetEnforcedPowerLimit", whole)
        clocks = "nvmlDeviceGetCurrentClocksEventReasons nvmlDeviceGetCurrentClocksThrottleReasons"
        bits = ask(clocks, whole)
        return replace(
            fixed,
            used_bytes=None if memory is None else int(memory.used),
            total_bytes=None if memory is None else int(memory.total),
            busy_percent=None if rates is None else float(rates.gpu),
            memory_busy_percent=None if rates is None else float(rates.memory),
            temperature_c=None if degrees is None else float(degrees),
            power_w=None if power_mw is None else power_mw / 1000,
            power_limit_w=None if limit_mw is None else limit_mw / 1000,
            throttled=None if bits is None else reasons(int(bits)),
        )

    def _ask(self, functions: str, *arguments: Any, **options: Any) -> Any:
        """Answer of the first of these functions that has one; None where nothing has the number.

        Neither this GPU, nor this driver, nor this nvidia-ml-py.
        """
        for function in functions.split():
            try:
                return getattr(self._nvml, function)(*arguments, **options)
            except AttributeError:
                continue
            except Exception as error:
                if getattr(error, "value", None) not in _LACKING:
                    raise
        return None

    def _find_links(self, whole_gpus: Mapping[int, Any]) -> Iterator[tuple[int, int, str]]:
        for (first, handle), (second, peer) in itertools.combinations(whole_gpus.items(), 2):
            # Nobody but the doctor looks at it: what fails here is no reason to read no GPU.
            with contextlib.suppress(Exception):
                kind = _LINKS.get(self._ask("nvmlDeviceGetTopologyCommonAncestor", handle, peer))
                nvlink = self._nvml.NVML_P2P_CAPS_INDEX_NVLINK
                if self._ask("nvmlDeviceGetP2PStatus", handle, peer, nvlink) == 0:  # it works
                    kind = "NV"
                if kind is not None:
                    yield first, second, kind


def read_by_smi(why: str = "") -> GpuReadings:
    """All GPUs by nvidia-smi, which tells neither of MIG slices, nor of links and low clocks.

    Raises:
        OSError: It cannot say either; `why` is the reason not to ask NVML.
    """
    program = shutil.which("nvidia-smi") or "nvidia-smi"
    command = [program, f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits"]
    done = subprocess.run(  # noqa: S603  # a fixed command line
        command, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    said = (done.stderr or done.stdout).strip() or f"exit code {done.returncode}"
    if done.returncode != 0 and "No devices" not in said:
        raise OSError(f"NVML: {why}; nvidia-smi: {said.splitlines()[0]}")
    rows = [line.split(", ", len(_FIELDS) - 1) for line in done.stdout.splitlines()]
    rows = [row for row in rows if len(row) == len(_FIELDS) and row[0].isdigit()]
    driver = rows[0][-2] if rows else ""
    return GpuReadings(tuple(map(_row_reading, rows)), driver=driver)


def _row_reading(row: list[str]) -> GpuReading:
    used, total = (None if (mib := _number(cell)) is None else int(mib * MIB) for cell in row[2:4])
    busy, memory_busy, temperature, power, limit = map(_number, row[4:9])
    mode = row[9] if row[9] in _COMPUTE_MODES.values() else None
    return GpuReading(
        int(row[0]), row[1], row[-1], used, total, busy, memory_busy, temperature, power, limit,
        compute_mode=mode,
    )  # fmt: skip


def _number(text: str) -> float | None:
    """A number of nvidia-smi; None for "[N/A]" and the like."""
    try:
        return float(text)
    except ValueError:
        return None


def read_device_files() -> GpuReadings:
    """How many GPUs there are: in a container that has neither of the driver's own means."""
    return GpuReadings(
        tuple(GpuReading(n, str(path), "NVIDIA GPU") for n, path in enumerate(_device_files()))
    )


def _device_files() -> list[Path]:
    return sorted(DEVICES.glob("nvidia[0-9]*"), key=lambda path: (len(path.name), path.name))


class GpuWatch:
    """Reads GPUs in a thread of its own: a driver that hangs holds up nobody who asks.

    The thread ends when nobody has asked for `idle_s`.
    """

    def __init__(
        self,
        period_s: float,
        idle_s: float = 10.0,
        driver: Callable[[], contextlib.AbstractContextManager[ReadGpus]] = open_driver,
    ):
        """Read nothing yet; the first `newest` begins.

        Args:
            period_s: Between two readings.
            idle_s: Without a question for so long the thread ends.
            driver: As `open_driver`. What it or the reading raises becomes a problem, and it is
                opened again.
        """
        self._driver = driver
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
        is_over = False
        while not is_over:
            try:
                with self._driver() as read:
                    while not is_over:
                        self._newest = read(), time.monotonic()
                        is_over = self._rest(stop)
            except Exception as error:  # noqa: BLE001  # told as a problem, and tried again
                self._newest = _unreadable(error), time.monotonic()
                is_over = is_over or self._rest(stop)

    def _rest(self, stop: threading.Event) -> bool:
        """Wait until the next reading; whether there is to be none."""
        stop.wait(self._period_s)
        with self._lock:
            if time.monotonic() > self._asked_s + self._idle_s and not stop.is_set():
                self._thread = None
                return True
        return stop.is_set()
