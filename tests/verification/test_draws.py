"""Masks of dropout that must differ between ranks, and those that must not."""

from nbdist.strategy.choice import Degrees
from nbdist.verification.draws import Draw, DrawProblem, draw_problems

DP, TP = Degrees(dp_replicate=2), Degrees(tp=2)


def draw(mask: str, *, hidden: int = 16, batch: int = 4, call: int = 0) -> Draw:
    return Draw("block.dropout", call, (batch, hidden), 0.1, mask)


def test_data_parallel_ranks_draw_different_masks() -> None:
    """Equal ones are a problem, different ones are not."""
    whole = [draw("w", batch=8)]

    assert draw_problems([[draw("a")], [draw("b")]], DP, whole) == ()
    assert draw_problems([[draw("a")], [draw("a")]], DP, whole) == (
        DrawProblem("block.dropout", "dp_replicate", (0, 1), is_equal=True),
    )


def test_ranks_along_tp_draw_one_mask_for_equal_activations() -> None:
    """Different ones are a problem; of activations that tp splits, they are not."""
    assert draw_problems([[draw("a")], [draw("a")]], TP, [draw("w")]) == ()
    assert draw_problems([[draw("a")], [draw("b")]], TP, [draw("w")]) == (
        DrawProblem("block.dropout", "tp", (0, 1), is_equal=False),
    )
    assert draw_problems([[draw("a")], [draw("b")]], TP, [draw("w", hidden=32)]) == ()


def test_small_masks_say_nothing() -> None:
    """31 elements may be equal by chance; 32 are taken as evidence."""
    small, large = draw("a", hidden=31, batch=1), draw("a", hidden=32, batch=1)

    assert draw_problems([[small], [small]], DP, [small]) == ()
    assert len(draw_problems([[large], [large]], DP, [large])) == 1


def test_only_masks_of_the_same_call_are_compared() -> None:
    """What one rank alone has drawn has nothing beside it."""
    assert draw_problems([[draw("a")], [draw("a", call=1)]], DP, []) == ()


def test_ranks_are_compared_along_their_own_axis() -> None:
    """On 2 x 2 ranks: those that differ along tp alone must be equal, along dp different."""
    mesh = Degrees(dp_shard=2, tp=2)
    first, second = [draw("a")], [draw("b")]
    by_rank = [first if mesh.coordinate(rank).dp_shard == 0 else second for rank in range(4)]

    assert draw_problems(by_rank, mesh, [draw("w", batch=8)]) == ()
    problems = draw_problems([first] * 4, mesh, [draw("w", batch=8)])
    assert {problem.axis for problem in problems} == {"dp_shard"}
    assert sorted(rank for problem in problems for rank in problem.ranks) == [0, 1, 2, 3]
