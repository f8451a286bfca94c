"""A loss whose backward has run: it hands gradients on, in place where nobody needs them again."""

import pytest
import torch

from nbdist.parallel.pp import loss_node


def make_loss(unscale: float = 1.0) -> tuple[torch.Tensor, list[torch.nn.Parameter], torch.Tensor]:
    """A loss of 3, two parameters of which one has a gradient, and that gradient."""
    parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    gradient = torch.tensor([1.0, 2.0])
    anchor = torch.zeros((), requires_grad=True)
    loss = loss_node.LossNode.apply(
        torch.tensor(3.0), unscale, [gradient, None], anchor, *parameters
    )  # type: ignore[no-untyped-call]
    return loss, parameters, gradient


@pytest.mark.parametrize(("factor", "unscale"), [(1.0, 1.0), (0.25, 1.0), (2.0, 0.125)])
def test_a_parameter_gets_the_very_gradient(factor: float, unscale: float) -> None:
    """Times the loss's own gradient, and no second copy of it."""
    loss, parameters, gradient = make_loss(unscale)
    address = gradient.data_ptr()
    del gradient
    (loss * factor).backward()

    assert parameters[0].grad is not None
    assert parameters[0].grad.tolist() == [1.0 * factor * unscale, 2.0 * factor * unscale]
    assert parameters[0].grad.data_ptr() == address
    assert parameters[1].grad is None
    assert loss.item() == 3.0


@pytest.mark.parametrize("can_ask", [True, False])
def test_retain_graph_lets_backward_run_again(
    can_ask: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And where torch cannot be asked, no backward spoils the next one."""
    if not can_ask:
        monkeypatch.delattr(torch._C._autograd, "_get_current_graph_task_keep_graph")
    loss, parameters, gradient = make_loss()
    (2 * loss).backward(retain_graph=True)
    loss.backward()

    assert parameters[0].grad is not None
    assert parameters[0].grad.tolist() == [3.0, 6.0]
    assert gradient.tolist() == [1.0, 2.0]


def test_a_second_backward_is_refused_as_torch_does() -> None:
    """Nothing is added then."""
    loss, parameters, _ = make_loss()
    loss.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()

    assert parameters[0].grad is not None
    assert parameters[0].grad.tolist() == [1.0, 2.0]
