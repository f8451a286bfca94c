"""Processes and memory of ranks that do nothing, beside ipyparallel's and without forks."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import psutil

from benchmarks import Row
from benchmarks.kernels import Notebook
from benchmarks.start import by_hand, cells_of_ours

# By then what a rank loads once it is idle is there.
SETTLED_S = 10.0
COUNTS = (2, 8)


def rows() -> list[Row]:
    """How many there are, and what they hold; both sides have torch, a group, one all_reduce."""
    made = []
    with tempfile.TemporaryDirectory(prefix="nbdist-bench-") as name:
        for ranks in COUNTS:
            place, cells = Path(name) / str(ranks), cells_of_ours(ranks)
            ours = _counted(place / "ours", cells, "%dist_shutdown")
            unforked = _counted(place / "unforked", cells, "%dist_shutdown", NBDIST_FORK="0")
            last = "client.cluster.stop_cluster_sync()"
            peer = _counted(place / "peer", by_hand(place / "store", ranks), last)
            how = f"{ranks} idle ranks after one all_reduce; all below the kernel"
            memory = f"{how}; proportional set sizes, {SETTLED_S:.0f} s later"
            made += [
                Row(
                    f"processes of {ranks} ranks", float(ours[0]), float(peer[0]), unit="", how=how
                ),
                Row(f"memory of {ranks} ranks", ours[1], peer[1], unit="MiB", how=memory),
                Row(
                    f"memory of {ranks} ranks, beside NBDIST_FORK=0",
                    ours[1],
                    unforked[1],
                    unit="MiB",
                    how=memory,
                    most_ratio=0.5 if ranks == max(COUNTS) else None,
                ),
            ]
    return made


def _counted(folder: Path, cells: tuple[str, ...], last: str, **env: str) -> tuple[int, float]:
    """(processes below the kernel, their memory in MiB)."""
    folder.mkdir(parents=True)
    with Notebook(folder, **env) as notebook:
        for cell in cells:
            notebook.run(cell)
        time.sleep(SETTLED_S)
        below = psutil.Process(notebook.pid).children(recursive=True)
        held_mib = sum(process.memory_full_info().pss for process in below) / 2**20
        notebook.run(last)
    return len(below), held_mib
