"""Watches for what usually goes wrong in training, and reports it at the end of a cell.

Nothing here meets another rank: each rank notes what it sees by itself, in the user's own calls,
and sends it with its cell's output. What needs several ranks is compared in the notebook
(lints/rules). What was seen in a cell is forgotten with it.
"""

from __future__ import annotations

import functools
import importlib
import sys
import warnings
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
)


@dataclass(slots=True)
class _State:
    """What this cell has noted so far, by lint and subject; modules that have begin and end."""

    noted: dict[tuple[str, str], Mapping[str, Any]] = field(default_factory=dict)
    parts: list[Any] = field(default_factory=list)
    is_installed: bool = False
    is_broken: bool = False
    is_in_cell: bool = False


_state = _State()
# What leaves torch as it was, once `uninstall` is called.
undo: list[Callable[[], None]] = []


def install() -> None:
    """Watch torch's calls from now on. Twice is harmless."""
    if not _state.is_installed:
        _state.is_installed, _state.is_broken = True, False
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


def guarded(function: Callable[P, T]) -> Callable[P, T | None]:
    """A function that runs in the user's calls: where it fails, lints end and the call goes on.

    One warning says so; all of them then return None at once.
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T | None:
        if _state.is_broken:
            return None
        try:
            return function(*args, **kwargs)
        except Exception as error:  # noqa: BLE001  # the user's step is not to fail with it
            _state.is_broken = True
            warnings.warn(f"lints are off on this rank from now on: {error!r}", stacklevel=1)
            return None

    return run


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
    """What was seen since `begin`; JSON can carry it. This rank alone."""
    for part in _state.parts:
        part.end()
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
    """This rank's part of a DTensor, or the tensor; without loading DTensors for it."""
    part = getattr(tensor, "to_local", None)
    return (tensor if part is None else part()).detach()


def parameters_by_id(optimizer: Any) -> dict[int, Any]:
    """The parameters that an optimizer steps, by their id."""
    return {id(p): p for group in optimizer.param_groups for p in group["params"]}


def leaves(value: Any, depth: int = 4, most: int | None = None) -> Iterator[Any]:
    """What is in dicts, lists and tuples in each other, so deep; `most` entries of a list."""
    if depth and isinstance(value, Mapping):
        items: Iterable[Any] = value.values()
    elif depth and isinstance(value, list | tuple):
        items = value[:most]
    else:
        yield value
        return
    for item in items:
        yield from leaves(item, depth - 1, most)


def shell() -> Any:
    """IPython's shell; None in a process without one."""
    from IPython.core.getipython import get_ipython

    return get_ipython()
