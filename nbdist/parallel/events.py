"""What others do when a model is prepared or called, around a backward and after a cell.

Whoever wants to know appends a function and removes it again; nothing here knows who that is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from nbdist.rpc.rank.cell_hooks import CellContext
    from nbdist.strategy.choice import Strategy

# Called with a model's class and tensors, before it gets rank 0's values.
on_prepare: list[Callable[[str, Iterable[torch.Tensor]], None]] = []
# Called with a model and the strategy that it is about to be put under, before anything of it is
# allocated.
before_build: list[Callable[[torch.nn.Module, Strategy], None]] = []
# Called with a model that ranks share a copy of, the tensors it is called with, and these ranks;
# before each of its forwards.
on_inputs: list[Callable[[torch.nn.Module, Sequence[torch.Tensor], Sequence[int]], None]] = []
# Called with a loss and the backwards that it is divided by; torch's backward runs in the result.
on_backward: list[Callable[[torch.Tensor, int], AbstractContextManager[None]]] = []

# Called when a cell has ended, well or not.
after_cell: list[Callable[[], None]] = []


@contextmanager
def around_cell(_cell: CellContext) -> Iterator[None]:
    """What a cell of the notebook runs in."""
    try:
        yield
    finally:
        for act in after_cell:
            act()


def backward(loss: torch.Tensor, divisor: int) -> ExitStack:
    """What an Accelerator's backward of this loss runs in; called by `backward` itself."""
    stack = ExitStack()
    for act in on_backward:
        stack.enter_context(act(loss, divisor))
    return stack


def backward_number() -> int:
    """A number of the backward that runs in this thread, of no other one; -1 where none runs.

    Private: nothing public tells one backward from the next, or that code runs in a hook of one.
    torch's own checkpointing asks the same. Without it no backward is known.
    """
    import torch

    ask = getattr(torch._C, "_current_graph_task_id", None)  # noqa: SLF001
    return -1 if ask is None else int(ask())
