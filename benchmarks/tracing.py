"""A recorded cell beside torch's profiler by hand, and how long a million events take."""

from __future__ import annotations

import gzip
import re
import statistics
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from benchmarks import Row
from benchmarks.kernels import Notebook
from nbdist.trace import breakdown, clock_sync, findings, read
from nbdist.trace.view.report import trace_report

DATA = Path(__file__).resolve().parent.parent / "tests" / "data" / "traces" / "ddp"
RANKS = 2
EVENTS = 10**6
ROUNDS = 3
MOST_S = 10.0
# Longer than the recording, so that the copies of it follow one another.
PERIOD_US = 300_000.0
_EVENT = '{\n    "ph": "'
_TS = re.compile(r'"ts": ([0-9.]+)')

PAIRS = 10
MOST_RATIO = 1.05
MAKE = """%%distributed
import statistics, time
from torch.profiler import profile, ProfilerActivity
torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(12)))
optimizer = torch.optim.AdamW(model.parameters())
model, optimizer = accelerator.prepare(model, optimizer)
inputs = torch.randn(64, 256)
def train():
    taken = []
    for _ in range(40):
        began = time.perf_counter()
        optimizer.zero_grad()
        accelerator.backward(model(inputs).square().mean())
        optimizer.step()
        taken.append(time.perf_counter() - began)
    slowest = torch.tensor(statistics.median(taken))
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    if rank == 0:
        print(f'step {slowest.item():.9f}')
train()
"""
OURS = "%%dist_profile\ntrain()"
BY_HAND = """%%distributed
with profile(activities=[ProfilerActivity.CPU], record_shapes=True):
    train()
"""


def rows() -> list[Row]:
    """One row of the cost, one of a million events."""
    return [_cost(), _million()]


def _cost() -> Row:
    with (
        tempfile.TemporaryDirectory(prefix="nbdist-bench-") as name,
        Notebook(Path(name)) as notebook,
    ):
        for cell in ("%load_ext nbdist", f"%dist_init -n {RANKS}", MAKE, OURS, BY_HAND):
            notebook.run(cell)
        pairs = []
        for number in range(PAIRS):
            order = (OURS, BY_HAND) if number % 2 else (BY_HAND, OURS)
            times = {cell: _step_s(notebook.run(cell).text) for cell in order}
            pairs.append((times[OURS] * 1000, times[BY_HAND] * 1000))
        notebook.run("%dist_shutdown")
    ours, other = zip(*pairs, strict=True)
    return Row(
        "one DDP step while it is recorded, 2 ranks",
        statistics.median(ours),
        statistics.median(other),
        unit="ms",
        how=f"{PAIRS} cells of 40 steps on each side, by turns; other: torch.profiler by hand",
        most_ratio=MOST_RATIO,
    )


def _step_s(text: str) -> float:
    match = re.search(r"step ([0-9.]+)", text)
    assert match, text
    return float(match.group(1))


def _million() -> Row:
    with tempfile.TemporaryDirectory(prefix="nbdist-bench-") as name:
        paths = [_long(rank, Path(name)) for rank in range(RANKS)]
        # Like ranks, which read their own files at the same time.
        with ProcessPoolExecutor(RANKS, get_context("spawn")) as pool:
            list(pool.map(_read_s, paths))  # whose first use imports
            taken = []
            for _ in range(ROUNDS):
                read_s = max(pool.map(_read_s, paths))
                taken.append(read_s + _shown_s(paths))
    return Row(
        f"{EVENTS:,} events of {RANKS} ranks: from torch's files to all that is shown",
        statistics.median(taken),
        MOST_S,
        unit="s",
        how=f"median of {ROUNDS}; each rank reads its file, the notebook does the rest; other: the "
        "most that was promised",
        most_ratio=1.0,
    )


def _long(rank: int, folder: Path) -> Path:
    """A file of torch's profiler with its events again and again, one after the other."""
    short = DATA / f"rank{rank}.json.gz"
    text = gzip.decompress(short.read_bytes()).decode()
    head, *events = text.split(_EVENT)
    # The last holds the end of the file.
    body, tail = events[:-1], events[-1]
    copies = -(-EVENTS // RANKS // (len(read.read(short).trace.events) - 1))
    path = folder / f"rank{rank}.json"
    with path.open("w") as file:
        file.write(head)
        joined = _EVENT + _EVENT.join(body)
        for copy in range(copies):
            later = PERIOD_US * copy
            file.write(
                _TS.sub(lambda match, later=later: f'"ts": {float(match[1]) + later:.3f}', joined)
            )
        file.write(_EVENT + tail)
    return path


def _read_s(path: Path) -> float:
    began_s = time.perf_counter()
    read.read(path)
    return time.perf_counter() - began_s


def _shown_s(paths: list[Path]) -> float:
    trace = clock_sync.align([read.read(path) for path in paths])
    began_s = time.perf_counter()
    counted = breakdown.breakdown(trace)
    view = trace_report(trace, counted, findings.findings(trace, counted))
    assert view._repr_mimebundle_()["text/html"]
    assert sum(len(rank_trace.events) for rank_trace in trace.ranks) >= EVENTS
    return time.perf_counter() - began_s
