"""Processes and memory of two ranks that do nothing, beside ipyparallel's defaults."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import psutil

from benchmarks import Row
from benchmarks.kernels import Notebook
from benchmarks.start import OURS, by_hand

# By then what a rank loads once it is idle is there.
SETTLED_S = 10.0


def rows() -> list[Row]:
    """How many there are, and what they hold; both sides have torch, a group, one all_reduce."""
    with tempfile.TemporaryDirectory(prefix="nbdist-bench-") as name:
        ours = _counted(Path(name) / "ours", OURS, "%dist_shutdown")
        cells = by_hand(Path(name) / "store")
        peer = _counted(Path(name) / "peer", cells, "client.cluster.stop_cluster_sync()")
    how = "2 idle ranks after one all_reduce; all below the kernel"
    memory = f"{how}; proportional set sizes, {SETTLED_S:.0f} s later"
    return [
        Row("processes", *(float(one[0]) for one in (ours, peer)), unit="", how=how),
        Row("memory", *(one[1] for one in (ours, peer)), unit="MiB", how=memory),
    ]


def _counted(folder: Path, cells: tuple[str, ...], last: str) -> tuple[int, float]:
    """(processes below the kernel, their memory in MiB)."""
    folder.mkdir()
    with Notebook(folder) as notebook:
        for cell in cells:
            notebook.run(cell)
        time.sleep(SETTLED_S)
        below = psutil.Process(notebook.pid).children(recursive=True)
        held_mib = sum(process.memory_full_info().pss for process in below) / 2**20
        notebook.run(last)
    return len(below), held_mib
