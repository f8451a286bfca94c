"""Lists of what was prepared that keep nothing alive, and say which are on all ranks."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

_numbers = itertools.count()


class WeakList:
    """What was prepared, in order, for as long as somebody else holds it.

    Accelerate's own lists keep the model of every cell that was run again, and save it too. Each
    entry has a number that is equal on all ranks, as preparing is.
    """

    def __init__(self, view: Callable[[Any], Any] = lambda one: one) -> None:
        """Empty.

        Args:
            view: What is shown in place of what is held; None for nothing.
        """
        self._view = view
        self._entries: list[tuple[int, Callable[[], Any]]] = []

    def append(self, one: Any) -> None:
        """Add what is not in it yet."""
        if any(held() is one for _, held in self._entries):
            return
        try:
            held: Callable[[], Any] = weakref.ref(one)
        except TypeError:  # an object with slots

            def held() -> Any:
                return one

        self._entries.append((next(_numbers), held))

    def extend(self, several: Iterable[Any]) -> None:
        """Add each that is not in it yet."""
        for one in several:
            self.append(one)

    def clear(self) -> None:
        """Hold nothing from now on; numbers that were given are not given again."""
        self._entries.clear()

    def numbers(self) -> set[int]:
        """Of those that are there."""
        return {number for number, one in self._entries if one() is not None}

    def keep(self, numbers: set[int]) -> None:
        """Hold only entries with these numbers from now on."""
        self._entries = [entry for entry in self._entries if entry[0] in numbers]

    def __iter__(self) -> Iterator[Any]:
        seen = (self._view(one) for _, held in self._entries if (one := held()) is not None)
        return iter([one for one in seen if one is not None])

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __getitem__(self, index: int) -> Any:
        return list(iter(self))[index]

    def __contains__(self, one: object) -> bool:
        # By identity: some of Accelerate's objects compare by what they hold.
        return any(held is one for held in self)
