"""Start and cells of many ranks on one machine, and the processor time of their kernel."""

from __future__ import annotations

import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks import Row
from benchmarks.kernels import Notebook
from benchmarks.monitoring import BUSY, SETTLED_S
from benchmarks.start import script, torchrun_s

COUNTS = (2, 4, 8, 16, 32, 64)
STARTS = (2, 4, 8, 16, 32)
# What runs -> (how often, the largest ratio that is promised).
CELLS: dict[str, tuple[int, float | None]] = {
    "pass": (20, 1.0),
    "print('one line')": (20, 1.0),
    "for n in range(10_000): print('line', n)": (3, 1.0),
}
# The kernel's processor time is taken at the most ranks beside the fewest, over so long.
SPENT_S = 20.0
# What ranks do meanwhile -> the cell; nothing where they are idle.
SPENT_IN = {
    "idle": "",
    "in a cell that sleeps": f"%%distributed\nimport time\ntime.sleep({SPENT_S})",
    "in a cell with collectives": BUSY.format(seconds=SPENT_S),
}
RANK_BYTES = 130 << 20  # an idle rank that was forked, or ipyparallel's
ENGINES_S = 300  # ipyparallel waits a minute, in which 64 of its engines do not start on two cores
PICTURE = Path(__file__).resolve().parents[1] / "docs" / "pictures" / "many_ranks.svg"


@dataclass(frozen=True, slots=True)
class Measured:
    """One side, at one number of ranks.

    Attributes:
        start_s: Until the first all_reduce.
        cells_s: Of each cell of CELLS.
        spent_percent: Of a core, the kernel in each case of SPENT_IN; none of the other side.
    """

    start_s: float
    cells_s: tuple[float, ...]
    spent_percent: tuple[float, ...] = ()


def rows() -> list[Row]:
    """Rows of both for each number of ranks that memory allows; draws the picture."""
    counts = [ranks for ranks in COUNTS if ranks * RANK_BYTES < psutil.virtual_memory().available]
    starts: dict[int, tuple[float, float]] = {}
    cells: dict[int, tuple[Measured, Measured]] = {}
    with tempfile.TemporaryDirectory(prefix="nbdist-bench-") as name:
        for ranks in counts:
            ours, peer, torchrun = (
                Path(name) / f"{ranks}.{side}" for side in ("ours", "px", "torchrun")
            )
            for folder in (ours, peer, torchrun):
                folder.mkdir()
            cells[ranks] = _ours(ours, ranks), _px(peer, ranks)
            if ranks in STARTS:
                starts[ranks] = cells[ranks][0].start_s, torchrun_s(torchrun, script(ranks), ranks)
    passes = {n: (a.cells_s[0] * 1000, b.cells_s[0] * 1000) for n, (a, b) in cells.items()}
    draw(starts, passes, PICTURE)
    left_out = [str(ranks) for ranks in COUNTS if ranks not in counts]
    note = f"; no memory for {', '.join(left_out)} ranks" if left_out else ""
    how = "one start; torchrun"
    return [
        *(
            Row(f"{n} ranks: start to the first all_reduce", *pair, unit="s", how=how)
            for n, pair in starts.items()
        ),
        *(
            Row(
                f"{n} ranks: `{code}`",
                ours.cells_s[number] * 1000,
                peer.cells_s[number] * 1000,
                unit="ms",
                how=f"median of {times}; %%px{note}",
                most_ratio=most_ratio,
            )
            for number, (code, (times, most_ratio)) in enumerate(CELLS.items())
            for n, (ours, peer) in cells.items()
        ),
        *_spent_rows(cells[counts[-1]][0], cells[counts[0]][0], counts),
    ]


def _spent_rows(most: Measured, fewest: Measured, counts: list[int]) -> list[Row]:
    how = f"of a core, by cpu_times over {SPENT_S:.0f} s; {counts[0]} ranks"
    pairs = zip(SPENT_IN, most.spent_percent, fewest.spent_percent, strict=True)
    return [
        Row(f"the kernel of {counts[-1]} ranks {what}", many, few, unit="%", how=how)
        for what, many, few in pairs
    ]


def _ours(folder: Path, ranks: int) -> Measured:
    with Notebook(folder) as notebook:
        cells = ("%load_ext nbdist", f"%dist_init -n {ranks}", "%%distributed\n" + _sum())
        start_s = sum(notebook.run(cell).elapsed_s for cell in cells)
        notebook.run("%%distributed\nimport torch._dynamo")
        cells_s = _cells_s(notebook, "%%distributed")
        spent_percent = tuple(_spent_percent(notebook, cell) for cell in SPENT_IN.values())
        notebook.run("%dist_shutdown")
    return Measured(start_s, cells_s, spent_percent)


def _px(folder: Path, ranks: int) -> Measured:
    with Notebook(folder) as notebook:
        cluster = f"ipyparallel.Cluster(n={ranks}, engine_timeout={ENGINES_S})"
        start = f"client = {cluster}.start_and_connect_sync(activate=True)"
        start_s = notebook.run(f"import ipyparallel\n{start}").elapsed_s
        measured = Measured(start_s, _cells_s(notebook, "%%px"))
        notebook.run("client.cluster.stop_cluster_sync()")
    return measured


def _cells_s(notebook: Notebook, magic: str) -> tuple[float, ...]:
    """The medians of CELLS, each after one run that does not count."""
    medians = []
    for code, (times, _) in CELLS.items():
        taken_s = [notebook.run(f"{magic}\n{code}").elapsed_s for _ in range(times + 1)]
        medians.append(statistics.median(taken_s[1:]))
    return tuple(medians)


def _spent_percent(notebook: Notebook, cell: str) -> float:
    """What the kernel takes of a core, in a cell or while nothing runs."""
    time.sleep(SETTLED_S)
    kernel = psutil.Process(notebook.pid)
    before_s, began_s = sum(kernel.cpu_times()[:2]), time.monotonic()
    if cell:
        notebook.run(cell)
    else:
        time.sleep(SPENT_S)
    spent_s = sum(kernel.cpu_times()[:2]) - before_s
    return 100 * float(spent_s) / (time.monotonic() - began_s)


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
