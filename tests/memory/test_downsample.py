"""Merging of small blocks: what stays exact, and that the peak is shown."""

from dataclasses import replace

import numpy as np
import pytest

from nbdist.memory.downsample import DownsampledRank, downsample, level
from nbdist.memory.snapshot import ACTIVATION, STAYS
from nbdist.memory.timeline import CLASSES, changes, is_in_use, sizes_at, totals
from tests.support.drawn_memory import Piece, million, random_blocks, rank_memory, training


def sums_after(rank: DownsampledRank, ns: int) -> np.ndarray:
    """The bytes of each class at a moment: the blocks shown alone, and the changes of the rest."""
    sums = np.zeros(CLASSES, np.int64)
    there = is_in_use(rank.blocks, ns)
    code = rank.blocks.category.astype(int) * 2 + rank.blocks.is_exact
    np.add.at(sums, code[there], rank.blocks.size_bytes[there])
    until = rank.time_ns <= ns
    np.add.at(sums, rank.code[until], rank.size_bytes[until])
    return sums


@pytest.mark.parametrize("least_bytes", [100, 500, 900, 2000])
@pytest.mark.parametrize("seed", range(4))
def test_sums_are_exact_whenever_the_picture_changes(seed: int, least_bytes: int) -> None:
    """Of each category at every change, against all blocks; the true peak is one of them."""
    columns = random_blocks(400, seed, span_ns=4000)
    rank = downsample(replace(rank_memory(0, []), blocks=columns), least_bytes, 5, 40)
    starts = np.maximum(rank.blocks.start_ns, 0)
    ends = rank.blocks.end_ns[rank.blocks.end_ns != STAYS]
    shown_ns = np.unique(np.concatenate([rank.time_ns, starts, ends]))
    truth = sizes_at(changes(columns), shown_ns).reshape(-1, CLASSES)
    sums = np.array([sums_after(rank, int(ns)) for ns in shown_ns])
    _, total = totals(changes(columns))

    assert (sums == truth).all()
    assert sums.sum(axis=1).max() == total.max()
    assert rank.merged + len(rank.blocks) == 400
    assert rank.merged > 0


def test_large_blocks_stay_and_small_ones_of_the_peak() -> None:
    """The largest of those, as many as have room."""
    pieces = [Piece(size, 10, 20) for size in (1, 2, 3, 4, 50)]
    pieces += [Piece(9, 0, 5), Piece(60, 30, 40)]
    rank = downsample(rank_memory(0, pieces), 50, 2, 100)

    assert sorted(rank.blocks.size_bytes.tolist()) == [3, 4, 50, 60]
    assert rank.merged == 3


def test_all_blocks_stay_where_there_is_room() -> None:
    """Nothing is merged, and nothing has to be told."""
    ranks = training().ranks
    shown = level(ranks, 10_000)

    assert (shown.merged, shown.least_bytes) == (0, 0)
    assert [drawn.blocks for drawn in shown.ranks] == [rank.blocks for rank in ranks]


def test_the_level_is_the_finest_that_has_room() -> None:
    """One step finer is too much; all ranks have the same."""
    snapshot = million(40_000, ranks=4)
    shown = level(snapshot.ranks, 5000)
    sizes = np.concatenate([rank.blocks.size_bytes for rank in snapshot.ranks])
    is_five = str(shown.least_bytes).startswith("5")
    finer = shown.least_bytes * 2 // 5 if is_five else shown.least_bytes // 2

    assert (sizes >= shown.least_bytes).sum() <= 5000 - 1000
    assert (sizes >= finer).sum() > 5000 - 1000
    assert sum(len(drawn.blocks) for drawn in shown.ranks) <= 5000
    assert shown.n_items == sum(len(drawn.blocks) + len(drawn.time_ns) for drawn in shown.ranks)
    for drawn, rank in zip(shown.ranks, snapshot.ranks, strict=True):
        time_ns, total = totals(changes(rank.blocks))
        assert sums_after(drawn, int(time_ns[np.argmax(total)])).sum() == total.max()


@pytest.mark.parametrize("most", [0, 1])
def test_no_room_at_all(most: int) -> None:
    """Everything is merged; the curve stays."""
    rank = rank_memory(0, [Piece(5, 1, 9, ACTIVATION), Piece(7, 2, 9, ACTIVATION)])
    (drawn,) = level([rank], most).ranks

    assert len(drawn.blocks) <= most
    assert sums_after(drawn, 5).sum() == 12
