"""Predicted beside measured, line by line."""

import pytest

from nbdist.planner.check import MeasuredMemory, checks, largest
from nbdist.planner.memory import Memory

PREDICTED = Memory(100, 50, 200, activations=30, buffers=5, step=7, overhead=0, most=140)
SEEN = MeasuredMemory(100, 50, 200, activations=40, buffers=5, peak=350)


def test_each_line_with_its_error() -> None:
    by_what = {check.what: check for check in checks(PREDICTED, SEEN)}

    assert list(by_what) == ["parameters", "gradients", "optimizer", "activations", "peak"]
    assert by_what["parameters"].error == 0
    assert by_what["activations"].error == pytest.approx(-0.25)
    # 200 of state, and 140 in forward and backward or 100 + 50 + 5 + 7 in the step.
    assert by_what["peak"].predicted == 362
    assert [check.what for check in by_what.values() if check.is_exact] == list(by_what)[:3]


def test_what_nobody_predicted_or_measured_is_left_out() -> None:
    partial = Memory(100, 50, 200, activations=0, buffers=5, is_partial=True)
    frozen = MeasuredMemory(100, 0, 0, activations=1, buffers=0, peak=101, has_optimizer=False)

    assert [check.what for check in checks(partial, SEEN)][-1] == "optimizer"
    assert "optimizer" not in {check.what for check in checks(PREDICTED, frozen)}
    assert checks(PREDICTED, frozen)[1].error is None
    without = [check.what for check in checks(PREDICTED, SEEN, has_forward=False)]
    assert without[-2:] == ["optimizer", "peak"]


def test_the_rank_that_needed_most() -> None:
    other = MeasuredMemory(1, 1, 1, 1, 1, peak=351)

    assert largest([SEEN, other]) is other
