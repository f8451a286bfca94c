"""Values out of dicts that may hold anything: each is what it has to be, or its place is told.

A place reads like Python: `segments[0].blocks[2].size`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from nbdist.errors import SnapshotError
from nbdist.memory.snapshot import Integers

MOST = int(np.iinfo(np.int64).max)
# Of an address and of a size: both together still fit.
MOST_BYTES = 2**62 - 1
_T = TypeVar("_T")
_LONGEST = 60
_LONGEST_BITS = 128


class _Needed:
    """Says that a field may not lack."""


NEEDED = _Needed()
_KINDS: Mapping[type, str] = {
    int: "a whole number", str: "a text", list: "a list", tuple: "a list", dict: "a dict",
    bool: "true or false", float: "a number with decimals", bytes: "bytes", type(None): "nothing",
}  # fmt: skip


def refused(value: object, where: str, wanted: str) -> SnapshotError:
    """The error that says what a value is, and what it has to be."""
    told = _told(value)
    kind = _KINDS.get(type(value), f"a {type(value).__name__}")
    return SnapshotError(f"{where} is {kind}{told and f' ({told})'}, not {wanted}.")


def _told(value: object) -> str:
    if isinstance(value, int) and value.bit_length() > _LONGEST_BITS:
        return f"of {value.bit_length()} bits"  # Python refuses to write very long ones
    if isinstance(value, (str, bytes)) and len(value) > _LONGEST:
        return f"{value[:_LONGEST]!r}..."
    return repr(value) if isinstance(value, (int, float, str, bytes)) else ""


def whole(value: object, where: str, least: int = -MOST, most: int = MOST) -> int:
    """A whole number within bounds.

    Raises:
        SnapshotError: If it is none.
    """
    if type(value) is not int:
        raise refused(value, where, "a whole number")
    if not least <= value <= most:
        raise SnapshotError(f"{where} is the number {_told(value)}, not one of {least} to {most}.")
    return value


def text(value: object, where: str) -> str:
    """A text.

    Raises:
        SnapshotError: If it is none.
    """
    if type(value) is not str or not _is_written(value):
        raise refused(value, where, "a text")
    return value


def _is_written(value: str) -> bool:
    """Whether it can be shown: pickles may hold halves of characters."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _are_texts(found: Sequence[Any]) -> bool:
    return set(map(type, found)) <= {str} and _is_written("".join(set(found)))


def record(value: object, where: str) -> Mapping[str, Any]:
    """A dict.

    Raises:
        SnapshotError: If it is none.
    """
    if type(value) is not dict:
        raise refused(value, where, "a dict")
    return value


def entries(value: object, where: str) -> Sequence[Any]:
    """A list, or a tuple.

    Raises:
        SnapshotError: If it is none.
    """
    if type(value) is not list and type(value) is not tuple:
        raise refused(value, where, "a list")
    return value


def records(value: object, where: str) -> Sequence[Mapping[str, Any]]:
    """A list of dicts.

    Raises:
        SnapshotError: If it is none.
    """
    found = entries(value, where)
    if not set(map(type, found)) <= {dict}:
        for number, one in enumerate(found):
            record(one, f"{where}[{number}]")
    return found


def field(one: Mapping[str, Any], key: str, where: str, default: _T | _Needed = NEEDED) -> Any | _T:
    """What a dict has under a key.

    Raises:
        SnapshotError: If it lacks and has no default.
    """
    value = one.get(key, default)
    if value is NEEDED:
        raise SnapshotError(f"{where} lacks {key!r}.")
    return value


def whole_of(
    one: Mapping[str, Any],
    key: str,
    where: str,
    *,
    default: int | _Needed = NEEDED,
    least: int = -MOST,
    most: int = MOST,
) -> int:
    """A whole number that a dict has under a key.

    Raises:
        SnapshotError: If it is none.
    """
    return whole(field(one, key, where, default), f"{where}.{key}", least, most)


def bytes_of(one: Mapping[str, Any], key: str, where: str, default: int | _Needed = NEEDED) -> int:
    """An address or a size that a dict has under a key.

    Raises:
        SnapshotError: If it is none.
    """
    return whole_of(one, key, where, default=default, least=0, most=MOST_BYTES)


def text_of(one: Mapping[str, Any], key: str, where: str, default: str | _Needed = NEEDED) -> str:
    """A text that a dict has under a key.

    Raises:
        SnapshotError: If it is none.
    """
    return text(field(one, key, where, default), f"{where}.{key}")


def column(
    rows: Sequence[Mapping[str, Any]],
    key: str,
    where: str,
    *,
    default: int | _Needed = NEEDED,
) -> list[int]:
    """The time, address or size that each dict has under a key.

    Raises:
        SnapshotError: If one lacks it, or has anything else there.
    """
    found = [row.get(key, default) for row in rows]
    if set(map(type, found)) <= {int} and (
        not found or (min(found) >= 0 and max(found) <= MOST_BYTES)
    ):
        return found
    return [bytes_of(row, key, f"{where}[{number}]", default) for number, row in enumerate(rows)]


def text_column(
    rows: Sequence[Mapping[str, Any]], key: str, where: str, default: str | _Needed = NEEDED
) -> list[str]:
    """The text that each dict has under a key.

    Raises:
        SnapshotError: If one lacks it, or has anything else there.
    """
    found = [row.get(key, default) for row in rows]
    if _are_texts(found):
        return found
    return [text_of(row, key, f"{where}[{number}]", default) for number, row in enumerate(rows)]


def wholes(value: object, where: str, least: int = -MOST, most: int = MOST) -> Integers:
    """A list of whole numbers within bounds.

    Raises:
        SnapshotError: If it is none.
    """
    found = entries(value, where)
    if not set(map(type, found)) <= {int} or (
        found and not (least <= min(found) and max(found) <= most)
    ):
        for number, one in enumerate(found):
            whole(one, f"{where}[{number}]", least, most)
    return np.array(found, np.int64)


def texts(value: object, where: str) -> tuple[str, ...]:
    """A list of texts.

    Raises:
        SnapshotError: If it is none.
    """
    found = entries(value, where)
    if not _are_texts(found):
        for number, one in enumerate(found):
            text(one, f"{where}[{number}]")
    return tuple(found)
