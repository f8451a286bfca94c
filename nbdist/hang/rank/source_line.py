"""Finds the line in the user's own code from a frame within torch."""

from __future__ import annotations

import linecache
import site
import sysconfig
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from nbdist.core import stacks
from nbdist.hang.call_log import pack_place
from nbdist.hang.records import SourceLine

MAX_PLACES = 4096
MAX_SOURCE_CHARS = 120
_PACKAGES = frozenset({"site-packages", "dist-packages"})
_NOT_THE_USERS = ("stdlib", "platstdlib", "purelib", "platlib")


# Programs that are run as `nbdist run FILE`, wherever they lie.
programs: set[str] = set()


class UserFrameFinder:
    """Finds the innermost line of a cell, a program, or a file that no package installed.

    Results are kept by instruction, so that a collective in a loop costs little. The rank's
    IPython shell knows which file name is which cell; it may be given later, as an attribute.
    """

    def __init__(self, shell: Any = None) -> None:
        self.shell = shell
        self._is_users: dict[str, bool] = {}
        # With the code, so that no other can come to have its id.
        self._packed: dict[tuple[int, int], tuple[bytes, CodeType]] = {}
        # Python's own folders, where packages are installed, and nbdist.
        paths = sysconfig.get_paths()
        names = [*(paths[name] for name in _NOT_THE_USERS), *site.getsitepackages()]
        folders = {*map(Path, names), Path(site.getusersitepackages()), stacks.PACKAGE}
        self._folders = tuple(folders | {folder.resolve() for folder in folders})

    def forget(self) -> None:
        """Look again: the same text can be run as a cell of another number."""
        self._packed = {}

    def find(self, frame: FrameType | None) -> SourceLine | None:
        """The innermost line of the user's code, from this frame outwards."""
        frame = self._users_frame(frame)
        return None if frame is None else self._describe(frame.f_code.co_filename, frame.f_lineno)

    def find_code(self, code: CodeType) -> SourceLine | None:
        """Line at which the user has written a function; None for one that is not the user's."""
        is_users = self._is_users_file(code.co_filename)
        return self._describe(code.co_filename, code.co_firstlineno) if is_users else None

    def is_users(self, frame: FrameType | None) -> bool:
        """Whether this frame, or one outwards of it, runs the user's code."""
        return self._users_frame(frame) is not None

    def pack_line(self, frame: FrameType | None) -> bytes:
        """The same, as it stands in a call log; empty where there is none."""
        frame = self._users_frame(frame)
        if frame is None:
            return b""
        code = frame.f_code
        # Finding the line's number takes a while in long functions; this is the same.
        key = (id(code), frame.f_lasti)
        cached = self._packed.get(key)
        if cached is None:
            if len(self._packed) >= MAX_PLACES:
                self.forget()
            packed = pack_place(self._describe(code.co_filename, frame.f_lineno))
            cached = self._packed[key] = (packed, code)
        return cached[0]

    def _users_frame(self, frame: FrameType | None) -> FrameType | None:
        is_users = self._is_users
        while frame is not None:
            file = frame.f_code.co_filename
            is_user = is_users.get(file)
            if is_user is None:
                is_user = is_users[file] = self._is_users_file(file)
            if is_user:
                return frame
            frame = frame.f_back
        return None

    def _is_users_file(self, file: str) -> bool:
        if file in programs or self._cell(file) is not None:
            return True
        if file.startswith("<"):  # generated code, frozen modules
            return False
        path = Path(file)
        if not _PACKAGES.isdisjoint(path.parts):  # on sys.path by PYTHONPATH or a .pth file
            return False
        return not any(path.is_relative_to(folder) for folder in self._folders)

    def _cell(self, file: str) -> int | None:
        """The number of the cell with this file name; None for other files.

        IPython keeps the numbers in a private dict of its compiler, for tracebacks. Without
        it a cell is known by its name alone, and the number is that of the running one.
        """
        if self.shell is None:
            return None
        numbers = getattr(self.shell.compile, "_filename_map", None)
        if numbers is not None:
            number = numbers.get(file)
            return number if isinstance(number, int) else None
        looks_like_one = "/ipykernel" in file or file.startswith("<ipython-input")
        return int(self.shell.execution_count) if looks_like_one else None

    def _describe(self, file: str, line: int) -> SourceLine:
        cell = self._cell(file)
        source = linecache.getline(file, line).strip()[:MAX_SOURCE_CHARS]
        name = "" if cell is not None else Path(file).name
        return SourceLine(cell=cell, file=name, line=line, source=source)
