"""GPUs as nvidia-smi tells of them, in one query with the fields that are wanted."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from nbdist.cluster.kernel import gpus
from nbdist.core.nvml import MIB, GpuReading
from nbdist.core.topology import Gpu
from nbdist.diagnostics import kernel as diagnostics_kernel
from tests.support.gpus import SMI


@pytest.fixture
def answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\ncat {tmp_path}/answer\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return (tmp_path / "answer").write_text


def test_a_reading_has_bytes_and_none_for_what_is_not_told(
    answer: Callable[[str], None],
) -> None:
    """MiB become bytes; a name may have commas."""
    answer(SMI)
    first, second = gpus.read_by_smi().gpus

    assert first == GpuReading(
        0, "GPU-8c2a1f", "NVIDIA H100 80GB HBM3", 1024 * MIB, 81559 * MIB, 97.0, 41.0, 61.0,
        512.33, 700.0,
    )  # fmt: skip
    assert second == GpuReading(
        1, "GPU-11aa22", "Odd, Name", 12 * MIB, 2048 * MIB, temperature_c=44.0
    )


@pytest.mark.parametrize("text", ["", "No devices were found\n", "\n\n", "0, 1\n"])
def test_an_nvidia_smi_without_gpus_gives_none(answer: Callable[[str], None], text: str) -> None:
    """A driver without devices is a machine without GPUs."""
    answer(text)

    assert gpus.visible() == gpus.read_by_smi().gpus == ()
    assert diagnostics_kernel.collect(2).gpus == ()


def test_the_doctor_learns_drivers_memory_and_modes(answer: Callable[[str], None]) -> None:
    """Memory in bytes, 0 where the machine shares it."""
    answer("0, GPU-aa, 570.86.15, 143771, 4, Default, NVIDIA H200\n1, b, 1, [N/A], 0, x, X\n")
    first, second = diagnostics_kernel.collect(2).gpus

    assert first.gpu == Gpu(0, "GPU-aa", "NVIDIA H200")
    assert (first.driver, first.compute_mode) == ("570.86.15", "Default")
    assert (first.total_bytes, first.used_bytes) == (143771 * MIB, 4 * MIB)
    assert second.total_bytes == 0
