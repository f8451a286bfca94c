"""The names that the user's code has on a rank, for a process that takes another's place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d


def names() -> tuple[str, ...]:
    """What the user's code has defined on this rank, in order, without IPython's own names."""
    shell = _shell()
    hidden = shell.user_ns_hidden
    return tuple(
        name
        for name, value in shell.user_ns.items()
        if not name.startswith("_") and (name not in hidden or hidden[name] is not value)
    )


def group_names() -> dict[str, str]:
    """Variable -> torch's name, for the user's variables that are process groups."""
    known = _shell().user_ns
    return {
        name: str(known[name].group_name)
        for name in names()
        if isinstance(known[name], dist.ProcessGroup)
    }


def name_groups(variables: Mapping[str, str]) -> None:
    """Give this rank's process groups the variables that they have on other ranks.

    Args:
        variables: `group_names` of the others; a group of which this rank is no member gets
            what `new_group` returns to such a rank.
    """
    # Nothing public finds a group by its name.
    groups = {str(name): pg for pg, name in c10d._world.pg_names.items()}  # noqa: SLF001
    outside = dist.GroupMember.NON_GROUP_MEMBER
    shell = _shell()
    shell.push({variable: groups.get(name, outside) for variable, name in variables.items()})


def _shell() -> Any:
    from IPython import get_ipython

    return get_ipython()
