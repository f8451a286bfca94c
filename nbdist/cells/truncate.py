"""The first and the last of a long output, by lines and characters; all of it goes to a file."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from nbdist.cells.line_merger import Line

# The limits of each end; the first that is reached counts.
SHOWN_LINES = 500
SHOWN_CHARACTERS = 1_000_000
# A line that does not fit is cut where it is longer than this, and else left for the end.
_WHOLE_CHARACTERS = 50_000


@dataclass(frozen=True, slots=True)
class Skipped:
    """How much of an output is shown nowhere; of a single long line only characters are."""

    lines: int = 0
    characters: int = 0

    def __str__(self) -> str:
        """`1,234 lines`, or `50,000,000 characters`."""
        return f"{self.lines:,} lines" if self.lines else f"{self.characters:,} characters"


class Clip:
    """Decides which lines are shown at once, and keeps the last of an output for its end.

    The first SHOWN_LINES lines are shown as they come, as long as they are SHOWN_CHARACTERS at
    most. From what follows on, everything (the first lines too) is handed to what `write_to`
    takes, and as much of the last is kept.
    """

    def __init__(self) -> None:
        self._head: list[str] = []
        self._head_lines = self._head_characters = 0
        self._tail: deque[Line] = deque()
        self._tail_characters = 0
        self._write: Callable[[str], object] | None = None
        self._later_lines = self._later_characters = 0

    @property
    def needs_file(self) -> bool:
        """Whether a file has to be given before `keep` is called."""
        return self._write is None

    @property
    def limit(self) -> str:
        """The limit that has been reached: `500 lines`."""
        is_by_lines = self._head_lines >= SHOWN_LINES
        return f"{SHOWN_LINES} lines" if is_by_lines else f"{SHOWN_CHARACTERS:,} characters"

    def write_to(self, write: Callable[[str], object]) -> None:
        """Write all lines to a file by its `write`, shown ones included."""
        self._write = write
        write("".join(self._head))
        self._head.clear()

    def first(self, text: str) -> tuple[str, str]:
        """(what of whole lines is to be shown at once, the rest, which is for `keep`)."""
        if self._write is not None:
            return "", text
        end = _end_of(text, SHOWN_LINES - self._head_lines)
        if end > (room := SHOWN_CHARACTERS - self._head_characters):
            begin = text.rfind("\n", 0, room) + 1
            is_short = text.find("\n", room) < begin + _WHOLE_CHARACTERS
            end = begin if is_short else room
        head = text[:end]
        self._head.append(head)
        self._head_lines += head.count("\n")
        self._head_characters += end
        return head + "\n" * (head[-1:] not in {"", "\n"}), text[end:]

    def keep(self, stream: str, text: str) -> None:
        """Count lines that are not shown at once, and keep the last of them."""
        self._later_lines += text.count("\n")
        self._later_characters += len(text)
        if self._write is not None:
            self._write(text)
        last = text[-SHOWN_CHARACTERS:].removesuffix("\n")
        for line in last.rsplit("\n", SHOWN_LINES)[-SHOWN_LINES:]:
            self._tail.append(Line(stream, f"{line}\n"))
            self._tail_characters += len(line) + 1
            if len(self._tail) > SHOWN_LINES:
                self._tail_characters -= len(self._tail.popleft().text)
        while (excess := self._tail_characters - SHOWN_CHARACTERS) > 0:
            first = self._tail.popleft()
            if len(first.text) > excess:
                self._tail.appendleft(Line(first.stream, first.text[excess:]))
            self._tail_characters -= min(excess, len(first.text))

    def rest(self) -> tuple[Skipped, list[Line]]:
        """Return how much is never shown, and the last lines, which are shown now."""
        skipped = Skipped(
            max(0, self._later_lines - len(self._tail)),
            max(0, self._later_characters - self._tail_characters),
        )
        return skipped, list(self._tail)


def _end_of(text: str, lines: int) -> int:
    """Offset at which so many lines of a text end; the text's length where it has fewer."""
    end = 0
    for _ in range(lines):
        end = text.find("\n", end) + 1
        if not end:
            return len(text)
    return end
