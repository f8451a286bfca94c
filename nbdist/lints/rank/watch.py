"""Watches for what usually goes wrong in training, and reports it at the end of a cell.

Nothing here meets another rank: each rank notes what it sees by itself, in the user's own calls,
and sends it with its cell's output. What needs several ranks is compared in the notebook
(lints/rules). What was seen in a cell is forgotten with it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

from nbdist.lints.rules import Observation
from nbdist.rpc.rank.cell_hooks import CellContext
from nbdist.rpc.wire import CELL_RUN, SEEN

P = ParamSpec("P")
T = TypeVar("T")

# Each has install, begin (a cell begins) and end (it has ended: note what it showed). Actions in
# `undo` put back what it replaced. Imported when a rank has its names, not before its group is
# formed.
PARTS = (
    "nbdist.lints.rank.data",
    "nbdist.lints.rank.ddp",
    "nbdist.lints.rank.optimizer_steps",
    "nbdist.lints.rank.initial_values",
    "nbdist.lints.rank.model_inputs",
    "nbdist.lints.rank.sharded_twice",
    "nbdist.lints.rank.experts",
)


@dataclass(slots=True)
class _State:
    """Notes of this cell so far, and the modules that look.

    Attributes:
        noted: By lint and subject.
        parts: Modules that have begin and end.
        off: Lints and ids of objects at which they failed -> the object.
        failures: Of which a warning was shown: lints, class of the object.
    """

    noted: dict[tuple[str, str], Mapping[str, Any]] = field(default_factory=dict)
    parts: list[Any] = field(default_factory=list)
    off: dict[tuple[str, int], weakref.ref[Any]] = field(default_factory=dict)
    failures: set[tuple[str, str]] = field(default_factory=set)
    is_installed: bool = False
    is_in_cell: bool = False


_state = _State()
# What leaves torch as it was, once `uninstall` is called.
undo: list[Callable[[], None]] = []


def install() -> None:
    """Watch torch's calls from now on. Twice is harmless."""
    if not _state.is_installed:
        _state.is_installed = True
        _state.off.clear()
        _state.failures.clear()
        for name in PARTS:
            add(name)
            sys.modules[name].install()


def uninstall() -> None:
    """Leave torch as it was before `install`."""
    if _state.is_installed:
        _state.is_installed = False
        while undo:
            undo.pop()()


def add(name: str) -> None:
    """Let a module's begin and end be called at those of cells. Twice is harmless."""
    module = importlib.import_module(name)
    if module not in _state.parts:
        _state.parts.append(module)


def guarded(lints: str) -> Callable[[Callable[P, T]], Callable[P, T | None]]:
    """A function that runs in the user's calls: where it fails, the call goes on.

    It is then called no more for its first argument, and returns None at once; for all others it
    goes on. One warning for each class of objects says so, and names the lints.
    """

    def guard(function: Callable[P, T]) -> Callable[P, T | None]:
        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> T | None:
            # Looked up only once there is something: it stands in every step.
            if _state.off and _is_off(lints, args[0]):
                return None
            try:
                return function(*args, **kwargs)
            except Exception as error:  # noqa: BLE001  # the user's step is not to fail with it
                _turn_off(lints, args[0], error)
                return None

        return run

    return guard


def _is_off(lints: str, obj: object) -> bool:
    reference = _state.off.get((lints, id(obj)))
    return reference is not None and reference() is obj


def _turn_off(lints: str, obj: object, error: Exception) -> None:
    with contextlib.suppress(TypeError):  # it takes no weak reference: it is looked at again
        _state.off[lints, id(obj)] = weakref.ref(obj)
    kind = obj if isinstance(obj, str) else type(obj).__name__
    if (lints, kind) not in _state.failures:
        _state.failures.add((lints, kind))
        warnings.warn(
            f"off on this rank from now on for this {kind}: {lints} ({error!r}). Lints of other "
            "objects, and other lints, go on",
            stacklevel=1,
        )


def note(lint: str, subject: str, **facts: Any) -> None:
    """Something was seen in this cell. Again with the same subject, the newest counts."""
    _state.noted[lint, subject] = facts


def note_now(lint: str, subject: str, facts: Mapping[str, Any]) -> None:
    """The same, told at once: this rank may not see the end of its cell. Nothing outside of one."""
    if _state.is_in_cell:
        shell().display_pub.publish({SEEN: [[lint, subject, dict(facts)]]})


def begin() -> None:
    """Forget what the cell before has noted."""
    _state.noted.clear()
    for part in _state.parts:
        part.begin()


def collect() -> list[Observation]:
    """Collect the observations since `begin`; JSON can carry them. This rank alone."""
    for part in _state.parts:
        try:
            part.end()
        except Exception as error:  # noqa: BLE001  # what the other parts saw still counts
            name = part.__name__.rpartition(".")[2]
            warnings.warn(f"{name} of this cell could not be evaluated: {error!r}", stacklevel=1)
    return [Observation(lint, subject, facts) for (lint, subject), facts in _state.noted.items()]


@contextmanager
def around_cell(cell: CellContext) -> Iterator[None]:
    """Send what a cell of the notebook has shown, with its output."""
    if CELL_RUN not in cell.metadata:
        yield
        return
    begin()
    _state.is_in_cell = True
    try:
        yield
    finally:
        _state.is_in_cell = False
        try:
            if observations := collect():
                content = [[seen.lint, seen.subject, dict(seen.facts)] for seen in observations]
                cell.kernel.shell.display_pub.publish({SEEN: content})
        except KeyboardInterrupt:
            pass  # one press more: the cell has ended already
        except Exception as error:  # noqa: BLE001  # else the cell would get no reply at all
            warnings.warn(f"lints of this cell could not be evaluated: {error!r}", stacklevel=1)


def variable(is_meant: Callable[[Any], bool], otherwise: str) -> str:
    """The first of the user's variables whose value is meant; else what it is called otherwise."""
    user_shell = shell()
    for name, value in list(user_shell.user_ns.items()) if user_shell is not None else ():
        if not name.startswith("_") and is_meant(value):
            return str(name)
    return otherwise


def wrap(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Replace an attribute by what `make` makes of it; `uninstall` takes that back."""
    original = getattr(owner, name)
    replaced = functools.wraps(original)(make(original))
    setattr(owner, name, replaced)

    def put_back() -> None:
        # Whoever has wrapped it since keeps what he has.
        if getattr(owner, name) is replaced:
            setattr(owner, name, original)

    undo.append(put_back)


def local(tensor: Any) -> Any:
    """Return this rank's part of a DTensor, or the tensor, without importing DTensor."""
    part = getattr(tensor, "to_local", None)
    return (tensor if part is None else part()).detach()


def parameters_by_id(optimizer: Any) -> dict[int, Any]:
    """The parameters that an optimizer steps, by their id."""
    return {id(p): p for group in optimizer.param_groups for p in group["params"]}


def leaves(value: Any, depth: int = 4, most: int | None = None) -> Iterator[Any]:
    """Leaves of dicts, lists and tuples in each other, so deep; `most` entries of a list."""
    kind = type(value)
    if depth and issubclass(kind, dict):
        items: Iterable[Any] = dict.values(value)  # a class's own may load, or raise
    elif depth and issubclass(kind, Mapping):
        items = value.values()
    elif depth and issubclass(kind, list | tuple):
        own_iter = list.__iter__ if issubclass(kind, list) else tuple.__iter__
        items = itertools.islice(own_iter(value), most)
    else:
        yield value
        return
    for item in items:
        yield from leaves(item, depth - 1, most)


def shell() -> Any:
    """IPython's shell; None in a process without one."""
    from IPython.core.getipython import get_ipython

    return get_ipython()
