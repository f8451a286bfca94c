"""The boxes of a checkpoint: every element once, by a rank that has it."""

import random
from collections import Counter

import numpy as np
import pytest

from nbdist.checkpoint.chunks import (
    MOST_BYTES,
    assign_chunks,
    chunks,
    is_complete,
    own_chunks,
)
from nbdist.strategy.choice import Degrees
from nbdist.strategy.tensor_layout import Placement, TensorLayout, local_runs
from tests.strategy.test_tensor_layout import held, some_side

SHAPES = [(), (1,), (7,), (12, 5), (6, 4, 3), (3, 0), (0,)]


@pytest.mark.parametrize("seed", range(60))
def test_each_element_is_written_once_and_from_its_place(seed: int) -> None:
    """What writers take from their local tensors, put where the chunks say, is the whole."""
    draw = random.Random(seed)
    shape = draw.choice(SHAPES)
    side = some_side(draw, shape)
    whole = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    rebuilt = np.full(shape, -1)
    for part in assign_chunks([("one", side, 4)], 4):
        chunk = part.chunk
        assert part.writer in chunk.holders
        local = held(side, whole, part.writer)
        assert local is not None
        place = tuple(slice(at, at + n) for at, n in zip(chunk.offsets, chunk.sizes, strict=True))
        inside = tuple(slice(at, at + n) for at, n in zip(chunk.local, chunk.sizes, strict=True))
        assert (rebuilt[place] == -1).all(), "an element comes twice"
        rebuilt[place] = local[inside]
    if is_complete(side, 4):
        assert (rebuilt == whole).all()
    else:
        assert (rebuilt == -1).any() or not rebuilt.size


@pytest.mark.parametrize("seed", range(20))
def test_the_chunks_of_a_rank_are_what_it_holds(seed: int) -> None:
    """As many elements as its runs say."""
    draw = random.Random(seed)
    side = some_side(draw, draw.choice([(7,), (12, 5), (6, 4, 3)]))
    for rank in range(4):
        runs = local_runs(side.layout, side.degrees, rank)
        count = 0 if runs is None else int(np.prod([sum(n for _, n in dim) for dim in runs]))
        assert sum(chunk.count for chunk in own_chunks(side, 4, rank)) == count


def test_copies_are_shared_out_evenly() -> None:
    """Every rank writes as much of what all have; a large tensor is cut for that."""
    side = Placement(TensorLayout((1 << 12, 1 << 10)), Degrees(dp_replicate=4))
    small = [(f"small {n}", Placement(TensorLayout((64,)), side.degrees), 4) for n in range(40)]
    written: Counter[int] = Counter()
    for part in assign_chunks([("large", side, 4), *small], 4):
        written[part.writer] += part.chunk.count * 4

    assert len(written) == 4
    assert max(written.values()) - min(written.values()) <= 64 * 4


def test_no_chunk_is_larger_than_the_limit() -> None:
    """Also of a tensor that one rank has alone, whose first dim is 1."""
    layout = TensorLayout((1, 3 * MOST_BYTES // 4 // 1000, 1000), ranks=frozenset({2}))
    parts = assign_chunks([("one", Placement(layout, Degrees()), 4)], 4)

    assert {part.writer for part in parts} == {2}
    assert max(part.chunk.count for part in parts) * 4 <= MOST_BYTES
    assert sum(part.chunk.count for part in parts) == np.prod(layout.shape)


def test_a_tensor_without_elements_is_one_chunk() -> None:
    """So that the checkpoint knows of it."""
    side = Placement(TensorLayout((3, 0)), Degrees(dp_replicate=2))
    (chunk,) = chunks(side, 2)

    assert (chunk.sizes, chunk.holders) == ((3, 0), (0, 1))
    assert is_complete(side, 2)
