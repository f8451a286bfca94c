"""Runs a program's text on a rank as the interpreter would: `nbdist run FILE`."""

from __future__ import annotations

import linecache
import sys
from typing import Any

from nbdist.errors import ScriptEnded
from nbdist.hang.rank import source_line

# (path, text, arguments) of the program that the next cell runs.
_programs: list[tuple[str, str, tuple[str, ...]]] = []


def take(path: str, text: str, arguments: tuple[str, ...]) -> None:
    """Keep a program for `run`, so that the cell that runs it is one short line.

    The file is on the notebook's host, and may not exist here. The arguments follow it in sys.argv.
    """
    _programs[:] = [(path, text, arguments)]


def run(names: dict[str, Any]) -> None:
    """Run the program that was taken, with its path as `__file__` and in sys.argv.

    Its global variables are those of cells, in which `__name__` is `__main__`.

    Raises:
        ScriptEnded: If it ends itself with another exit code than 0.
    """
    [(path, text, arguments)] = _programs
    sys.argv[:] = [path, *arguments]
    # In cells exit() and quit() are IPython's, and refused.
    names |= {"__file__": path, "exit": sys.exit, "quit": sys.exit}
    source_line.programs.add(path)
    # The text that ran, though the file may be changed meanwhile, or lie on another host.
    linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)
    try:
        exec(compile(text, path, "exec", dont_inherit=True), names)  # noqa: S102  # asked for
    except SystemExit as error:
        if error.code in {None, 0}:
            return
        raise ScriptEnded(f"the program exited with code {error.code}") from None
