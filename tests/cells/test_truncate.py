"""A long output is shown at both ends and written to a file as a whole."""

from __future__ import annotations

import io

import pytest

from nbdist.cells.line_merger import Line
from nbdist.cells.truncate import Clip


def clipped(clip: Clip, count: int) -> tuple[list[str], io.StringIO]:
    """Add `count` numbered lines as a live cell does; what is shown at once, and the file."""
    file = io.StringIO()
    at_once = []
    for number in range(count):
        add(clip, Line("stdout", f"{number}\n"), at_once, file)
    return at_once, file


def add(clip: Clip, lines: Line, at_once: list[str], file: io.StringIO) -> None:
    """Add lines as a live cell does."""
    first, rest = clip.first(lines.text)
    at_once += first.splitlines(keepends=True)
    if rest:
        if clip.needs_file:
            clip.write_to(file.write)
        clip.keep(lines.stream, rest)


def numbers(*ranges: range) -> list[str]:
    """The lines with these numbers."""
    return [f"{number}\n" for numbers in ranges for number in numbers]


@pytest.mark.parametrize(
    ("count", "at_once", "skipped", "last"),
    [
        (0, 0, 0, range(0)),
        (1, 1, 0, range(0)),
        (4, 4, 0, range(0)),
        (5, 5, 0, range(0)),
        (6, 5, 0, range(5, 6)),
        (9, 5, 0, range(5, 9)),
        (10, 5, 0, range(5, 10)),
        (11, 5, 1, range(6, 11)),
        (100, 5, 90, range(95, 100)),
    ],
)
def test_both_ends(count: int, at_once: int, skipped: int, last: range) -> None:
    """The first 5 come at once, the last 5 at the end, others are counted; the file has all."""
    clip = Clip(5)
    shown, file = clipped(clip, count)
    told, rest = clip.rest()

    assert shown == numbers(range(at_once))
    assert told == skipped
    assert [line.text for line in rest] == numbers(last)
    assert at_once + skipped + len(last) == count
    assert file.getvalue() == ("".join(numbers(range(count))) if count > 5 else "")


def test_the_last_lines_keep_their_streams() -> None:
    """Lines that are kept for the end come back as what they were."""
    clip = Clip(1)
    lines = [Line("stdout", "a\n"), Line("stderr", "b\n"), Line("stdout", "c\n")]
    for line in lines:
        add(clip, line, [], io.StringIO())

    assert clip.rest() == (1, [lines[2]])
    assert clip.count == 3


def test_without_a_file_nothing_fails() -> None:
    """A clip whose file could not be opened still shows both ends."""
    clip = Clip(2)
    for number in range(10):
        _, rest = clip.first(f"{number}\n")
        if rest:
            clip.keep("stderr", rest)

    assert clip.rest() == (6, [Line("stderr", "8\n"), Line("stderr", "9\n")])


@pytest.mark.parametrize("count", [1, 4, 5, 6, 10, 11, 40])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 40])
def test_lines_that_come_together_are_clipped_like_single_ones(count: int, size: int) -> None:
    """Whatever pieces the lines come in, the same are shown, kept, counted and written."""
    whole, parts = Clip(5), Clip(5)
    at_once, file = clipped(whole, count)
    lines = numbers(range(count))
    at_once_of_parts: list[str] = []
    file_of_parts = io.StringIO()
    for begin in range(0, count, size):
        text = "".join(lines[begin : begin + size])
        add(parts, Line("stdout", text), at_once_of_parts, file_of_parts)

    assert at_once_of_parts == at_once
    assert parts.rest() == whole.rest()
    assert parts.count == whole.count == count
    assert file_of_parts.getvalue() == file.getvalue()
