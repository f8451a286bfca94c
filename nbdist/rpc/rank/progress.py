"""How far this rank is in what takes long; core.progress says how work reports.

The main thread writes, and the control thread answers the notebook: nobody waits for anybody.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from nbdist.core.progress import Progress

_now: Progress | None = None
_is_whole = False  # what is under way reports for all that is inside of it
_is_silent = False  # this is inside


def newest() -> Progress | None:
    """Progress of the work under way on this rank; None for none. From any thread."""
    return _now


@contextlib.contextmanager
def during(name: str, *, is_whole: bool = False) -> Iterator[None]:
    """Report as this while inside; what is inside of another one reports as its own.

    With `is_whole` it does not: a user who has asked for a verification knows of no switch.
    """
    global _now, _is_whole  # one main thread
    before, was_whole = _now, _is_whole
    if was_whole:
        with _silent():
            yield
        return
    _now, _is_whole = Progress(name, "", phase=1), is_whole
    try:
        yield
    finally:
        _now, _is_whole = before, was_whole


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    global _is_silent  # noqa: PLW0603
    before, _is_silent = _is_silent, True
    try:
        yield
    finally:
        _is_silent = before


def tell(what: str, done: float = 0.0, total: float = 0.0, unit: str = "") -> None:
    """Note the work done now ("planning", "moving"), and how far; nothing outside of `during`.

    The unit is core.progress.BYTES, or a noun in the plural; the total 0 where it is not known.
    """
    global _now  # noqa: PLW0603
    if _now is not None and not _is_silent:
        # Not by Progress.after: a copy of a record costs three times as much as a record.
        _now = Progress(_now.name, what, done, total, unit, _now.phase + (_now.what != what))
