"""What every captured trace and snapshot has to hold, of CPU ranks and of GPUs alike."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from nbdist.commands.memory import snapshot_view
from nbdist.commands.trace import report
from nbdist.memory import file as memory_file
from nbdist.memory.findings import findings
from nbdist.memory.peak import peaks
from nbdist.memory.snapshot import BACKWARD, PARAMETER, STEPPING, Snapshot
from nbdist.trace.breakdown import breakdown
from nbdist.trace.kernel.recordings import read_folder
from nbdist.trace.trace import COMMUNICATION, Trace
from tests.support import pages

# Folders of what was captured on GPUs; others are of CPU ranks.
CUDA = "cuda"
# What a plain loop of a small model is told: a GPU's allocator takes 2 MB and 20 MB at a time, and
# its optimizers step all parameters at once.
TOLD = {
    "cpu": {"optimizer state on every rank"},
    "cuda": {
        "optimizer state on every rank", "fragmentation", "copies in the optimizer's step",
    },
}  # fmt: skip
# Of a view, as its docstring promises.
MOST_BYTES = 2e6


def device_of(folder: Path) -> str:
    """Where a folder's files were captured, by its name."""
    return "cuda" if folder.name.startswith(CUDA) else "cpu"


def check_trace(folder: Path) -> Trace:
    """Two whole steps on each rank whose parts add up to the time; every call has its group."""
    trace = read_folder(folder)
    device = device_of(folder)
    assert [rank.rank for rank in trace.ranks] == list(range(len(trace.ranks)))
    for rank, shares in zip(trace.ranks, breakdown(trace).ranks, strict=True):
        calls = rank.events.kind == COMMUNICATION
        parts = (shares.compute_ns, shares.exposed_ns, shares.copy_ns, shares.data_ns)
        assert (rank.problem, rank.device) == ("", device)
        assert [step.number for step in rank.steps] == [0, 1]
        assert any(lane.is_device for lane in rank.lanes) == (device == "cuda")
        assert sum(parts) + shares.idle_ns == shares.window_ns
        assert shares.compute_ns > 0
        assert calls.any()
        assert (rank.events.group[calls] >= 0).all()
    view = report(trace)
    pages.check_drawn(view, MOST_BYTES)
    assert ", 2 steps of " in view.text
    return trace


def check_snapshot(folder: Path) -> Snapshot:
    """Two steps of each rank with their phases, lines of the cell, nothing that tells a machine.

    On a GPU the blocks add up to the allocator's own peak. No rule finds a fault in a plain loop.
    """
    snapshot = memory_file.read_folder(folder)
    assert [rank.rank for rank in snapshot.ranks] == list(range(len(snapshot.ranks)))
    for rank in snapshot.ranks:
        files = {frame.file for stack in rank.stacks for frame in stack}
        blocks = rank.blocks
        assert (rank.problem, rank.lost, len(rank.step_ends_ns)) == ("", 0, 2)
        assert rank.device == device_of(folder)
        assert [phase.kind for phase in rank.phases] == [BACKWARD, STEPPING] * 2
        assert any(file.startswith("cell [") for file in files)
        assert all(file.startswith(("cell [", "/python/", "<")) for file in files)
        assert int(blocks.size_bytes[blocks.category == PARAMETER].sum()) > 0
        if rank.device == "cuda":
            times = np.unique(np.maximum(blocks.start_ns, 0))
            held = [
                blocks.size_bytes[(blocks.start_ns <= time) & (blocks.end_ns > time)].sum()
                for time in times
            ]
            assert max(held) == rank.allocator_peak_bytes
    rules = {finding.rule for finding in findings(snapshot, peaks(snapshot))}
    assert rules <= TOLD[device_of(folder)]
    view = snapshot_view(snapshot)
    pages.check_drawn(view, MOST_BYTES)
    assert ", 2 steps, " in view.text
    assert ("the allocator holds" in view.text) == (device_of(folder) == "cuda")
    return snapshot
