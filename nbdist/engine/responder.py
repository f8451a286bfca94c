"""Answers the notebook on ipykernel's control thread, also while the main thread is blocked.

It needs the GIL only: a main thread that waits in a collective, or sleeps, has released it.
"""

from __future__ import annotations

import importlib.metadata
import pickle
import sys
import threading
import traceback
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import psutil
import torch

from nbdist.checkpoint.rank import jobs
from nbdist.core import stacks
from nbdist.core.rank import this_rank
from nbdist.core.topology import Topology
from nbdist.engine import completion, journal
from nbdist.errors import StartError
from nbdist.hang.rank import call_log, main_thread, nccl_abort
from nbdist.hang.rank import gloo_abort as gloo
from nbdist.monitor import rank as monitor_rank
from nbdist.rpc import wire
from nbdist.rpc.rank import crash_files, gc_pause, progress
from nbdist.strategy.choice import Strategy
from nbdist.strategy.choose import default_choice


def ping() -> str:
    """The name of the thread that answers."""
    return threading.current_thread().name


def memory_bytes() -> dict[str, int]:
    """Measure this rank's memory: resident on the host, allocated and reserved on its GPU."""
    used = {"resident": int(psutil.Process().memory_info().rss)}
    if this_rank().place.device != "cpu":
        used["allocated"] = torch.cuda.memory_allocated()
        used["reserved"] = torch.cuda.memory_reserved()
    return used


def all_stacks() -> str:
    """Python stacks of all threads that do something, the cell's first; empty when idle."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    own_ident = threading.get_ident()
    thread_stacks = [
        stacks.ThreadStack(
            names.get(ident, f"thread {ident}"),
            is_current=False,
            frames=main_thread.with_sources(main_thread.frames_of(frame)),
        )
        for ident, frame in sys._current_frames().items()  # noqa: SLF001  # there is no other way
        if ident != own_ident
    ]
    return stacks.stacks_text(thread_stacks, crash_files.cells)


def abort(generation: int) -> int:
    """Break off every collective that this rank waits in; how many connections and groups.

    Groups of a newer generation are left alone.

    Raises:
        NbdistError: If NCCL refused. Gloo's connections have been ended even so.
    """
    if gloo.is_outdated(generation):
        return 0
    # First, so that all ranks abort NCCL at about the same time: Gloo's messages are given time
    # to arrive, on some ranks longer, and a peer must not read memory of an aborted rank.
    finish_nccl = nccl_abort.begin_abort()
    ended = gloo.abort(generation) or 0
    return ended + finish_nccl()


def standing() -> tuple[Topology, int, int, Strategy]:
    """Facts for a kernel that attaches: plan, generation of the groups, newest cell, strategy."""
    generation, run = call_log.newest()
    topology = this_rank().topology
    # Not imported for this: accelerate comes with it.
    registry = sys.modules.get("nbdist.parallel.live.registry")
    strategy = registry.current() if registry else default_choice(topology.world_size)
    return topology, generation, run, strategy


# All functions that can be asked; the kernel declares the same names. Nothing else is called.
TABLE: MappingProxyType[str, Callable[..., Any]] = MappingProxyType(
    {
        "ping": ping,
        "look": main_thread.snapshot,
        "newest": main_thread.newest_collectives,
        "stacks": all_stacks,
        "memory": memory_bytes,
        "abort": abort,
        "snapshot": call_log.snapshot,
        "usage": monitor_rank.usage,
        "attributes": completion.attributes,
        "glance": completion.glance,
        "progress": progress.newest,
        "save_state": jobs.state,
        "stop_save": jobs.stop,
        "standing": standing,
        "journal": journal.read,
    }
)


def install(kernel: Any) -> None:
    """Answer "nbdist_request" on the kernel's control channel from now on.

    `control_handlers` is ipykernel's own table of message types (6.29 and 7.4: a plain
    function is called there with stream, identities and the message). No public way adds a
    message to the control channel, and only that one is read while a cell runs.

    Raises:
        StartError: If this ipykernel has no such table.
    """
    handlers = getattr(kernel, "control_handlers", None)
    if not isinstance(handlers, dict):
        version = importlib.metadata.version("ipykernel")
        raise StartError(
            f"ipykernel {version} has no Kernel.control_handlers, which nbdist "
            f"needs. Install another one: {sys.executable} -m pip install 'ipykernel==7.*'"
        )

    def respond(stream: Any, ident: Any, request: Any) -> None:
        content, buffers = answer(request)
        kernel.session.send(
            stream, wire.CONTROL_REPLY, content, parent=request, ident=ident, buffers=buffers
        )

    handlers[wire.CONTROL_REQUEST] = respond


@gc_pause.gc_paused()  # requests to abort would wait behind a finalizer
def answer(request: Any) -> tuple[dict[str, str], list[bytes]]:
    """Content and buffers of the reply to a message; what the function raised is in it."""
    try:
        if torch.cuda.is_initialized() and this_rank().place.device != "cpu":  # type: ignore[no-untyped-call]
            # A thread begins on GPU 0, where each rank would take half a gigabyte for a context.
            torch.cuda.set_device(this_rank().place.device)
        function = TABLE[request["content"]["name"]]
        # Signed with the session's key by our own notebook, as every message is.
        arguments = pickle.loads(request["buffers"][0])  # noqa: S301
        return {"status": "ok"}, [pickle.dumps(function(*arguments))]
    except Exception as error:  # noqa: BLE001  # anything at all is the caller's, not this thread's
        content = {
            "status": "error",
            "ename": type(error).__name__,
            "evalue": str(error),
            "traceback": traceback.format_exc(),
        }
        return content, []
