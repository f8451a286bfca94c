"""The loss of a step whose backward has run: a node of autograd that hands its gradients on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from nbdist.parallel.base.tensors import like, local_of


class LossNode(torch.autograd.Function):
    """The loss, whose backward gives each parameter its gradient, times the loss's own.

    The gradients that it was given are handed out themselves, changed in place: no second copy
    of them is ever there, but where retain_graph asks for another backward.
    """

    @staticmethod
    def forward(
        ctx: Any, loss: torch.Tensor, unscale: float, gradients: Sequence[torch.Tensor | None],
        _anchor: torch.Tensor, *_parameters: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        """Args: the loss, by what to divide, gradients, a leaf that needs one, parameters."""
        ctx.unscale = unscale
        ctx.gradients = list(gradients)
        # For torch's own refusal of a second backward; it does not look at an attribute.
        ctx.save_for_backward(loss)
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The gradients, times that of the loss."""
        ctx.saved_tensors  # noqa: B018  # raises where the graph has been let go
        factor = gradient * ctx.unscale
        gradients: list[torch.Tensor | None] = ctx.gradients
        if retains_graph():
            gradients = [None if g is None else like(g, local_of(g) * factor) for g in gradients]
        else:
            # None is left here, so that autograd takes them for .grad instead of copies.
            ctx.gradients = None
            # On a GPU, looking at the factor would wait for all that was launched.
            if factor.device.type != "cpu" or factor.item() != 1:
                for g in gradients:
                    if g is not None:
                        local_of(g).mul_(factor)
        return None, None, None, torch.zeros_like(gradient), *gradients


def retains_graph() -> bool:
    """Whether the backward that runs is one with retain_graph, or torch cannot tell.

    Private: there is no public way to ask inside of a Function's backward. torch's AOT autograd
    asks the same to know whether it may free what it has saved.
    """
    ask = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)  # noqa: SLF001
    return True if ask is None else bool(ask())
