"""A test on ranks: it passes if no rank raises, and else tells which did and why."""

from pathlib import Path

import pytest
import torch

from tests.programs.rank import everyone, n, rank, total
from tests.support.torch_ranks import on_ranks, run_ranks


class Mine(torch.nn.Linear):
    """As a user's."""


@pytest.mark.parametrize("wanted", [3.0])
@on_ranks(2)
def test_a_program_runs_on_each_rank_as_the_notebooks_module(wanted: float) -> None:
    """Its arguments, its place, the other ranks."""
    assert total() == wanted
    assert everyone(rank) == list(range(n))
    assert Mine.__module__ == "__main__"


def differs() -> None:
    """Fails on one rank."""
    assert total() == 3.0 + rank


def test_a_failure_is_told_with_its_values(tmp_path: Path) -> None:
    """Of the rank that has failed."""
    with pytest.raises(AssertionError, match=r"(?s)rank 1, 1.*assert 3\.0 == \(3\.0 \+ 1\)"):
        run_ranks(tmp_path, 2, differs)
