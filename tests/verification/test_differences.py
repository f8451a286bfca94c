"""Tolerances and rows, against numbers worked out by hand."""

import math

import pytest

from nbdist.verification.differences import (
    GRADIENT,
    INPUT_GRADIENT,
    OUTPUT,
    PARAMETER,
    Difference,
    TensorKey,
    first_outside,
    problems,
    rows,
    tolerance,
)


def difference(name: str, error: float, *, what: str = OUTPUT, order: int = 0) -> Difference:
    return Difference(TensorKey(what, name), order, error=error, moved=0.5, size=2.0)


def test_a_tolerance_is_4_movements_4_roundings_and_one_of_the_largest() -> None:
    """4 * 0.5 + 0.01 * (4 * 2 + 1 * 10) = 2.18."""
    assert tolerance(difference("a", 0.0), 0.01, 10.0) == pytest.approx(2.18)


def test_a_row_has_the_worst_rank_and_those_outside() -> None:
    """The tolerance is 4 * 0.5 = 2 where nothing is rounded."""
    (row,) = rows([[difference("a", 1.0)], [difference("a", 3.0)], []], 0.0)

    assert row.tolerance == 2.0
    assert row.errors == {0: 0.5, 1: 1.5}
    assert row.outside == (1,)
    assert (row.relative, row.allowed) == (1.5, 1.0)


def test_rows_are_in_execution_order() -> None:
    """By phase, then by the order in the phase; the first outside is the first of all."""
    reports = [[
        difference("w", 9.0, what=PARAMETER), difference("w", 9.0, what=GRADIENT),
        difference("b", 9.0, what=INPUT_GRADIENT), difference("c", 9.0, order=2),
        difference("b", 0.0, order=1),
    ]]  # fmt: skip
    all_rows = rows(reports, 0.0)

    assert [(row.key.phase, row.key.name) for row in all_rows] == [
        ("forward", "b"), ("forward", "c"), ("backward", "b"), ("gradients", "w"),
        ("parameters", "w"),
    ]  # fmt: skip
    first = first_outside(all_rows)
    assert first is not None
    assert first.key.name == "c"
    assert first_outside(all_rows[:1]) is None


def test_what_is_no_number_is_outside() -> None:
    """nan compares as false, and must not pass for it."""
    (row,) = rows([[difference("a", math.nan)]], 0.0)

    assert row.outside == (0,)


def test_zero_is_right_where_zero_is_allowed() -> None:
    """A tensor of zeros has no tolerance: the same is right, anything else is not."""
    nothing = Difference(TensorKey(OUTPUT, "a"))
    something = Difference(TensorKey(OUTPUT, "a"), error=1e-30)

    assert rows([[nothing]], 1e-7)[0].outside == ()
    assert rows([[something]], 1e-7)[0].outside == (0,)


def test_a_problem_is_told_only_of_what_was_compared_nowhere() -> None:
    """A module that one rank has compared is not in the list."""
    problem = Difference(TensorKey(OUTPUT, "a"), problem="no layout")
    other = Difference(TensorKey(OUTPUT, "b"), problem="no layout")

    assert problems([[problem, other], [difference("a", 0.0)]]) == {"b": "no layout"}
    assert rows([[problem]], 0.0) == ()
