"""The GPUs that the notebook may use, found without torch or CUDA in the kernel."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from nbdist.core.nvml import QUERIES, UNKNOWN_FIELD, GpuReadings, Nvml, parse_smi
from nbdist.core.topology import Gpu

QUERY = ("--query-gpu=index,uuid,name", "--format=csv,noheader")
DEADLINE_S = 15.0


def visible() -> tuple[Gpu, ...]:
    """The GPUs of this machine, less those that CUDA_VISIBLE_DEVICES leaves out.

    Numbered as nvidia-smi numbers them. Without nvidia-smi the device files are counted.
    """
    return chosen(_listed(), os.environ.get("CUDA_VISIBLE_DEVICES"))


def chosen(gpus: tuple[Gpu, ...], variable: str | None) -> tuple[Gpu, ...]:
    """The GPUs that a value of CUDA_VISIBLE_DEVICES (numbers or UUIDs) leaves, in its order.

    As CUDA does, an entry that does not exist ends the list.
    """
    if variable is None:
        return gpus
    kept: list[Gpu] = []
    for entry in filter(None, (part.strip() for part in variable.split(","))):
        match = [g for g in gpus if entry == str(g.index) or g.uuid.startswith(entry)]
        if not match:
            break
        kept.append(match[0])
    return tuple(kept)


def parse(text: str) -> tuple[Gpu, ...]:
    """The GPUs in nvidia-smi's answer to QUERY."""
    rows = [line.split(", ", 2) for line in text.splitlines() if line.count(", ") >= 2]
    return tuple(Gpu(index=int(index), uuid=uuid, name=name) for index, uuid, name in rows)


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
    """What reads all GPUs of this host once: NVML, or nvidia-smi without its Python package.

    Without either it finds none. It may take seconds, and more where a driver hangs.
    """
    try:
        return Nvml(importlib.import_module("pynvml")).read  # the extra `gpu`
    except Exception:  # noqa: BLE001  # no package, no library, no driver: NVML's errors are its own
        return _read_by_smi


def _read_by_smi() -> GpuReadings:
    text, problem = smi(*QUERIES[0])
    if UNKNOWN_FIELD in problem:
        text, problem = smi(*QUERIES[1])
    return GpuReadings(
        parse_smi(text), (f"nvidia-smi does not answer: {problem}",) if problem else ()
    )


def _listed() -> tuple[Gpu, ...]:
    if shutil.which("nvidia-smi") is not None:
        # A broken driver: the engines find out by themselves and say so in the table.
        return parse(smi(*QUERY)[0])
    files = sorted(Path("/dev").glob("nvidia[0-9]*"))
    return tuple(
        Gpu(index=number, uuid=str(path), name="NVIDIA GPU") for number, path in enumerate(files)
    )
