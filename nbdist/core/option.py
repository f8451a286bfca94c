"""Options typed after a verb: as records, read from text, and records made of options."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

# A longer time (ten years) is a mistake, and more than waits of Python and torch can take.
LARGEST = 300_000_000
Record = TypeVar("Record")


@dataclass(frozen=True, slots=True)
class Option:
    """One option or argument of a verb.

    Attributes:
        flags: As typed (`-n`, `--num-processes`); the long one names it. An argument has one
            name without dashes.
        kind: Turns the text into a value; None for a switch.
        name: Its name in the parsed result.
        choices: What Tab offers for it, or what gives that; the verb itself checks what was typed.
        is_list: An argument that several words make.
        implied: The value where the option stands alone, of one that may.
    """

    flags: tuple[str, ...]
    help: str
    kind: Callable[[str], Any] | None = str
    default: Any = None
    metavar: str | None = None
    name: str | None = None
    choices: tuple[str, ...] | Callable[[], Iterable[str]] = ()
    is_list: bool = False
    implied: Any = None

    @property
    def is_argument(self) -> bool:
        """Whether it is typed without a name before it."""
        return not self.flags[0].startswith("-")

    @property
    def offered(self) -> tuple[str, ...]:
        """The choices as they are now."""
        return tuple(self.choices() if callable(self.choices) else self.choices)


def option(
    help_text: str,
    metavar: str,
    kind: Callable[[str], Any] = str,
    default: Any = None,
    *,
    choices: Iterable[str] | Callable[[], Iterable[str]] = (),
    **more: Any,
) -> Any:
    """A field of a record, typed as an option: as `flags`, or `--keep-free` for keep_free.

    `more` are flags and the implied value, as an Option has them.
    """
    offered = choices if callable(choices) else tuple(choices)
    values = {"flags": (), "choices": offered, **more}
    row = Option(help=help_text, kind=kind, default=default, metavar=metavar, **values)
    return field(default=default, metadata={"option": row})


def switch(help_text: str, *flags: str) -> Any:
    """A field of a record that is typed alone: True where it is."""
    return field(default=False, metadata={"option": Option(flags, help_text, None)})


def options_of(record: type) -> tuple[Option, ...]:
    """Options of the fields of a record, in their order."""
    rows = [(row.name, row.metadata["option"]) for row in fields(record) if row.metadata]
    return tuple(
        replace(row, flags=row.flags or (f"--{name.replace('_', '-')}",), name=name)
        for name, row in rows
    )


def of_values(record: type[Record], values: argparse.Namespace, **more: Any) -> Record:
    """A record of what was typed of its options; `more` are its other fields."""
    names = [str(row.name) for row in options_of(record)]
    return record(**{name: getattr(values, name) for name in names}, **more)


def positive_number(text: str) -> float:
    """A number above 0 and up to LARGEST, such as a time in seconds."""
    try:
        value = float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from error
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    if value > LARGEST:
        raise argparse.ArgumentTypeError(f"{text} is more than {LARGEST:,}")
    return value


def duration(text: str) -> float:
    """Seconds of a time such as 8h, 30m, 1h30m or 90s.

    Raises:
        argparse.ArgumentTypeError: If it is none, or 0.
    """
    units_s = {"d": 86400, "h": 3600, "m": 60, "s": 1}
    parts = re.findall(r"(\d+(?:\.\d+)?)([dhms])", text)
    seconds = sum(float(number) * units_s[unit] for number, unit in parts)
    if "".join(number + unit for number, unit in parts) != text or not 0 < seconds <= LARGEST:
        raise argparse.ArgumentTypeError(f"{text!r} is no time such as 8h, 30m, 1h30m or 90s")
    return seconds


def whole_number(what: str, least: int = 1, most: float = math.inf) -> Callable[[str], int]:
    """Make a reader of numbers from least to most, which rejects other text as not `what`."""

    def read(text: str) -> int:
        if not (text.isascii() and text.isdigit()) or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
        return int(text)

    return read


rank_count = whole_number("a valid number of ranks (1 or more)")
