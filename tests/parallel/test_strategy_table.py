"""The strategies' table and what ranks can do are the same."""

import pytest

import nbdist
from nbdist.parallel.accelerator import accelerator
from nbdist.parallel.base import transform
from nbdist.parallel.base.transform import Transform
from nbdist.parallel.live import registry
from nbdist.strategy.choice import steps_of
from nbdist.strategy.choose import choose, default_choice
from nbdist.strategy.table import ROWS, STEPS


def test_every_step_of_a_row_has_its_function() -> None:
    """The engine's table of steps has the names of the rows' steps, and no others."""
    assert set(transform.STEPS) == set(STEPS)


@pytest.mark.parametrize("name", ROWS)
def test_every_row_can_be_put_together(name: str) -> None:
    """Each of its steps exists, with every option that adds one."""
    choice = choose(name, {"bf16": True, "checkpoint": "full"}, 4)

    assert all(isinstance(step, Transform) for step in transform.load(steps_of(choice)))


def test_ranks_begin_with_the_default() -> None:
    """The notebook and the ranks agree on what counts where nothing was chosen."""
    assert registry.current() == default_choice(1)


def test_the_package_has_the_accelerator() -> None:
    """`from nbdist import Accelerator` is the one that follows the strategy."""
    assert nbdist.Accelerator is accelerator.Accelerator
    with pytest.raises(AttributeError, match="has no attribute 'accelerate'"):
        nbdist.accelerate  # noqa: B018
