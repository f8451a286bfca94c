"""Ranks that are kept: what it costs a cell, and how soon another kernel has them."""

from __future__ import annotations

import os
import re
import signal
import tempfile
import time
from pathlib import Path

from benchmarks import Row, compare
from benchmarks.kernels import Notebook

# What runs -> turns.
CELLS = {
    "pass": 60,
    "for n in range(10_000): print('line', n)": 7,
    "for n in range(100_000): print('line', n)": 3,
}
LINES = 1_000_000
PRINTS = f"%%distributed\nfor n in range({LINES}): print('line', n)"
DIES_AFTER_S = 1.0
LOAD, START = "%load_ext nbdist", "%dist_init -n 2"
WARM = "%%distributed\nimport torch._dynamo"


def rows() -> list[Row]:
    """Rows for cells, two kernels taking turns, and for an attach in the middle of a cell."""
    with tempfile.TemporaryDirectory(prefix="nbdist-bench-") as name:
        folders = [Path(name) / side for side in ("kept", "plain", "after")]
        for folder in folders:
            folder.mkdir()
        with Notebook(folders[0]) as keeping:
            with Notebook(folders[1]) as plain:
                started_s = [
                    _start(notebook, line)
                    for notebook, line in ((keeping, f"{START} --keep 1h"), (plain, START))
                ]
                cells = [_cell(code, rounds, keeping, plain) for code, rounds in CELLS.items()]
                plain.run("%dist_shutdown")
            run = keeping.run("import nbdist\nnbdist.session().cluster.run_dir.name").text.strip(
                "'"
            )
            keeping.begin(PRINTS)
            time.sleep(DIES_AFTER_S)
            os.kill(keeping.pid, signal.SIGKILL)
            with Notebook(folders[2]) as after:
                after.run(LOAD)
                attached_s = _attach(after, run)
                after.run("%dist_shutdown")
    how = (
        f"kernel killed in the middle of {LINES:,} lines of 2 ranks, none of which was lost or "
        "came twice; other: the start"
    )
    return [*cells, Row("attach", attached_s, started_s[0], "s", how)]


def _start(notebook: Notebook, line: str) -> float:
    notebook.run(LOAD)
    elapsed_s = notebook.run(line).elapsed_s
    notebook.run(WARM)
    return elapsed_s


def _cell(code: str, rounds: int, keeping: Notebook, plain: Notebook) -> Row:
    cell = f"%%distributed\n{code}"
    medians = compare(
        lambda: keeping.run(cell).elapsed_s * 1000, lambda: plain.run(cell).elapsed_s * 1000, rounds
    )
    how = f"{rounds} turns, each message written down by its rank; other: not kept"
    return Row(f"`{code}`, kept", *medians, unit="ms", how=how)


def _attach(notebook: Notebook, run: str) -> float:
    """Attach and see the cell through: how long until the ranks were there.

    Raises:
        RuntimeError: If a line is missing, or comes twice.
    """
    text = notebook.run(f"%dist_attach {run}").text
    path = re.search(r"(/\S+/output/cell-\S+\.txt)", text)
    attached = re.search(r"attached in ([\d.]+) s", text)
    if path is None or attached is None:
        raise RuntimeError(f"the attach has shown something else: {text[-1000:]}")
    lines = Path(path[1]).read_text().splitlines()
    for rank in (0, 1):
        labels = {f"[{rank}]", "[0-1]"}
        of_rank = [line for line in lines if line.partition(" ")[0] in labels]
        if [line.partition(" ")[2] for line in of_rank] != [f"line {n}" for n in range(LINES)]:
            raise RuntimeError(f"{len(of_rank):,} lines of rank {rank}, or in another order")
    return float(attached[1])
