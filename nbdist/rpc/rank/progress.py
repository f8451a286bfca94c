"""How far this rank is in what takes long; core.progress says how work reports.

The main thread writes, and the control thread answers the notebook: nobody waits for anybody.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from nbdist.core.progress import Progress

_now: Progress | None = None


def newest() -> Progress | None:
    """What is under way on this rank; None for nothing. From any thread."""
    return _now


@contextlib.contextmanager
def during(name: str) -> Iterator[None]:
    """Report as this while inside; what is inside of another one reports as its own."""
    global _now  # noqa: PLW0603  # one main thread
    before, _now = _now, Progress(name, "", phase=1)
    try:
        yield
    finally:
        _now = before


def tell(what: str, done: float = 0.0, total: float = 0.0, unit: str = "") -> None:
    """What is done now ("planning", "moving"), and how far; nothing outside of `during`.

    The unit is core.progress.BYTES, or a noun in the plural; the total 0 where it is not known.
    """
    global _now  # noqa: PLW0603
    if _now is not None:
        # Not by Progress.after: a copy of a record costs three times as much as a record.
        _now = Progress(_now.name, what, done, total, unit, _now.phase + (_now.what != what))
