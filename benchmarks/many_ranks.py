"""Start and cells of many ranks on one machine."""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

from benchmarks import Row
from benchmarks.kernels import Notebook
from benchmarks.start import script, torchrun_s

COUNTS = (2, 4, 8, 16, 32)
CELLS = 20
PICTURE = Path(__file__).resolve().parents[1] / "docs" / "pictures" / "many_ranks.svg"


def rows() -> list[Row]:
    """Rows of both for each number of ranks; draws the picture."""
    starts: dict[int, tuple[float, float]] = {}
    cells: dict[int, tuple[float, float]] = {}
    with tempfile.TemporaryDirectory(prefix="nbdist-bench-") as name:
        for ranks in COUNTS:
            ours, peer, own = (Path(name) / f"{ranks}.{one}" for one in ("ours", "px", "torchrun"))
            for folder in (ours, peer, own):
                folder.mkdir()
            start_s, cell_s = _ours(ours, ranks)
            starts[ranks] = start_s, torchrun_s(own, script(ranks), ranks)
            cells[ranks] = cell_s * 1000, _px_s(peer, ranks) * 1000
    draw(starts, cells, PICTURE)
    return [
        *(
            Row(
                f"{n} ranks: start to the first all_reduce",
                *pair,
                unit="s",
                how="one start; torchrun",
            )
            for n, pair in starts.items()
        ),
        *(
            Row(f"{n} ranks: `pass`", *pair, unit="ms", how=f"median of {CELLS}; %%px")
            for n, pair in cells.items()
        ),
    ]


def _ours(folder: Path, ranks: int) -> tuple[float, float]:
    """Seconds of (a start with its first all_reduce, a trivial cell)."""
    with Notebook(folder) as notebook:
        cells = ("%load_ext nbdist", f"%dist_init -n {ranks}", "%%distributed\n" + _sum())
        start_s = sum(notebook.run(cell).elapsed_s for cell in cells)
        notebook.run("%%distributed\nimport torch._dynamo")
        cell_s = _median_s(notebook, "%%distributed\npass")
        notebook.run("%dist_shutdown")
    return start_s, cell_s


def _px_s(folder: Path, ranks: int) -> float:
    with Notebook(folder) as notebook:
        cluster = f"ipyparallel.Cluster(n={ranks}).start_and_connect_sync(activate=True)"
        notebook.run(f"import ipyparallel\nclient = {cluster}")
        cell_s = _median_s(notebook, "%%px\npass")
        notebook.run("client.cluster.stop_cluster_sync()")
    return cell_s


def _median_s(notebook: Notebook, cell: str) -> float:
    return statistics.median(notebook.run(cell).elapsed_s for _ in range(CELLS))


def _sum() -> str:
    return "x = torch.ones(1); dist.all_reduce(x); print(x.item())"


def draw(
    starts: dict[int, tuple[float, float]], cells: dict[int, tuple[float, float]], path: Path
) -> None:
    """Both against the number of ranks. The same numbers give the same file."""
    import matplotlib as mpl

    mpl.use("svg")
    # Otherwise ids are random and the file carries the date of its making.
    mpl.rcParams["svg.hashsalt"] = "nbdist"
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
    for axes, taken, names, unit in (
        (panels[0], starts, ("nbdist", "torchrun"), "s, start to the first all_reduce"),
        (panels[1], cells, ("nbdist", "%%px"), "ms, trivial cell"),
    ):
        for side, label in enumerate(names):
            axes.plot(list(taken), [pair[side] for pair in taken.values()], marker="o", label=label)
        axes.set(xscale="log", xlabel="ranks", ylabel=unit, ylim=(0, None))
        axes.set_xticks(list(taken), [str(n) for n in taken])
        axes.legend()
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
