"""Ranks on several hosts by ssh, beside as many on one host."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks import Row
from tests.support.host_kernel import HostKernel
from tests.support.hosts import SHARED, Hosts, missing

# Hosts and ranks of each. All share this machine's cores: more of them cannot make anything faster.
SIZES = ((1, 2), (2, 2), (3, 2), (4, 4), (4, 8), (4, 16))
CELLS = 10
LINES = 10_000
PUSHED_MB = 1000
# A value of that size is in the kernel, on its way, and on each rank.
MOST_PUSHED_RANKS = 6
DEADLINE_S = 400.0
PICTURE = Path(__file__).resolve().parents[1] / "docs" / "pictures" / "several_hosts.svg"


@dataclass(frozen=True, slots=True)
class Measured:
    """What one start of ranks gave, in seconds; 0 where it was not measured."""

    start_s: float
    cell_s: float
    lines_s: float
    push_s: float
    told_s: float
    rank_mb: float


def rows() -> list[Row]:
    """Rows for each number of hosts; draws the picture. None where hosts cannot be made here."""
    if missing("sshd", "ssh"):
        return []
    pairs: dict[tuple[int, int], tuple[Measured, Measured]] = {}
    with Hosts(max(n for n, _ in SIZES)) as hosts:
        hosts.start_sshd()
        for n, each in SIZES:
            listed = ",".join(f"node{i}:{each}" for i in range(1, n + 1))
            ours = measure(hosts, f"--hosts {listed}", n * each)
            pairs[n, each] = ours, measure(hosts, f"-n {n * each}", n * each)
    draw(pairs, PICTURE)
    return [row for what in _ROWS for row in what(pairs)]


def measure(hosts: Hosts, options: str, n_ranks: int) -> Measured:
    """One start with these options by a kernel on the head, and what its ranks do."""
    env = {"OMP_NUM_THREADS": "1", "IPYTHONDIR": str(SHARED / "ipython")}
    with HostKernel(hosts, hosts.head, env) as kernel:
        kernel.run("%load_ext nbdist")
        start_s = _seconds(kernel, f"%dist_init {options} --grace 600 --timeout 300")
        memory = kernel.run(
            "%%distributed\nimport psutil\nprint(psutil.Process().memory_info().rss)"
        )
        cell_s = statistics.median(_seconds(kernel, "%%distributed\npass") for _ in range(CELLS))
        share = LINES // n_ranks
        lines_s = _seconds(kernel, f"%%distributed\nfor i in range({share}): print(rank, i)")
        push_s = 0.0
        if n_ranks <= MOST_PUSHED_RANKS:
            kernel.run(f"import numpy\nvalue = numpy.ones({PUSHED_MB} * 125_000)", DEADLINE_S)
            push_s = _seconds(kernel, "%dist_push value")
            kernel.run("del value")
            kernel.run("%%distributed\ndel value")
        told_s = _told_s(kernel)
        kernel.run("%dist_shutdown", DEADLINE_S)
    sizes = [int(size) for size in re.findall(r"\d{7,}", memory.text)]
    rank_mb = statistics.median(sizes) / 1e6 if sizes else 0.0
    return Measured(start_s, cell_s, lines_s, push_s, told_s, rank_mb)


def _seconds(kernel: HostKernel, code: str) -> float:
    """How long a cell took, which has to end well."""
    begun_s = time.monotonic()
    cell = kernel.run(code, DEADLINE_S)
    assert cell.status == "ok", cell.visible
    return time.monotonic() - begun_s


def _told_s(kernel: HostKernel) -> float:
    """From the beginning of a cell in which a rank leaves a collective out until that is shown."""
    begun_s = time.monotonic()
    hung = kernel.start("%%distributed\nif rank: dist.all_reduce(torch.ones(1))")
    kernel.wait_output(hung, "all_reduce(float32[1])", DEADLINE_S)
    told_s = time.monotonic() - begun_s
    kernel.interrupt()
    kernel.finish(hung, DEADLINE_S)
    return told_s


Pairs = dict[tuple[int, int], tuple[Measured, Measured]]


def _rows_of(
    name: str, value: Callable[[Measured], float], unit: str, how: str, most_ratio: float | None
) -> Callable[[Pairs], list[Row]]:
    def rows_of(pairs: Pairs) -> list[Row]:
        return [
            Row(
                f"{n} hosts x {each} ranks: {name}" if n > 1 else f"1 host x {each} ranks: {name}",
                value(ours),
                value(other),
                unit,
                how,
                # Promised for four hosts with four ranks each.
                most_ratio if (n, each) == (4, 4) else None,
            )
            for (n, each), (ours, other) in pairs.items()
            if value(ours) and value(other)
        ]

    return rows_of


_ROWS = (
    _rows_of("start", lambda m: m.start_s, "s", "one start; on one host", 2.0),
    _rows_of("`pass`", lambda m: m.cell_s * 1000, "ms", f"median of {CELLS}; on one host", None),
    _rows_of(f"{LINES:,} lines", lambda m: m.lines_s, "s", "of all ranks; on one host", None),
    _rows_of(f"push of {PUSHED_MB} MB", lambda m: m.push_s, "s", "to all ranks; on one host", None),
    _rows_of("hang told", lambda m: m.told_s, "s", "from the cell's begin; on one host", None),
    _rows_of("memory of a rank", lambda m: m.rank_mb, "MB", "resident; on one host", None),
)


def draw(pairs: Pairs, path: Path) -> None:
    """Start, cell and hang against the number of ranks. The same numbers give the same file."""
    import matplotlib as mpl

    mpl.use("svg")
    # Otherwise ids are random and the file carries the date of its making.
    mpl.rcParams["svg.hashsalt"] = "nbdist"
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(1, 3, figsize=(12, 3.5), layout="constrained")
    ranks = [n * each for n, each in pairs]
    labels = [f"{n * each}\n({n})" for n, each in pairs]
    shown: tuple[tuple[str, Callable[[Measured], float]], ...] = (
        ("s, start", lambda m: m.start_s),
        ("ms, trivial cell", lambda m: m.cell_s * 1000),
        ("s, hang told", lambda m: m.told_s),
    )
    for axes, (ylabel, value) in zip(panels, shown, strict=True):
        for side, label in enumerate(("several hosts", "one host")):
            values = [value(pair[side]) for pair in pairs.values()]
            axes.plot(ranks, values, marker="o", label=label)
        axes.set(xscale="log", xlabel="ranks (hosts)", ylabel=ylabel, ylim=(0, None))
        axes.set_xticks(ranks, labels)
        axes.minorticks_off()
        axes.legend()
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
