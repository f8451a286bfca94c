"""Numbers as short text; everywhere else they are bytes and seconds or nanoseconds.

Notebooks of nbdist are tests: their stored outputs are compared on every machine. With
NBDIST_TEST=1 in the environment, hosts, times, rates, memory and the like have a MARK on both
sides, a character without width or shape. A reader sees the values of the machine that stored
them; a comparison sees `#`. Blanks that the width of a value decides have PADDING on both sides
and are not compared; HTML that is drawn from values stands between comments. The same
expressions stand in nbval_sanitize.cfg, for nbval.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

PLACEHOLDER = "#"
MARK = "\u2060"  # word joiner
PADDING = "\u2063"  # invisible separator
BEGIN, END = "<!--shown-->", "<!--/shown-->"
SPAN = f"{MARK}[^{MARK}]*{MARK}"
_INVISIBLE = re.compile(f"[{MARK}{PADDING}]|{BEGIN}|{END}")
_BLANKS = re.compile(f"{PADDING} *{PADDING}")
_VALUE = re.compile(rf"{BEGIN}[\s\S]*?{END}|{SPAN}")
_PIECE = re.compile(rf"{SPAN}|[\s\S]")
# Decimal, as memory plans and GPU data sheets count.
BYTE_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
# Names of pretended hosts: a notebook has made them up, so they are the same on every machine.
_made_up_hosts: set[str] = set()
DURATION_UNITS = ((1e9, "s"), (1e6, "ms"), (1e3, "us"))
# What is below a unit by less than this prints as 1.0 of it, not as 1000.0 of the next.
ROUNDS_UP = 0.99995


def is_stored() -> bool:
    """Whether outputs are going to be stored and compared (NBDIST_TEST=1)."""
    return os.environ.get("NBDIST_TEST") == "1"


def marked(text: str) -> str:
    """The text as a value that is not compared."""
    return f"{MARK}{visible(text)}{MARK}"


def visible(text: str) -> str:
    """The text as a reader sees it: without marks."""
    return _INVISIBLE.sub("", text)


def compared(text: str, placeholder: str = PLACEHOLDER) -> str:
    """The text as it is compared: with a placeholder for each value."""
    return _VALUE.sub(placeholder, _BLANKS.sub("", text))


class _Shown(str):
    """A marked value; a width such as `{shown(loss):>8}` is that of what a reader sees."""

    __slots__ = ()

    def __format__(self, spec: str) -> str:
        return marked(format(visible(self), spec))

    def __repr__(self) -> str:
        return f"'{self}'"

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str(self),)


def shown(value: object) -> str:
    """The value as text; where outputs are stored it has marks, and is not compared."""
    return _Shown(marked(str(value))) if is_stored() else str(value)


def shown_lines(lines: Iterable[str]) -> list[str]:
    """The lines; where outputs are stored all are one value: not even their number is compared."""
    return [shown("\n".join(lines))] if is_stored() else list(lines)


def make_up_host(name: str) -> None:
    """Let a host's name be shown where outputs are stored, for the notebook has made it up."""
    _made_up_hosts.add(name)


def is_made_up(name: str) -> bool:
    """Whether a host of this name is pretended: its ranks run on this machine."""
    return name in _made_up_hosts


def shown_host(name: str) -> str:
    """The name of a host, which is not compared unless it is pretended."""
    return name if is_made_up(name) else shown(name)


def seconds(value_s: float) -> str:
    """`2.1 s`; the number is not compared."""
    return f"{shown(f'{value_s:.1f}')} s"


def span(value_s: float) -> str:
    """A time that a user has chosen, or what is left of it: `8 h`, `1 h 30 min`, `45 s`."""
    whole = round(value_s)
    if whole < 60:
        return f"{whole} s"
    hours, minutes = divmod(round(whole / 60), 60)
    return " ".join([f"{hours} h"] * bool(hours) + [f"{minutes} min"] * bool(minutes))


def size(value_bytes: float) -> str:
    """`1.2 GB`; neither number nor unit is compared."""
    return shown(exact_size(value_bytes))


def exact_size(value_bytes: float) -> str:
    """`1.2 GB`, which is compared: for bytes that are equal on every machine."""
    return _text(value_bytes, BYTE_UNITS, "B")


def duration(value_ns: float) -> str:
    """`1.2 ms`; neither number nor unit is compared."""
    return shown(_text(value_ns, DURATION_UNITS, "ns"))


def one_line(text: str, most: int = 60) -> str:
    """The text on one line; of a longer one its beginning and its end. A value stays whole."""
    pieces = _PIECE.findall(" ".join(text.split()))
    end = (most - 3) // 2
    if len(pieces) > most:
        pieces[most - 3 - end : -end] = "..."
    return "".join(pieces)


def _text(value: float, units: tuple[tuple[float, str], ...], smallest: str) -> str:
    for unit, name in units:
        if value >= unit * ROUNDS_UP:
            return f"{value / unit:.1f} {name}"
    return f"{value:.0f} {smallest}"


def gigabytes(size_bytes: float) -> str:
    """A size in GB = 10^9 bytes, as text."""
    return f"{size_bytes / 1e9:,.1f} GB"
