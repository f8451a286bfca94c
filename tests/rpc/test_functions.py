"""The kernel's page of remote functions is what the engines have."""

import inspect
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from importlib import import_module
from typing import Any

import pytest

from nbdist.checkpoint import remote_checkpoint, remote_weights
from nbdist.config import kernel as config_kernel
from nbdist.engine import responder
from nbdist.lints.kernel import remote_check
from nbdist.planner.kernel import remote_plan
from nbdist.rpc import wire
from nbdist.rpc.kernel import functions, remote_progress

pytestmark = pytest.mark.engine
FUNCTIONS = {
    **functions.REMOTE_FUNCTIONS,
    **remote_check.REMOTE_FUNCTIONS,
    **remote_plan.REMOTE_FUNCTIONS,
    **config_kernel.REMOTE_FUNCTIONS,
    **remote_checkpoint.REMOTE_FUNCTIONS,
    **remote_weights.REMOTE_FUNCTIONS,
}
QUESTIONS = {
    **functions.CONTROL_FUNCTIONS,
    **remote_checkpoint.CONTROL_FUNCTIONS,
    **remote_progress.CONTROL_FUNCTIONS,
}


def of_the_engine(name: str) -> Callable[..., Any]:
    module, _, function = name.partition(":")
    found: Callable[..., Any] = getattr(import_module(module), function)
    return found


@pytest.mark.parametrize(
    ("here", "name"), FUNCTIONS.items(), ids=lambda v: getattr(v, "__name__", None)
)
def test_parameters_match_the_engines_function(here: Callable[..., Future[Any]], name: str) -> None:
    """After `call` and `engine` come the engine function's own parameters, in its order."""
    ours = list(inspect.signature(here).parameters)
    theirs = inspect.signature(of_the_engine(name)).parameters
    # The engine is told its own number by its caller.
    names = [n for n in theirs if not (here is functions.describe and n == "engine_id")]
    required = [n for n in names if theirs[n].default is inspect.Parameter.empty]
    passed = ours[2:]

    assert ours[:2] == ["call", "engine"]
    assert passed == names[: len(passed)]
    assert len(passed) >= len(required)


@pytest.mark.parametrize(
    ("here", "name"), FUNCTIONS.items(), ids=lambda v: getattr(v, "__name__", None)
)
def test_a_call_sends_the_name_and_as_many_arguments_as_the_engine_takes(
    here: Callable[..., Future[Any]], name: str
) -> None:
    """What is sent can be bound to the engine's function."""
    sent: list[tuple[Any, ...]] = []

    def call(target: int, its_name: str, /, *args: Any) -> Future[Any]:
        sent.append((target, its_name, *args))
        return Future()

    count = len(inspect.signature(here).parameters) - 2
    here(call, 5, *[()] * count)
    [(target, its_name, *args)] = sent
    bound = inspect.signature(of_the_engine(name)).bind(*args)

    assert (target, its_name) == (5, name)
    assert bound.args is not None


def test_the_page_is_complete() -> None:
    """Every public function of the page stands in one of its tables."""
    public = {
        f
        for n, f in vars(functions).items()
        if inspect.isfunction(f) and f.__module__ == functions.__name__ and not n.startswith("_")
    }

    assert public == {*functions.REMOTE_FUNCTIONS, *functions.CONTROL_FUNCTIONS}


def test_what_the_control_thread_answers_is_what_can_be_asked() -> None:
    """Both tables have the same names, and the functions take the same arguments."""
    asked = {name: here for here, name in QUESTIONS.items()}
    parameters = {
        name: (
            list(inspect.signature(here).parameters)[2:],
            list(inspect.signature(responder.TABLE[name]).parameters),
        )
        for name, here in asked.items()
    }

    assert set(asked) == set(responder.TABLE)
    assert all(ours == theirs for ours, theirs in parameters.values())


@pytest.mark.parametrize("here", QUESTIONS, ids=lambda v: v.__name__)
def test_a_question_sends_its_name(here: Callable[..., Future[Any]]) -> None:
    """Each function of the page asks its engine by the name in the table."""
    sent: list[tuple[Any, ...]] = []

    def ask(target: int, its_name: str, /, *args: Any) -> Future[Any]:
        sent.append((target, its_name, *args))
        return Future()

    given = range(7, 5 + len(inspect.signature(here).parameters))
    here(ask, 5, *given)

    assert sent == [(5, QUESTIONS[here], *given)]


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
