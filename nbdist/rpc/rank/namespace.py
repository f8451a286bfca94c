"""The names that the user's code has on a rank: of its cells, or of the script that it runs."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from nbdist.errors import OptionError

T = TypeVar("T")
_MOST_NAMES = 8


def shell() -> Any:
    """IPython's shell, where cells run in one; None in a script, which does not load it."""
    ipython = sys.modules.get("IPython.core.getipython")
    return None if ipython is None else ipython.get_ipython()


def names() -> tuple[str, ...]:
    """Names that the user's code has defined on this rank, in order, without IPython's own."""
    hidden = getattr(shell(), "user_ns_hidden", {})
    return tuple(
        name
        for name, value in everything().items()
        if not name.startswith("_") and (name not in hidden or hidden[name] is not value)
    )


def everything() -> dict[str, Any]:
    """Every name that the user's code can use on this rank: the namespace itself, not a copy."""
    here = shell()
    variables: dict[str, Any] = vars(sys.modules["__main__"]) if here is None else here.user_ns
    return variables


def group_names() -> dict[str, str]:
    """Variable -> torch's name, for the user's variables that are process groups."""
    return {name: str(pg.group_name) for name, pg in values_of(dist.ProcessGroup).items()}


def name_groups(variables: Mapping[str, str]) -> None:
    """Give this rank's process groups the variables that they have on other ranks: `group_names`.

    A group of which this rank is no member gets what `new_group` returns to such a rank.
    """
    # Nothing public finds a group by its name.
    groups = {str(name): pg for pg, name in c10d._world.pg_names.items()}  # noqa: SLF001
    outside = dist.GroupMember.NON_GROUP_MEMBER
    push({variable: groups.get(name, outside) for variable, name in variables.items()})


def values_of(kind: type[T]) -> dict[str, T]:
    """Variable -> value, for the user's variables of a type, or of one made from it."""
    variables = everything()
    return {name: variables[name] for name in names() if issubclass(type(variables[name]), kind)}


def attributes(value: Any) -> dict[str, Any]:
    """An object's own attributes, read without running its class's code; none where it has no dict.

    So a lazy object loads nothing, and one whose `__getattr__` raises does not raise.
    """
    try:
        members = object.__getattribute__(value, "__dict__")
    except AttributeError:  # it has slots
        return {}
    return dict(members) if type(members) is dict else {}


def modules_in(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """A module and all inside it, each once, by torch's own tables: none of their code runs."""
    seen: set[int] = set()
    waiting = [module]
    while waiting:
        inner = waiting.pop()
        if id(inner) in seen or not issubclass(type(inner), torch.nn.Module):
            continue
        seen.add(id(inner))
        yield inner
        waiting.extend(reversed([*attributes(inner).get("_modules", {}).values()]))


def unwrapped(obj: Any) -> Any:
    """Module that a wrapper such as DDP's has as its `module`; any other object itself."""
    try:
        return getattr(obj, "module", obj)
    except Exception:  # noqa: BLE001  # a user's own __getattr__ raises what it likes
        return obj


def model_of(name: str) -> torch.nn.Module:
    """A variable on this rank that is a model, or what a path from one leads to.

    Raises:
        OptionError: It is none; lists those that are.
    """
    variables = everything()
    head, *rest = name.split(".")
    value: Any = variables.get(head)
    if head not in variables:
        raise OptionError(f"There is no variable {head} on the ranks. {_models()}")
    for part in rest:
        if not hasattr(value, part):
            raise OptionError(f"{head} on the ranks has no {'.'.join(rest)}. {_models()}")
        value = getattr(value, part)
    if not isinstance(value, torch.nn.Module):
        raise OptionError(
            f"{name} on the ranks is a {type(value).__name__}, not a model (torch.nn.Module). "
            f"{_models()}"
        )
    return value


def _models() -> str:
    models = [f"{n} ({type(m).__name__})" for n, m in values_of(torch.nn.Module).items()]
    if not models:
        return "No variable there is a model."
    more = f" and {len(models) - _MOST_NAMES} more" if len(models) > _MOST_NAMES else ""
    return f"Models there: {', '.join(models[:_MOST_NAMES])}{more}."


def push(variables: Mapping[str, object]) -> None:
    """Give the user's code these variables."""
    here = shell()
    if here is None:
        everything().update(variables)
    else:
        here.push(dict(variables))
