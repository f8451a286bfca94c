"""A side loss of a piece of the sequence: right, or an error in the backward that uses it."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from nbdist.errors import OptionError
from nbdist.parallel.sequence.kept import NameTable, find_holders, find_kept

_HELP = (
    "Under cp it may be a mean of what each position has for itself, and nothing else. Or use a "
    "strategy that splits no sequence, such as fsdp"
)


@dataclass(frozen=True)
class KeptWatch:
    """A watch over tensors that a model's forward keeps, by the gradients that they get.

    Attributes:
        base: A model whose forward, with gradients, has run.
        is_mean: Whether the mean of the ranks' values was the whole's when the model was tried.
        length: Of this rank's piece. What is as long has its own value for each position.
        refused: Is called before an error in the middle of a backward.
    """

    base: torch.nn.Module
    is_mean: Mapping[str, bool]
    length: int
    refused: Callable[[], None]
    _warned: set[str] = field(default_factory=set)

    @functools.cached_property
    def _holders(self) -> list[NameTable]:
        return find_holders(self.base)

    def watch(self) -> None:
        """After each forward: let the backward raise where ranks' mean is not the whole's value.

        It warns, once for each name, where that is not known.
        """
        for name, tensors in find_kept(self._holders).items():
            if self.is_mean.get(name):
                continue
            tell = self._refuse if name in self.is_mean else self._warn
            for tensor in tensors:
                if tensor.grad_fn is not None and self.length not in tensor.shape:
                    tensor.register_hook(functools.partial(tell, name))  # type: ignore[no-untyped-call]

    def _refuse(self, name: str, _gradient: torch.Tensor) -> None:
        self.refused()
        raise OptionError(
            f"the loss uses {name}, which each rank computes from its piece of the sequence, and "
            f"the mean over ranks is not its value for the whole (tried on a short one). {_HELP}"
        )

    def _warn(self, name: str, _gradient: torch.Tensor) -> None:
        if name in self._warned:
            return
        self._warned.add(name)
        warnings.warn(
            f"The loss uses {name}, which each rank computes from its piece of the sequence. It "
            "was not there when the model was tried, in eval mode, so it was not compared with "
            f"its value for the whole sequence. {_HELP}.",
            stacklevel=2,
        )
