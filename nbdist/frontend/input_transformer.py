"""Where a typed cell goes: into the kernel, or to the ranks without blocking the kernel."""

from __future__ import annotations

import ast
import re
import sys
from dataclasses import dataclass
from typing import Any

from IPython import get_ipython
from IPython.core.inputtransformer2 import TransformerManager
from IPython.core.interactiveshell import InteractiveShell

from nbdist.commands import REPLACED_MAGICS, VERBS
from nbdist.errors import OptionError, did_you_mean
from nbdist.notebook.notebook import LOCAL, NOTEBOOK
from nbdist.notebook.verb import Verb

LOCAL_CELL = "local"
# Leave the notebook's own shell, in automatic mode as well.
EXITS = frozenset({"exit", "exit()", "quit", "quit()"})
CELL_VERBS = tuple(name for name, verb in VERBS.items() if verb.is_cell)
# With a text below them, but not as one cell of the ranks.
CODE_VERBS = tuple(name for name, verb in VERBS.items() if verb.takes_code)
WITH_BODY = frozenset({*CELL_VERBS, *CODE_VERBS, LOCAL_CELL})
OWN_NAMES = frozenset({*VERBS, *REPLACED_MAGICS, LOCAL_CELL})
TYPED = (*(verb.typed for verb in VERBS.values()), f"%%{LOCAL_CELL}")

# `%%rank[0,1]` is written without a space in nbdistributed, which IPython takes for a name.
_GLUED_RANKS = re.compile(r"^%%rank\[")
_MAGIC = re.compile(r"^(%%?)(\w+)(.*)$", re.DOTALL)
_LOADING = re.compile(r"^%(load|reload|unload)_ext\s+nbdist\b")


def route(lines: list[str]) -> list[str]:
    """Rewrite a typed cell for where it is to run (an IPython input transformer).

    A distributed cell becomes one `await`, so that the kernel goes on answering (widgets,
    interrupts) while it runs. Inside another magic (%%time) or a nested run_cell an await
    is not possible; there the lines stay as they are and the blocking magic runs.
    """
    lines = [_GLUED_RANKS.sub("%%rank [", line) for line in lines]
    shell = get_ipython()
    if shell is None or _is_nested() or _is_silent(shell):
        return lines
    NOTEBOOK.cell_number = shell.execution_count
    first = _first_code_line(lines)
    if first is None:
        return lines
    _check_misspelled(shell, lines, first)
    percents, name, rest = _magic(lines[first])
    if percents == "%%" and name in WITH_BODY:
        return _routed_cell(shell, lines, first, name, rest.strip())
    if not lines[first].startswith("%%"):
        _check_misplaced(lines, first)
    code = "".join(lines)
    if code.strip() in EXITS or _stays(name, lines[first]):
        return lines
    return [_call(shell, "distributed", f"--ranks {NOTEBOOK.mode}", code)]


@dataclass(frozen=True, slots=True)
class Destination:
    """Where a cell would run, as far as it is typed.

    Attributes:
        verb: The magic in its first line; None for a plain cell on ranks.
        start: Where what the ranks get begins, in characters; the magic's line is above.
        line: What stands behind the magic.
    """

    verb: Verb | None
    start: int
    line: str


def destination(code: str) -> Destination | None:
    """Where this cell would go: to ranks, or None where it stays in the notebook."""
    lines = code.splitlines(keepends=True)
    first = _first_code_line(lines)
    if first is None:
        return None if NOTEBOOK.mode == LOCAL else Destination(None, 0, "")
    percents, name, rest = _magic(_GLUED_RANKS.sub("%%rank [", lines[first]))
    if percents == "%%" and name in (*CELL_VERBS, *CODE_VERBS):
        start = sum(map(len, lines[: first + 1]))
        return Destination(VERBS[name], start, rest.strip())
    return None if _stays(name, lines[first]) else Destination(None, 0, "")


def _magic(line: str) -> tuple[str, str, str]:
    """The percent signs, the name and the rest of a line with a magic; empty for another line."""
    magic = _MAGIC.match(line)
    return (magic[1], magic[2], magic[3]) if magic else ("", "", "")


def _stays(name: str, line: str) -> bool:
    """Whether a cell that begins with this magic, or none, runs in the notebook."""
    return NOTEBOOK.mode == LOCAL or name in OWN_NAMES or _LOADING.match(line) is not None


def _routed_cell(
    shell: InteractiveShell, lines: list[str], first: int, name: str, line: str
) -> list[str]:
    if line in {"?", "??"}:
        return lines  # `%%distributed?` asks IPython for help
    if name == LOCAL_CELL and line:
        raise OptionError(f"%%local takes no options, but got {line!r}: it runs in the notebook.")
    body = "".join(lines[first + 1 :])
    if name in CODE_VERBS:
        # IPython would refuse one without lines below, in a way that Run All passes over.
        return lines if body.strip() else [lines[first].removeprefix("%")]
    code = sent_code("".join(lines[: first + 1]), body)
    if name == LOCAL_CELL:
        return code.splitlines(keepends=True)
    return [_call(shell, name, line, code if body.strip() else "")]


def sent_code(above: str, body: str) -> str:
    """The body under the lines above it as comments, so that line numbers stay right.

    A body that begins with a cell magic has to begin with it; its own line numbers are
    relative in IPython anyway.
    """
    if body.lstrip().startswith("%%"):
        return body
    commented = "".join(
        line if line.startswith("#") else f"# {line}" for line in above.splitlines(keepends=True)
    )
    return commented + body


def _call(shell: InteractiveShell, name: str, line: str, code: str) -> str:
    magics = "__import__('nbdist.frontend.magics').frontend.magics"
    call = f"await {magics}.run_typed" if shell.autoawait else f"{magics}.run_blocking"
    return f"{call}({name!r}, {line!r}, {code!r})\n"


def _first_code_line(lines: list[str]) -> int | None:
    texts = map(str.strip, lines)
    return next((n for n, text in enumerate(texts) if text and not text.startswith("#")), None)


def _check_misspelled(shell: InteractiveShell, lines: list[str], first: int) -> None:
    """Say which magic of ours was meant, for one that nobody has.

    IPython says only that there is none, as a UsageError, over which Run All passes.
    """
    below = [] if lines[first].startswith("%%") else lines[first + 1 :]
    for line in [lines[first], *below]:
        percents, name, _ = _magic(line.lstrip())
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
        percents, name, _ = _magic(line)
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
