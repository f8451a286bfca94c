"""Traces and snapshots of real ranks, kept for the tests of what reads and draws them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from nbdist.notebook.session import Session
from nbdist.trace.breakdown import breakdown
from tests.gpu import results
from tests.gpu.places import device_type, on, strategy_of
from tests.support import capture_memory, capture_traces
from tests.support.captured import CUDA, check_snapshot, check_trace

pytestmark = [pytest.mark.cluster, pytest.mark.engine]

# Of one rank's file, so that a repository can have it.
MOST_BYTES = 300_000


def folder_of(session: Session, kind: str, strategy: str, otherwise: Path) -> Path:
    """Where a capture goes: as it lies in tests/data, below what `make gpu` says."""
    name = device_type(session).replace("cuda", CUDA)
    if session.topology.backend == "nccl":
        name += "_nccl"
    return Path(os.environ.get(results.DATA, otherwise)) / kind / f"{name}_{strategy}"


def sizes(folder: Path) -> list[int]:
    return [path.stat().st_size for path in folder.iterdir()]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@on("cpu", "shared", "own")
def test_a_trace(ranks: Session, strategy: str, tmp_path: Path, measured: Any) -> None:
    """Two steps add up on every rank, and the files are small."""
    folder = folder_of(ranks, "traces", strategy, tmp_path)
    with strategy_of(ranks, strategy):
        capture_traces.capture(ranks, folder)
    trace = check_trace(folder)
    shares = breakdown(trace)
    measured("step, ms", round(shares.step_ns / 1e6, 2))
    measured("kB a rank", round(max(sizes(folder)) / 1e3))

    assert trace.strategy.startswith(strategy)
    assert max(sizes(folder)) < MOST_BYTES


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@on("cpu", "shared", "own")
def test_a_snapshot(ranks: Session, strategy: str, tmp_path: Path, measured: Any) -> None:
    """Two steps with all phases; on a GPU the blocks add up to the allocator's peak."""
    folder = folder_of(ranks, "memory", strategy, tmp_path)
    with strategy_of(ranks, strategy):
        capture_memory.capture(ranks, folder)
    snapshot = check_snapshot(folder)
    check_snapshot(folder.with_name(f"{folder.name}_leak"))
    measured("peak of the allocator, kB", snapshot.ranks[0].allocator_peak_bytes // 1000)
    measured("kB a rank", round(max(sizes(folder)) / 1e3))

    assert max(sizes(folder)) < MOST_BYTES
