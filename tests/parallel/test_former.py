"""A parameter that a model no longer has can be read, and not trained."""

import copy
import io
from collections.abc import Callable

import pytest
import torch

from nbdist.errors import NbdistError
from nbdist.parallel.live.former import mark


def former(*, is_replaced: bool = True) -> torch.nn.Parameter:
    """A parameter that is marked."""
    parameter = torch.nn.Parameter(torch.arange(3.0))
    mark(parameter, "head.weight", lambda _: is_replaced)
    return parameter


def clear(parameter: torch.nn.Parameter) -> None:
    parameter.grad = None


def freeze(parameter: torch.nn.Parameter) -> None:
    parameter.requires_grad = False


def step(parameter: torch.nn.Parameter) -> None:
    with torch.no_grad():
        parameter -= 1


USES = [
    clear,
    freeze,
    step,
    lambda parameter: parameter.grad,
    lambda parameter: parameter.requires_grad_(False),
    lambda parameter: parameter.data.numel() and parameter.clamp_(0, 1),
]


@pytest.mark.parametrize("use", USES)
def test_what_trains_names_the_parameter(use: Callable[[torch.nn.Parameter], object]) -> None:
    """Its gradient, a freeze and a change in place; one that came back is trained again."""
    with pytest.raises(NbdistError, match=r"head\.weight is used as it was before prepare\(\)"):
        use(former())
    with torch.no_grad():
        use(former(is_replaced=False))


def test_values_can_be_read() -> None:
    """What is computed from it, copied and saved is plain; an optimizer's code is let through."""
    parameter = former()
    other = torch.nn.Parameter(parameter.detach().clone())
    file = io.BytesIO()
    torch.save({"weight": parameter}, file)
    file.seek(0)
    (parameter * other).sum().backward()
    torch.optim.SGD([parameter], 0.1).step()

    assert type(torch.load(file)["weight"]) is torch.nn.Parameter
    assert type(parameter * 2) is type(parameter.data) is torch.Tensor
    assert isinstance(parameter, torch.nn.Parameter)
    assert other.grad is not None
    assert torch.equal(other.grad, torch.arange(3.0))
    copied = copy.deepcopy(parameter)
    assert type(copied) is torch.nn.Parameter
    copied.grad = None
