"""The rank functions that the kernel declares are what the engines have."""

import ast
import inspect
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import nbdist
from nbdist.engine import responder
from nbdist.rpc import wire
from nbdist.rpc.kernel.functions import RankFunction

pytestmark = pytest.mark.engine
KERNEL = ("client", "commands")  # the folders whose files declare rank functions
# An annotation's source -> (the types of the parameters, the type of the result).
Types = tuple[list[str], str]


def declared() -> Iterator[tuple[str, RankFunction[..., Any], Types]]:
    """Every rank function of the kernel, as `module.name`, with its types as they are written."""
    root = Path(nbdist.__file__).parent
    for path in sorted(path for folder in KERNEL for path in (root / folder).rglob("*.py")):
        module = ".".join(path.relative_to(root.parent).with_suffix("").parts)
        for node in ast.parse(path.read_text()).body:
            match node:
                case ast.AnnAssign(
                    target=ast.Name(id=name),
                    annotation=ast.Subscript(
                        value=ast.Name(id="RankFunction"),
                        slice=ast.Tuple(elts=[ast.List(elts=given), result]),
                    ),
                ):
                    function = getattr(import_module(module), name)
                    types = [ast.unparse(one) for one in given], ast.unparse(result)
                    yield f"{module}.{name}", function, types


DECLARED = list(declared())
CALLED = [one for one in DECLARED if ":" in one[1].name]
ASKED = [one for one in DECLARED if ":" not in one[1].name]


def of_the_engine(name: str) -> Callable[..., Any]:
    """The function that is meant."""
    if name in responder.TABLE:
        return responder.TABLE[name]
    module, _, function = name.partition(":")
    found: Callable[..., Any] = getattr(import_module(module), function)
    return found


def test_every_rank_function_is_found() -> None:
    """Each place that makes one is a declaration at the top of a module, with its types."""
    root = Path(nbdist.__file__).parent
    made = sum(path.read_text().count("= RankFunction(") for path in root.rglob("*.py"))

    assert made == len(DECLARED) > 60


@pytest.mark.parametrize(("_where", "here", "types"), DECLARED, ids=[one[0] for one in DECLARED])
def test_the_declared_types_are_those_of_the_engines_function(
    _where: str, here: RankFunction[..., Any], types: Types
) -> None:
    """In their order; what is left out has a default there, and the result is the same."""
    signature = inspect.signature(of_the_engine(here.name))
    theirs = list(signature.parameters.values())
    given, result = types

    assert given == [one.annotation for one in theirs][: len(given)]
    assert all(one.default is not inspect.Parameter.empty for one in theirs[len(given) :])
    assert result == signature.return_annotation


@pytest.mark.parametrize(("_where", "here", "types"), DECLARED, ids=[one[0] for one in DECLARED])
def test_a_call_sends_name_and_arguments(
    _where: str, here: RankFunction[..., Any], types: Types
) -> None:
    """To the rank that is meant."""
    sent: list[tuple[Any, ...]] = []

    def call(target: int, its_name: str, /, *args: Any) -> Future[Any]:
        sent.append((target, its_name, *args))
        return Future()

    here(call, 5, *range(len(types[0])))

    assert sent == [(5, here.name, *range(len(types[0])))]


def test_what_the_control_thread_answers_is_what_can_be_asked() -> None:
    """Every name of its table is declared once."""
    assert sorted(one[1].name for one in ASKED) == sorted(responder.TABLE)


def test_a_call_by_name_resolves_the_function() -> None:
    """Module and function are split at the colon; what is missing raises as an import does."""
    assert wire.call("math:sqrt", 9.0) == 3.0
    with pytest.raises(ModuleNotFoundError):
        wire.call("nbdist.nowhere:f")
    with pytest.raises(AttributeError):
        wire.call("math:nothing")


def holds_and_fails(kept: list[weakref.ref[set[int]]]) -> None:
    """Raises while two functions hold a set each."""

    def inner() -> None:
        own = {1}
        kept.append(weakref.ref(own))
        raise KeyError(own.pop())

    mine = {2}
    kept.append(weakref.ref(mine))
    try:
        inner()
    except KeyError as error:
        raise ValueError(mine.pop()) from error


def test_an_error_of_a_call_holds_nothing_of_what_raised_it() -> None:
    """The shell keeps the last error; models in its frames would stay in memory with it."""
    kept: list[weakref.ref[set[int]]] = []
    with pytest.raises(ValueError, match="2") as told:
        wire.call(f"{__name__}:holds_and_fails", kept)

    assert isinstance(told.value.__cause__, KeyError)
    assert [one() for one in kept] == [None, None]
