"""Changes of a strategy in a model's modules, written down and taken off again.

Steps change modules as torch does: other classes, hooks, attributes. Nothing public of torch
takes these off. So every module is looked at before and after, and the difference is the record.
What the user changes meanwhile, hooks of his own included, is not in it and stays.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

_VALUES = ("_parameters", "_buffers")
# Hooks of all kinds, and the submodules.
_TABLES = tuple(
    key
    for key, value in vars(torch.nn.Module()).items()
    if isinstance(value, dict) and key not in _VALUES
)
# FSDP2 registers some hooks only at the first forward.
_LATE = "torch.distributed.fsdp."
_ABSENT = object()


@dataclass(frozen=True, slots=True)
class ModuleSnapshot:
    """One module as it was.

    Attributes:
        attributes: Its `__dict__`; the values themselves.
        tables: What the dicts in it held: hooks, submodules, parameters, buffers.
        lists: What the lists in it held: an LSTM keeps its parameters in one as well.
        shard_state: What FSDP2's table of modules says of it.
    """

    module: torch.nn.Module
    kind: type
    attributes: dict[str, Any]
    tables: dict[str, dict[Any, Any]]
    lists: dict[str, list[Any]]
    shard_state: Any


@dataclass(frozen=True, slots=True)
class ModuleChange:
    """Changes of steps in one module: (key -> the value before, the value that they set).

    Attributes:
        kind: Its class before.
        attributes: Of its `__dict__`.
        tables: Of its hooks and submodules, by the name of the table.
    """

    module: torch.nn.Module
    kind: type
    attributes: dict[str, tuple[Any, Any]]
    tables: dict[str, dict[Any, tuple[Any, Any]]]


def snapshot_modules(base: torch.nn.Module) -> list[ModuleSnapshot]:
    """Every module of a model as it is; no values are copied."""
    states = _shard_states()
    return [
        ModuleSnapshot(
            module,
            type(module),
            dict(vars(module)),
            {key: dict(vars(module)[key]) for key in (*_TABLES, *_VALUES)},
            {key: list(value) for key, value in vars(module).items() if type(value) is list},
            states.get(module),
        )
        for module in base.modules()
    ]


def restore(snapshots: Iterable[ModuleSnapshot]) -> None:
    """Make modules exactly what they were. Tables stay the same dicts, which handles refer to."""
    states = _shard_states()
    for snapshot in snapshots:
        module: Any = snapshot.module
        module.__class__ = snapshot.kind
        attributes = vars(module)
        attributes.clear()
        attributes.update(snapshot.attributes)
        for key, table in snapshot.tables.items():
            attributes[key].clear()
            attributes[key].update(table)
        for key, items in snapshot.lists.items():
            attributes[key][:] = items
        _set_shard_state(states, module, snapshot.shard_state)


def diff(snapshots: Iterable[ModuleSnapshot]) -> list[ModuleChange]:
    """Find the changes since the snapshots, by module. Parameters and buffers do not count."""
    changes = []
    for snapshot in snapshots:
        module = snapshot.module
        attributes = vars(module)
        tables = {key: _difference(snapshot.tables[key], attributes[key]) for key in _TABLES}
        others = {
            key: pair
            for key, pair in _difference(snapshot.attributes, attributes).items()
            if key not in (*_TABLES, *_VALUES)
        }
        changes.append(ModuleChange(module, snapshot.kind, others, tables))
    return changes


def revert(changes: Iterable[ModuleChange]) -> None:
    """Undo changes, wherever there still is what the steps had put there."""
    from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY

    states = _shard_states()
    for change in changes:
        module: Any = change.module
        module.__class__ = change.kind
        attributes = vars(module)
        _undo(attributes, change.attributes)
        for key in _TABLES:
            _undo(attributes[key], change.tables[key])
            for late in [k for k, hook in attributes[key].items() if _is_late(hook)]:
                # Wherever its number stands: some tables only say how others are called.
                for hooks in set(_TABLES) - {"_modules"}:
                    attributes[hooks].pop(late, None)
        _set_shard_state(states, module, None)
        for key in (STATE_KEY, REGISTRY_KEY):  # of what fully_shard has sharded
            attributes.pop(key, None)


def _difference(before: dict[Any, Any], after: dict[Any, Any]) -> dict[Any, tuple[Any, Any]]:
    keys = dict.fromkeys((*before, *after))
    pairs = {key: (before.get(key, _ABSENT), after.get(key, _ABSENT)) for key in keys}
    return {key: (old, new) for key, (old, new) in pairs.items() if old is not new}


def _undo(table: dict[Any, Any], pairs: dict[Any, tuple[Any, Any]]) -> None:
    for key, (old, new) in pairs.items():
        if table.get(key, _ABSENT) is not new:
            continue  # the user has put something else there
        if old is _ABSENT:
            del table[key]
        else:
            table[key] = old


def _is_late(hook: Any) -> bool:
    function = hook
    while isinstance(function, functools.partial):
        function = function.func
    if not callable(function) or isinstance(function, torch.nn.Module):
        return False
    return str(getattr(inspect.unwrap(function), "__module__", "")).startswith(_LATE)


def _shard_states() -> Any:
    """FSDP2's table of modules. A module that stands in it cannot be sharded again."""
    from torch.distributed import _composable_state

    return _composable_state._module_state_mapping  # noqa: SLF001


def _set_shard_state(states: Any, module: torch.nn.Module, state: Any) -> None:
    if state is None:
        states.pop(module, None)
    else:
        states[module] = state
