"""Python source as text: indent it, replace statements, without touching what is in its strings."""

from __future__ import annotations

import ast
import contextlib
import copy
import inspect
import io
import re
import symtable
import textwrap
import tokenize
import warnings
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

INDENT = "    "
# f-strings are several tokens from Python 3.12 on, t-strings exist from 3.14 on.
_BEGINS = {getattr(tokenize, name, None) for name in ("FSTRING_START", "TSTRING_START")}
_ENDS = {getattr(tokenize, name, None) for name in ("FSTRING_END", "TSTRING_END")}
# Python counts a line's blanks anew after a form feed.
_PAGE = re.compile(r"^[ \t\f]*\f")
_BLANK = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
          tokenize.ENDMARKER}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Edit:
    """Other lines in the place of some.

    Attributes:
        first, last: Numbers of the first and the last line, from 1.
        lines: What stands there instead.
    """

    first: int
    last: int
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CheckedSource:
    """A cell's source that Python accepts.

    Attributes:
        is_async: It awaits at the top level.
    """

    tree: ast.Module
    is_async: bool


def parse(source: str) -> CheckedSource:
    """The source as Python reads it in a notebook, where `await` may stand at the top level.

    Raises:
        SyntaxError: If it is not Python; the message and line are Python's.
    """
    allow = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    with quiet():
        try:
            tree = compile(source, "cell", "exec", ast.PyCF_ONLY_AST | allow, dont_inherit=True)
            code = compile(tree, "cell", "exec", allow, dont_inherit=True)
        except (ValueError, RecursionError, MemoryError) as error:  # a null byte, endless nesting
            raise SyntaxError(str(error) or type(error).__name__) from error
    return CheckedSource(tree, bool(code.co_flags & inspect.CO_COROUTINE))


def indent(source: str) -> str:
    r"""Return the source one level deeper, every string with its value.

    Lines that begin inside a string stay as they are: blanks there belong to its value.

    >>> indent("x = '''a\nb'''")
    "    x = '''a\nb'''"
    """
    inside: set[int] = set()
    began: list[int] = []
    for token in _tokens(source):
        if token.type == tokenize.STRING:
            inside.update(range(token.start[0] + 1, token.end[0] + 1))
        elif token.type in _BEGINS:
            began.append(token.start[0])
        elif token.type in _ENDS:
            inside.update(range(began.pop() + 1, token.end[0] + 1))
    return "\n".join(
        line if number in inside or not line.strip() else INDENT + _PAGE.sub("", line)
        for number, line in enumerate(source.split("\n"), 1)
    )


def block(head: str, source: str) -> str:
    """Return the source as the block under a line such as `if RANK in (0,):`."""
    body = source.strip("\n")
    if not _statements(body):
        body = f"{body}\npass".lstrip("\n")
    text = f"{head}\n{indent(body)}"
    # What a mistake here would cost is a script that computes something else.
    below = _statements(text)[0]
    assert isinstance(below, ast.If | ast.AsyncFunctionDef), text
    assert [*map(ast.dump, below.body)] == [*map(ast.dump, _statements(body))], text
    return text


def wrap_async(function: str, source: str) -> str:
    """Return the source as an `async def` whose names are the module's.

    Raises:
        SyntaxError: Where Python does not allow that (`import *`).
    """
    head = f"async def {function}():"
    text = block(head, source)
    with quiet():
        table = symtable.symtable(text, "cell", "exec").get_children()[0]
    bound = sorted(symbol.get_name() for symbol in table.get_symbols() if symbol.is_local())
    if not bound:
        return text
    line = f"global {', '.join(bound)}"
    shared = textwrap.fill(line, 92, subsequent_indent=INDENT).replace("\n", " \\\n" + INDENT)
    return f"{head}\n{INDENT}{shared}\n{text.partition(chr(10))[2]}"


def replace_lines(source: str, edits: Iterable[Edit]) -> str:
    """Return the source with lines replaced; the edits do not overlap."""
    lines = source.split("\n")
    for edit in sorted(edits, key=lambda edit: edit.first, reverse=True):
        lines[edit.first - 1 : edit.last] = edit.lines
    return "\n".join(lines)


def wrap_value(source: str, node: ast.Expr, function: str) -> Edit:
    """The edit that hands a statement's value to a function: `x` becomes `function(x)`."""
    lines = source.split("\n")[node.lineno - 1 : last_line(node)]
    before = lines[0].encode()[: node.col_offset].decode()
    after = lines[-1].encode()[node.end_col_offset :].decode()
    text = "\n".join(lines).removeprefix(before).removesuffix(after)
    inside = text if _is_one_argument(text, node.value) else f"({text})"
    called_lines = f"{before}{function}({inside}){after}".split("\n")
    return Edit(node.lineno, last_line(node), tuple(called_lines))


def comment(source: str) -> str:
    """Return the source with every line as a comment."""
    return "\n".join(f"# {line}".rstrip() for line in drop_unprintable(source).split("\n"))


def drop_unprintable(line: str) -> str:
    """Return the text without signs that a source file cannot hold, or that end a line."""
    return "".join(sign if sign.isprintable() or sign in "\t\n" else "?" for sign in line)


def stands_alone(source: str, node: ast.stmt) -> bool:
    """Whether no other code is on the lines of a statement."""
    lines = source.split("\n")
    before = lines[node.lineno - 1].encode()[: node.col_offset].decode()
    after = lines[last_line(node) - 1].encode()[node.end_col_offset :].decode()
    return not before.strip() and bool(re.fullmatch(r"\s*;?\s*(#.*)?", after))


def margin(source: str, node: ast.stmt) -> str:
    """The blanks before a statement."""
    line = source.split("\n")[node.lineno - 1]
    return line[: len(line) - len(line.lstrip())]


def is_silenced(source: str) -> bool:
    """Whether the last statement ends with a semicolon: then a notebook shows no result."""
    tokens = [token for token in _tokens(source) if token.type not in _BLANK]
    return bool(tokens) and tokens[-1].string == ";"


def words(source: str) -> frozenset[str]:
    """Every name in the source, attributes too, and those inside f-strings as far as known."""
    return frozenset(token.string for token in _tokens(source) if token.type == tokenize.NAME)


def bound_names(tree: ast.AST) -> frozenset[str]:
    """Every name that the source gives a value anywhere."""
    return frozenset(_bound(tree))


def _bound(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Name(ctx=ast.Store() | ast.Del()):
                yield node.id
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.name
            case ast.arg():
                yield node.arg
            case ast.alias():
                yield node.asname or node.name.partition(".")[0]
            case ast.ExceptHandler(name=str(name)):
                yield name


def given_names(tree: ast.Module) -> frozenset[str]:
    """Every name that the module itself gets a value for, functions' own names left out."""
    return frozenset(_bound(_Surface().visit(copy.deepcopy(tree))))


class _Surface(ast.NodeTransformer):
    """Takes the insides of functions and classes away."""

    def visit(self, node: ast.AST) -> ast.AST:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                return ast.Name(node.name, ast.Store())
            case ast.Lambda():
                return ast.Constant(None)
        return self.generic_visit(node)


def read_names(tree: ast.AST) -> frozenset[str]:
    """Every name whose value the source reads."""
    return frozenset(
        node.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    )


def calls_method(tree: ast.AST, methods: Collection[str]) -> bool:
    """Whether the source calls a method of one of these names, of whatever object."""
    return any(
        isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr in methods
        for call in ast.walk(tree)
    )


def last_line(node: ast.stmt) -> int:
    """The number of a statement's last line."""
    return node.end_lineno or node.lineno


def _is_one_argument(text: str, value: ast.expr) -> bool:
    """Whether the text between a call's parentheses is this one value: `a, b` is not."""
    try:
        with quiet():
            call = ast.parse(f"f({text})", mode="eval").body
    except SyntaxError:
        return False
    assert isinstance(call, ast.Call), text
    return not call.keywords and [*map(ast.dump, call.args)] == [ast.dump(value)]


def _tokens(source: str) -> Iterator[tokenize.TokenInfo]:
    return tokenize.generate_tokens(io.StringIO(source).readline)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Read source without warnings: the notebook has shown those of wrong escapes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _statements(source: str) -> list[ast.stmt]:
    with quiet():
        return ast.parse(source).body
