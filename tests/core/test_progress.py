"""How far something is, in words, and what several ranks' records come to."""

from __future__ import annotations

import pytest

from nbdist.core.progress import BYTES, Progress, together

MOVING = Progress("switch", "moving", 1.2e9, 3.4e9, BYTES, phase=2)


def at(share: float, phase: int = 2, what: str = "moving") -> Progress:
    return Progress("switch", what, share, 1.0, phase=phase)


@pytest.mark.parametrize(
    ("progress", "expected"),
    [
        (MOVING, "switch: moving 1.2 GB of 3.4 GB, 35%"),
        (Progress("plan", "counting tp", 3, 9, "strategies"),
         "plan: counting tp 3 of 9 strategies, 33%"),
        (Progress("trace", "recording", 5, unit="steps"), "trace: recording 5 steps"),
        (Progress("switch", "planning"), "switch: planning"),
        (Progress("switch", ""), "switch"),
    ],
)  # fmt: skip
def test_it_is_told_in_words(progress: Progress, expected: str) -> None:
    """With the percentage where the total is known."""
    assert str(progress) == expected


def test_more_than_all_is_all() -> None:
    """A total that was too small makes no bar longer than itself."""
    assert Progress("a", "b", 3, 2).share == 1.0
    assert Progress("a", "b", 3, 0).share is None


def test_phases_count_what_is_done() -> None:
    """A new word is a new phase; a new name begins again."""
    first = Progress("switch", "planning").after(None)
    second = Progress("switch", "moving").after(first)

    assert (first.phase, second.phase) == (1, 2)
    assert Progress("switch", "moving", 1).after(second).phase == 2
    assert Progress("trace", "moving").after(second).phase == 1


def test_the_last_rank_is_told_with_where_the_others_are() -> None:
    """A rank that is slower than the others is seen."""
    progress = together({0: at(0.62), 1: at(0.1), 2: at(0.4), 3: at(0.5), 4: None})
    committing = together({0: at(0.1), 1: at(0, 3, "committing"), 2: at(0.2)})

    assert progress is not None
    assert (progress.share, progress.ranks) == (0.1, "rank 1; 0,2-3: 40-62%")
    assert committing is not None
    assert committing.ranks == "rank 0; 1-2: 20%, committing"


def test_ranks_in_step_are_one() -> None:
    """Without a word of ranks; nobody's record is none."""
    assert together({0: at(0.5), 1: at(0.52)}) == at(0.5)
    assert together({0: None}) is None
    assert together({}) is None
