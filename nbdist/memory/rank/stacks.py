"""The lines of Python above an allocation: kept once each, without those that say nothing."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from nbdist.memory.snapshot import Frame

NO_LINK = -1
# How calls come about, not what is called: torch's dispatch, the profiler, the shell, nbdist.
_NOISE = re.compile(
    r"(^|[/\\])(torch[/\\](nn[/\\]modules[/\\]module|_ops|_tensor|overrides|utils[/\\]_contextlib"
    r"|autograd[/\\](profiler|graph|__init__|function)|profiler[/\\]\w+)\.py$"
    r"|(IPython|ipykernel|ipyparallel|nbdist|asyncio|tornado|zmq|traitlets)[/\\]"
    r"|(contextlib|runpy|selectors|threading|typing|functools)\.py$)"
    r"|^<frozen|^$"
)


@dataclass(frozen=True, slots=True)
class _Link:
    """A call, and the one that it was made from.

    Attributes:
        outer: Place of that one; NO_LINK for none.
        file, line, function, is_known: As memory.snapshot.Frame has them.
    """

    outer: int
    file: str
    line: int
    function: str
    is_known: bool


@dataclass(slots=True)
class Stacks:
    """Every stack once, made from calls that are under way.

    Attributes:
        cells: File name -> number, for the code of cells.
        links: Every call once.
        found: Every stack once, innermost frame first.
    """

    cells: Mapping[str, int]
    links: list[_Link] = field(default_factory=list)
    found: list[tuple[Frame, ...]] = field(default_factory=list)
    _places: dict[_Link, int] = field(default_factory=dict)
    _stacks: dict[tuple[Frame, ...], int] = field(default_factory=dict)
    _known: dict[int, int] = field(default_factory=dict)
    _files: dict[str, str] = field(default_factory=dict)

    def call(self, outer: int, file: str, line: int, function: str) -> int:
        """A function begins; `line` is its first one."""
        return self._place(_Link(outer, file, line, function, is_known=False))

    def at(self, link: int, line: int) -> int:
        """The same function, now at this line."""
        if link == NO_LINK:
            return link
        one = self.links[link]
        return self._place(_Link(one.outer, one.file, line, one.function, is_known=True))

    def place(self, link: int) -> int:
        """The stack of a call, as a place in `found`; -1 where nothing of it is worth showing."""
        known = self._known.get(link)
        if known is None:
            known = self._known[link] = self._new(link)
        return known

    def _new(self, link: int) -> int:
        frames = []
        while link != NO_LINK:
            one = self.links[link]
            file = self._file(one.file)
            if file:
                frames.append(Frame(file, one.line, one.function, one.is_known))
            link = one.outer
        if not frames:
            return -1
        stack = tuple(frames)
        if stack not in self._stacks:
            self._stacks[stack] = len(self.found)
            self.found.append(stack)
        return self._stacks[stack]

    def _place(self, link: _Link) -> int:
        place = self._places.get(link)
        if place is None:
            place = self._places[link] = len(self.links)
            self.links.append(link)
        return place

    def _file(self, file: str) -> str:
        if file not in self._files:
            self._files[file] = shown_file(file, self.cells)
        return self._files[file]


def shown(
    stacks: Sequence[tuple[Frame, ...]], cells: Mapping[str, int]
) -> tuple[tuple[tuple[Frame, ...], ...], npt.NDArray[np.int32]]:
    """Stacks of whole file names as `Stacks` has them, and the new place of each; the last is -1.

    A stack of which nothing is shown has no place: -1.
    """
    found: dict[tuple[Frame, ...], int] = {}
    files = {frame.file: shown_file(frame.file, cells) for stack in stacks for frame in stack}
    places = []
    for stack in stacks:
        own = tuple(replace(one, file=files[one.file]) for one in stack if files[one.file])
        places.append(found.setdefault(own, len(found)) if own else -1)
    return tuple(found), np.array([*places, -1], np.int32)


def shown_file(file: str, cells: Mapping[str, int]) -> str:
    """`cell [3]`, or the file as Python names it; empty for one that says nothing."""
    number = cell_number(file, cells)
    if number is not None:
        return f"cell [{number}]"
    return "" if _NOISE.search(file) else whole_name(file)


def cell_number(file: str, cells: Mapping[str, int]) -> int | None:
    """The cell with this file name, of which the beginning may be cut off."""
    if file in cells:
        return cells[file]
    return next((cells[one] for one in cells if one.endswith(f"/{file}") and "ipy" in file), None)


def whole_name(file: str) -> str:
    """A file as Python names it: the profiler cuts off what is on sys.path."""
    if file.startswith("<") or Path(file).is_absolute():
        return file
    return next(
        (str(path) for one in sys.path if (path := Path(one) / file).is_file()),
        file,
    )
