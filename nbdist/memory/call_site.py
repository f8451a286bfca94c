"""Chooses the lines of a stack that show where memory was allocated, and writes them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

from nbdist.memory.snapshot import AllocationFrame

# Code that no user has written: installed packages, Python's own, code without a file.
_LIBRARY = re.compile(
    r"^<(?!ipython-input|cell)|(?:^|[/\\])(?:site-packages|dist-packages|python3\.\d+|torch)[/\\]"
    r"|[/\\]nbdist[/\\](?:core|engine|parallel|strategy|variables|\w+[/\\]rank)[/\\]"
)
_PACKAGES = re.compile(r".*/(?:site|dist)-packages/")
# Of a library's path, so that nn/modules/linear.py differs from another linear.py.
_PARTS = 3


def is_own(frame: AllocationFrame) -> bool:
    """Whether the line is the user's own: a cell's, or of a file that no package installed."""
    return _is_users(frame.file)


# A snapshot has thousands of stacks, of few files.
@lru_cache(4096)
def _is_users(file: str) -> bool:
    return _LIBRARY.search(file) is None


def innermost_own(stack: Sequence[AllocationFrame]) -> AllocationFrame | None:
    """The user's own line that led here; None where the stack has none."""
    return next((frame for frame in stack if is_own(frame)), None)


def innermost_library(stack: Sequence[AllocationFrame]) -> AllocationFrame | None:
    """The library's innermost line, where it is further in than the user's own."""
    return stack[0] if stack and not is_own(stack[0]) else None


def frame_text(frame: AllocationFrame | None) -> str:
    """`train.py:12 forward`; without a number where it is only the function's first line."""
    if frame is None:
        return "-"
    file = _short(frame.file)
    place = f"{file}:{frame.line}" if frame.is_line_known else file
    return f"{place} {frame.function}".strip()


@lru_cache(4096)
def _short(file: str) -> str:
    parts = _PACKAGES.sub("", file.replace("\\", "/")).split("/")
    return parts[-1] if _is_users(file) else "/".join(parts[-_PARTS:])
