"""Ranks that share one copy of a model call it with the same inputs, or are told."""

import pytest

from tests.support.deep_model import TWO_BLOCKS
from tests.support.kernel import Kernel

_BY_HAND = "%%distributed\nmine = tokens.roll(rank, 0)\n"
_TRAINED = f"{_BY_HAND}accelerator.backward(model(mine, labels=mine))"
_EVALUATED = f"{_BY_HAND}with torch.no_grad():\n    loss = model(mine, labels=mine)"
_LINT = "lint model-inputs [0-1]: model was called with different inputs on rank 0 and rank 1"


@pytest.mark.parametrize(
    "typed",
    ["tp", "pp", *(pytest.param(name, marks=pytest.mark.parity) for name in ("cp", "ulysses"))],
)
def test_a_batch_that_was_shared_out_by_hand(kernel: Kernel, typed: str) -> None:
    """The first training step fails and changes nothing; later steps and evaluation are linted."""
    kernel.run(f"%dist_strategy {typed}")
    kernel.run(TWO_BLOCKS)
    expected = kernel.run("%%distributed\nmodel, optimizer = fresh()\ntrain_step(), train_step()")
    kernel.run("%%distributed\nmodel, optimizer = fresh()")
    kernel.run("%dist_check --tell all")
    first = kernel.run(_TRAINED)
    steps = kernel.run("%%distributed\ntrain_step(), train_step()")
    later = kernel.run(f"{_TRAINED}\noptimizer.zero_grad()")
    kernel.run("%dist_check --tell all")
    alike = kernel.run("%%distributed\nwith torch.no_grad():\n    loss = model(tokens, tokens)")
    evaluated = kernel.run(_EVALUATED)
    again = kernel.run(_EVALUATED)
    kernel.run("%dist_strategy ddp")

    assert "Ranks 0-1 share one copy of the model and were given different inputs" in first.visible
    assert first.status == "error"
    assert (steps.status, steps.text) == ("ok", expected.text), steps.visible
    assert "lint" not in steps.stderr + alike.stderr
    assert _LINT in later.stderr, later.visible
    assert _LINT in evaluated.stderr, evaluated.visible
    assert "lint" not in again.stderr


def test_a_switch_compares_anew(kernel: Kernel) -> None:
    """What every rank may see for itself under ddp is refused in the first step under tp."""
    kernel.run(TWO_BLOCKS)
    kernel.run("%%distributed\nmodel, optimizer = fresh()")
    before = kernel.run(_TRAINED)
    kernel.run("%dist_strategy tp")
    switched = kernel.run(_TRAINED)
    kernel.run("%dist_strategy ddp")

    assert before.status == "ok", before.visible
    assert "were given different inputs" in switched.visible
