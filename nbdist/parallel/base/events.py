"""Hooks for other parts: a model is prepared or called, and an Accelerator's backward.

Whoever wants to know appends a function and removes it again; nothing here knows who that is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from nbdist.strategy.choice import Strategy

# Called with a model's class and tensors, before it gets rank 0's values.
on_prepare: list[Callable[[str, Iterable[torch.Tensor]], None]] = []
# Called with a model and the strategy that it is about to be put under, before anything of it is
# allocated.
before_build: list[Callable[[torch.nn.Module, Strategy], None]] = []
# Called with a model that ranks share a copy of, the tensors it is called with, and these ranks;
# before each of its forwards.
on_inputs: list[Callable[[torch.nn.Module, Sequence[torch.Tensor], Sequence[int]], None]] = []
# Called with a model and the name of a parameter that it no longer has and that got a gradient.
on_former_gradient: list[Callable[[torch.nn.Module, str], None]] = []
# Called with a prepared loader, the dataset that it reads and what draws its indices (None for a
# stream), on each rank where a loop over it begins; not under `single`.
on_loop: list[Callable[[Any, Any, Any], None]] = []
# Called with a loss and the backwards that it is divided by; torch's backward runs in the result.
on_backward: list[Callable[[torch.Tensor, int], AbstractContextManager[None]]] = []


def backward(loss: torch.Tensor, divisor: int) -> ExitStack:
    """Surround an Accelerator's backward of this loss; called by `backward` itself."""
    stack = ExitStack()
    for act in on_backward:
        stack.enter_context(act(loss, divisor))
    return stack
