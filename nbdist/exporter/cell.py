"""One cell of a notebook as part of a script."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from nbdist.exporter import source as text
from nbdist.exporter.source import Edit

# What can be said of cells, in the order in which it is told. The first ones are left out.
LEFT_OUT = {
    "control": "left out, magics of nbdist that only a notebook needs",
    "local": "left out, they run in the notebook and not on the ranks",
    "python": "left out, Python calls of nbdist",
    "failed": "left out, they failed when they ran",
    "repeated": "left out, the same text as an earlier cell",
    "magic": "left out, kept as comments: not Python",
    "syntax": "left out, kept as comments: Python does not accept them",
    "options": "left out, kept as comments: their options cannot be read",
    "line": "left out, kept as comments: a statement that cannot stay shares its line",
}
CHANGED = {
    "comment": "kept as comments, a script has no magics and shell commands",
    "stops": "the script stops there: a magic or shell command gives a value. Write it in Python",
    "nested": "kept as comments: a cell magic inside Python code. Write it as a cell of its own",
    "notebook": "names that only a notebook has",
    "keyboard": "they ask for typed input, which ranks do not have",
    "timeout": "--timeout has no effect in a script",
}
# Cell magics whose body is Python that runs once.
_TRANSPARENT = {"time", "capture"}
_CELL_MAGIC = re.compile(r"^%%(\w+)(.*)$")
_GLUED_RANKS = re.compile(r"^%%rank\[", re.MULTILINE)
# Methods of IPython's shell that its transformer writes in place of magics and commands.
_SHELL_CALLS = {"run_line_magic", "run_cell_magic", "system", "getoutput", "magic"}
_ONLY_NOTEBOOKS = re.compile(r"_{1,3}|_\d+|_i{1,3}|_i\d+|_ih|_oh|_dh|In|Out|get_ipython|exit|quit")
_KEYBOARD = {"input", "getpass", "breakpoint"}
# What stands for names of nbdist in a script: for the name, or as it is imported.
_IN_PLACE_OF = {"shown": "{} = str", "step": "def {}(): pass"}


# The packages that have an Accelerator.
ACCELERATE, NBDIST = "accelerate", "nbdist"


@dataclass(frozen=True, slots=True)
class Note:
    """Something to say of a cell.

    Attributes:
        kind: A key of LEFT_OUT or CHANGED.
        what: The magic, name or message; may be empty.
    """

    kind: str
    number: int
    what: str = ""


@dataclass(frozen=True, slots=True)
class CellPart:
    """Python that a cell becomes in the script.

    Attributes:
        source: Python for the module level; under which ranks, the script says.
        is_async: It awaits at the top level.
        accelerators: The package that the script has its Accelerator from.
        futures: Names that it imports from __future__; they go to the top of the script.
        notes: (kind, what) of CHANGED.
    """

    source: str
    tree: ast.Module
    is_async: bool
    accelerators: str = ACCELERATE
    futures: list[str] = field(default_factory=list)
    notes: list[tuple[str, str]] = field(default_factory=list)

    def calls(self, *methods: str) -> bool:
        """Whether it calls one of these methods."""
        return text.calls_method(self.tree, methods)


class LeftOutError(Exception):
    """A cell cannot be in a script; its arguments are a kind of LEFT_OUT and what to say."""


def split_magics(cell: str) -> tuple[list[tuple[str, str]], str]:
    """A cell's magics, outermost first, as (name, what follows it on the line); and the rest.

    Blank lines and comments may stand above the first.
    """
    magics: list[tuple[str, str]] = []
    body = _GLUED_RANKS.sub("%%rank [", cell)
    while True:
        lines = body.split("\n")
        texts = (k for k, line in enumerate(lines) if line.strip() and line.lstrip()[0] != "#")
        first = next(texts, 0)
        match = _CELL_MAGIC.match(lines[first])
        if match is None:
            return magics, body
        magics.append((match.group(1), match.group(2).strip()))
        body = "\n".join(lines[:first] + lines[first + 1 :])


def foreign_magic(magics: Sequence[tuple[str, str]], nbdist_magics: frozenset[str]) -> str:
    """The first cell magic under which the cell is no plain Python any more; "" for none."""
    for name, line in magics:
        if name not in nbdist_magics and (name not in _TRANSPARENT or (name == "capture" and line)):
            return f"%%{name}"
    return ""


@dataclass(frozen=True, slots=True)
class LineMagic:
    """A line magic in a cell of Python.

    Attributes:
        is_inside: It stands in a statement of Python's: in a loop, a function, an assignment.
    """

    name: str
    line: str
    is_inside: bool

    @property
    def typed(self) -> str:
        """The magic as a user types it."""
        return " ".join(f"%{self.name} {self.line}".split())


def line_magics(body: str, transform: Callable[[str], str]) -> list[LineMagic]:
    """Every line magic of a cell, in order; none where it is not Python."""
    try:
        tree = text.parse(python_of(body, transform)).tree
    except SyntaxError:
        return []
    alone = {id(node.value) for node in tree.body if isinstance(node, ast.Expr)}
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    calls = [(node, _shell_call(node)) for node in sorted(nodes, key=lambda node: node.lineno)]
    return [
        LineMagic(call[1][0], call[1][1], is_inside=id(node) not in alone)
        for node, call in calls
        if call is not None and call[0] == _LINE_MAGIC and len(call[1]) == 2
    ]


_LINE_MAGIC = "run_line_magic"


def has_python(body: str, transform: Callable[[str], str]) -> bool:
    """Whether a cell has statements beside magics and shell commands."""
    try:
        statements = text.parse(python_of(body, transform)).tree.body
    except SyntaxError:
        return True
    return any(_shell_call(getattr(node, "value", None)) is None for node in statements)


def python_of(body: str, transform: Callable[[str], str]) -> str:
    """A cell as IPython would run it, without the warnings that it gave when it ran."""
    with text.quiet():
        return transform(body)


def part(
    body: str, transform: Callable[[str], str], show: str, accelerators: str = ACCELERATE
) -> CellPart:
    """Convert a distributed cell, whose body is without its cell magics.

    `show` is the function that shows the value of the last expression, `accelerators` the package
    that the script has its Accelerator from.

    Raises:
        LeftOutError: If it cannot be in a script.
    """
    try:
        source = python_of(body, transform).rstrip("\n")
        read = text.parse(source)
    except SyntaxError as error:
        where = f"line {error.lineno}: " if error.lineno else ""
        raise LeftOutError("syntax", f"{where}{error.msg}") from error
    cell_part = CellPart(source, read.tree, read.is_async, accelerators)
    statements = [node for node in ast.walk(read.tree) if isinstance(node, ast.stmt)]
    edits = [edit for node in statements if (edit := _edit(cell_part, node)) is not None]
    cell_part.notes.extend(_find_uses(read.tree, source, edits))
    edited = text.replace_lines(source, edits)
    final = text.parse(edited)  # %time has brought names along
    last = final.tree.body[-1] if final.tree.body else None
    if isinstance(last, ast.Expr) and _is_shown(read.tree.body[-1], last, edits):
        is_silenced = text.is_silenced(edited)
        shown = [] if is_silenced else [text.wrap_value(edited, last, show)]
        edited = text.replace_lines(edited, shown)
    return replace(cell_part, source=edited, tree=final.tree, is_async=final.is_async)


def _is_shown(typed: ast.stmt, last: ast.Expr, edits: Sequence[Edit]) -> bool:
    """Whether the last value of the script's cell is the one that the notebook shows."""
    instead = next(
        (edit.lines[-1] for edit in edits if edit.first <= typed.lineno <= edit.last), _TIMED
    )
    is_print = isinstance(last.value, ast.Call) and ast.unparse(last.value.func) in {
        "print",
        "display",
    }
    return instead.endswith(_TIMED) and not is_print


# Ends the line of what %time timed.
_TIMED = "  # %time"


def _edit(cell_part: CellPart, node: ast.stmt) -> Edit | None:
    """Edit that replaces a statement; None where it stays."""
    lines = _replacement(cell_part, node)
    if lines is None:
        return None
    if not text.stands_alone(cell_part.source, node):
        raise LeftOutError("line", cell_part.source.split("\n")[node.lineno - 1].strip())
    margin = text.margin(cell_part.source, node)
    return Edit(node.lineno, text.last_line(node), tuple(f"{margin}{line}" for line in lines))


def _replacement(cell_part: CellPart, node: ast.stmt) -> list[str] | None:
    match node:
        case ast.ImportFrom(module="__future__"):
            cell_part.futures.extend(alias.name for alias in node.names)
            return _as_comment(cell_part, node, _lines_of(cell_part, node))
        case ast.ImportFrom(module=str(module)) if module.split(".")[0] == "nbdist":
            return _imports(node, cell_part.accelerators)
        case ast.Import() if any(alias.name.split(".")[0] == "nbdist" for alias in node.names):
            raise LeftOutError("python", ast.unparse(node))
        case ast.Expr() if (call := _shell_call(node.value)) is not None:
            return _magic(cell_part, node, *call)
        case ast.Assign() | ast.AnnAssign() | ast.AugAssign():
            call = _shell_call(node.value)
            return None if call is None else _stop(cell_part, node, _as_typed(*call))
    return None


def _lines_of(cell_part: CellPart, node: ast.stmt) -> list[str]:
    lines = cell_part.source.split("\n")[node.lineno - 1 : text.last_line(node)]
    return [line.strip() for line in lines]


def _imports(node: ast.ImportFrom, accelerators: str) -> list[str]:
    """Lines that replace `from nbdist import ...`."""
    lines = []
    for alias in node.names:
        if node.module == NBDIST and alias.name == "Accelerator":
            line = ast.unparse(ast.ImportFrom(accelerators, [alias], 0))
        elif node.module == NBDIST and alias.name in _IN_PLACE_OF:
            line = _IN_PLACE_OF[alias.name].format(alias.asname or alias.name)
        else:
            raise LeftOutError("python", ast.unparse(node))
        lines.append(f"{line}  # from nbdist in the notebook")
    return lines


def _magic(cell_part: CellPart, node: ast.Expr, method: str, words: Sequence[str]) -> list[str]:
    """A magic or shell command that stands alone."""
    typed = _as_typed(method, words)
    if method == _LINE_MAGIC and words[:1] == ["time"] and _is_python(words[1:]):
        return [f"{words[1]}{_TIMED}"]
    is_nested = method == "run_cell_magic"
    cell_part.notes.append(("nested" if is_nested else "comment", typed))
    lines = _lines_of(cell_part, node) if is_nested else [typed]
    return _as_comment(cell_part, node, lines)


def _is_python(words: Sequence[str]) -> bool:
    if not words or not words[0].strip() or "\n" in words[0]:
        return False
    try:
        text.parse(words[0])
    except SyntaxError:
        return False
    return True


def _as_comment(cell_part: CellPart, node: ast.stmt, lines: Sequence[str]) -> list[str]:
    comments = [text.comment(line) for line in lines]
    is_nested = all(node is not statement for statement in cell_part.tree.body)
    return [*comments, "pass"] if is_nested else comments


def _stop(
    cell_part: CellPart, node: ast.Assign | ast.AnnAssign | ast.AugAssign, value: str
) -> list[str]:
    """A statement that takes a value from a magic or a shell command."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    typed = " = ".join([*map(ast.unparse, targets), value])
    cell_part.notes.append(("stops", typed))
    reason = f"{typed}: a script has no magics and shell commands; write it in Python"
    return [text.comment(typed), f"raise NotImplementedError({reason!r})"]


def _find_uses(tree: ast.Module, source: str, edits: Sequence[Edit]) -> list[tuple[str, str]]:
    """Find uses that stay as they are and will not work."""
    uses = []
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    for node in sorted(names, key=lambda name: (name.lineno, name.col_offset)):
        if any(edit.first <= node.lineno <= edit.last for edit in edits):
            continue
        if _ONLY_NOTEBOOKS.fullmatch(node.id):
            uses.append(("notebook", node.id))
        elif node.id in _KEYBOARD:
            uses.append(("keyboard", f"{node.id}()"))
    defined = text.bound_names(tree)
    return [(kind, what) for kind, what in dict.fromkeys(uses) if what.strip("()") not in defined]


def _shell_call(node: ast.AST | None) -> tuple[str, list[str]] | None:
    """Method and arguments of a call such as `get_ipython().system('ls')`; None of another."""
    match node:
        case ast.Call(
            func=ast.Attribute(value=ast.Call(func=ast.Name(id="get_ipython")), attr=method)
        ) if method in _SHELL_CALLS:
            return method, [_constant(argument) for argument in node.args]
    return None


def _constant(node: ast.expr) -> str:
    """A literal's text, or the source of what is no literal."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    return ast.unparse(node)


def _as_typed(method: str, words: Sequence[str]) -> str:
    """A magic or shell command as it is typed, in one line."""
    marks = {_LINE_MAGIC: "%", "run_cell_magic": "%%", "magic": "%"}
    return (marks.get(method, "!") + " ".join(words).replace("\n", " ")).strip()
