"""Holds the package's shape: which way imports point, and what each place may load.

    front (magics, routing, cli, ...) -> commands (with panel, notebook, verbs)
        -> client | view | engine -> core -> errors

Siblings never import each other, core is plain Python and numpy, and nothing that runs in
the notebook's kernel imports torch.
"""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "nbdist"
SOURCES = sorted(PACKAGE.rglob("*.py"))
MAX_LINES = 600

FRONT = {
    "__init__",
    "__main__",
    "cli",
    "completion",
    "magics",
    "pytest_plugin",
    "routing",
    "testing",
}
COMMANDS = {"commands", "notebook", "panel", "verbs"}
BELOW = {
    "errors": set(),
    "core": {"errors"},
    "engine": {"core", "errors"},
    "view": {"core", "errors"},
    "client": {"core", "errors"},
    "commands": {"client", "view", "engine", "core", "errors"},
    "front": {"commands", "client", "view", "engine", "core", "errors"},
}
# The kernel never loads torch: it must start at once and never touch a GPU.
HEAVY = {"torch", "accelerate"}
BANNED = {
    "engine": {"ipyparallel", "ipywidgets"},
    "view": HEAVY | {"ipyparallel"},
    "client": HEAVY,
    "commands": HEAVY,
    "front": HEAVY,
}
# ml_dtypes are numpy's small floats, loaded when one is met.
ONLY = {
    "errors": set(sys.stdlib_module_names),
    "core": {*sys.stdlib_module_names, "numpy", "ml_dtypes"},
}
# Where an engine process begins: it hands itself over to ipyparallel.
ENGINE_ENTRY = "nbdist.engine.__main__"


def module_name(path: Path) -> str:
    """The dotted name of a file of the package."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def layer(module: str) -> str | None:
    """The layer of nbdist.<part>...; None for a part that has none."""
    part = module.split(".")[1]
    if part in FRONT:
        return "front"
    if part in COMMANDS:
        return "commands"
    return part if part in BELOW else None


def imported(tree: ast.AST) -> Iterator[str]:
    """Every module that the source asks for, at the top or inside a function."""
    for node in ast.walk(tree):
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


def import_problem(module: str, target: str) -> str | None:
    """Why this module may not import that one, or None."""
    own = layer(module)
    top = target.split(".", maxsplit=1)[0]
    if target == ".":
        return "imports relatively"
    if top == "nbdist":
        # `import nbdist` alone loads nothing new: it is the parent of every module here.
        other = own if target == "nbdist" else layer(target) or "front"
        return None if other in {own, *BELOW[own]} else f"imports {target}: {own} -> {other}"
    if top in BANNED.get(own, ()) and module != ENGINE_ENTRY:
        return f"imports {target}: not in {own}"
    if own in ONLY and top not in ONLY[own]:
        return f"imports {target}: {own} has only the standard library" + (
            " and numpy" if own == "core" else ""
        )
    return None


def problems(source: str, module: str) -> list[str]:
    """Everything that is wrong with one file of the package, as sentences."""
    if layer(module) is None:
        return [f"{module} belongs to no layer; name it in tests/test_layers.py"]
    tree = ast.parse(source)
    found = [import_problem(module, target) for target in imported(tree)]
    if ast.get_docstring(tree) is None:
        found.append("has no docstring")
    if (count := len(source.splitlines())) > MAX_LINES:
        found.append(f"has {count} lines, more than {MAX_LINES}")
    return [f"{module} {sentence}" for sentence in found if sentence]


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_file_keeps_to_its_layer(path: Path) -> None:
    """Each file imports only what its layer may, has a docstring and fits in 600 lines."""
    assert problems(path.read_text(encoding="utf-8"), module_name(path)) == []


@pytest.mark.parametrize(
    ("module", "line", "told"),
    [
        ("nbdist.core.units", "import torch", "core has only the standard library and numpy"),
        ("nbdist.core.units", "from IPython import display", "core has only"),
        ("nbdist.core.units", "import nbdist.client.session", "core -> client"),
        ("nbdist.core.units", "from nbdist import start", "core -> front"),
        ("nbdist.errors", "import numpy", "errors has only the standard library"),
        ("nbdist.errors", "from nbdist import core", "errors -> core"),
        ("nbdist.client.session", "def late():\n    import torch.distributed", "not in client"),
        ("nbdist.client.session", "from nbdist.view import cells", "client -> view"),
        ("nbdist.client.session", "from nbdist.engine.runtime import join", "client -> engine"),
        ("nbdist.client.session", "import nbdist.commands", "client -> commands"),
        ("nbdist.view.cells", "from accelerate import Accelerator", "not in view"),
        ("nbdist.view.cells", "import importlib\nimportlib.import_module('torch')", "not in view"),
        ("nbdist.view.cells", "from . import html", "imports relatively"),
        ("nbdist.engine.runtime", "import ipyparallel", "not in engine"),
        ("nbdist.engine.runtime", "from ipywidgets import Button", "not in engine"),
        ("nbdist.engine.runtime", "from nbdist import client", "engine -> client"),
        ("nbdist.commands", "from nbdist import magics", "commands -> front"),
        ("nbdist.magics", "import torch", "not in front"),
        ("nbdist.somewhere", "import os", "belongs to no layer"),
        ("nbdist.core.units", "\n" * MAX_LINES, "more than 600"),
    ],
)
def test_broken_rule_is_told(module: str, line: str, told: str) -> None:
    """Made-up source that breaks one rule is reported, once, by that rule."""
    found = problems(f'"""A made-up file."""\n{line}\n', module)

    assert len(found) == 1
    assert told in found[0]


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("nbdist.core.units", "import numpy as np\nfrom nbdist.errors import NbdistError"),
        ("nbdist.core.units", "from nbdist.core import ranks"),
        ("nbdist.engine.runtime", "import torch\nfrom nbdist.core.topology import Rank"),
        ("nbdist.engine.__main__", "from ipyparallel.apps.ipengineapp import launch_new_instance"),
        ("nbdist.client.launcher", "import nbdist\nimport ipyparallel"),
        ("nbdist.commands", "from nbdist import client, notebook, view"),
        ("nbdist.magics", "from nbdist import commands\nfrom nbdist.routing import rewrite"),
        ("nbdist.__init__", "from nbdist.api import start"),
    ],
)
def test_allowed_import_passes(module: str, line: str) -> None:
    """Made-up source that keeps the rules is not reported."""
    assert problems(f'"""A made-up file."""\n{line}\n', module) == []


def test_missing_docstring_is_told() -> None:
    """A module without a docstring is reported."""
    assert problems("import os\n", "nbdist.core.units") == ["nbdist.core.units has no docstring"]


def test_kernel_side_loads_no_torch() -> None:
    """Importing everything that runs in the kernel leaves torch and accelerate unloaded."""
    modules = [
        module_name(path).removesuffix(".__init__")
        for path in SOURCES
        if layer(module_name(path)) != "engine" and path.stem != "__main__"
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
