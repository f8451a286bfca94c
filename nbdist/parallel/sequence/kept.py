"""Tensors that a forward keeps beside its result: attributes of modules, lists of hooks.

A side loss, say, which the training loop adds.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import types
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from nbdist.parallel.base.training_state import PutBack
from nbdist.parallel.sequence.split_sequence import tensors

# Attributes of every module, which are torch's.
_TORCH = frozenset(vars(torch.nn.Module()))
# A longer list is data, and not what one forward has made.
_CONTAINERS = (list, tuple, dict)
_LONGEST = 256
# Whose code keeps nothing for a user outside of modules.
_LIBRARIES = frozenset({"nbdist", "torch", "transformers", "peft", "accelerate"})


@dataclass(frozen=True, slots=True)
class NameTable:
    """A table of names in which a forward may have put tensors.

    Attributes:
        path: Of the module in the model.
        by: Whose code names the table's values, as a message has it; "" where they are the
            module's attributes.
        table: Name -> value.
        names: Those that count; None for all that are not torch's.
    """

    path: str
    by: str
    table: dict[str, Any]
    names: Collection[str] | None = None

    def items(self) -> Iterator[tuple[str, str, Any]]:
        """Each value that may hold tensors: its name in a message, its key, itself."""
        for key in sorted(self.table.keys() & self.names if self.names else [*self.table]):
            value = self.table[key]
            is_kept = isinstance(value, _CONTAINERS) and len(value) <= _LONGEST
            is_kept |= not self.by and isinstance(value, torch.Tensor)
            if is_kept and (self.by or key not in _TORCH):
                name = f"{self.path}.{key}" if self.path else key
                yield f"{key} ({self.by})" if self.by else name, key, value


def find_holders(base: torch.nn.Module) -> list[NameTable]:
    """List the places that `find_kept` searches: modules, their hooks, names of a forward."""
    every = (holder for path, module in base.named_modules() for holder in _of(path, module))
    return [holder for holder in every if any(holder.items())]


def find_kept(holders: Iterable[NameTable]) -> dict[str, list[torch.Tensor]]:
    """The tensors of numbers that are kept, also in lists and dicts, by name; each value once."""
    return {
        name: [tensor for tensor in tensors(value) if tensor.is_floating_point()]
        for _, name, _, value in entries(holders)
    }


def entries(holders: Iterable[NameTable]) -> Iterator[tuple[NameTable, str, str, Any]]:
    """Each value that may hold tensors, once: its holder, its name, its key there, itself."""
    value_ids: set[int] = set()
    for holder in holders:
        for name, key, value in holder.items():
            if id(value) not in value_ids:
                value_ids.add(id(value))
                yield holder, name, key, value


def keep_attributes(base: torch.nn.Module) -> PutBack:
    """Copy modules' attributes that are not torch's, with the contents of lists and dicts.

    Tensors among them are copied, and so are the lists that hooks fill.
    """
    tables = [NameTable(path, "", vars(module)) for path, module in base.named_modules()]
    names = [{*holder.table} for holder in tables]
    values = [
        (holder.table, key, value, _contents(value))
        for holder, _, key, value in entries(find_holders(base))
    ]

    def put_back() -> None:
        for holder, before in zip(tables, names, strict=True):
            for _, key, _ in [*holder.items()]:
                if key not in before:
                    del holder.table[key]
        for table, key, value, contents in values:
            table[key] = value
            _restore(value, contents)

    return put_back


def user_hooks(module: torch.nn.Module) -> list[Callable[..., Any]]:
    """The forward hooks that neither torch nor nbdist has registered.

    Private: torch gives hooks no other way to be found.
    """
    hooks: dict[int, Callable[..., Any]] = module._forward_hooks  # noqa: SLF001
    return [hook for hook in hooks.values() if _root(hook) not in {"nbdist", "torch"}]


def _of(path: str, module: torch.nn.Module) -> Iterator[NameTable]:
    yield NameTable(path, "", vars(module))
    for hook in user_hooks(module):
        for table, names in _reached(hook):
            yield NameTable(path, f"in a hook on {path or 'the model'}", table, names)
    if _root(type(module)) not in _LIBRARIES:
        for table, names in _reached(type(module).forward):
            yield NameTable(path, f"in {path or 'the model'}", table, names)


def _reached(function: Any) -> Iterator[tuple[dict[str, Any], Collection[str] | None]]:
    """The tables with what a function's code names: its owner's, its closure's, its module's."""
    while isinstance(function, functools.partial):
        yield {str(number): value for number, value in enumerate(function.args)}, None
        function = function.func
    owner = getattr(function, "__self__", None)
    if owner is not None and not isinstance(owner, torch.nn.Module):
        yield getattr(owner, "__dict__", {}), None
    function = inspect.unwrap(getattr(function, "__func__", function))
    if inspect.isfunction(function):
        yield dict(_cells(function)), None
        yield dict(zip("defaults", function.__defaults__ or (), strict=False)), None
        # The table itself: a notebook makes a new list for each step.
        yield function.__globals__, frozenset(function.__code__.co_names)


def _cells(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # of a variable that has no value yet
            yield name, cell.cell_contents


def _root(code: Any) -> str:
    return str(getattr(code, "__module__", "")).partition(".")[0]


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
