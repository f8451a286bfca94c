"""The GPUs that the notebook may use, found without torch or CUDA in the kernel."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

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


def _listed() -> tuple[Gpu, ...]:
    program = shutil.which("nvidia-smi")
    if program is not None:
        try:
            answer = subprocess.run(  # noqa: S603  # a fixed command line
                [program, *QUERY],
                capture_output=True,
                text=True,
                timeout=DEADLINE_S,
                check=True,
            )
        except (OSError, subprocess.SubprocessError):
            # A broken driver: the engines find out by themselves and say so in the table.
            return ()
        return parse(answer.stdout)
    files = sorted(Path("/dev").glob("nvidia[0-9]*"))
    return tuple(
        Gpu(index=number, uuid=str(path), name="NVIDIA GPU") for number, path in enumerate(files)
    )
