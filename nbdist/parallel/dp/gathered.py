"""What FSDP2 has gathered for a forward goes back where no backward follows.

torch leaves the root's parameters whole for the backward that it expects, with grad-op all of
them. Until then the model shows these: an optimizer that is made now would train copies, and what
is frozen or changed in place is lost (https://github.com/pytorch/pytorch/issues/149205).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from nbdist.parallel import events
from nbdist.parallel.cp.split_sequence import tensors as tensors_in
from nbdist.parallel.prepared import find_prepared


class _Awaited:
    """A hook of the autograd graph of one forward; gone with it."""

    def __init__(self, gathered: Gathered) -> None:
        self.gathered = gathered
        self.number = gathered.number

    def __call__(self, _gradients: object) -> None:
        """A backward has come to what the forward returned: FSDP2 puts back what it gathers."""
        self.gathered.is_pending = False

    def __del__(self) -> None:
        if self.gathered.number == self.number:
            self.gathered.put_back()


class Gathered:
    """The hooks of one model that FSDP2 splits.

    Attributes:
        number: Of the last forward that has begun.
        is_pending: Its parameters are whole, for a backward that has not begun.
    """

    def __init__(self, root: torch.nn.Module, reshard: Callable[[torch.nn.Module], None]) -> None:
        """Watch this model's forwards; `reshard` puts back what is whole. This rank alone."""
        self.number = 0
        self.is_pending = False
        self._root = weakref.ref(root)
        self._reshard = reshard
        self._is_known = False
        root.register_forward_pre_hook(self._before, prepend=True)  # before FSDP2 gathers
        root.register_forward_hook(self._after)
        _live.add(self)
        _watch()

    def put_back(self) -> None:
        """Make parameters this rank's pieces again, if no backward has begun. No rank is met."""
        root = self._root()
        if root is None or not self.is_pending or events.backward_number() >= 0:
            return
        self.is_pending = False
        self._reshard(root)

    def forget(self, module: torch.nn.Module) -> None:
        """The parameters of this module have been put back by somebody else."""
        self.is_pending &= self._root() is not module

    def _before(self, *_: object) -> None:
        # A rank that keeps an output still has all whole, and another has put them back: each
        # has to gather, or one would wait for the other.
        self.put_back()
        self.number += 1

    def _after(self, module: torch.nn.Module, _args: object, output: object) -> None:
        if torch.compiler.is_compiling() or events.backward_number() >= 0:
            return  # in a backward: a block is computed again
        self._remember(module)
        tensors = list(tensors_in(output))
        self.is_pending = True
        if torch.is_grad_enabled() and any(t.grad_fn is not None for t in tensors):
            awaited = _Awaited(self)
            for node in {t.grad_fn for t in tensors if t.grad_fn is not None}:
                node.register_prehook(awaited)
        elif not _shares_memory(tensors, module):
            self.put_back()

    def _remember(self, root: torch.nn.Module) -> None:
        """What is whole counts as former: who holds it gets the pieces, or is told."""
        prepared = find_prepared(root)
        if self._is_known or prepared is None:
            return
        self._is_known = True
        pieces = prepared.parameters
        shown = dict(root.named_parameters())
        prepared.remember(
            {
                name: whole
                for name, whole in shown.items()
                if (piece := pieces.get(name)) is not None
                and piece is not whole
                and piece.shape == whole.shape
            }
        )


_live: weakref.WeakSet[Gathered] = weakref.WeakSet()


def put_back_all() -> None:
    """Put back what is whole of every model. This rank alone; a backward gathers it again."""
    for gathered in list(_live):
        gathered.put_back()


def forget(module: torch.nn.Module) -> None:
    """The parameters of this module have been put back."""
    for gathered in list(_live):
        gathered.forget(module)


@functools.cache  # once in a process
def _watch() -> None:
    """Put back what is whole at the end of a cell, and before an optimizer takes parameters.

    A generator such as `model.parameters()` then yields this rank's pieces.
    """
    events.after_cell.append(put_back_all)
    for name in ("__init__", "add_param_group"):
        original = getattr(Optimizer, name)

        @functools.wraps(original)
        def replaced(*args: Any, _original: Any = original, **kwargs: Any) -> Any:
            put_back_all()
            return _original(*args, **kwargs)

        setattr(Optimizer, name, replaced)


def _shares_memory(tensors: list[torch.Tensor], module: torch.nn.Module) -> bool:
    """Whether an output lies in a parameter that is whole now, and would be gone with it."""
    whole = {
        parameter.untyped_storage().data_ptr()
        for parameter in module.parameters()
        if not hasattr(parameter, "to_local")
    }
    return any(tensor.untyped_storage().data_ptr() in whole for tensor in tensors)
