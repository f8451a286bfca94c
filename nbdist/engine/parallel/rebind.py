"""After a switch: the user's names get the new objects, and what still holds old ones is named.

Old parameters and wrappers are dead: whatever holds one is wrong. The user's variables, plain
lists and plain dicts are put right. What cannot be changed without guessing (a closure, an
attribute, a default argument) is found through Python's garbage collector, and told.
"""

from __future__ import annotations

import collections
import functools
import gc
import re
import sys
import types
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from IPython.core.getipython import get_ipython
from torch.optim import Optimizer

# Their objects hold what they need, and look after it themselves.
_INTERNAL = (
    "accelerate.",
    "nbdist.",
    "torch.autograd.",
    "torch.distributed.",
    "torch.nn.parallel.",
    "torch._",
)
# IPython's memory of outputs: put right as all others, and not worth a line.
_HISTORY = frozenset({"In", "Out"})
_CONTAINERS = (list, dict, tuple, set, frozenset, collections.deque, types.CellType)
# A list in an attribute of an object in a list: nobody reads a longer way.
_MAX_DEPTH = 5
_MAX_NAMED = 4


@dataclass(frozen=True, slots=True)
class Pair:
    """An object and what stands in its place from now on.

    Attributes:
        old: It.
        new: The other one.
        label: What it is, for a person: "model", or a parameter's name.
    """

    old: Any
    new: Any
    label: str


@dataclass(slots=True)
class Rebound:
    """What was found.

    Attributes:
        names: Variables that stand for the new object now.
        lists: Lists and dicts that hold new objects now.
        stale: What still points to an old one, a phrase each.
    """

    names: list[str] = field(default_factory=list)
    lists: list[str] = field(default_factory=list)
    stale: list[str] = field(default_factory=list)


def variables() -> dict[str, Any]:
    """The user's variables; the very dict."""
    shell = get_ipython()
    found: dict[str, Any] = vars(sys.modules["__main__"]) if shell is None else shell.user_ns
    return found


def names_for(one: object) -> set[str]:
    """The user's variables that hold an object."""
    return {name for name, value in variables().items() if value is one}


def rebind(
    dead: Sequence[Pair], modules: Sequence[Pair] = (), kept: Collection[str] = ()
) -> Rebound:
    """Put the user's names and plain lists right, and name what else holds something old.

    This rank alone.

    Args:
        dead: Parameters that are replaced, and wrappers that are gone.
        modules: The user's own modules where a wrapper has come. They are not dead: variables,
            and the lists and dicts in variables, change, and what else holds one is named.
        kept: Variables that mean the user's own module, and stay.
    """
    user = variables()
    fresh = {id(pair.old): pair.new for pair in (*dead, *modules)}
    found = Rebound()
    for name, value in list(user.items()):
        if id(value) in fresh and name not in kept:
            user[name] = fresh[id(value)]
            if _is_shown(name):
                found.names.append(name)
    for name, held in _plain_in(user):
        if _replace(held, fresh) and _is_shown(name):
            found.lists.append(name)
    labels = {id(pair.old): pair.label for pair in (*dead, *modules)}
    # Of the user's own module the variables that stay are no news.
    _name_holders([pair.old for pair in dead], fresh, labels, found)
    _name_holders([pair.old for pair in modules], {}, labels, found)
    return found


def _name_holders(
    targets: list[Any], fresh: Mapping[int, Any], labels: Mapping[int, str], found: Rebound
) -> None:
    """Look through Python's objects for those that hold a target; see `rebind`."""
    search = _Search(targets)
    told: dict[str, list[str]] = {}
    for holder, held in search.holders():
        is_plain = type(holder) in (list, dict) and not search.is_table(holder)
        if fresh and is_plain and not search.is_internal(holder):
            if _replace(holder, fresh):
                found.lists += [name for name in search.names(holder) if name not in found.lists]
            continue
        for one in held:
            for name in search.names(holder, one):
                told.setdefault(name, []).append(labels[id(one)])
    for name, what in told.items():
        own = list(dict.fromkeys(what))
        more = f" and {len(own) - _MAX_NAMED} more" if len(own) > _MAX_NAMED else ""
        found.stale.append(f"{name} ({', '.join(own[:_MAX_NAMED])}{more})")


class _Search:
    """Who holds what, level by level; one look through all objects for each level."""

    def __init__(self, targets: list[Any]) -> None:
        self._targets = targets
        self._own = {id(self), id(vars(self)), id(targets)}
        self._owners: dict[int, list[Any]] = {}
        level = targets
        # Kept alive, so that an id stays one object's.
        self._levels: list[list[Any]] = []
        self._own.add(id(self._levels))
        self._own.add(id(self._owners))
        while level and len(self._levels) < _MAX_DEPTH:
            self._levels.append(level)
            self._own.add(id(level))
            level = self._climb(level)
        self._variables = {id(value): name for name, value in variables().items()}

    def holders(self) -> Iterator[tuple[Any, list[Any]]]:
        """Each object that holds targets, with these."""
        held: dict[int, tuple[Any, list[Any]]] = {}
        for target in self._targets:
            for owner in self._owners.get(id(target), ()):
                held.setdefault(id(owner), (owner, []))[1].append(target)
        yield from held.values()

    def names(self, item: Any, inner: Any = None) -> list[str]:
        """How a person would call what holds something; nothing for what is internal.

        Args:
            item: It.
            inner: What it holds; None to name the item itself.
        """
        own = "" if inner is None else _key(item, inner)
        return list(dict.fromkeys(_short(name) for name in self._paths(item, own, 0)))

    def is_table(self, holder: Any) -> bool:
        """Whether a dict holds an object's attributes, a module's names or its children."""
        return type(holder) is dict and any(
            _attributes(owner) is holder
            or (type(owner) is dict and isinstance(self._object_of(owner), torch.nn.Module))
            for owner in self._owners.get(id(holder), ())
        )

    def is_internal(self, holder: Any) -> bool:
        """Whether nobody but packages that look after it themselves has it."""
        owners = self._owners.get(id(holder), ())
        return bool(owners) and all(
            _is_internal(owner) or _is_internal(self._object_of(owner)) for owner in owners
        )

    def _object_of(self, table: Any) -> Any:
        """The object whose attributes a dict holds."""
        owners = self._owners.get(id(table), ())
        return next((one for one in owners if _attributes(one) is table), None)

    def _climb(self, level: list[Any]) -> list[Any]:
        """Note who holds these, and return who has no name of its own."""
        wanted = {id(one): one for one in level}
        self._own.add(id(wanted))
        found = gc.get_referrers(*level)
        above = []
        for owner in found:
            if id(owner) in self._own or isinstance(owner, types.FrameType):
                continue
            inside = {id(one) for one in gc.get_referents(owner)} & wanted.keys()
            for key in inside:
                self._owners.setdefault(key, []).append(owner)
            if isinstance(owner, _CONTAINERS) and owner is not variables():
                above.append(owner)
        self._own.add(id(found))
        self._own.add(id(above))
        for key in wanted:
            self._own.add(id(self._owners.get(key)))
        return above

    def _paths(self, item: Any, way: str, depth: int) -> Iterator[str]:
        if item is variables():
            name = way.removeprefix("['").replace("']", "", 1)
            if _is_shown(re.split(r"[.\[]", name)[0]):
                yield name
        elif isinstance(item, _CONTAINERS):
            if depth < _MAX_DEPTH:
                for owner in self._owners.get(id(item), ()):
                    yield from self._paths(owner, self._step(owner, item) + way, depth + 1)
        elif not _is_internal(item):
            yield self._called(item, way)

    def _step(self, owner: Any, item: Any) -> str:
        """The part of a way from an owner to what it holds."""
        if _attributes(owner) is item or isinstance(item, types.CellType | tuple):
            return ""
        return _key(owner, item)

    def _called(self, item: Any, way: str) -> str:
        if isinstance(item, types.FunctionType):
            closure = [cell.cell_contents for cell in item.__closure__ or () if _is_full(cell)]
            is_inside = any(id(one) in map(id, self._targets) for one in closure)
            is_inside = is_inside or any(id(one) in self._owners for one in closure)
            where = "the closure of" if is_inside else "a default argument of"
            return f"{where} {item.__qualname__}"
        if isinstance(item, types.MethodType):
            return f"the bound method {item.__func__.__qualname__}"
        if isinstance(item, functools.partial):
            return f"a partial of {getattr(item.func, '__qualname__', item.func)}"
        if isinstance(item, types.ModuleType):
            return f"{item.__name__}{_dotted(way)}"
        name = self._variables.get(id(item)) or type(item).__name__
        return f"{name}{_dotted(way)}"


def _plain_in(user: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The lists and dicts in variables, and those in these."""
    for name, value in list(user.items()):
        if type(value) not in (list, dict) or value is user or name.startswith("__"):
            continue
        yield name, value
        items = list(value.items() if type(value) is dict else enumerate(value))
        yield from (
            (f"{name}[{key!r}]", item) for key, item in items if type(item) in (list, dict)
        )


def _replace(held: Any, fresh: Mapping[int, Any]) -> bool:
    """Put new objects in old ones' places in a list, or a dict's values."""
    items = list(held.items() if type(held) is dict else enumerate(held))
    hits = [(key, fresh[id(item)]) for key, item in items if id(item) in fresh]
    for key, new in hits:
        held[key] = new
    return bool(hits)


def _key(owner: Any, item: Any) -> str:
    """Under which key, index or attribute an object is in another one."""
    table: Any = owner
    if isinstance(owner, list | tuple | collections.deque):
        table = dict(enumerate(owner))
    elif not isinstance(owner, dict):
        table = _attributes(owner) or {}
        return next((f".{key}" for key, value in table.items() if value is item), "")
    return next((f"[{key!r}]" for key, value in table.items() if value is item), "")


def _attributes(one: Any) -> dict[str, Any] | None:
    """An object's `__dict__`, without running its code."""
    if isinstance(one, (*_CONTAINERS, types.FunctionType)):
        return None
    try:
        found = object.__getattribute__(one, "__dict__")
    except (AttributeError, TypeError):
        return None
    return found if type(found) is dict else None


def _is_internal(one: Any) -> bool:
    if isinstance(one, Optimizer):
        return True
    if isinstance(one, types.FunctionType | types.ModuleType):
        return f"{getattr(one, '__module__', None) or one.__name__}.".startswith(_INTERNAL)
    return f"{type(one).__module__}.".startswith(_INTERNAL)


def _is_full(cell: types.CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def _is_shown(name: str) -> bool:
    return not name.startswith("_") and name not in _HISTORY


def _dotted(way: str) -> str:
    """['net'] of an object's attributes as .net"""
    return re.sub(r"^\['([^']+)'\]", r".\1", way)


def _short(name: str) -> str:
    """Leave out in which table of a module something is."""
    return re.sub(r"(\._|\['_)(modules|parameters|buffers)('\])?\['([^']+)'\]", r".\4", name)


