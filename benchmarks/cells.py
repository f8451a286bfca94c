"""Cells on two ranks, beside ipyparallel's %%px."""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks import Row, compare
from benchmarks.kernels import Notebook

RANKS = 2
# What runs -> (turns, the largest ratio that is promised).
CELLS: dict[str, tuple[int, float | None]] = {
    "pass": (60, 0.8),
    "print('one line')": (60, None),
    "for n in range(10_000): print('line', n)": (7, 1.3),
    "for n in range(100_000): print('line', n)": (3, None),
}
OURS = ("%load_ext nbdist", f"%dist_init -n {RANKS}")
PEER = (
    "import ipyparallel",
    f"client = ipyparallel.Cluster(n={RANKS}).start_and_connect_sync(activate=True)",
)


def rows() -> list[Row]:
    """A row for each cell; two kernels take turns."""
    with tempfile.TemporaryDirectory(prefix="nbdist-bench-") as name:
        folders = [Path(name) / side for side in ("ours", "px")]
        for folder in folders:
            folder.mkdir()
        with Notebook(folders[0]) as ours, Notebook(folders[1]) as peer:
            for notebook, cells in ((ours, OURS), (peer, PEER)):
                for cell in cells:
                    notebook.run(cell)
            # Ranks load what DDP needs once they are idle; a cell would wait for it.
            ours.run("%%distributed\nimport torch._dynamo")
            rows = [_row(code, ours, peer) for code in CELLS]
            ours.run("%dist_shutdown")
            peer.run("client.cluster.stop_cluster_sync()")
    return rows


def _row(code: str, ours: Notebook, peer: Notebook) -> Row:
    rounds, most_ratio = CELLS[code]
    first, second = f"%%distributed\n{code}", f"%%px\n{code}"
    medians = compare(
        lambda: ours.run(first).elapsed_s * 1000, lambda: peer.run(second).elapsed_s * 1000, rounds
    )
    return Row(
        f"`{code}`",
        *medians,
        unit="ms",
        how=f"{rounds} turns, until the reply and all output are there; other: %%px",
        most_ratio=most_ratio,
    )
