"""After a switch: the user's names get the new objects, and what still holds old ones is reported.

Old parameters and wrappers are dead: whatever holds one is wrong. The user's variables, plain
lists and plain dicts are updated. What cannot be changed without guessing (a closure, an
attribute, a default argument) is found through Python's garbage collector and reported.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import gc
import re
import sys
import traceback
import types
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer

from nbdist.core.failures import chain
from nbdist.rpc.rank import namespace

# Their objects hold what they need, and look after it themselves.
_INTERNAL = (
    "IPython.",
    "accelerate.",
    "ipykernel.",
    "nbdist.",
    "torch.autograd.",
    "torch.distributed.",
    "torch.nn.parallel.",
    "torch._",
)
# IPython's memory of outputs: put right as all others, and not worth a line.
_HISTORY = frozenset({"In", "Out"})
# A bound method too: only who holds it can be told from others.
_CONTAINERS = (
    list, dict, tuple, set, frozenset, collections.deque, types.CellType, types.MethodType,
)  # fmt: skip
# A list in an attribute of an object in a list: nobody reads a longer way.
_MAX_DEPTH = 5
_MAX_NAMED = 4
# Targets asked for at once, how often, and containers at a level: for time alone.
_AT_ONCE = 4
_MAX_LOOKS = 8
_MAX_LEVEL = 64


@dataclass(frozen=True, slots=True)
class Replacement:
    """An object, what stands in its place from now on, and what it is called in messages."""

    old: Any
    new: Any
    label: str


@dataclass(slots=True)
class RebindReport:
    """The user's names and containers after a switch.

    Attributes:
        lists: Lists and dicts that hold new objects now.
        stale: What still points to an old one, a phrase each.
    """

    names: list[str] = field(default_factory=list)
    lists: list[str] = field(default_factory=list)
    stale: list[str] = field(default_factory=list)


def names_for(held_object: object) -> list[str]:
    """The user's variables that hold an object, in the order in which they were made."""
    return [
        name
        for name, value in namespace.everything().items()
        if value is held_object and _is_shown(name)
    ]


def rebind(
    dead: list[Replacement], modules: Sequence[Replacement] = (), excluded: Collection[str] = ()
) -> RebindReport:
    """Update the user's names and plain lists, and report what else holds something old.

    This rank alone.

    Args:
        dead: Parameters that are replaced, and wrappers that are gone. The list is emptied, and
            what nobody else holds ends in here.
        modules: The user's own modules where a wrapper has come. They are not dead: variables,
            and the lists and dicts in variables, change, and what else holds one is named.
        excluded: Variables that mean the user's own module, and stay.
    """
    user = namespace.everything()
    fresh = {id(pair.old): pair.new for pair in (*dead, *modules)}
    report = RebindReport()
    # No loop over values: this frame would hold the last one, which nobody else may hold now.
    for name in [name for name, value in user.items() if id(value) in fresh]:
        if name not in excluded:
            user[name] = fresh[id(user[name])]
            if _is_shown(name):
                report.names.append(name)
    for name, container in _plain_in(user):
        if _replace(container, fresh) and _is_shown(name):
            report.lists.append(name)
    fresh.clear()  # an id may soon be another object's
    _name_holders(_still_held(dead), modules, excluded, report)
    return report


def holders(objects: Sequence[Any]) -> list[list[str]]:
    """The names by which each object can be reached, for messages; none for what is internal."""
    if not objects:
        return []
    search = _Search([*objects, object()], ())  # the last one is held as all others
    names: dict[int, list[str]] = {id(obj): [] for obj in objects}
    for holder, targets in search.holders():
        for target in targets:
            names.setdefault(id(target), []).extend(search.names(holder, target))
    return [names[id(obj)] for obj in objects]


def _still_held(dead: list[Replacement]) -> list[Replacement]:
    """Let go of dead objects, and return those that somebody else holds.

    The variables of frames of the last failed cell's traceback are dropped: nobody can assign them.
    """
    for error in chain(getattr(sys, "last_value", None)):
        traceback.clear_frames(error.__traceback__)
    references = [(weakref.ref(pair.old), pair.new, pair.label) for pair in dead]
    dead.clear()
    gc.collect()  # DDP's and FSDP's objects hold each other in circles
    return [
        Replacement(old, new, label)
        for reference, new, label in references
        if (old := reference()) is not None
    ]


def _name_holders(
    dead: Sequence[Replacement],
    modules: Sequence[Replacement],
    excluded: Collection[str],
    report: RebindReport,
) -> None:
    """Look through Python's objects for those that hold something old; see `rebind`."""
    fresh = {id(pair.old): pair.new for pair in dead}
    labels = {id(pair.old): pair.label for pair in (*dead, *modules)}
    probe = Replacement(object(), None, "")  # held as all others, and by nobody else
    search = _Search([pair.old for pair in (*dead, *modules, probe)], excluded)
    labels_by_name: dict[str, list[str]] = {}
    for holder, targets in search.holders():
        is_right = type(holder) in (list, dict) and not search.is_table(holder)
        is_right = is_right and not search.is_only_internal(holder)
        if is_right and _replace(holder, fresh):
            report.lists += [name for name in search.names(holder) if name not in report.lists]
        for target in targets:
            if is_right and id(target) in fresh and not _is_key(holder, target):
                continue
            for name in search.names(holder, target):
                labels_by_name.setdefault(name, []).append(labels[id(target)])
    for name, target_labels in labels_by_name.items():
        distinct = list(dict.fromkeys(target_labels))
        more = f" and {len(distinct) - _MAX_NAMED} more" if len(distinct) > _MAX_NAMED else ""
        report.stale.append(f"{name} ({', '.join(distinct[:_MAX_NAMED])}{more})")


class _Search:
    """Who holds what, level by level.

    The collector's answer takes time in proportion to how many objects it is asked for, so it is
    asked for those alone that somebody besides us holds, a few at a time.
    """

    def __init__(self, targets: list[Any], excluded: Collection[str]) -> None:
        self._targets = targets
        self._excluded = excluded
        self._owners: dict[int, list[Any]] = {}
        self._variables = {id(value): name for name, value in namespace.everything().items()}
        # What is ours, and is no finding. Kept alive, so that an id stays one object's.
        self._ours: list[Any] = [self, vars(self), targets, self._owners, self._variables]
        level = self._direct_holders()
        for _ in range(_MAX_DEPTH):
            level = self._climb(level)

    def _direct_holders(self) -> list[Any]:
        """Look for who holds targets; return the holders that have no name of their own."""
        level: list[Any] = []
        for _ in range(_MAX_LOOKS):
            counts = [
                sys.getrefcount(target) - self._count_explained(target) for target in self._targets
            ]
            # The last target is held by us alone.
            odd = [index for index, count in enumerate(counts) if count > counts[-1]]
            if not odd:
                break
            level += self._climb([self._targets[index] for index in odd[:_AT_ONCE]], self._targets)
        return list({id(holder): holder for holder in level}.values())

    def _count_explained(self, target: Any) -> int:
        """How many references to a target come from owners that are known."""
        owners = self._owners.get(id(target), ())
        return sum(
            sum(referent is target for referent in gc.get_referents(owner)) for owner in owners
        )

    def holders(self) -> Iterator[tuple[Any, list[Any]]]:
        """Each object that holds targets, with these."""
        targets_by_owner: dict[int, tuple[Any, list[Any]]] = {}
        for target in self._targets:
            for owner in self._owners.get(id(target), ()):
                targets_by_owner.setdefault(id(owner), (owner, []))[1].append(target)
        yield from targets_by_owner.values()

    def names(self, item: Any, inner: Any = None) -> list[str]:
        """Names, for messages, of an item, or of where it holds `inner`; empty if internal."""
        key = "" if inner is None else _key(item, inner)
        return list(dict.fromkeys(_short(name) for name in self._paths(item, key, 0)))

    def is_table(self, holder: Any) -> bool:
        """Whether a dict holds an object's attributes, a module's names or its children."""
        return type(holder) is dict and any(
            _attributes(owner) is holder
            or (type(owner) is dict and isinstance(self._object_of(owner), torch.nn.Module))
            for owner in self._owners.get(id(holder), ())
        )

    def is_only_internal(self, holder: Any) -> bool:
        """Whether nobody but packages that look after it themselves has it."""
        owners = self._owners.get(id(holder), ())
        return bool(owners) and all(
            is_internal(owner) or is_internal(self._object_of(owner)) for owner in owners
        )

    def _object_of(self, table: Any) -> Any:
        """The object whose attributes a dict holds."""
        owners = self._owners.get(id(table), ())
        return next((owner for owner in owners if _attributes(owner) is table), None)

    def _climb(self, level: list[Any], others: Sequence[Any] = ()) -> list[Any]:
        """Note who holds these (and which of the others), and return who has no name."""
        if not level:
            return []
        ours = {id(mine) for mine in self._ours}
        wanted = {id(target) for target in (*level, *others)}
        referrers = gc.get_referrers(*level[:_MAX_LEVEL])
        if not any(referrer is namespace.everything() for referrer in referrers):
            referrers.append(
                namespace.everything()
            )  # which the collector does not show after gc.freeze()
        above: list[Any] = []
        for owner in referrers:
            is_ours = id(owner) in ours or isinstance(owner, types.FrameType) or owner is level
            if is_ours or owner is others:
                continue
            inside = {id(referent) for referent in gc.get_referents(owner)} & wanted
            for key in inside:
                owners = self._owners.setdefault(key, [])
                if not any(known_owner is owner for known_owner in owners):
                    owners.append(owner)
                    self._ours.append(owners)
            if inside and isinstance(owner, _CONTAINERS) and owner is not namespace.everything():
                above.append(owner)
        self._ours.append(above)
        return above

    def _paths(self, item: Any, way: str, depth: int) -> Iterator[str]:
        if item is namespace.everything():
            name = way.removeprefix("['").replace("']", "", 1)
            if _is_shown(re.split(r"[.\[]", name)[0]) and name not in self._excluded:
                yield name
        elif isinstance(item, _CONTAINERS):
            if depth < _MAX_DEPTH:
                for owner in self._owners.get(id(item), ()):
                    yield from self._paths(owner, self._step(owner, item) + way, depth + 1)
        elif not is_internal(item):
            yield self._describe(item, way)

    def _step(self, owner: Any, item: Any) -> str:
        """The part of a way from an owner to what it holds."""
        if _attributes(owner) is item or isinstance(item, types.CellType):
            return ""
        return _key(owner, item)

    def _describe(self, item: Any, way: str) -> str:
        if isinstance(item, types.FunctionType):
            closure = gc.get_referents(*(item.__closure__ or ()))
            is_inside = any(id(cell_value) in map(id, self._targets) for cell_value in closure)
            is_inside = is_inside or any(id(cell_value) in self._owners for cell_value in closure)
            where = "the closure of" if is_inside else "a default argument of"
            return f"{where} {item.__qualname__}"
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
        yield from ((f"{name}[{key!r}]", item) for key, item in items if type(item) in (list, dict))


def _replace(container: Any, fresh: Mapping[int, Any]) -> bool:
    """Put new objects in old ones' places in a list, or a dict's values."""
    items = list(container.items() if type(container) is dict else enumerate(container))
    hits = [(key, fresh[id(item)]) for key, item in items if id(item) in fresh]
    for key, new in hits:
        container[key] = new
    return bool(hits)


def _key(owner: Any, item: Any) -> str:
    """Under which key, index or attribute an object is in another one."""
    table: Any = owner
    if isinstance(owner, list | tuple | collections.deque):
        table = dict(enumerate(owner))
    elif not isinstance(owner, dict):
        table = _attributes(owner) or _in_slots(owner)
        return next((f".{key}" for key, value in table.items() if value is item), "")
    if _is_key(owner, item):
        return ", as a key"
    return next((f"[{key!r}]" for key, value in table.items() if value is item), "")


def _is_key(owner: Any, item: Any) -> bool:
    return isinstance(owner, dict) and any(key is item for key in owner)


def _attributes(item: Any) -> dict[str, Any] | None:
    """An object's `__dict__`, without running its code."""
    if isinstance(item, (*_CONTAINERS, types.FunctionType)):
        return None
    try:
        attributes = object.__getattribute__(item, "__dict__")
    except (AttributeError, TypeError):
        return None
    return attributes if type(attributes) is dict else None


def _in_slots(item: Any) -> dict[str, Any]:
    values = {}
    for kind in type(item).__mro__:
        for name, member in vars(kind).items():
            if isinstance(member, types.MemberDescriptorType):
                with contextlib.suppress(AttributeError):
                    values[name] = member.__get__(item)
    return values


def has_hooks(parameter: torch.Tensor) -> bool:
    """Whether the user has registered hooks on a parameter. Strategies register their own.

    Private: nothing public lists a tensor's hooks.
    """
    tables = (
        getattr(parameter, "_backward_hooks", None),
        getattr(parameter, "_post_accumulate_grad_hooks", None),
    )
    hooks = [hook for table in tables if table for hook in table.values()]
    return any(not is_internal(hook) for hook in hooks)


def is_internal(item: Any) -> bool:
    """Whether an object belongs to a package that looks after it itself."""
    while isinstance(item, functools.partial):
        item = item.func
    if isinstance(item, Optimizer):
        return True
    if isinstance(item, types.FunctionType | types.ModuleType):
        return f"{getattr(item, '__module__', None) or item.__name__}.".startswith(_INTERNAL)
    return f"{type(item).__module__}.".startswith(_INTERNAL)


def _is_shown(name: str) -> bool:
    return not name.startswith("_") and name not in _HISTORY


def _dotted(way: str) -> str:
    """['net'] of an object's attributes as .net; the rest as it is."""
    return re.sub(r"^\['([^']+)'\]", r".\1", way)


def _short(name: str) -> str:
    """Leave out in which table of a module something is."""
    return re.sub(r"(\._|\['_)(modules|parameters|buffers)('\])?\['([^']+)'\]", r".\4", name)
