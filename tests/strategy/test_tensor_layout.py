"""Who holds what, and who sends what: against numpy's own splitting, element by element."""

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest

from nbdist.strategy.choice import Degrees
from nbdist.strategy.tensor_layout import (
    Placement,
    TensorLayout,
    Transfer,
    is_first,
    is_same,
    local_runs,
    local_shape,
    missing_on_ranks,
    split,
    transfers,
)

# Every way in which 4 ranks can be a mesh, and by themselves.
MESHES = [
    Degrees(*sizes)
    for sizes in itertools.product((1, 2, 4), repeat=5)
    if Degrees(*sizes).product in {1, 4}
]


def chunk(array: np.ndarray, degree: int, index: int, dim: int) -> np.ndarray:
    """torch.chunk's piece, written another way: rows by their number."""
    per_rank = (array.shape[dim] + degree - 1) // degree
    indices = [i for i in range(array.shape[dim]) if i // max(per_rank, 1) == index]
    return np.take(array, indices, axis=dim)


def held(side: Placement, whole: np.ndarray, rank: int) -> np.ndarray | None:
    """What a rank holds, from splitting the tensor itself as its axes say."""
    layout, degrees = side.layout, side.degrees
    place = degrees.coordinate(rank)
    if layout.ranks is not None and rank not in layout.ranks:
        return None
    if layout.stages is not None and place.pp not in layout.stages:
        return None
    part = whole
    if (dim := layout.tp_dim) is not None:
        parts = np.split(part, layout.tp_parts, axis=dim)
        part = np.concatenate([chunk(p, degrees.tp, place.tp, dim) for p in parts], axis=dim)
    if layout.shard_dim is not None:
        part = chunk(part, degrees.dp_shard, place.dp_shard, layout.shard_dim)
    return part


def taken(whole: np.ndarray, side: Placement, rank: int) -> np.ndarray | None:
    runs = local_runs(side.layout, side.degrees, rank)
    if runs is None:
        return None
    rows = [[i for start, n in dim for i in range(start, start + n)] for dim in runs]
    return whole[np.ix_(*rows)] if rows else whole


def deliver(piece: Transfer, source: np.ndarray, target: np.ndarray) -> None:
    """Copy a piece's elements, one by one."""
    dims = [[(a + i, b + i) for a, b, n in cuts for i in range(n)] for cuts in piece.dims]
    for block in itertools.product(*dims):
        there = tuple(new for _, new in block)
        assert target[there] == -1, "an element comes twice"
        target[there] = source[tuple(old for old, _ in block)]


def some_side(draw: random.Random, shape: tuple[int, ...]) -> Placement:
    """Any layout of a tensor on any mesh."""
    degrees = draw.choice(MESHES)
    dims = [None, *range(len(shape))]
    tp_dim = draw.choice(dims)
    parts = [k for k in (1, 2, 3) if tp_dim is not None and shape[tp_dim] % k == 0] or [1]
    stages = draw.choice([None, frozenset({0}), frozenset({0, degrees.pp - 1})])
    return Placement(
        TensorLayout(shape, stages, tp_dim, draw.choice(parts), draw.choice(dims)), degrees
    )


def some_shape(draw: random.Random) -> tuple[int, ...]:
    return tuple(draw.choice((0, 1, 2, 3, 5, 6, 7, 12)) for _ in range(draw.choice((0, 1, 2, 3))))


def test_a_rank_holds_what_splitting_the_tensor_gives() -> None:
    """500 random layouts: runs and shapes are those of the split array, in its order."""
    draw = random.Random(0)
    for _ in range(500):
        shape = some_shape(draw)
        side = some_side(draw, shape)
        whole = np.arange(np.prod(shape, dtype=int)).reshape(shape)
        for rank in range(4):
            expected, actual = held(side, whole, rank), taken(whole, side, rank)
            actual_shape = local_shape(side.layout, side.degrees, rank)
            assert (actual is None) == (expected is None), (side, rank)
            assert actual_shape == (None if expected is None else expected.shape), (side, rank)
            if expected is not None:
                np.testing.assert_array_equal(actual, expected, err_msg=f"{side} {rank}")


@pytest.mark.parametrize("limit", [1, 3, 10**6])
def test_pieces_bring_every_element_once(limit: int) -> None:
    """400 random pairs: each rank gets its new part, each element once, and from any source."""
    draw = random.Random(limit)
    for _ in range(400):
        shape = some_shape(draw)
        old, new = some_side(draw, shape), some_side(draw, shape)
        whole = np.arange(np.prod(shape, dtype=int)).reshape(shape)
        before = [held(old, whole, rank) for rank in range(4)]
        after = [held(new, whole, rank) for rank in range(4)]
        got = [None if array is None else np.full_like(array, -1) for array in after]
        for piece in transfers(old, new, 4):
            for part in split(piece, limit):
                assert np.prod(part.shape) <= limit
                source = before[draw.choice(part.sources)]
                deliver(part, source, got[part.target])  # type: ignore[arg-type]
        for rank in range(4):
            if local_runs(old.layout, old.degrees, rank) == local_runs(
                new.layout, new.degrees, rank
            ):
                assert got[rank] is None or (got[rank] == -1).all()
            elif after[rank] is not None:
                np.testing.assert_array_equal(got[rank], after[rank], err_msg=f"{old} {new}")


def test_each_part_has_one_first_holder() -> None:
    """Summed over ranks, parts that `is_first` counts are the whole tensor, once."""
    draw = random.Random(2)
    for _ in range(200):
        shape = some_shape(draw)
        side = some_side(draw, shape)
        whole = np.arange(np.prod(shape, dtype=int)).reshape(shape)
        ranks = [r for r in range(4) if is_first(side.layout, side.degrees, r)]
        counted = np.concatenate([held(side, whole, r).ravel() for r in ranks])  # type: ignore[union-attr]

        np.testing.assert_array_equal(np.sort(counted), whole.ravel(), err_msg=str(side))


def test_layouts_that_say_the_same_move_nothing() -> None:
    """A split over one rank is none; a copy on more ranks goes to those alone, from any holder."""
    whole = Placement(TensorLayout((6,)), Degrees(dp_replicate=4))
    other = Placement(TensorLayout((6,), tp_dim=0, tp_parts=3, shard_dim=0), Degrees(cp=4))
    owned = Placement(TensorLayout((6,), ranks=frozenset({1, 3})), Degrees(dp_replicate=4))

    assert is_same(whole, other, 4)
    assert transfers(whole, other, 4) == ()
    assert not is_same(owned, whole, 4)
    assert [(p.sources, p.target) for p in transfers(owned, whole, 4)] == [((1, 3), 0), ((1, 3), 2)]
    assert transfers(whole, owned, 4) == ()


def test_elements_that_nobody_has_are_missing() -> None:
    """Rank 1 of two shards has nothing: who needs its half is named; an empty part is no loss."""
    half = Placement(TensorLayout((3,), shard_dim=0, ranks=frozenset({0})), Degrees(dp_shard=2))
    whole = Placement(TensorLayout((3,)), Degrees(dp_replicate=2))
    first = Placement(TensorLayout((3,), tp_dim=0), Degrees(tp=2))
    single = replace(half.layout, shape=(1,))

    assert missing_on_ranks(half, whole, 2) == (0, 1)
    assert missing_on_ranks(half, first, 2) == (1,)
    wanted = Placement(TensorLayout((1,)), whole.degrees)
    assert missing_on_ranks(Placement(single, half.degrees), wanted, 2) == ()
