"""A tensor of 1 GB to two ranks and back, beside the copies that it needs at least."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from benchmarks import Row
from benchmarks.kernels import Notebook

SIZE_BYTES = 10**9
ROUNDS = 5
# More than either side needs.
TOUCHED_BYTES = 8 * SIZE_BYTES
MOST_RATIO = 3.0
SAMPLE_S = 0.02
MAKE = f"""
import numpy as np
big = np.random.default_rng(0).random({SIZE_BYTES} // 8)
"""
OURS = ("%load_ext nbdist", "%dist_init -n 2", MAKE)
THERE = "%dist_push big"
BACK = "%dist_pull big"
# What came back is on both ranks what was sent; then it is let go of.
CHECK = """
assert isinstance(big, list) and len(big) == 2 and np.array_equal(big[0], big[1])
big = big[0]; big.sum()
"""
# One copy into fresh pages of /dev/shm, and a fresh private copy for each of two ranks.
FLOOR = """
import mmap, os, tempfile, time
def floor():
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        began = time.perf_counter()
        os.truncate(file.fileno(), big.nbytes)
        with mmap.mmap(file.fileno(), big.nbytes) as memory:
            shared = np.frombuffer(memory, big.dtype)
            shared[:] = big
            private = [np.empty_like(big) for _ in range(2)]
            for one in private:
                one[:] = shared
            elapsed = time.perf_counter() - began
            del shared
    return elapsed
print(floor())
"""
PEER = (
    "import ipyparallel",
    "client = ipyparallel.Cluster(n=2).start_and_connect_sync(activate=True)",
    MAKE,
)
PEER_TRIP = """
view = client[:]
view.push({"big": big}, block=True)
big = view.pull("big", block=True)
"""


def rows() -> list[Row]:
    """Time beside the floor of the same kernel; memory beside ipyparallel's push and pull."""
    with tempfile.TemporaryDirectory(prefix="nbdist-bench-") as name:
        ours = Path(name) / "ours"
        ours.mkdir()
        with Notebook(ours) as notebook:
            for cell in OURS:
                notebook.run(cell)
            notebook.run(FLOOR)
            trips, floors = [], []
            for _ in range(ROUNDS + 1):
                _touch_memory()
                floors.append(float(notebook.run("print(floor())").text))
                _touch_memory()
                there_s = _trip_s(notebook, THERE)
                _touch_memory()
                trips.append(there_s + _trip_s(notebook, BACK))
                notebook.run(CHECK)
            with peak_bytes() as peak:
                _trip_s(notebook, THERE, BACK)
            notebook.run("%dist_shutdown")
        peer = _peer_peak_bytes(Path(name) / "peer")
    return [
        Row(
            "1 GB to two ranks and back",
            statistics.median(trips[1:]),
            statistics.median(floors[1:]),
            unit="s",
            how=f"{ROUNDS} rounds; other: one copy into fresh pages of /dev/shm and two fresh "
            "private copies",
            most_ratio=MOST_RATIO,
        ),
        Row(
            "memory at most while it is under way, above what there was before",
            peak[0] / 1e9,
            peer / 1e9,
            unit="GB",
            how="all processes and /dev/shm; results kept; other: ipyparallel's push and pull",
        ),
    ]


def _touch_memory() -> None:
    """Let the machine have memory at hand, for either side.

    A virtual one gives freed memory back to its host after a second or two; the faults with which
    it then comes again, five times as slow as the copy, would be measured in its place.
    """
    code = f"import numpy; numpy.ones({TOUCHED_BYTES} // 8)"
    subprocess.run([sys.executable, "-c", code], check=True)


def _trip_s(notebook: Notebook, *cells: str) -> float:
    return sum(notebook.run(cell).elapsed_s for cell in cells)


def _peer_peak_bytes(folder: Path) -> int:
    folder.mkdir()
    with Notebook(folder) as notebook:
        for cell in PEER:
            notebook.run(cell)
        with peak_bytes() as peak:
            notebook.run(PEER_TRIP)
        notebook.run(CHECK)
        notebook.run("client.cluster.stop_cluster_sync()")
    return peak[0]


@contextmanager
def peak_bytes() -> Iterator[list[int]]:
    """[the most memory that the machine lacks meanwhile, above what it lacked before]."""
    before = psutil.virtual_memory().available
    most, is_over = [0], threading.Event()

    def watch() -> None:
        while not is_over.wait(SAMPLE_S):
            most[0] = max(most[0], before - psutil.virtual_memory().available)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield most
    finally:
        is_over.set()
        thread.join()
