"""Source as text: indenting, showing and replacing leave what it computes as it is."""

import argparse
import ast
import asyncio
import dataclasses
import inspect
import textwrap
import types
import typing

import pytest

from nbdist.exporter import source as text

_SOURCES = {
    "a string over lines": "x = '''a\n  b\n\tc\n'''",
    "an f-string over lines": 'n = 1\nx = f"""a\n  {n}\n{n + 1}\n  b"""',
    "f-strings in f-strings": "n = 2\nx = f'''{f\"\"\"a\n{n}\n  b\"\"\"}\n c'''",
    "bytes and raw strings": "x = b'''a\nb''', r'''\\n\nb'''",
    "a string that goes on after a backslash": "x = 'a\\\n  b'",
    "a backslash": "x = 1 + \\\n2",
    "brackets": "x = [\n1,\n  2,\n    '''a\nb''',\n]",
    "decorators": "def twice(f):\n  return lambda: 2 * f()\n@twice\ndef g():\n  return 3\nx = g()",
    "a class with docstrings": 'class A:\n  """One.\n\n  Two."""\n  def f(self):\n    """x\ny"""\n'
    "x = A.__doc__, A.f.__doc__",
    "tabs": "if True:\n\tx = 1\n\tif x:\n\t\tx = '''\t\n\tb'''",
    "tabs and blanks": "if True:\n \tx = 1\nif x:\n\ty = 2",
    "comments at the margin": "def f():\n# one\n  return 1\n# two\nx = f()",
    "only comments": "# one\n\n# two",
    "nothing": "",
    "blank lines with blanks": "x = 1\n   \ny = 2\n",
    "a string that looks like code": "x = '''\n@a\ndef f():\n# no comment\n'''",
    "two strings side by side": "x = '''a\nb''' '''c\nd'''; y = 1",
    "letters of several bytes": "x = 'é日'; y = '''é\n日'''",
    "a line separator": "x = 'a\u2028b\x0cc'",
    "form feeds": "def f():\n  \f  return '\f'\n\fx = f()\n",
    "globals in functions": "x = 1\ndef f():\n  global x\n  x = 2\nf()",
    "a bad escape": "x = '''\\d\n  \\w'''",
}
_SHOWN = {
    "1 + 1": [2],
    "(1 +\n 1)": [2],
    "1, 2": [(1, 2)],
    "(1), 2": [(1, 2)],
    "*[1, 2], 3": [(1, 2, 3)],
    "(i for i in range(0))": [None],
    "(x := 5)": [5],
    "[\n  1,\n]  # a comment": [[1]],
    "'é'; 'ü'": ["ü"],
    "'''a\n  b'''": ["a\n  b"],
    "dict(a=1)": [{"a": 1}],
    "lambda: 1": [None],
    "1 if True else 2": [1],
    "1 + \\\n2": [3],
}


@pytest.mark.filterwarnings("ignore:invalid escape sequence")
@pytest.mark.parametrize("name", _SOURCES)
def test_a_block_computes_the_same(name: str) -> None:
    """Under `if True:` each variable gets the value that it has without."""
    source = _SOURCES[name]
    block = text.block("if True:", source)

    assert _values(block) == _values(source)


@pytest.mark.filterwarnings("ignore:invalid escape sequence")
@pytest.mark.parametrize("name", _SOURCES)
def test_an_awaited_block_computes_the_same_in_the_module(name: str) -> None:
    """As a function that is awaited it leaves the same variables in the module."""
    source = _SOURCES[name]
    namespace: dict[str, object] = {}
    exec(text.wrap_async("cell", source), namespace)
    asyncio.run(namespace.pop("cell")())

    assert _plain(namespace) == _values(source)


@pytest.mark.parametrize("module", [argparse, dataclasses, inspect, textwrap, typing])
def test_whole_modules_are_indented_as_they_are(module: types.ModuleType) -> None:
    """Python's own files, with all their docstrings, have the same tree in a block."""
    source = inspect.getsource(module)
    below = ast.parse(text.block("if True:", source)).body[0]

    assert isinstance(below, ast.If)
    assert [*map(ast.dump, below.body)] == [*map(ast.dump, ast.parse(source).body)]


def test_names_that_only_await_binds_are_the_modules() -> None:
    """Loops, `with`, `except`, walrus and unpacking bind module names; inner ones stay inner."""
    source = (
        "import os.path, json as j\nfor a in [1]: pass\nb, *c = [1, 2]\n(d := 3)\n"
        "[e := 4 for f in [1]]\ndef g(h):\n  i = 1\nclass K:\n  l = 1\nm = 0\nm += 1"
    )
    namespace: dict[str, object] = {}
    exec(text.wrap_async("cell", source), namespace)
    asyncio.run(namespace.pop("cell")())

    assert set(namespace) - {"__builtins__"} == {"os", "j", "a", "b", "c", "d", "e", "g", "K", "m"}


def test_many_names_stand_on_lines_of_their_own() -> None:
    """A long `global` is broken, and still valid."""
    source = "\n".join(f"a_long_name_{k} = {k}" for k in range(40))
    shown = text.wrap_async("cell", source)

    assert max(map(len, shown.split("\n"))) < 100
    compile(shown, "cell", "exec")


@pytest.mark.parametrize("source", _SHOWN)
def test_the_last_value_is_handed_on(source: str) -> None:
    """The function gets the whole value as one argument, however it is written."""
    shown: list[object] = []
    node = text.parse(source).tree.body[-1]
    edited = text.replace_lines(source, [text.wrap_value(source, node, "show")])
    exec(edited, {"show": shown.append})

    wanted = _SHOWN[source]
    assert len(shown) == 1
    assert wanted in ([None], shown)


@pytest.mark.parametrize(
    ("source", "is_silenced"),
    [("x;", True), ("x; # no", True), ("x # ;", False), ("x", False), ("';'", False), ("", False),
     ("x;\n# end\n\n", True), ("'''\n;'''", False)],
)  # fmt: skip
def test_a_semicolon_at_the_end_silences(source: str, *, is_silenced: bool) -> None:
    """The last sign that is no comment decides."""
    assert text.is_silenced(source) == is_silenced


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("return 1", "'return' outside function"),
        ("yield 1", "'yield' outside function"),
        ("x = = 1", "invalid syntax"),
        ("  x = 1", "unexpected indent"),
        ("x = '\0'", "null bytes"),
        ("break", "'break' outside loop"),
    ],
)
def test_what_is_no_python_is_told(source: str, expected: str) -> None:
    """Python's own message comes, also for what only its compiler finds."""
    with pytest.raises(SyntaxError, match=expected):
        text.parse(source)


@pytest.mark.parametrize(
    ("source", "is_async"),
    [("await f()", True), ("async for x in y: pass", True), ("async with x: pass", True),
     ("[x async for x in y]", True), ("async def f(): await g()", False), ("x = 1", False)],
)  # fmt: skip
def test_await_at_the_top_level_is_noticed(source: str, *, is_async: bool) -> None:
    """A cell may await; inside a function it is that function's."""
    assert text.parse(source).is_async == is_async


def test_names_of_the_module_are_told_from_those_of_functions() -> None:
    """What a function takes or assigns gives the module nothing; what a loop assigns does."""
    tree = text.parse("def f(a):\n  b = a\nfor c in d: pass\nimport e.g\ng = lambda h: i").tree

    assert text.given_names(tree) == {"f", "c", "e", "g"}
    assert text.read_names(tree) == {"a", "d", "i"}


def _values(source: str) -> dict[str, object]:
    namespace: dict[str, object] = {}
    exec(source, namespace)
    return _plain(namespace)


def _plain(namespace: dict[str, object]) -> dict[str, object]:
    """Variables that can be compared: no functions and classes."""
    return {
        name: value
        for name, value in namespace.items()
        if name != "__builtins__" and not isinstance(value, types.FunctionType | type)
    }
