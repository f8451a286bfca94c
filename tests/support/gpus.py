"""How many GPUs there are; and some that are played, by a module pynvml and by nvidia-smi."""

import functools
import os
import subprocess
from types import SimpleNamespace
from typing import Any

# As printed by a driver of branch 550 for two GPUs, the second one a laptop's.
SMI = """\
0, GPU-8c2a1f, 1024, 81559, 97, 41, 61, 512.33, 700.00, NVIDIA H100 80GB HBM3
1, GPU-11aa22, 12, 2048, [N/A], [N/A], 44, [N/A], [N/A], Odd, Name
"""


@functools.cache
def count() -> int:
    """GPUs that nvidia-smi lists and CUDA_VISIBLE_DEVICES leaves visible; torch stays out of it."""
    try:
        listed = subprocess.run(
            ["nvidia-smi", "--list-gpus"], capture_output=True, text=True, timeout=30, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return 0
    n_listed = sum(line.startswith("GPU ") for line in listed.splitlines())
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return n_listed
    return min(n_listed, len([v for v in visible.split(",") if v not in {"", "-1"}]))


class DriverError(Exception):
    """As pynvml's: a number, and a text."""

    def __init__(self, value: int, text: str) -> None:
        super().__init__(text)
        self.value = value


class Driver:
    """A module pynvml with GPUs of the test's own."""

    NVML_TEMPERATURE_GPU = 0
    nvmlMemory_v2 = 33554472  # noqa: N815

    def __init__(self, count: int, mig: int = 0, uuids: tuple[str, ...] = ("0", "1", "2")) -> None:
        self.count = count
        self.uuids = uuids
        self.lost: set[int] = set()
        self.mig = mig
        self.failing: dict[str, DriverError] = {}
        self.begun = 0

    def __getattr__(self, name: str) -> Any:
        answers: dict[str, Any] = {
            "nvmlInit": self._begin,
            "nvmlShutdown": lambda: None,
            "nvmlDeviceGetCount": lambda: self.count,
            "nvmlDeviceGetHandleByIndex": self._handle,
            "nvmlDeviceGetUUID": self._uuid,
            "nvmlDeviceGetName": lambda h: "NVIDIA H200",
            "nvmlDeviceGetMigMode": lambda h: (int(self.mig > 0), 0),
            "nvmlDeviceGetMaxMigDeviceCount": lambda h: 7,
            "nvmlDeviceGetMigDeviceHandleByIndex": self._mig,
            "nvmlDeviceGetMemoryInfo": lambda h, version: SimpleNamespace(used=5, total=50),
            "nvmlDeviceGetUtilizationRates": self._rates,
            "nvmlDeviceGetTemperature": lambda h, kind: 55,
            "nvmlDeviceGetPowerUsage": lambda h: 123_456,
            "nvmlDeviceGetEnforcedPowerLimit": lambda h: 700_000,
            "nvmlDeviceGetCurrentClocksThrottleReasons": lambda h: 0x61,
        }
        if name not in answers:
            raise AttributeError(name)

        def ask(*args: Any, **options: Any) -> Any:
            if name in self.failing:
                raise self.failing[name]
            return answers[name](*args, **options)

        return ask

    def _handle(self, index: int) -> str:
        if index in self.lost:
            raise DriverError(15, "GPU is lost")
        return str(index)

    def _uuid(self, handle: str) -> str:
        return f"MIG-{handle}" if "/" in handle else f"GPU-{self.uuids[int(handle)]}"

    def _begin(self) -> None:
        self.begun += 1

    def _mig(self, handle: str, number: int) -> str:
        if number >= self.mig:
            raise DriverError(6, "Not Found")
        return f"{handle}/{number}"

    def _rates(self, handle: str) -> Any:
        if "/" in handle:
            raise DriverError(3, "Not Supported")
        return SimpleNamespace(gpu=90, memory=20)
