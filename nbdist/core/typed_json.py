"""Plain values of a file, which may hold anything: each has its type, or its place is told.

A place reads like Python: `segments[0].blocks[2].size`. Nothing is converted in silence.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

MOST = int(np.iinfo(np.int64).max)
# Of an address and of a size: both together still fit.
MOST_BYTES = 2**62 - 1
T = TypeVar("T")
_LONGEST = 60
_LONGEST_BITS = 128
_NEEDED: Any = object()
_KINDS: Mapping[type, str] = {
    int: "a whole number", str: "a text", list: "a list", tuple: "a list", dict: "a dict",
    bool: "true or false", float: "a number with decimals", bytes: "bytes", type(None): "nothing",
}  # fmt: skip


class Misfit(Exception):
    """A value is not what it has to be; the message says where, what it is, and what is needed."""


@dataclass(frozen=True, slots=True)
class Value:
    """A value, and where it stands.

    Every method raises Misfit where the value is anything else than what it is asked for.

    Attributes:
        raw: As it was read.
        where: Its place; empty for the whole.
    """

    raw: Any
    where: str

    def refused(self, needed: str) -> Misfit:
        """The error that says what it is, and what it has to be."""
        raw_text = _raw_text(self.raw)
        kind = _KINDS.get(type(self.raw), f"a {type(self.raw).__name__}")
        return Misfit(
            f"{self.where or 'it'} is {kind}{raw_text and f' ({raw_text})'}, not {needed}"
        )

    def get(self, key: str, default: Any = _NEEDED) -> Value:
        """Value under a key of a dict; without a default the key may not lack."""
        value = self.mapping().get(key, default)
        if value is _NEEDED:
            raise Misfit(f"{self.where or 'it'} lacks {key!r}")
        return Value(value, self._below(key))

    def __getitem__(self, key: str) -> Value:
        return self.get(key)

    def _below(self, key: str) -> str:
        return f"{self.where}.{key}" if self.where else key

    def mapping(self) -> Mapping[str, Any]:
        """A dict, as it was read."""
        if type(self.raw) is not dict:
            raise self.refused("a dict")
        return self.raw

    def sequence(self) -> Sequence[Any]:
        """A list or a tuple, as it was read."""
        if type(self.raw) is not list and type(self.raw) is not tuple:
            raise self.refused("a list")
        return self.raw

    def entries(self) -> list[Value]:
        """Each value of a list with its own place."""
        return [Value(raw, f"{self.where}[{n}]") for n, raw in enumerate(self.sequence())]

    def rows(self, length: int) -> list[list[Value]]:
        """A list of lists that are all of one length."""
        rows = [row.entries() for row in self.entries()]
        for number, row in enumerate(rows):
            if len(row) != length:
                raise Misfit(f"{self.where}[{number}] has {len(row)} entries, not {length}")
        return rows

    def records(self) -> Sequence[Mapping[str, Any]]:
        """A list of dicts, as it was read."""
        records: Sequence[Mapping[str, Any]] = self.sequence()
        if not _are(dict, records):
            for entry in self.entries():
                entry.mapping()
        return records

    def whole(self, least: int = -MOST, most: int = MOST) -> int:
        """A whole number within bounds."""
        if type(self.raw) is not int:
            raise self.refused("a whole number")
        if not least <= self.raw <= most:
            raw_text = _raw_text(self.raw)
            raise Misfit(f"{self.where} is the number {raw_text}, not one of {least} to {most}")
        return self.raw

    def size(self) -> int:
        """An address or a number of bytes."""
        return self.whole(0, MOST_BYTES)

    def text(self, choices: Sequence[str] = ()) -> str:
        """A text that can be shown; one of the choices, where there are any."""
        if type(self.raw) is not str or not _is_written(self.raw):
            raise self.refused("a text")
        if choices and self.raw not in choices:
            raise self.refused(f"one of {', '.join(choices)}")
        return self.raw

    def integers(self, least: int = -MOST, most: int = MOST) -> npt.NDArray[np.int64]:
        """A list of whole numbers within bounds."""
        if not _are_within(self.sequence(), least, most):
            for entry in self.entries():
                entry.whole(least, most)
        return np.array(self.raw, np.int64)

    def texts(self) -> tuple[str, ...]:
        """A list of texts."""
        if not _are_texts(self.sequence()):
            for entry in self.entries():
                entry.text()
        return tuple(self.raw)

    def sizes_of(self, key: str, default: int = _NEEDED) -> list[int]:
        """The time, address or size that each dict of a list has under a key."""
        sizes = [row.get(key, default) for row in self.records()]
        if not _are_within(sizes, 0, MOST_BYTES):
            return [row.get(key, default).size() for row in self.entries()]
        return sizes

    def texts_of(self, key: str) -> list[str]:
        """The text that each dict of a list has under a key."""
        texts = [row.get(key, _NEEDED) for row in self.records()]
        return texts if _are_texts(texts) else [row[key].text() for row in self.entries()]

    def record(self, kind: type[T]) -> T:
        """A dataclass of what its asdict() became in JSON, by the types of its fields.

        Fields that are not there take their default; fields that the class does not have are
        passed over, as a later version of the same format may have written them.
        """
        mapping, hints, values = self.mapping(), typing.get_type_hints(kind), {}
        for field in dataclasses.fields(kind):  # type: ignore[arg-type]  # T is a dataclass
            if field.name in mapping:
                values[field.name] = self[field.name].of_type(hints[field.name])
            elif field.default is field.default_factory is dataclasses.MISSING:
                raise Misfit(f"{self._below(field.name)} is missing")
        return kind(**values)

    def of_type(self, kind: Any) -> Any:
        """Read as a type hint says; of unions only `X | None`, tuples and dicts of one kind."""
        origin, inner = typing.get_origin(kind), typing.get_args(kind)
        if origin in (typing.Union, types.UnionType):
            return None if self.raw is None else self.of_type(inner[0])
        if origin is tuple:
            return tuple(entry.of_type(inner[0]) for entry in self.entries())
        if origin in (dict, Mapping):
            return {key: self[key].of_type(inner[1]) for key in self.mapping()}
        if dataclasses.is_dataclass(kind):
            return self.record(typing.cast(type[Any], kind))
        return self._plain(kind)

    def _plain(self, kind: Any) -> Any:
        if kind is float and type(self.raw) is int:
            return float(self.raw)
        if kind is not Any and type(self.raw) is not kind:
            raise self.refused("a number" if kind is float else _KINDS[kind])
        return self.raw


def _raw_text(raw: object) -> str:
    if isinstance(raw, int) and raw.bit_length() > _LONGEST_BITS:
        return f"of {raw.bit_length()} bits"  # Python refuses to write very long ones
    if isinstance(raw, (str, bytes)) and len(raw) > _LONGEST:
        return f"{raw[:_LONGEST]!r}..."
    return repr(raw) if isinstance(raw, (int, float, str, bytes)) else ""


def _is_written(text: str) -> bool:
    """Whether it can be shown: pickles may hold halves of characters."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _are(kind: type, values: Iterable[Any]) -> bool:
    return set(map(type, values)) <= {kind}


def _are_texts(values: Sequence[Any]) -> bool:
    return _are(str, values) and _is_written("".join(set(values)))


def _are_within(values: Sequence[Any], least: int, most: int) -> bool:
    return _are(int, values) and (not values or (least <= min(values) and max(values) <= most))
