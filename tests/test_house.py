"""Holds the shape of the package: which way imports point, and what each place may load.

A package is a feature, or one floor of the platform under the features. One word in a module's
path says where its lines run: `rank` (also `parallel`, `engine`, `fake`), `kernel`, `view`;
no word means pure code. docs/architecture.md draws what these rules hold.
"""

import ast
import functools
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

from tests.test_packaging import bounds

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "nbdist"
MAX_FILES, MAX_LINES, MAX_FUNCTION = 20, 600, 50

# From the bottom up: a file imports its own package and those before it.
FLOORS = (
    "errors",
    "core",
    "rpc",
    "strategy",
    "parallel",
    "cluster",
    "hang",
    "cells",
    "switch",
    "variables",
    "recording",
    "checkpoint",
    "trace",
    "memory",
    "lints",
    "monitor",
    "bandwidth",
    "comparison",
    "planner",
    "verification",
    "config",
    "diagnostics",
    "exporter",
    "engine",
    "notebook",
    "panel",
    "commands",
    "frontend",
    "testing",
)
# What a module on the rank's side has in its path, and what stands beside the kernel's side.
RANK_WORDS = {"rank", "parallel", "engine", "fake"}
# Programs of their own: what watches a run or a host, and ipyparallel's controller.
PROGRAM_WORDS = ("agent", "controller")
NOTEBOOK_PACKAGES = {"notebook", "commands", "frontend", "client", "testing"}
# The kernel never loads torch: it must start at once and never touch a GPU.
HEAVY = {"torch", "accelerate"}
BANNED = {
    "rank": {"ipyparallel", "ipywidgets"},
    "view": HEAVY | {"ipyparallel"},
    "kernel": HEAVY,
    "notebook": HEAVY,
    "controller": HEAVY,
    "agent": HEAVY | {"IPython", "ipykernel", "ipyparallel", "ipywidgets", "zmq"},
    "pure": HEAVY | {"IPython", "ipykernel", "ipyparallel", "ipywidgets", "zmq"},
}
# Which sides a module of one side may import.
REACH = {
    "pure": {"pure"},
    "rank": {"pure", "rank"},
    "view": {"pure", "view"},
    "kernel": {"pure", "agent", "kernel"},
    "notebook": {"pure", "agent", "kernel", "view", "notebook"},
    "agent": {"agent"},
    "controller": {"pure", "controller"},
}
# Libraries beside numpy that pure code may use, by module.
PURE_LIBRARIES = {
    "nbdist.config.yaml_reader": {"yaml"},
    "nbdist.core.gpus": {"pynvml"},
    "nbdist.variables.definitions": {"cloudpickle"},
    "nbdist.variables.unpack": {"ml_dtypes"},
}
# What only some machines have; the code imports it late and goes on without it.
OPTIONAL_MODULES = {"deepspeed", "nbval", "peft", "pytest", "transformers", "viztracer"}
# A program that is run by its path and begins without nbdist, so it has no second file. Not more.
LONG = {"nbdist.engine.fork_server": 648}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
# As a comment names a file: from the root, or from the package.
NAMED_FILE = re.compile(
    r"(?<![\w./-])((?:nbdist|tests|benchmarks|"
    + "|".join(name for name in FLOORS if name not in {"errors", "testing"})
    + r")/[\w/]+\.py)\b"
)
# Lines of each package. A commit that needs more writes the number here, and says why.
LINES = {
    "": 555, "bandwidth": 1133, "cells": 4155, "checkpoint": 5448, "cluster": 8455,
    "commands": 2715, "comparison": 720, "config": 3017, "core": 3130, "diagnostics": 1593,
    "engine": 3145, "exporter": 1621, "frontend": 766, "hang": 6517, "lints": 3748, "memory": 6043,
    "monitor": 1736, "notebook": 1210, "panel": 2249, "parallel": 16158, "planner": 7763,
    "recording": 624, "rpc": 972, "strategy": 2513, "switch": 1146, "testing": 317, "trace": 3895,
    "variables": 1063, "verification": 3394,
}  # fmt: skip
# Names of locals and arguments that say little. Their count may only fall.
PALE = {"place": 793, "what": 408, "typed": 220, "here": 184, "others": 177, "wanted": 139,
        "rest": 131, "seen": 69}  # fmt: skip
# How a first line of a docstring does not begin: its subject has no noun.
HEADLESS = {"Of", "As", "Its", "For", "Those", "That", "These", "This", "What", "Where", "Whose"}
# Sentences of README.md and docs/ with more words than a reader follows.
MOST_WORDS = 40
# What a local is not called: the word says nothing of what it holds.
VAGUE = {"found", "kept", "known", "one", "own", "told"}
# Where an engine process begins: it hands itself over to ipyparallel.
ENGINE_ENTRY = "nbdist.engine.__main__"
# `from nbdist import Accelerator, join` loads them when they are asked for.
LAZY = {("nbdist", "nbdist.parallel.accelerator.accelerator"), ("nbdist", "nbdist.engine.torchrun")}

# The word of a verb's file in commands/ -> its package, where that is another word.
# `nbdist.plan` and others are public functions, so no package may have these names.
PACKAGE_OF = {
    "check": "lints",
    "compare": "comparison",
    "doctor": "diagnostics",
    "export": "exporter",
    "plan": "planner",
    "terminal": "cluster",
    "verify": "verification",
}
# The package -> its page in docs/, where that is another word.
PAGE_OF = {
    "cells": "usage",
    "cluster": "usage",
    "comparison": "strategies",
    "diagnostics": "usage",
    "engine": "usage",
    "exporter": "usage",
    "planner": "plan",
    "variables": "usage",
    "verification": "verify",
}


parsed = functools.cache(ast.parse)


@functools.cache
def nodes_of(tree: ast.AST) -> list[ast.AST]:
    """What ast.walk gives, in less time: half a million nodes, for three rules.

    Fields alone: `executing`, which IPython uses for tracebacks, gives nodes a `parent`, and with
    nodes that all trees of a process share (ast.Load) these lead into other trees, in circles.
    """
    nodes = [tree]
    for node in nodes:
        for name in node._fields:
            value = getattr(node, name, None)
            children = value if isinstance(value, list) else [value]
            nodes.extend(child for child in children if isinstance(child, ast.AST))
    return nodes


@pytest.fixture(scope="module", autouse=True)
def _trees_of_this_module_alone() -> Iterator[None]:
    """A million objects of syntax trees would make each later collection take half a second."""
    yield
    for cached in (parsed, nodes_of, imported):
        cached.cache_clear()


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@functools.cache
def sources() -> dict[str, Path]:
    """Module -> file, of the whole package."""
    return {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def side(module: str) -> str:
    """Where the lines of a module run, as a key of BANNED."""
    words = module.split(".")[1:]
    if RANK_WORDS & {*words}:
        return "rank"
    if words[:2] == ["panel", "kernel"]:  # it draws and runs verbs
        return "notebook"
    for word in ("view", "kernel", *PROGRAM_WORDS):
        if word in words:
            return word
    return "notebook" if not words or words[0] in {*NOTEBOOK_PACKAGES, "__main__"} else "pure"


def floor(module: str) -> int:
    """The height of a module's package; the root is above all."""
    words = module.split(".")
    return FLOORS.index(words[1]) if len(words) > 1 and words[1] in FLOORS else len(FLOORS)


@functools.cache
def imported(tree: ast.AST) -> tuple[str, ...]:
    """Every name that the source imports: at the top, in functions and for type checkers alone."""
    return tuple(_imported(tree))


def _imported(tree: ast.AST) -> Iterator[str]:
    importing = (ast.Import, ast.ImportFrom, ast.Call)
    for node in nodes_of(tree):
        if not isinstance(node, importing):
            continue
        match node:
            case ast.Import():
                yield from (alias.name for alias in node.names)
            case ast.ImportFrom(level=0, module=str(module)):
                yield from (f"{module}.{alias.name}" for alias in node.names)
            case ast.ImportFrom():
                yield "."
            case ast.Call(
                func=ast.Name(id="__import__" | "import_module")
                | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                yield name


def bound(tree: ast.AST) -> set[str]:
    """The names of arguments and locals; the fields of records are none."""
    nodes = nodes_of(tree)
    records = [
        statement for node in nodes if isinstance(node, ast.ClassDef) for statement in node.body
    ]
    fields = {statement.target for statement in records if isinstance(statement, ast.AnnAssign)}
    stored = {
        node.id
        for node in nodes
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node not in fields
    }
    return stored | {node.arg for node in nodes if isinstance(node, ast.arg)}


def owner(name: str) -> str:
    """The module of the package that an imported name lies in."""
    while name not in sources() and "." in name:
        name = name.rpartition(".")[0]
    return name


def import_problem(module: str, name: str) -> str | None:
    """Why this module may not import that name, or None."""
    if name == ".":
        return "imports relatively"
    is_ours = name.split(".", maxsplit=1)[0] == "nbdist"
    return own_problem(module, owner(name)) if is_ours else library_problem(module, name)


def library_problem(module: str, name: str) -> str | None:
    """Why this module may not import that library, or None."""
    here, top = side(module), name.split(".", maxsplit=1)[0]
    if top in BANNED[here] and module != ENGINE_ENTRY:
        return f"imports {name}: not on the side {here!r}"
    libraries = {"pure": {"numpy", *PURE_LIBRARIES.get(module, ())}, "agent": set[str]()}
    if here in libraries and top not in {*sys.stdlib_module_names, *libraries[here]}:
        numpy = " and numpy" if here == "pure" else ""
        return f"imports {name}: {here} code has the standard library{numpy} alone"
    return None


def own_problem(module: str, target: str) -> str | None:
    """Why this module may not import that one, or None."""
    # `import nbdist` alone loads nothing new: it is the parent of every module.
    if target in {"nbdist", module} or (module, target) in LAZY:
        return None
    here, there = side(module), side(target)
    if there not in REACH[here]:
        return f"imports {target}: {here} -> {there}"
    return f"imports {target}, which is above it" if floor(target) > floor(module) else None


def problems(source: str, module: str) -> list[str]:
    """Everything that is wrong with one file of the package, as sentences."""
    tree = parsed(source)
    sentences = {import_problem(module, name) for name in imported(tree)}
    sentences |= {f"has a local {name!r}" for name in sorted(VAGUE & bound(tree))}
    if ast.get_docstring(tree) is None:
        sentences.add("has no docstring")
    if (lines := source.count("\n")) > LONG.get(module, MAX_LINES):
        sentences.add(f"has {lines} lines, more than {MAX_LINES}")
    sentences |= {
        f"{node.name} has {lines} lines, more than {MAX_FUNCTION}"
        for node in nodes_of(tree)
        if isinstance(node, FUNCTIONS) and (lines := statement_lines(node)) > MAX_FUNCTION
    }
    sentences |= {f"names {path}, which does not exist" for path in named_files(source)}
    return sorted(f"{module} {sentence}" for sentence in sentences if sentence)


def statement_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function without its docstring."""
    assert function.end_lineno is not None
    has_docstring = ast.get_docstring(function) is not None
    docstring = function.body[0] if has_docstring else None
    ends = (docstring.lineno, docstring.end_lineno or 0) if docstring else (1, 0)
    return function.end_lineno - function.lineno + 1 - (ends[1] - ends[0] + 1)


def named_files(source: str) -> set[str]:
    """Files of this repository that a text names and that do not exist."""
    named = {*NAMED_FILE.findall(source)}
    return {path for path in named if not ((ROOT / path).exists() or (PACKAGE / path).exists())}


def twice_named() -> set[str]:
    """Public classes that share their name."""
    classes = Counter(
        node.name
        for path in sources().values()
        for node in parsed(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    return {name for name, count in classes.items() if count > 1}


def folders(edges: dict[str, set[str]]) -> dict[str, set[str]]:
    """Folder -> folders that its modules import; the root, whose errors all import, is left out."""
    folder_of = {module: module_name(path.parent) for module, path in sources().items()}
    joined: dict[str, set[str]] = {folder: set() for folder in folder_of.values()}
    for module, targets in edges.items():
        here = folder_of[module]
        joined[here] |= {folder_of[target] for target in targets} - {here, "nbdist"}
    return joined


@functools.cache
def graph() -> dict[str, set[str]]:
    """Module -> modules of the package that it imports, hints and late imports counted."""
    return {
        module: {
            target
            for name in imported(parsed(path.read_text(encoding="utf-8")))
            if name.startswith("nbdist")
            and (target := owner(name)) not in {"nbdist", module}
            and (module, target) not in LAZY
        }
        for module, path in sources().items()
    }


def reachable(start: str, edges: dict[str, set[str]]) -> set[str]:
    """Everything that a module imports, and what that imports."""
    seen: set[str] = set()
    waiting = [start]
    while waiting:
        new = edges[waiting.pop()] - seen
        seen |= new
        waiting.extend(new)
    return seen


def violations() -> set[str]:
    """All that breaks a rule, as sentences."""
    wrong = {
        sentence
        for module, path in sources().items()
        for sentence in problems(path.read_text(encoding="utf-8"), module)
    }
    circles = {
        f"{name} is in a circle"
        for edges in (graph(), folders(graph()))
        for name in edges
        if name in reachable(name, edges)
    }
    sizes = Counter(str(path.parent.relative_to(ROOT)) for path in sources().values())
    crowded = {
        f"{folder} has more than {MAX_FILES} files"
        for folder, count in sizes.items()
        if count > MAX_FILES
    }
    shared = {f"the name {name} has two classes" for name in twice_named()}
    return wrong | circles | crowded | shared


def test_the_house_keeps_its_rules() -> None:
    """Imports, names, docstrings, circles and sizes of the package are as they should be."""
    assert violations() == set()


@pytest.mark.parametrize(
    ("module", "line", "sentence"),
    [
        ("nbdist.core.units", "import torch", "not on the side 'pure'"),
        ("nbdist.core.units", "from IPython import display", "not on the side 'pure'"),
        ("nbdist.core.units", "import pandas", "pure code has the standard library"),
        ("nbdist.core.units", "import nbdist.rpc.kernel.channel", "pure -> kernel"),
        ("nbdist.core.units", "import nbdist.rpc.wire", "above it"),
        ("nbdist.errors", "from nbdist.core import units", "above it"),
        ("nbdist.trace.view.image", "def late():\n    import torch.cuda", "not on the side 'view'"),
        ("nbdist.trace.view.image", "import importlib\nimportlib.import_module('torch')", "'view'"),
        ("nbdist.trace.view.image", "from . import html", "imports relatively"),
        ("nbdist.rpc.kernel.channel", "import torch", "not on the side 'kernel'"),
        ("nbdist.trace.kernel.x", "from nbdist.trace import rank", "kernel -> rank"),
        ("nbdist.trace.kernel.x", "from nbdist.trace.view import image", "kernel -> view"),
        ("nbdist.engine.join", "import ipyparallel", "not on the side 'rank'"),
        ("nbdist.engine.join", "from nbdist.rpc.kernel import channel", "rank -> kernel"),
        ("nbdist.trace.rank", "from nbdist.engine import join", "above it"),
        ("nbdist.commands.trace", "import accelerate", "not on the side 'notebook'"),
        ("nbdist.commands.trace", "from nbdist.trace import rank", "notebook -> rank"),
        ("nbdist.commands.trace", "from nbdist.frontend import magics", "above it"),
        ("nbdist.core.units", "def f(one: int) -> int:\n    return one", "a local 'one'"),
        ("nbdist.core.units", "class A:\n    found: str\n    def f(s): told = 1", "local 'told'"),
    ],
)
def test_broken_rule_is_told(module: str, line: str, sentence: str) -> None:
    """Made-up source that breaks one rule is reported, once, by that rule."""
    sentences = problems(f'"""A made-up file."""\n{line}\n', module)

    assert len(sentences) == 1
    assert sentence in sentences[0]


def test_missing_docstring_is_told() -> None:
    """A module without a docstring is reported."""
    assert problems("import os\n", "nbdist.core.units") == ["nbdist.core.units has no docstring"]


def test_every_import_is_a_declared_dependency() -> None:
    """What nbdist imports at run time stands in pyproject, not only in somebody's environment."""
    names = {name for path in sources().values() for name in imported(parsed(path.read_text()))}
    ours = {"nbdist", *sys.stdlib_module_names, *OPTIONAL_MODULES}
    owners = packages_distributions()
    declared = {canonicalize_name(name) for name in bounds()}

    assert not [
        module
        for module in sorted({name.partition(".")[0] for name in names} - ours)
        if not declared & {canonicalize_name(name) for name in owners.get(module, [])}
    ]


def test_packages_say_what_belongs_in_them() -> None:
    """Each package has a docstring, and no code but the table of verbs and the public names."""
    packages = {path.parent for path in sources().values()} - {PACKAGE, PACKAGE / "commands"}
    with_code = [
        str(folder.relative_to(ROOT))
        for folder in sorted(packages)
        if not (tree := ast.parse((folder / "__init__.py").read_text(encoding="utf-8")))
        or not ast.get_docstring(tree)
        or len(tree.body) > 1
    ]

    assert with_code == []


def test_no_package_hides_a_public_name() -> None:
    """`nbdist.plan` is a function: a package of that name would take its place once imported."""
    import nbdist

    assert {*nbdist.__all__} & {path.name for path in PACKAGE.iterdir() if path.is_dir()} == set()


@pytest.mark.parametrize(
    "word", sorted(path.stem for path in (PACKAGE / "commands").glob("[a-z]*.py"))
)
def test_verbs_word_finds_everything(word: str) -> None:
    """A file of verbs finds its package, its page and its tests by its word, or by the tables."""
    package = PACKAGE_OF.get(word, word)
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")}
    page = PAGE_OF.get(package, package)

    assert (PACKAGE / package).is_dir()
    assert {page, f"{page}s", f"{page[:-1]}ies"} & pages
    assert any((ROOT / "tests" / package).glob("test_*.py"))


def test_kernel_side_loads_no_torch() -> None:
    """Importing everything that runs in the kernel leaves torch and accelerate unloaded."""
    modules = [
        module
        for module, path in sources().items()
        if side(module) != "rank" and path.stem != "__main__"
    ]
    program = (
        "import importlib, json, sys\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        f"print(json.dumps(sorted({HEAVY!r} & sys.modules.keys())))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []


def test_the_page_and_its_picture_are_of_today() -> None:
    """docs/architecture.md's table and picture are made from docstrings and imports."""
    from tests.support import house_page

    written = house_page.PAGE.read_text(encoding="utf-8")

    assert written == house_page.page(written), "python -m tests.support.house_page"
    assert house_page.PICTURE.read_text(encoding="utf-8") == house_page.picture()


def test_lines_and_pale_words_grow_by_hand_alone() -> None:
    """A package has at most its lines, and each pale word stands at most as often as is written."""
    lines, pale = Counter[str](), Counter[str]()
    for module, path in sources().items():
        source = path.read_text(encoding="utf-8")
        package = module.split(".")[1] if "." in module else ""
        lines[package if package in LINES else ""] += source.count("\n")
        for node in nodes_of(parsed(source)):
            name = getattr(node, "arg", None) if isinstance(node, ast.arg) else None
            pale[name or getattr(node, "id", "")] += 1

    assert {name: n for name, n in lines.items() if n > LINES[name]} == {}
    assert {word: pale[word] for word, most in PALE.items() if pale[word] > most} == {}


def test_docstrings_begin_with_a_verb_or_a_noun() -> None:
    """A first line such as "What is sent" has no subject."""
    first_lines = [
        f"{module}: {docstring.splitlines()[0]}"
        for module, path in sources().items()
        for node in nodes_of(parsed(path.read_text(encoding="utf-8")))
        if isinstance(node, (*FUNCTIONS, ast.ClassDef, ast.Module))
        and (docstring := ast.get_docstring(node))
    ]

    assert [line for line in first_lines if line.split()[1].strip(",") in HEADLESS] == []


def sentences(page: str) -> Iterator[str]:
    """The sentences of a page's text: not those of its tables, headings and blocks of code."""
    text = re.sub(r"^```.*?^```", "", page, flags=re.DOTALL | re.MULTILINE)
    lines = [line for line in text.splitlines() if not re.match(r"    |\s*\||#|!\[", line)]
    for paragraph in re.split(r"\n\s*\n|\n(?=\s*(?:-|\d+\.) )", "\n".join(lines)):
        yield from re.split(r"(?<=[\w`)\]%*\"][.!?:]) ", " ".join(paragraph.split()))


def test_pages_have_no_long_sentences() -> None:
    """A sentence of at most 40 words is read once."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    long = [
        f"{page.name}: {sentence}"
        for page in pages
        for sentence in sentences(page.read_text(encoding="utf-8"))
        if len(sentence.split()) > MOST_WORDS
    ]

    assert long == []


def test_what_is_looked_for_is_where_the_page_says() -> None:
    """The definitions of the table "Where is it?" are in their files."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| .* \| \[`([\w/]+\.py)`\]\(.*\) \| `(\w+)` \|$", text, re.MULTILINE)
    defined = {
        path: {node.name for node in ast.walk(ast.parse((PACKAGE / path).read_text()))
               if isinstance(node, (*FUNCTIONS, ast.ClassDef))}
        for path, _ in rows
    }  # fmt: skip

    assert len(rows) >= 20
    assert [f"{path}: {name}" for path, name in rows if name not in defined[path]] == []


def test_each_promise_has_a_test_of_make_test() -> None:
    """Tests in the table "What must hold" exist, and no mark keeps them for another target."""
    text = (ROOT / "docs" / "testing.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| .* \| ([\w/]+\.py) \| `(test_\w+)` \|$", text, re.MULTILINE)
    left_out = "faults|parity|accuracy|more_browser|more_hosts|versions|skip"
    problems = []
    for path, name in rows:
        tree = parsed((ROOT / "tests" / path).read_text(encoding="utf-8"))
        definitions = [n for n in tree.body if isinstance(n, FUNCTIONS) and n.name == name]
        marks = [ast.unparse(mark) for test in definitions for mark in test.decorator_list]
        if not definitions or any(re.match(rf"pytest\.mark\.({left_out})\b", m) for m in marks):
            problems.append(f"{path}::{name}")

    assert len(rows) >= 30
    assert problems == []


@pytest.mark.parametrize("page", ["architecture", "internals", "adding", "private_names"])
def test_pages_name_files_that_are_there(page: str) -> None:
    """Each file of the package that a page on its structure names exists."""
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:nbdist/|tests/)?(?:\w+/)+\w+\.py)", text))

    assert {
        name for name in named if not any((at / name).exists() for at in (ROOT, PACKAGE))
    } == set()
