"""The first and the last lines of a long output; everything goes to a file."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Protocol

from nbdist.core.lines import Line

SHOWN_LINES = 500


class LineFile(Protocol):
    """What takes all lines."""

    def write(self, text: str) -> object:
        """Append one line."""

    def writelines(self, texts: Iterable[str]) -> object:
        """Append lines."""


class Clip:
    """Decides which lines are shown at once, and keeps the last ones for the end.

    The first `shown` lines are shown as they come. From the next one on, all lines
    (the first ones too) are written to the file that `write_to` names, and the last
    `shown` are kept.
    """

    def __init__(self, shown: int = SHOWN_LINES):
        self._shown = shown
        self._head: list[str] = []
        self._tail: deque[Line] = deque(maxlen=shown)
        self._file: LineFile | None = None
        self.count = 0

    @property
    def needs_file(self) -> bool:
        """Whether a file has to be given before the next line."""
        return self._file is None and self.count >= self._shown

    def write_to(self, file: LineFile) -> None:
        """Write all lines to this file, those already shown included."""
        self._file = file
        file.writelines(self._head)
        self._head.clear()

    def add(self, line: Line) -> bool:
        """Count one line; True when it is to be shown at once."""
        self.count += 1
        if self.count <= self._shown:
            self._head.append(line.text)
            return True
        if self._file is not None:
            self._file.write(line.text)
        self._tail.append(line)
        return False

    def rest(self) -> tuple[int, list[Line]]:
        """How many lines are shown nowhere, and the last ones, which are to be shown now."""
        return max(0, self.count - self._shown - len(self._tail)), list(self._tail)
