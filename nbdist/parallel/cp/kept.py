"""What blocks keep as attributes in a forward: a side loss, say, which the training loop adds."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from nbdist.errors import OptionError
from nbdist.parallel.cp import split_sequence
from nbdist.parallel.training_state import PutBack

# Attributes of every module, which are torch's.
_TORCH = frozenset(vars(torch.nn.Module()))
# A longer list is data, and not what one forward has made.
_CONTAINERS = (list, tuple, dict)
_LONGEST = 256

_HELP = (
    "Under cp it may be a mean of what each position has for itself, and nothing else. Or use a "
    "strategy that splits no sequence, such as fsdp"
)


def find_kept(modules: Iterable[tuple[str, torch.nn.Module]]) -> dict[str, list[torch.Tensor]]:
    """The tensors of numbers that modules have as attributes, also in lists and dicts, by name."""
    return {
        name: [tensor for tensor in split_sequence.tensors(value) if tensor.is_floating_point()]
        for name, _, _, value in _attributes(modules)
    }


def find_holders(base: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    """The modules of which `find_kept` may find something, with their names."""
    return [(path, module) for path, module in base.named_modules() if any(_keys(module))]


def keep_attributes(base: torch.nn.Module) -> PutBack:
    """What modules have as attributes that are not torch's, with the contents of lists and dicts.

    Tensors among them are copied.
    """
    modules = [vars(module) for module in base.modules()]
    names = [{*table} for table in modules]
    values = [
        (table, key, value, _contents(value))
        for _, table, key, value in _attributes(base.named_modules())
    ]

    def put_back() -> None:
        for table, before in zip(modules, names, strict=True):
            for key in {*table} - before:
                del table[key]
        for table, key, value, contents in values:
            table[key] = value
            _restore(value, contents)

    return put_back


@dataclass(frozen=True)
class KeptWatch:
    """What the modules of a model keep, watched by the gradients that it gets.

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
    def _holders(self) -> list[tuple[str, torch.nn.Module]]:
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


def _attributes(
    modules: Iterable[tuple[str, torch.nn.Module]],
) -> Iterator[tuple[str, dict[str, Any], str, Any]]:
    """Name in the model, the module's table, key and value of what may hold tensors."""
    for path, module in modules:
        for key in _keys(module):
            yield f"{path}.{key}" if path else key, vars(module), key, vars(module)[key]


def _keys(module: torch.nn.Module) -> Iterator[str]:
    table = vars(module)
    for key in sorted(table.keys() - _TORCH):
        value = table[key]
        is_short = isinstance(value, _CONTAINERS) and len(value) <= _LONGEST
        if is_short or isinstance(value, torch.Tensor):
            yield key


def _contents(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return copy.copy(value) if isinstance(value, list | dict) else None


def _restore(value: Any, contents: Any) -> None:
    if isinstance(value, torch.Tensor):
        value.detach().copy_(contents)
    elif isinstance(value, list):
        value[:] = contents
    elif isinstance(value, dict):
        value.clear()
        value.update(contents)
