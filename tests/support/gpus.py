"""GPUs that are played, by a module pynvml and by an nvidia-smi that report the same."""

import functools
import inspect
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pynvml
import pytest

from nbdist.core import gpus

# What nvidia-smi is asked for, and so the order of its columns.
ASKED = (
    "--query-gpu=index,uuid,memory.used,memory.total,utilization.gpu,utilization.memory,"
    "temperature.gpu,power.draw,enforced.power.limit,compute_mode,driver_version,name"
)
VERSION = "570.86.15"
MODES = ("Default", "Exclusive_Thread", "Prohibited", "Exclusive_Process")
MIB = 2**20


@dataclass(frozen=True)
class Card:
    """One GPU; None is what it does not support."""

    uuid: str = "GPU-8c2a1f"
    name: str = "NVIDIA H100 80GB HBM3"
    used_mib: int | None = 1024
    total_mib: int | None = 81559
    busy: int | None = 97
    memory_busy: int | None = 41
    temperature: int | None = 61
    power_mw: int | None = 512_330
    limit_mw: int | None = 700_000
    clock_reasons: int | None = 0x61
    mode: int = 0
    slices: int | None = None  # None: it is not in MIG mode


LAPTOP = Card(
    "GPU-11aa22", "Odd, Name", 12, 2048, None, None, 44, None, None, clock_reasons=None, mode=3
)


def smi_text(cards: Sequence[Card]) -> str:
    """As a driver of branch 570 prints them."""
    rows = []
    for index, card in enumerate(cards):
        watts = [mw if mw is None else f"{mw / 1000:.2f}" for mw in (card.power_mw, card.limit_mw)]
        numbers = (card.used_mib, card.total_mib, card.busy, card.memory_busy, card.temperature)
        cells = ["[N/A]" if cell is None else str(cell) for cell in (*numbers, *watts)]
        rows.append(
            ", ".join([str(index), card.uuid, *cells, MODES[card.mode], VERSION, card.name])
        )
    return "".join(f"{row}\n" for row in rows)


class Driver:
    """A module pynvml with these GPUs: names, signatures, structs and errors are the real one's.

    Attributes:
        lost: Numbers of GPUs that have fallen off the bus.
        failing: Function -> the number of the error that it raises.
        absent: Functions that this nvidia-ml-py does not have.
        nvlinks: Pairs of GPUs; all others meet behind the link between the CPUs.
        opened: How often it is initialised and not shut down.
    """

    def __init__(self, *cards: Card) -> None:
        self.cards = cards
        self.lost: set[int] = set()
        self.failing: dict[str, int] = {}
        self.absent: set[str] = set()
        self.nvlinks: set[frozenset[str]] = set()
        self.opened = 0

    def __getattr__(self, name: str) -> Any:
        real = getattr(pynvml, name)
        if name in self.absent:
            raise AttributeError(name)
        if not inspect.isfunction(real):
            return real
        return functools.partial(self._answer, name, inspect.signature(real))

    def _answer(self, name: str, signature: inspect.Signature, *args: Any, **options: Any) -> Any:
        signature.bind(*args, **options)
        if name in self.failing:
            raise pynvml.NVMLError(self.failing[name])
        if name == "nvmlInit":
            self.opened += 1
        elif name == "nvmlShutdown":
            self.opened -= 1
        elif name == "nvmlDeviceGetCount":
            return len(self.cards)
        elif name == "nvmlSystemGetDriverVersion":
            return VERSION
        elif name == "nvmlDeviceGetHandleByIndex":
            return self._handle(*args)
        else:
            return self._of_card(name, *args)
        return None

    def _handle(self, index: int) -> str:
        if index in self.lost:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        return str(index)

    def _of_card(self, name: str, handle: str, *args: Any) -> Any:
        number, _, part = handle.partition("/")
        card = self.cards[int(number)]
        if name == "nvmlDeviceGetMigDeviceHandleByIndex":
            if args[0] >= (card.slices or 0):
                raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
            return f"{handle}/{args[0]}"
        if part and name == "nvmlDeviceGetUtilizationRates":
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        memory = pynvml.c_nvmlMemory_v2_t(
            used=(card.used_mib or 0) * MIB, total=(card.total_mib or 0) * MIB
        )
        is_near = bool(args) and frozenset((handle, args[0])) in self.nvlinks
        answers = {
            "nvmlDeviceGetUUID": f"MIG-{card.uuid[4:]}-{part}" if part else card.uuid,
            "nvmlDeviceGetName": f"{card.name} MIG 1g.10gb" if part else card.name,
            "nvmlDeviceGetMigMode": None if card.slices is None else [1, 1],
            "nvmlDeviceGetMaxMigDeviceCount": 7,
            "nvmlDeviceGetComputeMode": card.mode,
            "nvmlDeviceGetMemoryInfo": None if card.used_mib is None else memory,
            "nvmlDeviceGetUtilizationRates": None
            if card.busy is None
            else pynvml.c_nvmlUtilization_t(gpu=card.busy, memory=card.memory_busy),
            "nvmlDeviceGetTemperatureV": card.temperature,
            "nvmlDeviceGetTemperature": card.temperature,
            "nvmlDeviceGetPowerUsage": card.power_mw,
            "nvmlDeviceGetEnforcedPowerLimit": card.limit_mw,
            "nvmlDeviceGetCurrentClocksEventReasons": card.clock_reasons,
            "nvmlDeviceGetCurrentClocksThrottleReasons": card.clock_reasons,
            "nvmlDeviceGetTopologyCommonAncestor": pynvml.NVML_TOPOLOGY_SYSTEM,
            "nvmlDeviceGetP2PStatus": pynvml.NVML_P2P_STATUS_OK
            if is_near
            else pynvml.NVML_P2P_STATUS_NOT_SUPPORTED,
        }
        if answers[name] is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return answers[name]


def play(
    monkeypatch: pytest.MonkeyPatch, folder: Path, driver: Driver | None, smi: str | None
) -> Path:
    """This machine from now on: with that module pynvml and what nvidia-smi prints; None: without.

    Returns:
        The file that nvidia-smi prints: without it nvidia-smi fails.
    """
    devices, programs = folder / "dev", folder / "bin"
    answer = folder / "nvidia-smi.txt"
    for made in (devices, programs):
        made.mkdir()
    for index in range(len(driver.cards) if driver else 0):
        (devices / f"nvidia{index}").touch()
    monkeypatch.setitem(sys.modules, "pynvml", driver)  # type: ignore[arg-type]
    monkeypatch.setattr(gpus, "DEVICES", devices)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if smi is None:
        folders = os.environ["PATH"].split(os.pathsep)
        others = [name for name in folders if not (Path(name) / "nvidia-smi").exists()]
        monkeypatch.setenv("PATH", os.pathsep.join(others))
        return answer
    answer.write_text(smi)
    program = programs / "nvidia-smi"
    program.write_text(
        f'#!/bin/sh\n[ "$1" = "{ASKED}" ] || exit 2\n'
        f"cat {answer} 2>/dev/null || {{ echo driver gone; exit 9; }}\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(programs), prepend=os.pathsep)
    return answer
