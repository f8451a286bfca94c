"""The first and the last lines of a long output; everything goes to a file."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from nbdist.cells.line_merger import Line

SHOWN_LINES = 500


class Clip:
    """Decides which lines are shown at once, and keeps the last ones for the end.

    The first SHOWN_LINES lines are shown as they come. From the next one on, all lines
    (the first ones too) are handed to what `write_to` takes, and as many of the last are kept.
    """

    def __init__(self) -> None:
        self._head: list[str] = []
        self._tail: deque[Line] = deque(maxlen=SHOWN_LINES)
        self._write: Callable[[str], object] | None = None
        self.count = 0

    @property
    def needs_file(self) -> bool:
        """Whether a file has to be given before the next line."""
        return self._write is None and self.count >= SHOWN_LINES

    def write_to(self, write: Callable[[str], object]) -> None:
        """Write all lines to a file by its `write`, those already shown included."""
        self._write = write
        write("".join(self._head))
        self._head.clear()

    def first(self, text: str) -> tuple[str, str]:
        """(those of the lines that are to be shown at once, the others, which are for `keep`)."""
        end = _end_of(text, max(0, SHOWN_LINES - self.count))
        if end:
            self.count += text.count("\n", 0, end)
            self._head.append(text[:end])
        return text[:end], text[end:]

    def keep(self, stream: str, text: str) -> None:
        """Count lines that are not shown at once, and keep the last of them."""
        self.count += text.count("\n")
        if self._write is not None:
            self._write(text)
        last = text[: -len("\n")].rsplit("\n", SHOWN_LINES)[-SHOWN_LINES:]
        self._tail.extend(Line(stream, f"{line}\n") for line in last)

    def rest(self) -> tuple[int, list[Line]]:
        """How many lines are shown nowhere, and the last ones, which are to be shown now."""
        return max(0, self.count - SHOWN_LINES - len(self._tail)), list(self._tail)


def _end_of(text: str, lines: int) -> int:
    """Where so many lines of a text end; its own end where it has not so many."""
    end = 0
    for _ in range(lines):
        end = text.find("\n", end) + 1
        if not end:
            return len(text)
    return end
