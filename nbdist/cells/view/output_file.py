"""The file that takes all lines of a long output."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TextIO


class OutputFile:
    """Takes lines as long as the disk does; then it stops, and `problem` says why.

    A cell must not fail because its output is long and the disk is full.
    """

    def __init__(self, path: Path):
        self.path = path
        self.problem = ""
        self._file: TextIO | None = None
        self._try(self._open)

    def write(self, text: str) -> None:
        """Append whole lines; a full disk is noted in `problem` and raises nothing."""
        self.writelines([text])

    def writelines(self, texts: Iterable[str]) -> None:
        """As `write`, for several texts at once."""
        file = self._file
        if file is not None:
            self._try(lambda: file.writelines(texts))

    def flush(self) -> None:
        """Let others read what there is."""
        if self._file is not None:
            self._try(self._file.flush)

    def close(self, *, is_needed: bool) -> None:
        """Close it, and remove it where nobody was told of it."""
        if self._file is not None:
            self._try(self._file.close)
        if not is_needed:
            self.path.unlink(missing_ok=True)

    def _open(self) -> None:
        self._file = self.path.open("w", encoding="utf-8", errors="backslashreplace")

    def _try(self, action: Callable[[], object]) -> None:
        try:
            action()
        except OSError as error:
            self.problem = self.problem or error.strerror or str(error)
            self._give_up()

    def _give_up(self) -> None:
        """Let go of the file; what it still holds cannot be written either."""
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()
