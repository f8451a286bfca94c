"""torch's own checks of every collective (TORCH_DISTRIBUTED_DEBUG=DETAIL), without their faults.

torch puts a checking backend around each group's own. With Gloo a DistributedDataParallel then
ends the process (SIGSEGV, 2.11 to 2.13): its logger takes the backend of type GLOO for Gloo's
own class. With NCCL the same level makes torch end a rank whose call was aborted. Both look only
at the moment or at the place in which a backend was made. So here groups are made at the level
below, and the checking backend comes in afterwards, under a type that no code asks for by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from nbdist.errors import NbdistError

_CHECKED = ("gloo", "nccl")
_NAMED_NUMBERS, _LAST_NUMBER = 7, 255
_installed: list[Any] = []  # torch's own helper, once it is replaced


def are_on() -> bool:
    """Whether this process was started with torch's checks of every collective."""
    return dist.get_debug_level() == dist.DebugLevel.DETAIL


def install() -> None:
    """Check every group that is made from now on, if checks were asked for.

    Once per process, before its first group. Where this torch lacks what is needed, its own
    way of checking stays, with its faults.
    """
    if _installed or not are_on() or not hasattr(c10d, "_create_process_group_wrapper"):
        return
    # Below init_process_group, new_group and init_device_mesh: they all look it up by this name.
    helper = c10d._new_process_group_helper  # noqa: SLF001
    _installed.append(helper)

    def checking(*args: Any, **kwargs: Any) -> Any:
        with suspended():
            group, store = result = helper(*args, **kwargs)
        if isinstance(group, dist.ProcessGroup):  # else this rank is no member
            _check(group, store)
        return result

    c10d._new_process_group_helper = checking  # noqa: SLF001


@contextmanager
def suspended() -> Iterator[None]:
    """Backends that are made in here are made at the level below torch's checks."""
    level = dist.get_debug_level()
    if are_on():
        dist.set_debug_level(dist.DebugLevel.INFO)
    try:
        yield
    finally:
        dist.set_debug_level(level)


def _check(group: Any, store: dist.Store) -> None:
    """Put checking backends before the group's own. Collective: its members."""
    world = c10d._world  # noqa: SLF001  # torch keeps a group's kinds nowhere else
    config = c10d.BackendConfig(c10d.Backend(world.pg_backend_config[group]))
    kinds = config.get_device_backend_map()
    backends: dict[str, Any] = {}
    for device, kind in kinds.items():
        if not kind.startswith(_CHECKED):  # "nccl2" is NCCL as well
            continue
        backend = group._get_backend(torch.device(device))  # noqa: SLF001  # there is no other way
        timeout = backend.options._timeout  # noqa: SLF001
        checked = around(backend, group, dist.PrefixStore(f"{device}/", store), timeout)
        # One kind for all devices: torch makes it once, under the first device's prefix.
        if len(set(kinds.values())) == 1:
            backends = dict.fromkeys(kinds, checked)
            break
        backends[device] = checked
    register(group, backends)


def register(group: Any, backends: Mapping[str, Any]) -> None:
    """Put backends, by device, in the place of the group's own; each gets one new type.

    The default backend stays a name, "gloo": an unknown number there fails DDP.
    """
    kinds: dict[int, Any] = {}
    for device, backend in backends.items():
        if id(backend) not in kinds:
            kinds[id(backend)] = unused_type(group)
        group._register_backend(torch.device(device), kinds[id(backend)], backend)  # noqa: SLF001
    # The group tells its backends too, and torch's flight recorder shows what they know.
    group._set_group_name(c10d._world.pg_names[group])  # noqa: SLF001
    group._set_group_desc(group.group_desc)  # noqa: SLF001


def around(backend: Any, group: Any, store: dist.Store, timeout: timedelta) -> Any:
    """The backend of a group inside torch's checks if they are on, else the backend itself.

    Collective: every member, with a new store that has the prefix of group and device. Register
    the result under a type that has no name.
    """
    # Private; without it the group works, but is no longer checked.
    wrap = getattr(c10d, "_create_process_group_wrapper", None)
    if not are_on() or wrap is None:
        return backend
    return wrap(
        wrapped_pg=backend,
        store_prefix=group.group_name,
        store=store,
        rank=group.rank(),
        world_size=group.size(),
        timeout=timeout,
    )


def unused_type(group: Any) -> Any:
    """A backend type that the group has not had yet: 255, then 254 and so on.

    torch's number of a type is one byte, and is bound to its first backend for good, so every
    new backend needs another. The first seven have names and meanings (gloo, nccl, ...).

    Raises:
        NbdistError: There is none left.
    """
    for number in range(_LAST_NUMBER, _NAMED_NUMBERS - 1, -1):
        kind = dist.ProcessGroup.BackendType(number)
        try:
            group._backend_id(kind)  # noqa: SLF001  # torch cannot be asked otherwise
        except RuntimeError:
            return kind
    raise NbdistError(
        f"group {group.group_name} cannot be recovered again: torch has numbers for "
        f"{_LAST_NUMBER - _NAMED_NUMBERS + 1} new backends of a group, and each recovery has taken "
        "one for each of its backends. Save what you need, then run %dist_reset."
    )
