"""The file that takes all lines of a long output."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
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
        file = self._file
        if file is not None:
            self._try(lambda: file.write(text))

    def flush(self) -> None:
        """Let others read what there is."""
        if self._file is not None:
            self._try(self._file.flush)

    def close(self, *, is_needed: bool) -> None:
        """Close the file, and remove it where no line has named it."""
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
            file, self._file = self._file, None
            with contextlib.suppress(OSError):  # what it still holds cannot be written either
                if file is not None:
                    file.close()
