"""Python stacks as text: from a rank's own answer, and from what faulthandler has written."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

# Where nbdist itself lies.
PACKAGE = Path(__file__).parents[1]

# What lies under a program's own frames on a rank, or else under a cell's: what runs it.
_RUNNERS = {
    "run": re.compile(r"[/\\]nbdist[/\\]engine[/\\]script\.py$"),
    "run_code": re.compile(r"IPython[/\\]core[/\\]interactiveshell\.py$"),
}
# What an idle thread of an engine consists of.
_ENGINE = re.compile(
    r"[/\\](?:(?:IPython|ipykernel|ipyparallel|traitlets|tornado|asyncio|zmq|jupyter_client)[/\\].*"
    r"|nbdist[/\\]engine[/\\](?:__main__|fork_server)\.py|(?:threading|selectors|runpy)\.py)$"
    r"|^<(?:frozen runpy|decorator-gen-\d+)>$"
)
# nbdist's own, around torch's functions.
_OURS = re.compile(
    r"[/\\]nbdist[/\\](?:bandwidth|cells|checkpoint|comparison|config|core|engine|hang|lints|memory"
    r"|monitor|parallel|planner|recording|rpc|switch|trace|variables)[/\\](?:\w+[/\\])*\w+\.py$"
)
_LIBRARY = re.compile(r".*[/\\](?:site-packages|dist-packages|python3\.\d+)[/\\]")
_THREAD = re.compile(r"(Current thread|Thread) 0x[0-9a-fA-F]+.*\(most recent call first\):")
_FRAME = re.compile(r'  File "(.*)", line (\d+|\?\?\?) in (.*)')


@dataclass(frozen=True, slots=True)
class Frame:
    """One line of a stack.

    Attributes:
        line: From 1; 0 where it is not known.
        function: "<module>" at the top level.
        source: The line's text, stripped; empty where it is not known.
    """

    file: str
    line: int
    function: str
    source: str = ""


@dataclass(frozen=True, slots=True)
class ThreadStack:
    """Stack of one thread."""

    name: str  # or its number
    is_current: bool  # it is the one that crashed, or was asked
    frames: tuple[Frame, ...]  # innermost last


def user_part(frames: Sequence[Frame]) -> tuple[Frame, ...]:
    """The frames from the program or cell on, innermost last; else those above the engine's.

    nbdist's own frames around torch's functions are left out.
    """
    runners = (
        number
        for function, file in _RUNNERS.items()
        for number, frame in enumerate(frames)
        if frame.function == function and file.search(frame.file)
    )
    users = (n for n, frame in enumerate(frames) if not _ENGINE.search(frame.file))
    start = next(runners, None)
    if start is None:
        start = next(users, len(frames)) - 1
    return tuple(frame for frame in frames[start + 1 :] if not is_ours(frame.file))


def is_ours(file: str) -> bool:
    """Whether a file is nbdist's own, on a rank."""
    return bool(_OURS.search(file))


def is_library(file: str) -> bool:
    """Whether a file is an installed package's, or Python's own."""
    return bool(_LIBRARY.match(file))


def frame_text(frame: Frame, cells: Mapping[str, int]) -> str:
    """`cell [12], line 3`, `cell [12], line 3, in step`, `torch/nn/linear.py, line 9, in f`.

    `cells` has the cell's number for the file name of its code.
    """
    line = f"line {frame.line}" if frame.line else "an unknown line"
    within = "" if frame.function == "<module>" else f", in {frame.function}"
    source = f": {frame.source}" if frame.source else ""
    return f"{place_name(frame.file, cells)}, {line}{within}{source}"


def place_name(file: str, cells: Mapping[str, int]) -> str:
    """`cell [12]`, a library's file from its package on, another file's base name."""
    if file in cells:
        return f"cell [{cells[file]}]"
    short = _LIBRARY.sub("", file)
    return short if short != file else re.split(r"[/\\]", file)[-1]


def stacks_text(threads: Sequence[ThreadStack], cells: Mapping[str, int]) -> str:
    """All threads that do something, the one with a cell first; empty if all are idle."""
    shown = [(thread, user_part(thread.frames)) for thread in threads]
    # The sort keeps the order of the others.
    shown.sort(key=lambda pair: not any(frame.file in cells for frame in pair[1]))
    return "\n".join(
        "\n".join([f"{thread.name}:", *(f"  {frame_text(frame, cells)}" for frame in frames)])
        for thread, frames in shown
        if frames
    )


def parse_dump(text: str) -> tuple[ThreadStack, ...]:
    """The threads of the last report in a text that faulthandler wrote, in its order."""
    # A child process that was forked, such as a DataLoader's, writes into the same file.
    text = text.rpartition("Fatal Python error: ")[2]
    threads: list[tuple[bool, list[Frame]]] = []
    for line in text.splitlines():
        if head := _THREAD.match(line):
            threads.append((head[1] == "Current thread", []))
        elif threads and (frame := _FRAME.match(line)):
            number = int(frame[2]) if frame[2].isdigit() else 0
            threads[-1][1].append(Frame(frame[1], number, frame[3]))
    # Python lists the newest thread first.
    names = [*(f"thread {number}" for number in range(1, len(threads))), "MainThread"]
    return tuple(
        ThreadStack(name, is_current, tuple(reversed(frames)))
        for name, (is_current, frames) in zip(names, threads, strict=False)
    )


def parse_cells(text: str) -> dict[str, int]:
    """File name of a cell's code -> the cell's number, as a rank has noted them.

    A cell that was run again counts with its newest number; a line that is not whole not at all.
    """
    pairs = (line.partition(" ") for line in text.split("\n")[:-1])
    return {file: int(number) for number, _, file in pairs if number.isdigit() and file}
