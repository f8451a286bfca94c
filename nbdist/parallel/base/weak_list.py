"""Lists of what was prepared that keep nothing alive, and say which are on all ranks."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

# Numbers that were given, of all lists.
_count = 0


def last_number() -> int:
    """How many numbers this rank has given."""
    return _count


def count_on(number: int) -> None:
    """Go on after a number that other ranks have given: this one may have replaced another."""
    global _count  # noqa: PLW0603  # one process is one rank
    _count = max(_count, number)


class WeakList:
    """Prepared objects in order, for as long as somebody else holds them.

    Accelerate's own lists keep the model of every cell that was run again, and save it too. Each
    entry has a number that is equal on all ranks, as preparing is.
    """

    def __init__(self, view: Callable[[Any], Any] = lambda obj: obj) -> None:
        """Begin empty. A view is shown in place of what is held; None for nothing."""
        self._view = view
        self._entries: list[tuple[int, Callable[[], Any]]] = []

    def append(self, obj: Any) -> None:
        """Add an object, unless it is in the list."""
        if any(reference() is obj for _, reference in self._entries):
            return
        try:
            reference: Callable[[], Any] = weakref.ref(obj)
        except TypeError:  # an object with slots

            def reference() -> Any:
                return obj

        self._entries.append((_count, reference))
        count_on(_count + 1)

    def extend(self, several: Iterable[Any]) -> None:
        """Add each that is not in it yet."""
        for obj in several:
            self.append(obj)

    def clear(self) -> None:
        """Hold nothing from now on; numbers that were given are not given again."""
        self._entries.clear()

    def entries(self) -> list[tuple[int, str]]:
        """The numbers and classes of the entries that still live, in order."""
        living = ((number, reference()) for number, reference in self._entries)
        return [(number, type(obj).__name__) for number, obj in living if obj is not None]

    def keep(self, numbers: set[int]) -> None:
        """Hold only entries with these numbers from now on."""
        self._entries = [entry for entry in self._entries if entry[0] in numbers]

    def __iter__(self) -> Iterator[Any]:
        views = (
            self._view(obj) for _, reference in self._entries if (obj := reference()) is not None
        )
        return iter([view for view in views if view is not None])

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __getitem__(self, index: int) -> Any:
        return list(iter(self))[index]

    def __contains__(self, obj: object) -> bool:
        # By identity: some of Accelerate's objects compare by what they hold.
        return any(item is obj for item in self)
