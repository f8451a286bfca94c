"""Routes a typed cell: into the kernel, or to the ranks without blocking the kernel."""

from __future__ import annotations

import ast
import itertools
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from IPython import get_ipython
from IPython.core.inputtransformer2 import TransformerManager
from IPython.core.interactiveshell import InteractiveShell

from nbdist.commands import REPLACED_MAGICS, VERBS
from nbdist.errors import OptionError, did_you_mean
from nbdist.frontend import cell_magics
from nbdist.frontend.cell_magics import (
    GLUED_RANKS,
    LOCAL_CELL,
    WITH_BODY,
    MagicCell,
    TypedMagic,
    first_code_line,
    split_magic,
)
from nbdist.notebook.notebook import LOCAL, NOTEBOOK

# Leave the notebook's own shell, in automatic mode as well.
EXITS = frozenset({"exit", "exit()", "quit", "quit()"})
OWN_NAMES = frozenset({*VERBS, *REPLACED_MAGICS, LOCAL_CELL})
TYPED = (*(verb.typed for verb in VERBS.values()), f"%%{LOCAL_CELL}")

_LOADING = re.compile(r"^%(load|reload|unload)_ext\s+nbdist\b")


def route(lines: list[str]) -> list[str]:
    """Rewrite a typed cell for where it is to run (an IPython input transformer).

    A distributed cell becomes one `await`, so that the kernel goes on answering (widgets,
    interrupts) while it runs. Inside another magic (%%time) or a nested run_cell an await
    is not possible; there the lines stay as they are and the blocking magic runs.
    """
    lines = [GLUED_RANKS.sub("%%rank [", line) for line in lines]
    shell = get_ipython()
    if shell is None or _is_nested() or _is_silent(shell):
        return lines
    NOTEBOOK.cell_number = shell.execution_count
    first = first_code_line(lines)
    if first is None:
        return lines
    _check_misspelled(shell, lines, first)
    if (cell := cell_magics.read(lines)) is not None:
        return _routed_cell(shell, lines, cell)
    if not lines[first].startswith("%%"):
        _check_misplaced(lines, first)
    code = "".join(lines)
    if code.strip() in EXITS or _stays(lines[first]):
        return lines
    return [_call(shell, (("distributed", f"--ranks {NOTEBOOK.mode}"),), code)]


@dataclass(frozen=True, slots=True)
class Destination:
    """Magics and start of a cell for ranks, as far as it is typed.

    Attributes:
        magics: Ours above it; none above a plain cell on ranks.
        start: Where what the ranks get begins, in characters; the magics are above.
    """

    magics: tuple[TypedMagic, ...]
    start: int


def destination(code: str) -> Destination | None:
    """Destination of this cell: on ranks, or None where it stays in the notebook."""
    lines = code.splitlines(keepends=True)
    try:
        cell = cell_magics.read(lines)
    except OptionError:  # it is being typed
        return None
    if cell is not None:
        is_local = cell.magics[0][0] == LOCAL_CELL
        return None if is_local else Destination(cell.magics, cell.start)
    first = first_code_line(lines)
    stays = NOTEBOOK.mode == LOCAL if first is None else _stays(lines[first])
    return None if stays else Destination((), 0)


def _stays(line: str) -> bool:
    """Whether a cell that begins with this line runs in the notebook."""
    _, name, _ = split_magic(line)
    return NOTEBOOK.mode == LOCAL or name in OWN_NAMES or _LOADING.match(line) is not None


def _routed_cell(shell: InteractiveShell, lines: list[str], cell: MagicCell) -> list[str]:
    name, line = cell.magics[0]
    # `%%distributed?` asks IPython for help; a cell of %%time is the notebook's.
    if line in {"?", "??"} or not cell.is_outermost:
        return lines
    if name == LOCAL_CELL:
        if line:
            raise OptionError(
                f"%%local takes no options, but got {line!r}: it runs in the notebook."
            )
        return cell.code.splitlines(keepends=True)
    if cell.taker is not None:
        # IPython would refuse one without lines below, in a way that Run All passes over.
        return lines if cell.code else [f"%{' '.join(cell.taker)}\n"]
    return [_call(shell, cell.magics, cell.code)]


def _call(shell: InteractiveShell, magics: tuple[TypedMagic, ...], code: str) -> str:
    module = "__import__('nbdist.frontend.magics').frontend.magics"
    call = f"await {module}.run_typed" if shell.autoawait else f"{module}.run_blocking"
    return f"{call}({magics!r}, {code!r})\n"


def _check_misspelled(shell: InteractiveShell, lines: list[str], first: int) -> None:
    """Say which magic of ours was meant, for one that nobody has.

    IPython says only that there is none, as a UsageError, over which Run All passes.
    """
    below: Iterable[str] = lines[first + 1 :]
    if lines[first].startswith("%%"):
        below = itertools.takewhile(lambda line: line.startswith("%%"), below)
    for line in [lines[first], *below]:
        percents, name, _ = split_magic(line.lstrip())
        is_magic = any(shell.find_magic(name, kind) for kind in ("line", "cell"))
        hint = "" if not percents or is_magic else did_you_mean(f"{percents}{name}", TYPED)
        if hint and not _is_python(lines):  # else it stands in a string
            raise OptionError(
                f"There is no magic {percents}{name}.{hint} %dist_help shows all of nbdist."
            )


def _is_python(lines: list[str]) -> bool:
    try:
        ast.parse("".join(lines))
    except SyntaxError:
        return False
    return True


def _check_misplaced(lines: list[str], first: int) -> None:
    """Say so when a cell magic of ours stands below other code.

    IPython would print that there is no such line magic, and count the cell as passed.
    """
    for line in lines[first + 1 :]:
        percents, name, _ = split_magic(line)
        if percents == "%%" and name in WITH_BODY and not _is_python(lines):
            raise OptionError(
                f"%%{name} has to be the first line of its cell, and the whole cell "
                "runs on the ranks. Put the lines above it into a cell of their own."
            )


def _is_nested() -> bool:
    """Whether a cell is running below this one: then it cannot be awaited on.

    The same while a console asks whether what has been typed so far is a whole cell.
    """
    running = {InteractiveShell.run_code.__code__, TransformerManager.check_complete.__code__}
    frame: Any = sys._getframe()  # noqa: SLF001
    while frame is not None:
        if frame.f_code in running:
            return True
        frame = frame.f_back
    return False


def _is_silent(shell: InteractiveShell) -> bool:
    """Whether a frontend asks for itself (a variable inspector, say): never for the ranks."""
    kernel = getattr(shell, "kernel", None)
    parent = {} if kernel is None else kernel.get_parent("shell")
    return bool(parent.get("content", {}).get("silent"))
