"""Bars of several ranks as one line: the lowest rank's, and where the others are."""

from __future__ import annotations

import pytest

from nbdist.cells.tqdm_bars import percent, together


@pytest.mark.parametrize(
    ("bars", "text"),
    [
        ({}, ""),
        ({2: " 50%|##  |"}, "[2]  50%|##  |"),
        ({0: "50%", 1: "50%"}, "[0-1] 50%"),
        ({0: "50% 3it/s", 1: "50% 4it/s"}, "[0] 50% 3it/s (rank 1: 50%)"),
        ({0: "62%", 1: "40%", 2: "62% a", 3: "60%"}, "[0] 62% (ranks 1-3: 40-62%, rank 1 last)"),
        ({0: "10%", 1: "60%", 2: "62%"}, "[0] 10% (ranks 1-2: 60-62%)"),
        ({0: "90%", 1: "30%", 2: "30% b"}, "[0] 90% (ranks 1-2: 30%)"),
        ({0: "3 of 4", 1: "4 of 4", 2: "9 of 9"}, "[0] 3 of 4 (and 2 bars of ranks 1-2)"),
        ({0: "50%", 1: "7it"}, "[0] 50% (and 1 bar of rank 1)"),
    ],
)
def test_ranks_bars_are_one_line(bars: dict[int, str], text: str) -> None:
    """A rank that is slower than the others is named."""
    assert together(bars) == text


@pytest.mark.parametrize(("bar", "far"), [("  7%|", 7), ("99.9 %", 99), ("120%", 100), ("7", None)])
def test_a_bar_is_as_far_as_its_percentage(bar: str, far: int | None) -> None:
    """None where there is no percentage."""
    assert percent(bar) == far
