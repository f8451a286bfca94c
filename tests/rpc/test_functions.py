"""The rank functions that the kernel declares are what the engines have."""

import ast
import inspect
import weakref
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import nbdist
from nbdist.engine import responder
from nbdist.rpc import wire
from nbdist.rpc.kernel.functions import RankFunction

# An annotation's source -> (the types of the parameters, the type of the result).
Types = tuple[list[str], str]


def declared() -> Iterator[tuple[str, RankFunction[..., Any], Types]]:
    """Every rank function of the kernel, as `module.name`, with its types as they are written."""
    root = Path(nbdist.__file__).parent
    for path in sorted(root.rglob("*.py")):
        module = ".".join(path.relative_to(root.parent).with_suffix("").parts)
        for node in ast.parse(path.read_text()).body:
            match node:
                case ast.AnnAssign(
                    target=ast.Name(id=name),
                    annotation=ast.Subscript(
                        value=ast.Name(id="RankFunction"),
                        slice=ast.Tuple(elts=[ast.List(elts=parameters), result]),
                    ),
                ):
                    function = getattr(import_module(module), name)
                    types = [ast.unparse(parameter) for parameter in parameters]
                    yield f"{module}.{name}", function, (types, ast.unparse(result))


DECLARED = list(declared())


def of_the_engine(name: str) -> Any:
    if name in responder.TABLE:
        return responder.TABLE[name]
    module, _, function = name.partition(":")
    return getattr(import_module(module), function)


def test_every_rank_function_is_found() -> None:
    """Each place that makes one is a declaration at the top of a module, with its types."""
    root = Path(nbdist.__file__).parent
    declarations = sum(path.read_text().count("= RankFunction(") for path in root.rglob("*.py"))

    assert declarations == len(DECLARED) > 60


@pytest.mark.parametrize(("_where", "here", "types"), DECLARED, ids=[row[0] for row in DECLARED])
def test_the_declared_types_are_those_of_the_engines_function(
    _where: str, here: RankFunction[..., Any], types: Types
) -> None:
    """In their order; what is left out has a default there, and the result is the same."""
    signature = inspect.signature(of_the_engine(here.name))
    theirs = list(signature.parameters.values())
    parameters, result = types

    assert parameters == [parameter.annotation for parameter in theirs][: len(parameters)]
    assert all(
        parameter.default is not inspect.Parameter.empty for parameter in theirs[len(parameters) :]
    )
    assert result == signature.return_annotation


def test_what_the_control_thread_answers_is_what_can_be_asked() -> None:
    """Every name of its table is declared once."""
    asked = [function.name for _, function, _ in DECLARED if ":" not in function.name]

    assert sorted(asked) == sorted(responder.TABLE)


def test_a_call_by_name_resolves_the_function() -> None:
    """Module and function are split at the colon; what is missing raises as an import does."""
    assert wire.call("math:sqrt", 9.0) == 3.0
    with pytest.raises(ModuleNotFoundError):
        wire.call("nbdist.nowhere:f")
    with pytest.raises(AttributeError):
        wire.call("math:nothing")


def holds_and_fails(references: list[weakref.ref[set[int]]]) -> None:
    """Raises while two functions hold a set each."""

    def inner() -> None:
        local = {1}
        references.append(weakref.ref(local))
        raise KeyError(local.pop())

    mine = {2}
    references.append(weakref.ref(mine))
    try:
        inner()
    except KeyError as error:
        raise ValueError(mine.pop()) from error


def test_an_error_of_a_call_holds_nothing_of_what_raised_it() -> None:
    """The shell keeps the last error; models in its frames would stay in memory with it."""
    references: list[weakref.ref[set[int]]] = []
    with pytest.raises(ValueError, match="2") as caught:
        wire.call(f"{__name__}:holds_and_fails", references)

    assert isinstance(caught.value.__cause__, KeyError)
    assert [reference() for reference in references] == [None, None]
