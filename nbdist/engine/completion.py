"""A rank's names for Tab and Shift-Tab: from IPython, or, while a cell runs, by looking alone."""

from __future__ import annotations

import builtins
import inspect
from types import ModuleType
from typing import Any

import torch
from IPython import get_ipython

from nbdist.cells.completion import Reply, inspect_reply

_NOTHING = object()
# Where a torch module keeps what its attributes show.
_TABLES = ("_modules", "_parameters", "_buffers")


def complete(code: str, cursor: int) -> tuple[Reply, dict[str, str]]:
    """IPython's completions on this rank, and its names with their types. In the main thread."""
    shell = get_ipython()
    # Jedi reads sources for a second or more; most requests here are about live objects.
    shell.Completer.use_jedi = False
    return shell.kernel.do_complete(code, cursor), attributes(())


def inspection(code: str, cursor: int, detail: int) -> Reply:
    """IPython's text on the name at the cursor. Called in the main thread."""
    reply: Reply = get_ipython().kernel.do_inspect(code, cursor, detail)
    return reply


def attributes(path: tuple[str, ...]) -> dict[str, str]:
    """Name -> type of an object's attributes; without a path, of the user's variables.

    Looks without running anything of the user's: no property, no __getattr__, no __dir__. So
    the control thread can answer it while the main thread is anywhere.
    """
    if not path:
        shell = get_ipython()
        hidden = shell.user_ns_hidden
        return {
            name: _type(value)
            for name, value in dict(shell.user_ns).items()
            if name not in hidden or hidden[name] is not value
        }
    value = _value(path)
    members = {} if value is _NOTHING else _tables(value)
    return {name: _type(member) for name, member in members.items()}


def glance(path: tuple[str, ...]) -> Reply:
    """Describe a name without running anything: its type, shape and documentation."""
    value = _value(path)
    if value is _NOTHING:
        return inspect_reply("")
    lines = [f"Type: {type(value).__name__}"]
    if type(value) in (torch.Tensor, torch.nn.Parameter):
        lines.append(f"Shape: {tuple(value.shape)}, {value.dtype}, {value.device}")
    if inspect.isroutine(value) or isinstance(value, ModuleType):
        text = value.__doc__
    else:
        text = inspect.getattr_static(value if isinstance(value, type) else type(value), "__doc__")
    if isinstance(text, str):
        lines += ["", inspect.cleandoc(text)]
    return inspect_reply("\n".join(lines))


def _value(path: tuple[str, ...]) -> Any:
    space = get_ipython().user_ns
    value = space.get(path[0], getattr(builtins, path[0], _NOTHING))
    for part in path[1:]:
        value = _tables(value).get(part, _NOTHING)
        if value is _NOTHING or inspect.isdatadescriptor(value):
            return _NOTHING
    return value


def _tables(value: Any) -> dict[str, Any]:
    """Attributes by name, nearest last: of the classes, of the object, of a torch module."""
    members: dict[str, Any] = {}
    kinds = value.__mro__ if isinstance(value, type) else type(value).__mro__
    for kind in reversed(kinds):
        members.update(vars(kind))
    if not isinstance(value, type):
        try:
            instance_members = object.__getattribute__(value, "__dict__")
        except AttributeError:  # slots alone
            instance_members = {}
        if isinstance(instance_members, dict):
            members.update(instance_members)
            for name in _TABLES if isinstance(value, torch.nn.Module) else ():
                members.update(instance_members.get(name) or {})
    return members


def _type(value: Any) -> str:
    if isinstance(value, ModuleType):
        return "module"
    if isinstance(value, type):
        return "class"
    return "function" if inspect.isroutine(value) else "instance"
