"""A live model as bytes for a process that has not run the notebook's cells.

Classes and functions that no import finds (those of cells) travel as their code; tensors as shape
and type, without values. What is unpickled is the same user's, on the same machine or cluster.
"""

from __future__ import annotations

import builtins
import dataclasses
import functools
import importlib
import io
import marshal
import pickle
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map

# What a class's own dict has that belongs to the class object itself.
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE
_OF_TYPE = frozenset({"__dict__", "__weakref__"})


def dumps(value: Any) -> bytes:
    """The value with all that it needs.

    Raises:
        pickle.PicklingError, TypeError, AttributeError: Something in it cannot travel.
    """
    into = io.BytesIO()
    _Pickler(into, protocol=5).dump(value)
    return into.getvalue()


def loads(data: bytes) -> Any:
    """What `dumps` has written. Tensors are on meta."""
    return pickle.loads(data)  # noqa: S301


def as_real(value: Any) -> Any:
    """The same with tensors on the CPU in the place of those on meta: under a FakeTensorMode."""

    def made(one: Any) -> Any:
        if not isinstance(one, torch.Tensor) or not one.is_meta:
            return one
        fresh = torch.zeros(one.shape, dtype=one.dtype)
        return fresh.requires_grad_(one.requires_grad)

    return tree_map(made, value)


class _Pickler(pickle.Pickler):
    """Knows what pickle by name does not reach."""

    def reducer_override(self, value: Any) -> Any:
        for kinds, reduced in _REDUCED:
            if isinstance(value, kinds):
                return reduced(value)
        return NotImplemented


def _is_importable(value: Any) -> bool:
    module = sys.modules.get(getattr(value, "__module__", None) or "")
    if module is None or module.__name__ == "__main__":
        return False
    found: Any = module
    for part in value.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is value


def _reduced_module(value: types.ModuleType) -> Any:
    return importlib.import_module, (value.__name__,)


def _reduced_property(value: property) -> Any:
    return property, (value.fget, value.fset, value.fdel)


def _reduced_method(value: Any) -> Any:
    return type(value), (value.__func__,)


def _reduced_cached(value: functools.cached_property[Any]) -> Any:
    return functools.cached_property, (value.func,)


def _reduced_mapping(value: types.MappingProxyType[Any, Any]) -> Any:
    return _mapping, (dict(value),)


def _mapping(value: dict[Any, Any]) -> types.MappingProxyType[Any, Any]:
    return types.MappingProxyType(value)


def _reduced_mark(value: Any) -> Any:
    """A dataclass's own marks are compared by identity; these names are in every Python."""
    return getattr, (dataclasses, getattr(value, "name", "MISSING"))


def _reduced_reference(_value: Any) -> Any:
    return _lost, ()


def _reduced_tensor(value: torch.Tensor) -> Any:
    shape, is_parameter = tuple(value.shape), isinstance(value, torch.nn.Parameter)
    return (
        _tensor,
        (shape, tuple(value.stride()), value.dtype, value.requires_grad, is_parameter),
        {key: one for key, one in vars(value).items() if key in _KEPT} or None,
    )


# What nbdist or users set on parameters and steps look at.
_KEPT = frozenset({"tp_plan"})


def _tensor(
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    dtype: torch.dtype,
    has_gradient: bool,
    is_parameter: bool,
) -> torch.Tensor:
    empty = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    if is_parameter:
        return torch.nn.Parameter(empty, requires_grad=has_gradient)
    return empty.requires_grad_(has_gradient) if dtype.is_floating_point else empty


def _reduced_function(value: types.FunctionType) -> Any:
    if _is_importable(value):
        return NotImplemented
    code = value.__code__
    names = _names(code)
    own = {key: value.__globals__[key] for key in names if key in value.__globals__}
    state = {
        "globals": own,
        "defaults": value.__defaults__,
        "kwdefaults": value.__kwdefaults__,
        "dict": dict(vars(value)),
    }
    blank = (marshal.dumps(code), value.__name__, value.__qualname__, value.__module__)
    return _blank_function, (*blank, value.__closure__), state, None, None, _fill_function


def _names(code: types.CodeType) -> set[str]:
    """Every global that a code, or one inside it, may use."""
    found = set(code.co_names)
    for one in code.co_consts:
        if isinstance(one, types.CodeType):
            found |= _names(one)
    return found


def _blank_function(
    code: bytes, name: str, qualname: str, module: str, cells: tuple[types.CellType, ...] | None
) -> types.FunctionType:
    own = {"__builtins__": builtins, "__name__": module}
    made = types.FunctionType(marshal.loads(code), own, name, None, cells)  # noqa: S302
    made.__qualname__ = qualname
    return made


def _fill_function(made: types.FunctionType, state: dict[str, Any]) -> None:
    made.__globals__.update(state["globals"])
    made.__defaults__, made.__kwdefaults__ = state["defaults"], state["kwdefaults"]
    vars(made).update(state["dict"])


def _reduced_cell(value: types.CellType) -> Any:
    try:
        inside: tuple[Any, ...] = (value.cell_contents,)
    except ValueError:
        inside = ()
    return _blank_cell, (), inside, None, None, _fill_cell


def _blank_cell() -> types.CellType:
    return types.CellType()


def _fill_cell(cell: types.CellType, inside: tuple[Any, ...]) -> None:
    if inside:
        cell.cell_contents = inside[0]


def _reduced_class(value: type) -> Any:
    # Types of C have no code to send: pickle knows them all.
    if not value.__flags__ & _HEAP_TYPE or _is_importable(value):
        return NotImplemented
    own = {key: one for key, one in vars(value).items() if key not in _OF_TYPE}
    slots = own.get("__slots__", ())
    for key in (slots,) if isinstance(slots, str) else slots:
        own.pop(key, None)
    blank = (type(value), value.__name__, value.__bases__, {"__module__": value.__module__})
    return _blank_class, blank, own, None, None, _fill_class


def _blank_class(kind: Any, name: str, bases: tuple[type, ...], own: dict[str, Any]) -> Any:
    return types.new_class(name, bases, {"metaclass": kind}, lambda space: space.update(own))


def _fill_class(made: type, own: dict[str, Any]) -> None:
    for key, one in own.items():
        if key not in {"__module__", "__doc__", "__slots__", "_abc_impl"}:
            setattr(made, key, one)


def _lost() -> None:
    return None


_REDUCED: tuple[tuple[Any, Callable[[Any], Any]], ...] = (
    (torch.Tensor, _reduced_tensor),
    (types.FunctionType, _reduced_function),
    (type, _reduced_class),
    (types.ModuleType, _reduced_module),
    (types.CellType, _reduced_cell),
    (property, _reduced_property),
    ((staticmethod, classmethod), _reduced_method),
    (functools.cached_property, _reduced_cached),
    (types.MappingProxyType, _reduced_mapping),
    ((type(dataclasses.MISSING), getattr(dataclasses, "_FIELD_BASE", ())), _reduced_mark),
    ((weakref.ref, weakref.WeakSet, weakref.WeakKeyDictionary), _reduced_reference),
)
