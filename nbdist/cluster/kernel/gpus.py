"""The GPUs that the notebook may use, found without torch or CUDA in the kernel."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from nbdist.core.nvml import MIB, GpuReading, GpuReadings, Nvml
from nbdist.core.topology import Gpu

# The name is last: it may have commas.
READ = (
    "index", "uuid", "memory.used", "memory.total", "utilization.gpu", "utilization.memory",
    "temperature.gpu", "power.draw", "power.limit", "name",
)  # fmt: skip
DEADLINE_S = 15.0


def visible() -> tuple[Gpu, ...]:
    """The GPUs of this machine, less those that CUDA_VISIBLE_DEVICES leaves out.

    Numbered as nvidia-smi numbers them. Without nvidia-smi the device files are counted.
    """
    if shutil.which("nvidia-smi") is not None:
        # A broken driver: the engines find out by themselves and say so in the table.
        rows, _ = table("index", "uuid", "name")
        gpus = [Gpu(int(index), uuid, name) for index, uuid, name in rows]
    else:
        files = enumerate(sorted(Path("/dev").glob("nvidia[0-9]*")))
        gpus = [Gpu(index, str(path), "NVIDIA GPU") for index, path in files]
    return filter_visible(tuple(gpus), os.environ.get("CUDA_VISIBLE_DEVICES"))


def filter_visible(gpus: tuple[Gpu, ...], variable: str | None) -> tuple[Gpu, ...]:
    """The GPUs that a value of CUDA_VISIBLE_DEVICES (numbers or UUIDs) leaves, in its order.

    As CUDA does, an entry that does not exist ends the list.
    """
    if variable is None:
        return gpus
    gpus_left: list[Gpu] = []
    for entry in filter(None, (part.strip() for part in variable.split(","))):
        match = [g for g in gpus if entry == str(g.index) or g.uuid.startswith(entry)]
        if not match:
            break
        gpus_left.append(match[0])
    return tuple(gpus_left)


def table(*fields: str) -> tuple[list[list[str]], str]:
    """(these fields of each GPU, why nvidia-smi does not tell); the last one may have commas."""
    text, problem = smi(f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits")
    rows = [line.split(", ", len(fields) - 1) for line in text.splitlines()]
    return [row for row in rows if len(row) == len(fields) and row[0].isdigit()], problem


def number(text: str) -> float | None:
    """A number of nvidia-smi; None for "[N/A]" and the like."""
    try:
        return float(text)
    except ValueError:
        return None


def smi(*arguments: str) -> tuple[str, str]:
    """(what nvidia-smi prints, why it does not); both empty where there is none."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return "", ""
    try:
        done = subprocess.run(  # noqa: S603  # a fixed command line
            [program, *arguments],
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
    except (OSError, subprocess.SubprocessError) as error:
        return "", str(error)
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip().splitlines()
        return "", said[0] if said else f"exit code {done.returncode}"
    return done.stdout, ""


def reader() -> Callable[[], GpuReadings]:
    """What reads all GPUs of this host once: NVML, or nvidia-smi where NVML fails.

    Without either it finds none. It may take seconds, and more where a driver hangs.
    """
    try:
        return Nvml(importlib.import_module("pynvml")).read  # late: it takes 0.1 s
    except Exception:  # noqa: BLE001  # no library, no driver: NVML's errors are its own
        return read_by_smi


def read_by_smi() -> GpuReadings:
    """All GPUs by nvidia-smi, which tells neither of MIG instances nor why clocks are low."""
    rows, problem = table(*READ)
    problems = (f"nvidia-smi does not answer: {problem}",) if problem else ()
    return GpuReadings(tuple(map(_reading, rows)), problems)


def _reading(row: list[str]) -> GpuReading:
    used, total = (None if (mib := number(cell)) is None else int(mib * MIB) for cell in row[2:4])
    busy, memory_busy, temperature, power, limit = map(number, row[4:-1])
    return GpuReading(
        int(row[0]), row[1], row[-1], used, total, busy, memory_busy, temperature, power, limit
    )
