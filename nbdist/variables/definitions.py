"""Functions and classes of cells as their code, for processes in which these cells have not run.

There their globals are that process's variables, as if the cells had run there.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import linecache
import sys
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NoReturn

import cloudpickle

from nbdist.errors import TransferError
from nbdist.variables.pack import Packed, Packer, pack

MAIN = "__main__"  # the module of what cells define


def cell_variables() -> dict[str, Any]:
    """The variables of this process's cells."""
    return vars(sys.modules[MAIN])


class _CellVariables(dict[str, Any]):
    """Stands in a pickle for the variables of the process that loads it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return cell_variables, ()


def _variable_of(value: FunctionType | type) -> tuple[str, Any]:
    """(name, value) of the cells' variable under which this, or what it is part of, is found."""
    name, *parts = value.__qualname__.split(".")
    variable = cell_variables().get(name) if value.__module__ == MAIN else None
    part = variable
    for attribute in parts:
        part = getattr(part, attribute, None)
    return (name, variable) if part is value else ("", None)


def code_of_cell(make: Callable[..., CodeType], args: Any, file: str, text: str) -> CodeType:
    """A code object, whose lines tracebacks find as those of this file, which need not exist."""
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    return make(*args)


def corrected(value: Any) -> Any:
    """How to reduce what cloudpickle 3 makes wrong or refuses of classes; else NotImplemented."""
    if value is dataclasses.MISSING:  # which dataclasses compare by identity
        return "MISSING"
    if isinstance(value, functools.cached_property):  # Python 3.11's has a lock
        return functools.cached_property, (value.func,), {"attrname": value.attrname}
    return NotImplemented


def _refuse_file(file: io.TextIOWrapper) -> NoReturn:
    raise TypeError(f"cannot pickle {type(file).__name__!r} object")


class DefinitionPacker(Packer, cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles by value the functions and classes of cells that it is told to, others by name."""

    # cloudpickle would send the text of an open file.
    dispatch_table = cloudpickle.Pickler.dispatch_table.new_child({io.TextIOWrapper: _refuse_file})

    def __init__(
        self, *args: Any, by_value: AbstractSet[int], name_of: Callable[[str], str], **named: Any
    ):
        super().__init__(*args, **named)
        self._by_value, self._name_of = by_value, name_of  # the former by id()
        # cloudpickle's table of what becomes of a function's globals.
        self.globals_ref[id(cell_variables())] = _CellVariables()

    def reducer_override(self, value: Any) -> Any:
        """Reduce as Packer does; note which variables of cells a function needs."""
        reduced = super().reducer_override(value)
        if reduced is not NotImplemented:
            return reduced
        if isinstance(value, CodeType):
            return self._reduce_code(value)
        if not isinstance(value, FunctionType | type):
            return corrected(value)
        variables = cell_variables()
        name, variable = _variable_of(value)
        if name and not {id(value), id(variable)} & self._by_value:
            self.uses[name] = variable
            return NotImplemented  # so it goes by its name
        reduced = cloudpickle.Pickler.reducer_override(self, value)
        if reduced is not NotImplemented and getattr(value, "__globals__", None) is variables:
            # Its globals by cloudpickle 3: they are variables of their own here, which the
            # receiver binds or not, and never when it unpickles.
            _, slots = reduced[2]
            self.uses |= slots["__globals__"]
            slots["__globals__"] = {}
        return reduced

    def _reduce_code(self, code: CodeType) -> Any:
        text = "".join(linecache.getlines(code.co_filename))
        file = self._name_of(code.co_filename)
        make, args = self.dispatch_table[CodeType](code.replace(co_filename=file))
        return (code_of_cell, (make, args, file, text)) if text else (make, args)


def pack_definitions(
    variables: Mapping[str, object],
    torch: Any = None,
    name_of: Callable[[str], str] = str,
    *,
    keeps_memory: bool = True,
) -> Packed:
    """Take values apart, those that are functions and classes of cells as their code.

    What they use is not in it, but named in `uses`; as is what instances in it are made of.

    Args:
        variables: By name.
        torch: The module, where it is loaded.
        name_of: What the file of a cell's code is called in the receiver's tracebacks.
        keeps_memory: As in pack.

    Raises:
        TransferError: If one of them cannot be pickled; the message names it.
    """
    by_value = {id(value) for value in variables.values()}
    packer = functools.partial(DefinitionPacker, by_value=by_value, name_of=name_of)
    return pack(variables, torch, keeps_memory=keeps_memory, packer_type=packer)


def used_by(
    packed: Packed, named: Mapping[str, object], torch: Any = None
) -> tuple[dict[str, Any], dict[str, str]]:
    """(name -> value of what is used, directly or not; name -> why it cannot be sent).

    `named` is sent already, and not in it.
    """
    uses, refused, new = dict[str, Any](), dict[str, str](), dict(packed.uses)
    while new:
        name, value = new.popitem()
        if name in named or name in uses or name in refused or name.startswith("__"):
            continue
        try:
            new |= pack_definitions({name: value}, torch, keeps_memory=False).uses
            uses[name] = value
        except TransferError as error:
            refused[name] = str(error)
    return uses, refused


def is_imported(value: object) -> bool:
    """Whether a name for it means the same in every process: a module, or something of one."""
    kinds = (FunctionType, BuiltinFunctionType, MethodType, type)
    is_of_module = isinstance(value, kinds) and value.__module__ != MAIN
    return is_of_module or isinstance(value, ModuleType)
