"""Every function of the engines that the notebook may call, by name: the wire on one page.

The kernel never imports the engine's modules. A test resolves each name and compares the
signatures.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from nbdist.core.topology import EngineReport, Topology

RUNTIME = "nbdist.engine.runtime"
FACTS = "nbdist.engine.facts"


class Caller(Protocol):
    """Something that can call a function by name on one rank or engine."""

    def __call__(self, target: int, name: str, /, *args: Any) -> Future[Any]:
        """A future of the function's result."""
        ...


def describe(call: Caller, engine: int, controller_address: str) -> Future[EngineReport]:
    """The engine's report of itself."""
    return call(engine, f"{FACTS}:describe", engine, controller_address)


def prepare(call: Caller, engine: int, seed: int | None) -> Future[Topology]:
    """Put rank, accelerator and so on into the engine's namespace."""
    return call(engine, f"{RUNTIME}:prepare", seed)


def open_store(call: Caller, engine: int, address: str, world_size: int) -> Future[int]:
    """Open the store for several hosts; its port."""
    return call(engine, f"{RUNTIME}:open_store", address, world_size)


def reachable(
    call: Caller, engine: int, addresses: Sequence[str], port: int
) -> Future[tuple[str, ...]]:
    """Those of the addresses that the engine can reach."""
    return call(engine, f"{RUNTIME}:reachable", tuple(addresses), port)


def join_by_plan(  # noqa: PLR0913, PLR0917  # mirrors the engine's function
    call: Caller, engine: int, plan: Topology, rank: int, store_path: str, address: str, port: int
) -> Future[None]:
    """Form the group. On every engine at once."""
    return call(engine, f"{RUNTIME}:join_by_plan", plan, rank, store_path, address, port)


def adopt_notebook(call: Caller, engine: int, sys_path: list[str], folder: str) -> Future[None]:
    """Use the notebook's sys.path and folder."""
    return call(engine, f"{RUNTIME}:adopt_notebook", sys_path, folder)


def memory_bytes(call: Caller, engine: int) -> Future[dict[str, int]]:
    """The rank's memory on host and GPU."""
    return call(engine, f"{RUNTIME}:memory_bytes")


def barrier(call: Caller, engine: int, key: str, deadline_s: float) -> Future[float]:
    """Wait for all ranks. On every engine at once, with the same new key."""
    return call(engine, f"{RUNTIME}:barrier", key, deadline_s)


# Each function of this page with the engine's function that it calls.
REMOTE_FUNCTIONS: dict[Callable[..., Future[Any]], str] = {
    describe: f"{FACTS}:describe",
    prepare: f"{RUNTIME}:prepare",
    open_store: f"{RUNTIME}:open_store",
    reachable: f"{RUNTIME}:reachable",
    join_by_plan: f"{RUNTIME}:join_by_plan",
    adopt_notebook: f"{RUNTIME}:adopt_notebook",
    memory_bytes: f"{RUNTIME}:memory_bytes",
    barrier: f"{RUNTIME}:barrier",
}
