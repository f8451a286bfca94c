"""What a step of training changes is put back bit by bit, however the step ends."""

import random

import numpy as np
import pytest
import torch
from torch import nn

from nbdist.errors import NbdistError
from nbdist.parallel.base.training_state import (
    generators,
    keep_gradients,
    keep_modes,
    keep_optimizer,
    keep_values,
    put_back_after,
    same_random,
)


def _drawn() -> list[float]:
    return [random.random(), float(np.random.rand()), torch.rand(()).item()]  # noqa: NPY002


def test_a_step_leaves_nothing_behind() -> None:
    """Values, gradients, modes, an optimizer's state and settings, and random numbers."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(), nn.BatchNorm1d(3)).eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.5))
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    moments = {p: {k: v.clone() for k, v in state.items()} for p, state in optimizer.state.items()}
    rate = optimizer.param_groups[0]["lr"]
    with same_random():
        expected = _drawn()

    puts = [
        keep_values("the model", model.state_dict),
        keep_gradients(model),
        keep_modes(model),
        keep_optimizer(optimizer),
        generators().put_back,
    ]

    @put_back_after(*puts)
    def step_and_fail() -> None:
        model.train()
        model.zero_grad()
        model(torch.randn(2, 3)).square().sum().backward()
        optimizer.step()
        rate.fill_(9.0)
        _drawn()
        raise KeyError

    with pytest.raises(KeyError):
        step_and_fail()

    assert _drawn() == expected
    assert not any(module.training for module in model.modules())
    assert all(parameter.grad is gradient for parameter, gradient in gradients)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == 0.5
    for parameter, state in moments.items():
        assert all(torch.equal(optimizer.state[parameter][key], state[key]) for key in state)


def test_state_that_has_come_since_is_gone_again() -> None:
    """Of an optimizer that had not stepped; what is laid out differently by then is named."""
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], momentum=0.9)
    put_back = keep_optimizer(optimizer)
    weight.grad = torch.ones(2)
    optimizer.step()
    put_back()
    assert not optimizer.state

    tensors = {"weight": torch.ones(2)}
    put_back = keep_values("Net", lambda: tensors)
    tensors = {"weight": torch.ones(3)}
    with pytest.raises(NbdistError, match="weight of Net is laid out differently"):
        put_back()
