"""A notebook's script goes through a real Slurm, and its checkpoint comes back to the notebook."""

import json
import sys
from pathlib import Path

import pytest

from tests.support.host_kernel import HostKernel
from tests.support.hosts import SHARED, Hosts
from tests.support.kernel import Kernel

_START_S = 100.0
_JOB_S = 120.0
_ENV = {"OMP_NUM_THREADS": "1", "MPLCONFIGDIR": f"{SHARED}/matplotlib", "HF_HUB_OFFLINE": "1"}
_FIRST = f"{SHARED}/first"
_MODEL = """%%distributed
torch.manual_seed(3)
x = torch.randn(32, 8)
model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), batch_size=4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)"""
_EPOCH = """%%distributed
for (a,) in loader:
    loss = (model(a) - a.sin()).pow(2).mean()
    optimizer.zero_grad()
    accelerator.backward(loss)
    optimizer.step()
    mean = accelerator.reduce(loss.detach(), "mean").item()
    if rank == 0:
        print("loss", f"{mean:.7f}")"""
_CELLS = ["%load_ext nbdist", "%dist_init -n 2 --strategy zero1", _MODEL, _EPOCH,
          f"%dist_save {_FIRST}"]  # fmt: skip


def losses(text: str) -> list[float]:
    """Those that rank 0 has printed."""
    lines = [line.removeprefix("[0] ") for line in text.splitlines()]
    return [float(line.split()[1]) for line in lines if line.startswith("loss ")]


def ran(kernel: Kernel, code: str) -> str:
    """What a cell showed."""
    cell = kernel.run(code, _START_S)
    assert cell.status == "ok", cell.visible
    return cell.visible


@pytest.mark.more_hosts
def test_a_job_goes_on_from_the_notebook_and_back(slurm: Hosts) -> None:
    """On two nodes, from the notebook's checkpoint: its next losses; what it wrote loads there."""
    cells = [{"cell_type": "code", "source": cell} for cell in _CELLS]
    notebook = slurm.path("head", f"{SHARED}/a.ipynb")
    notebook.write_text(json.dumps({"nbformat": 4, "nbformat_minor": 5, "cells": cells}))
    with HostKernel(slurm, slurm.head, _ENV) as kernel:
        for code in _CELLS:
            ran(kernel, code)
        second, third = losses(ran(kernel, _EPOCH)), losses(ran(kernel, _EPOCH))
        shown = ran(
            kernel,
            f"%dist_export {SHARED}/train.py --from {SHARED}/a.ipynb --nodes 2 "
            f"--slurm {SHARED}/train.sbatch",
        )
        bin_folder = Path(sys.executable).parent
        slurm.run(
            "head",
            ["sbatch", "--wait", f"{SHARED}/train.sbatch", "--resume", _FIRST],
            env={**_ENV, "PATH": f"{bin_folder}:/usr/sbin:/usr/bin:/sbin:/bin"},
            cwd=SHARED,
            timeout_s=_JOB_S,
            check=False,
        )
        [output] = slurm.path("head", SHARED).glob("train-*.out")
        job = output.read_text()

        assert "it needs nbdist: zero1, dp 2: Accelerate has ZeRO stage 1 only through" in shown
        assert shown.rstrip().endswith(f"or: sbatch {SHARED}/train.sbatch")
        assert losses(job) == pytest.approx(second, abs=1e-6), job
        ran(kernel, "%dist_strategy fsdp")
        ran(kernel, f"%dist_load {_FIRST}")
        assert losses(ran(kernel, _EPOCH)) == pytest.approx(third, abs=1e-6)
        ran(kernel, "%dist_shutdown")
