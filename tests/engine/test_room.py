"""Memory for what is received: as large as asked for, there at once, and written nowhere else."""

import sys
from pathlib import Path

import pytest
import torch

from nbdist.engine.parallel.exchange import room_for

CPU = torch.device("cpu")


@pytest.mark.parametrize("shape", [(), (0,), (3, 5), (257, 1031), (1024, 1025)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_a_tensor_of_the_shape(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Contiguous, writable, of any size and dtype."""
    tensor = room_for(shape, dtype, CPU)

    assert (tensor.shape, tensor.dtype) == (torch.Size(shape), dtype)
    assert tensor.is_contiguous()
    assert tensor.fill_(3).sum().item() == pytest.approx(3 * tensor.numel(), rel=1e-2)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems give pages as they are written")
def test_its_pages_are_there_before_it_is_written() -> None:
    """64 MiB more are resident; torch.empty's are not."""
    before = _resident_mib()
    lazy = torch.empty(16 << 20)
    between = _resident_mib()
    tensor = room_for((16 << 20,), torch.float32, CPU)

    assert between - before < 8
    assert _resident_mib() - between > 60
    assert lazy.shape == tensor.shape


def _resident_mib() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(one for one in lines if one.startswith("VmRSS:")).split()[1]) / 1024
