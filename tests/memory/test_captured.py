"""Tests of real snapshots: tests/data/memory, two ranks, as tests/support/capture_memory.py."""

from pathlib import Path

import numpy as np
import pytest

from nbdist.memory import file as memory_file
from nbdist.memory.diff import diff
from nbdist.memory.snapshot import (
    ACTIVATION,
    CATEGORIES,
    COMMUNICATION,
    GRADIENT,
    OPTIMIZER,
    PARAMETER,
    RankMemory,
    Snapshot,
)
from nbdist.memory.timeline import curve
from tests.support.captured import check_snapshot

FOLDER = Path(__file__).resolve().parents[1] / "data" / "memory"
NAMES = sorted(path.name for path in FOLDER.iterdir())
# By hand: three blocks of Linear(64, 256) and Linear(256, 64), in fp32.
PARAMETERS = 3 * (64 * 256 + 256 + 256 * 64 + 64) * 4
TENSORS = 3 * 4
SAMPLES = 128
INPUT, INNER = SAMPLES * 64 * 4, SAMPLES * 256 * 4
# Losses, the first gradient, and what a checkpoint keeps of the random generator.
SMALL, RANDOM = 64, 5056
LEAK = 2 * 1000 * 4


def read(name: str) -> Snapshot:
    return memory_file.read_folder(FOLDER / name)


def most(rank: RankMemory, category: int) -> int:
    return int(curve(rank.blocks).size_bytes[:, category].sum(axis=1).max())


@pytest.mark.parametrize("name", NAMES)
def test_each_has_two_steps_of_two_ranks(name: str) -> None:
    """With the phases of each step, lines of the cell, and nothing that tells of a machine."""
    assert len(check_snapshot(FOLDER / name).ranks) == 2


@pytest.mark.parametrize(("name", "parts"), [("ddp", 1), ("checkpoint", 1), ("fsdp", 2)])
def test_states_are_the_bytes_of_their_elements(name: str, parts: int) -> None:
    """Of each rank's part: Adam has two tensors like a parameter, and a count of steps."""
    for rank in read(name).ranks:
        blocks = rank.blocks
        for category, size_bytes in (
            (PARAMETER, PARAMETERS // parts),
            (OPTIMIZER, 2 * PARAMETERS // parts + TENSORS * 4),
        ):
            chosen = blocks.category == category
            assert blocks.is_exact[chosen].all()
            assert int(blocks.size_bytes[chosen].sum()) == size_bytes, CATEGORIES[category]
        # fully_shard has gradients of a block, whole, before it has them in parts.
        assert PARAMETERS // parts <= most(rank, GRADIENT) <= PARAMETERS


@pytest.mark.parametrize(
    ("name", "saved"),
    [
        # Results of relu, and each block's result: the input of the first one is a variable.
        ("ddp", 3 * INNER + 3 * INPUT),
        # Inputs alone, and the state of the random generator for each block.
        ("checkpoint", 3 * INPUT + 3 * RANDOM),
    ],
)
def test_activations_are_what_backward_needs(name: str, saved: int) -> None:
    """Results of relu, and each block's result: the input of the first one is a variable."""
    for rank in read(name).ranks:
        assert saved <= most(rank, ACTIVATION) <= saved + SMALL


def test_ddp_holds_its_buckets_all_the_time() -> None:
    """As many bytes as there are gradients, at every moment."""
    for rank in read("ddp").ranks:
        communication = curve(rank.blocks).size_bytes[:, COMMUNICATION].sum(axis=1)
        assert np.median(communication) == PARAMETERS
        assert communication.min() == PARAMETERS


def test_fsdp_gathers_a_block_or_two_and_never_all() -> None:
    """Pieces, the whole block, and what is sent of its gradients; nothing when a step begins."""
    block = PARAMETERS // 3
    for rank in read("fsdp").ranks:
        assert block <= most(rank, COMMUNICATION) <= 5 * block


@pytest.mark.parametrize("name", ["ddp", "fsdp", "checkpoint"])
def test_a_leak_is_what_grew(name: str) -> None:
    """Two tensors of a thousand numbers on each rank, by the list and by the line."""
    grown = diff(read(name), read(f"{name}_leak")).grown
    leak = [growth for growth in grown if growth.kind.name == "kept[...]"]

    assert [dict(growth.ranks) for growth in leak] == [{0: LEAK, 1: LEAK}]
    assert [(line.file, line.line) for line in leak[0].kind.lines[:1]] == [("cell [1]", 33)]
