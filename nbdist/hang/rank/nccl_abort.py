"""NCCL on a rank: abort hung calls, void the cell's results, and put new backends in place.

Written from torch's documentation and source (2.11 to 2.15). It has run on a GPU with groups of one
rank (docs/gpu.md), not where ranks wait for each other in NCCL, nor with the newer of torch 2.15's
backends.

Collectives are queued on the GPU, so that a hang is met later, in the first call that waits for
the GPU (`.item()`, `.cpu()`, `torch.cuda.synchronize()`). Once NCCL is aborted that call returns
without an error and with whatever was in memory: therefore `abort` calls `void` first.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from nbdist.errors import NbdistError
from nbdist.hang.rank import debug_checks

ABORT_DEADLINE_S = 10.0
CUDA = torch.device("cuda")
# The name of the function in which IPython runs the code of a cell.
CELL_FUNCTION = "run_code"


class Void(BaseException):
    """Raised in a cell whose NCCL calls were aborted; what it has computed since is void.

    No Exception, as KeyboardInterrupt is none: a loop that catches those would go on with it.
    """

    def __init__(self) -> None:
        super().__init__(
            "NCCL calls of this rank hung and were aborted. What this cell received from other "
            "ranks since then is void: compute it again."
        )


def backend(group: dist.ProcessGroup) -> Any | None:
    """The group's NCCL backend, or None if it has none.

    With TORCH_DISTRIBUTED_DEBUG=DETAIL torch puts a checking backend around it, which is left out.
    """
    if not dist.is_nccl_available():
        return None
    try:
        # Private, but torch has no other way to a group's backends, and uses it itself.
        nccl: Any = group._get_backend(CUDA)  # noqa: SLF001
    except RuntimeError:  # the group has nothing for this kind of device
        return None
    while isinstance(nccl, c10d._ProcessGroupWrapper):  # noqa: SLF001
        nccl = nccl.wrapped_pg
    # torch 2.15 has three classes for NCCL, none derived from another; they alone split
    # communicators.
    return nccl if hasattr(nccl, "perform_nocolor_split") else None


def backends() -> list[Any]:
    """The NCCL backends of all groups of this rank, the newest group's first. From any thread."""
    # Private: torch lists its groups nowhere else. In this order torch aborts them itself.
    names = dict(c10d._world.pg_names)  # noqa: SLF001  # the main thread may end one meanwhile
    groups = sorted(names, key=lambda group: names[group], reverse=True)
    return [nccl for group in groups if (nccl := backend(group)) is not None]


def abort(deadline_s: float = ABORT_DEADLINE_S) -> int:
    """Void the running cell, abort the NCCL calls of every group, and return how many groups.

    Not the main thread, which hangs. On every rank: peers stay in their calls otherwise. The
    groups cannot be used before `renew`. Without NCCL nothing happens, and the result is 0.

    Raises:
        NbdistError: If NCCL did not return in time, or refused.
    """
    return begin_abort(deadline_s)()


def begin_abort(deadline_s: float = ABORT_DEADLINE_S) -> Callable[[], int]:
    """Begin to `abort`, and return what waits for its end: all ranks should begin together."""
    aborted = backends()
    if aborted:
        void()
    errors: list[BaseException] = []
    # At the same time: an abort frees memory of the GPU, which waits for the calls of all
    # communicators on it, also of one that would be aborted after it (pytorch issue 119797).
    # NCCL's own groups of calls do not help: torch aborts in a thread of its own. And it waits
    # for NCCL as long as the group's timeout, without a way to stop it.
    threads = [
        threading.Thread(
            target=_abort_one, args=(nccl, errors), name="nbdist-nccl-abort", daemon=True
        )
        for nccl in aborted
    ]
    for thread in threads:
        thread.start()
    return functools.partial(_finish, threads, errors, deadline_s, time.monotonic())


def _abort_one(nccl: Any, errors: list[BaseException]) -> None:
    try:
        nccl.abort()
    except BaseException as error:  # noqa: BLE001  # handed on by who waits
        errors.append(error)


def _finish(
    threads: Sequence[threading.Thread],
    errors: Sequence[BaseException],
    deadline_s: float,
    began_s: float,
) -> int:
    for thread in threads:
        thread.join(max(0.0, began_s + deadline_s - time.monotonic()))
    n_hung = sum(thread.is_alive() for thread in threads)
    if n_hung:
        raise NbdistError(
            f"NCCL did not abort the calls of {n_hung} of {len(threads)} groups within "
            f"{deadline_s:g} s. %dist_restart replaces this rank."
        )
    if errors:
        raise NbdistError(
            f"NCCL could not be aborted: {errors[0]}. %dist_restart replaces this rank."
        ) from errors[0]
    return len(threads)


def void() -> bool:
    """Let the running cell fail with `Void` as soon as it is back in Python.

    From another thread than the main one, before NCCL is aborted. Returns False, and does
    nothing, if no cell is running. The interpreter raises it between two steps of Python code,
    so that `y = x.item()` never binds the garbage that it returned.

    An exception of our own and not SIGINT: that would look like an interrupt by the user, is
    ignored by ipykernel when it comes early, and cannot be taken back.
    """
    if not in_cell():
        return False
    _raise_in_main(Void)  # the interpreter makes the instance
    if in_cell():
        return True
    # The cell ended between the two looks: nothing outside of it is to be hit.
    _raise_in_main(None)
    return False


def in_cell() -> bool:
    """Whether the main thread is inside the code of a cell."""
    # Documented as for debugging: there is no other way to another thread's frames.
    frame = sys._current_frames().get(threading.main_thread().ident or 0)  # noqa: SLF001
    while frame is not None:
        if frame.f_code.co_name == CELL_FUNCTION and "IPython" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


def _raise_in_main(error: type[BaseException] | None) -> None:
    raised = ctypes.py_object(error) if error is not None else None
    ident = ctypes.c_ulong(threading.main_thread().ident or 0)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, raised)


def renew(group: dist.ProcessGroup, store: dist.Store, timeout: timedelta) -> None:
    """Put a new NCCL backend of its kind in the place of the group's old one, connected and ready.

    Collective: every member, in the main thread, after `abort`. Nothing happens for a group
    without NCCL. The group object stays, and with it DDP, FSDP, meshes and the user's names. The
    store is new for this recovery, with the group's own prefix.

    Raises:
        torch.AcceleratorError, RuntimeError: If the abort left the GPU in an error from which
            CUDA does not come back: the rank must be replaced.
        torch.distributed.DistBackendError: If a member did not come, or NCCL refused.
    """
    old = backend(group)
    if old is None:
        return
    device = group.bound_device_id or torch.device("cuda", torch.cuda.current_device())
    torch.cuda.synchronize(device)  # what the abort broke on the GPU comes out here
    store = dist.PrefixStore("cuda/", store)
    # No split_from: the parent's communicator is as dead as this one.
    options = type(old.options)()
    options.is_high_priority_stream = old.options.is_high_priority_stream
    options.config = old.options.config
    # The default group's own list is empty, which only its first backend takes for all ranks.
    options.global_ranks_in_group = list(c10d._world.pg_group_ranks[group])  # noqa: SLF001
    options.group_name = old.options.group_name
    options._timeout = timeout  # noqa: SLF001  # as in init_process_group
    with debug_checks.suspended():
        new = type(old)(store, group.rank(), group.size(), options)
    checked = debug_checks.around(new, group, store, timeout)
    kind = debug_checks.unused_type(group)
    group._register_backend(CUDA, kind, checked)  # noqa: SLF001
    checked.eager_connect_single_device(device)
    _record(group, kind)


def _record(group: Any, kind: Any) -> None:
    """Show the recorder, where torch puts one before a group, which of its backends is in use.

    It hears from the default backend which calls have ended: of a new one it would hear nothing.
    """
    world = c10d._world  # noqa: SLF001  # torch keeps what holds the recorder nowhere else
    held = getattr(world, "pg_flight_recorder_hooks", {})
    if group not in held:
        return
    held[group].remove()
    default = dist.ProcessGroup.BackendType.__members__[group.name().upper()]
    group._set_default_backend(kind)  # noqa: SLF001  # there is no other way
    ranks = list(world.pg_group_ranks[group])
    held[group] = c10d.FlightRecorderHook.attach(group, ranks)
    # It must have the old type: DDP and barrier() look at the type's name.
    group._set_default_backend(default)  # noqa: SLF001
