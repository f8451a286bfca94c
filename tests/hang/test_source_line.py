"""Which line is the user's: found by where its file lies, whatever packages are on the path."""

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from nbdist.hang.rank.source_line import UserFrameFinder


def called_in(file: str) -> FrameType:
    """A frame of code that has this file name, called from this test."""
    names: dict[str, Any] = {"sys": sys}
    exec(compile("def f():\n    return sys._getframe()\nframe = f()", file, "exec"), names)
    frame: FrameType = names["frame"]
    return frame


@pytest.mark.parametrize(
    "folder", ["/elsewhere/lib/python3.11/site-packages/pkg", "/usr/lib/python3/dist-packages"]
)
def test_a_package_installed_anywhere_is_not_the_users(folder: str) -> None:
    """Also one that only PYTHONPATH or a .pth file puts on the path of this Python."""
    place = UserFrameFinder().find(called_in(f"{folder}/loop.py"))

    assert place is not None
    assert place.file == Path(__file__).name


def test_a_file_of_the_user_is_told_with_its_line() -> None:
    """The innermost one, by its base name."""
    place = UserFrameFinder().find(called_in("/work/project/train.py"))

    assert place is not None
    assert (place.cell, place.file, place.line) == (None, "train.py", 2)
