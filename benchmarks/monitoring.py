"""Processor time that samples once a second take, kernel, controller and ranks together."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

from benchmarks import Row
from benchmarks.kernels import Notebook

RANKS = 2
# By then what a rank loads once it is idle is there.
SETTLED_S = 10.0
IDLE_S = 60.0
BUSY_S = 30.0
SETUP = (
    f"%load_ext nbdist\n%dist_init -n {RANKS}",
    "import nbdist\nmonitor = nbdist.session().monitor",
)
# Ranks of another host are asked, through their control threads, for all that is told of them.
ASKED = "monitor._health.pids = lambda: {}"
# A thousand collectives in a second: every record of the black boxes is new in each sample.
BUSY = (
    "%%distributed\nimport time\nimport torch.distributed as dist\nx = torch.ones(1)\n"
    "end_s = time.monotonic() + {seconds}\nwhile True:\n"
    "    ends = torch.tensor(float(time.monotonic() > end_s))\n    dist.all_reduce(ends)\n"
    "    if ends:\n        break\n    time.sleep(0.001)"
)


def rows() -> list[Row]:
    """Percent of one core, with samples and without, of two ranks on this host."""
    with (
        tempfile.TemporaryDirectory(prefix="nbdist-bench-") as name,
        Notebook(Path(name)) as notebook,
    ):
        for cell in SETUP:
            notebook.run(cell)
        notebook.run(BUSY.format(seconds=1))
        time.sleep(SETTLED_S)
        below = psutil.Process(notebook.pid).children(recursive=True)
        everybody = [psutil.Process(notebook.pid), *below]
        without = _idle(everybody, IDLE_S)
        busy_without = _busy(notebook)
        notebook.run("monitor.wait(0.0, 10.0)")
        with_samples = _idle(everybody, IDLE_S)
        busy_with = _busy(notebook)
        notebook.run(ASKED)
        asked = _idle(everybody, IDLE_S)
        notebook.run("%dist_shutdown")
    return [
        Row(
            f"{RANKS} idle ranks",
            with_samples,
            without,
            unit="%",
            how=f"of a core, by cpu_times over {IDLE_S:.0f} s; without samples",
            most_more=1.0,
        ),
        Row(
            f"{RANKS} ranks with a thousand collectives a second: the kernel alone",
            busy_with,
            busy_without,
            unit="%",
            how=f"of a core, by cpu_times over {BUSY_S:.0f} s; without samples",
            most_more=1.0,
        ),
        Row(
            f"{RANKS} idle ranks that are asked, as those of other hosts are",
            asked,
            without,
            unit="%",
            how=f"of a core, by cpu_times over {IDLE_S:.0f} s; without samples",
        ),
    ]


def _idle(everybody: Iterable[psutil.Process], seconds: float) -> float:
    before_s, began_s = _spent_s(everybody), time.monotonic()
    time.sleep(seconds)
    return 100 * (_spent_s(everybody) - before_s) / (time.monotonic() - began_s)


def _busy(notebook: Notebook) -> float:
    kernel = [psutil.Process(notebook.pid)]
    before_s, began_s = _spent_s(kernel), time.monotonic()
    notebook.run(BUSY.format(seconds=BUSY_S))
    return 100 * (_spent_s(kernel) - before_s) / (time.monotonic() - began_s)


def _spent_s(those: Iterable[psutil.Process]) -> float:
    return float(sum(sum(process.cpu_times()[:2]) for process in those))
