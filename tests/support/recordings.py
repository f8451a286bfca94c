"""A cell that is recorded, in a kernel or in a process that is no rank."""

from typing import Any

import pytest

from tests.support.cells import Cell
from tests.support.kernel import Kernel

_OFF = """%%distributed
from torch.optim import optimizer as o
(torch.autograd._profiler_enabled(), len(o._global_optimizer_post_hooks),
 sum(h.__module__ != "nbdist.lints.rank.optimizer_steps"
     for h in o._global_optimizer_pre_hooks.values()))
"""


def ran(kernel: Kernel, code: str) -> Cell:
    """A cell that passes, after which nothing is recorded on any rank."""
    cell = kernel.run(code)

    assert cell.status == "ok", cell.visible
    assert "CPUAllocator" not in cell.visible  # what torch says of frees of older memory
    assert "USDT:" not in cell.visible  # what libkineto says where a profiler starts and stops
    assert "gpuGetDeviceCount" not in cell.visible  # its question for GPUs where there are none
    assert "registerClient" not in cell.visible  # of a fork whose torch another thread has imported
    assert kernel.run(_OFF).visible.count("(False, 0, 0)") >= 1
    return cell


class Place:
    """Stands for where this rank is."""

    class place:  # noqa: N801  # read as an attribute
        rank, device = 0, "cpu"


def own_profiler() -> Any:
    """One that a user's cell may run."""
    import torch

    return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])


def forbid_parsing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand for names of code that is gone: to read all events' names fails, as torch 2.13 does."""
    import torch

    def parse(*_: object) -> None:
        b"\xd0 gone".decode()

    monkeypatch.setattr(torch.autograd.profiler.profile, "_parse_kineto_results", parse)
