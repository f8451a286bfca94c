"""Frozen records made of what JSON has given, by their types; nothing is converted in silence."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

T = TypeVar("T")


class Misfit(Exception):
    """A value is not of the type that its field has; the message says where and which."""


def record(kind: type[T], found: Any, where: str = "") -> T:
    """A dataclass of what its asdict() became in JSON.

    Fields that are not there take their default; fields that the class does not have are passed
    over, as a later version of the same format may have written them.

    Raises:
        Misfit: A field without default is missing, or a value has another type.
    """
    if not isinstance(found, dict):
        raise Misfit(f"{where or 'it'} is {_kind(found)}, not an object")
    hints, values = typing.get_type_hints(kind), {}
    for one in dataclasses.fields(kind):  # type: ignore[arg-type]  # T is a dataclass
        path = f"{where}.{one.name}" if where else one.name
        if one.name in found:
            values[one.name] = _value(hints[one.name], found[one.name], path)
        elif one.default is one.default_factory is dataclasses.MISSING:
            raise Misfit(f"{path} is missing")
    return kind(**values)


def _value(kind: Any, found: Any, where: str) -> Any:
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):  # only `X | None` is used
        return None if found is None else _value(inner[0], found, where)
    if origin is tuple:
        _expect(list, found, where)
        return tuple(_value(inner[0], one, f"{where}[{n}]") for n, one in enumerate(found))
    if origin in (dict, Mapping):
        _expect(dict, found, where)
        return {key: _value(inner[1], one, f"{where}.{key}") for key, one in found.items()}
    if dataclasses.is_dataclass(kind):
        return record(typing.cast(type[Any], kind), found, where)
    return _plain(kind, found, where)


def _plain(kind: Any, found: Any, where: str) -> Any:
    if kind is Any:
        return found
    if kind is float and isinstance(found, int) and not isinstance(found, bool):
        return float(found)
    _expect(kind, found, where)
    return found


def _expect(kind: type[Any], found: Any, where: str) -> None:
    # A bool is an int for isinstance, and no number.
    if not isinstance(found, kind) or (kind is int and isinstance(found, bool)):
        raise Misfit(f"{where} is {_kind(found)}, not {_NAMES.get(kind, kind.__name__)}")


_NAMES: dict[type[Any], str] = {
    int: "a whole number", float: "a number", str: "a text", bool: "true or false",
    list: "a list", dict: "an object",
}  # fmt: skip


def _kind(found: Any) -> str:
    return "null" if found is None else _NAMES.get(type(found), type(found).__name__)
