"""Traces and snapshots of real ranks, kept for the tests of what reads and draws them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from nbdist.notebook.session import Session
from nbdist.trace.breakdown import breakdown
from tests.gpu import results
from tests.gpu.places import device_type, on, strategy_of
from tests.support import capture_memory, capture_traces
from tests.support.captured import CUDA, check_snapshot, check_trace

# Of one rank's file, so that a repository can have it.
MOST_BYTES = 300_000


def folder_of(session: Session, strategy: str, parent: Path) -> Path:
    """Where a capture goes, by the name that it has in tests/data."""
    name = device_type(session).replace("cuda", CUDA)
    if session.topology.backend == "nccl":
        name += "_nccl"
    return parent / f"{name}_{strategy}"


def keep(kind: str, *folders: Path) -> None:
    """What was captured and is as it has to be goes where `make gpu` says."""
    if results.DATA in os.environ:
        for folder in folders:
            shutil.copytree(folder, Path(os.environ[results.DATA]) / kind / folder.name)


def sizes(folder: Path) -> list[int]:
    return [path.stat().st_size for path in folder.iterdir()]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@on("cpu", "shared", "own")
def test_a_trace(ranks: Session, strategy: str, tmp_path: Path, measured: Any) -> None:
    """Two steps add up on every rank, and the files are small."""
    folder = folder_of(ranks, strategy, tmp_path)
    with strategy_of(ranks, strategy):
        capture_traces.capture(ranks, folder)
    trace = check_trace(folder)
    shares = breakdown(trace)
    measured("step, ms", round(shares.step_ns / 1e6, 2))
    measured("kB a rank", round(max(sizes(folder)) / 1e3))

    assert trace.strategy.startswith(strategy)
    assert max(sizes(folder)) < MOST_BYTES
    keep("traces", folder)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@on("cpu", "shared", "own")
def test_a_snapshot(ranks: Session, strategy: str, tmp_path: Path, measured: Any) -> None:
    """Two steps with all phases; on a GPU the blocks add up to the allocator's peak."""
    folder = folder_of(ranks, strategy, tmp_path)
    with strategy_of(ranks, strategy):
        capture_memory.capture(ranks, folder)
    leak = folder.with_name(f"{folder.name}_leak")
    snapshot = check_snapshot(folder)
    check_snapshot(leak)
    measured("peak of the allocator, kB", snapshot.ranks[0].allocator_peak_bytes // 1000)
    measured("kB a rank", round(max(sizes(folder)) / 1e3))

    assert max(sizes(folder)) < MOST_BYTES
    keep("memory", folder, leak)
