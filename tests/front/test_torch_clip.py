"""torch's own clipping, which nearly all code calls, is that of the whole model."""

import json
import re

import pytest

from tests.support.deep_model import TWO_BLOCKS
from tests.support.kernel import Kernel

_CURVES = """%%distributed
import json
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm

def by_norm():
    return clip_grad_norm_(model.parameters(), 0.3).item()

def by_value():
    clip_grad_value_(model.parameters(), 0.01)
    return get_total_norm([p.grad for p in model.parameters() if p.grad is not None]).item()

curves = []
for clip in by_norm, by_value:
    model, optimizer = fresh()
    for _ in range(2):
        loss = forward_backward()
        norm = clip()
        optimizer.step()
        optimizer.zero_grad()
        curves += [accelerator.reduce(loss.detach(), "mean").item(), norm]
print("curves", json.dumps(curves))
"""


def _curves(kernel: Kernel, typed: str) -> list[list[float]]:
    """Losses and norms in turn, of each rank; one list where they are equal."""
    switched = kernel.run(f"%dist_strategy {typed}")
    assert switched.status == "ok", switched.visible
    assert kernel.run(TWO_BLOCKS).status == "ok"
    cell = kernel.run(_CURVES)
    assert cell.status == "ok", cell.visible
    return [json.loads(text) for text in re.findall(r"curves (\[.*\])", cell.text)]


@pytest.mark.parametrize("typed", ["pp", pytest.param("tp", marks=pytest.mark.parity)])
def test_losses_and_norms_are_those_of_one_process(kernel: Kernel, typed: str) -> None:
    """By norm and by value; with the norm that is returned, on every rank."""
    [expected, *_] = _curves(kernel, "single")
    for curve in _curves(kernel, typed):
        assert curve == pytest.approx(expected, rel=1e-4)
    kernel.run("%dist_strategy ddp")


def test_a_norm_that_is_not_finite_is_refused_where_it_is_asked(kernel: Kernel) -> None:
    """On all ranks of a pipeline, also those whose own gradients are finite."""
    switched = kernel.run("%dist_strategy pp")
    assert switched.status == "ok", switched.visible
    kernel.run(TWO_BLOCKS)
    kernel.run("%%distributed\nmodel, optimizer = fresh()\nloss = forward_backward()")
    cell = kernel.run(
        "%%distributed\nif rank == 1:\n"
        "    next(p for p in model.parameters() if p.grad is not None).grad.fill_(float('nan'))\n"
        "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)"
    )
    kernel.run("%dist_strategy ddp")

    assert "ranks 0-1 raised RuntimeError: The total norm of order 2" in cell.visible
