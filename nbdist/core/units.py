"""Numbers as short text; everywhere else they are bytes and seconds or nanoseconds.

Notebooks of nbdist are tests: their stored outputs have to be equal on every machine. With
NBDIST_TEST=1 in the environment, hosts, times, rates, memory and the like print as `#`.
"""

from __future__ import annotations

import os

PLACEHOLDER = "#"
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


def shown(value: object) -> str:
    """The value as text, or `#` where outputs are stored and compared."""
    return PLACEHOLDER if is_stored() else str(value)


def make_up_host(name: str) -> None:
    """Let a host's name be shown where outputs are stored, for the notebook has made it up."""
    _made_up_hosts.add(name)


def is_made_up(name: str) -> bool:
    """Whether a host of this name is pretended: its ranks run on this machine."""
    return name in _made_up_hosts


def shown_host(name: str) -> str:
    """The name of a host, or `#` where outputs are stored; of a pretended host always the name."""
    return name if is_made_up(name) else shown(name)


def seconds(value_s: float) -> str:
    """`2.1 s`, or a placeholder where outputs are stored."""
    return f"{shown(f'{value_s:.1f}')} s"


def span(value_s: float) -> str:
    """A time that a user has chosen, or what is left of it: `8 h`, `1 h 30 min`, `45 s`."""
    whole = round(value_s)
    if whole < 60:
        return f"{whole} s"
    hours, minutes = divmod(round(whole / 60), 60)
    return " ".join([f"{hours} h"] * bool(hours) + [f"{minutes} min"] * bool(minutes))


def size(value_bytes: float) -> str:
    """`1.2 GB`, or a placeholder (for the unit too, which may differ) where outputs are stored."""
    return PLACEHOLDER if is_stored() else exact_size(value_bytes)


def exact_size(value_bytes: float) -> str:
    """`1.2 GB`, also where outputs are stored: for bytes that are equal on every machine."""
    return _text(value_bytes, BYTE_UNITS, "B")


def duration(value_ns: float) -> str:
    """`1.2 ms`, or a placeholder (for the unit too, which may differ) where outputs are stored."""
    return PLACEHOLDER if is_stored() else _text(value_ns, DURATION_UNITS, "ns")


def one_line(text: str, most: int = 60) -> str:
    """The text on one line; of a longer one its beginning and its end."""
    line = " ".join(text.split())
    if len(line) <= most:
        return line
    end = (most - 3) // 2
    return f"{line[: most - 3 - end]}...{line[-end:]}"


def _text(value: float, units: tuple[tuple[float, str], ...], smallest: str) -> str:
    for unit, name in units:
        if value >= unit * ROUNDS_UP:
            return f"{value / unit:.1f} {name}"
    return f"{value:.0f} {smallest}"


def gigabytes(size_bytes: float) -> str:
    """A size in GB = 10^9 bytes, as text."""
    return f"{size_bytes / 1e9:,.1f} GB"
