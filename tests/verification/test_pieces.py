"""Which part of a whole tensor a rank computes, against slices taken by hand."""

import torch

from nbdist.strategy.choice import Degrees
from nbdist.verification.rank.pieces import RankShare, pieces


def share(index: int, samples: tuple[int, int, int] = (0, 1, 1), **degrees: int) -> RankShare:
    mesh = Degrees(**degrees)
    return RankShare(mesh, mesh.coordinate(index), samples)


def parts(
    whole: torch.Tensor, shape: tuple[int, ...], rank_share: RankShare
) -> list[tuple[list[object], list[str]]]:
    return [
        (piece.value.tolist(), sorted(piece.axes)) for piece in pieces(whole, shape, rank_share)
    ]


WHOLE = torch.arange(24).reshape(4, 6)


def test_what_has_the_whole_shape_is_whole() -> None:
    """No axis splits it."""
    assert parts(WHOLE, (4, 6), share(1, (2, 4, 4), dp_shard=2)) == [(WHOLE.tolist(), [])]


def test_dp_takes_its_samples() -> None:
    """By the sizes of the ranks' batches, which may differ."""
    assert parts(WHOLE, (3, 6), share(1, (1, 4, 4), dp_replicate=2)) == [
        (WHOLE[1:4].tolist(), ["dp"])
    ]
    tokens = torch.arange(8)  # two positions of each sample, one behind the other
    assert parts(tokens, (6,), share(1, (1, 4, 4), dp_replicate=2)) == [
        ([2, 3, 4, 5, 6, 7], ["dp"])
    ]


def test_cp_takes_one_stretch_of_the_sequence() -> None:
    """The second rank of two has the second half."""
    assert parts(WHOLE, (4, 3), share(1, cp=2)) == [(WHOLE[:, 3:].tolist(), ["cp"])]


def test_tp_takes_a_stretch_of_each_of_the_parts_side_by_side() -> None:
    """One, two or three parts of the hidden dim: query, key and value are three."""
    whole = torch.arange(12).reshape(1, 12)

    assert [value for value, _ in parts(whole, (1, 6), share(1, tp=2))] == [
        [[6, 7, 8, 9, 10, 11]],
        [[3, 4, 5, 9, 10, 11]],
        [[2, 3, 6, 7, 10, 11]],
    ]


def test_two_axes_split_two_dims() -> None:
    """First as the first dim is the batch's, then the other way round."""
    rank_share = share(3, (2, 4, 4), dp_shard=2, cp=2)
    whole = torch.arange(16).reshape(4, 4)

    assert parts(whole, (2, 2), rank_share) == [
        (whole[2:, 2:].tolist(), ["cp", "dp"]),
        (whole[2:, 2:].tolist(), ["cp", "dp"]),
    ]
    assert parts(whole, (2, 4), rank_share)[0] == (whole[2:].tolist(), ["dp"])


def test_what_no_axis_splits_so_has_no_piece() -> None:
    """Another number of dims, more dims than axes, a length that is no share."""
    assert parts(WHOLE, (24,), share(0, dp_shard=2)) == []
    assert parts(WHOLE, (2, 3), share(0, (0, 2, 4), dp_shard=2)) == []
    assert parts(WHOLE, (1, 6), share(0, (0, 2, 4), dp_shard=2)) == []
    assert parts(WHOLE, (4, 2), share(0, cp=2)) == []
