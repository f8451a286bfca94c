"""Every function of the engines that the notebook may call, by name: the wire on one page.

The kernel never imports the engine's modules. A test resolves names and compares signatures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from nbdist.core.bandwidth import Timing
from nbdist.core.calls import CxxCall, Look
from nbdist.core.comparison import Watched
from nbdist.core.completion import Reply
from nbdist.core.monitor import Answer
from nbdist.core.parcels import Parcel
from nbdist.core.recovery import MadeGroup, MadeMesh, Recovered
from nbdist.core.shortage import Shortage
from nbdist.core.snapshot import MemoryOptions
from nbdist.core.strategy import Choice
from nbdist.core.switching import Switched
from nbdist.core.topology import EngineReport, Topology
from nbdist.core.trace import TraceOptions

RUNTIME = "nbdist.engine.runtime"
BANDWIDTH = "nbdist.engine.bandwidth"
BLACKBOX = "nbdist.engine.blackbox"
COMPARED = "nbdist.engine.compared"
COMPLETION = "nbdist.engine.completion"
FACTS = "nbdist.engine.facts"
GROUPS = "nbdist.engine.groups"
MEMORY = "nbdist.engine.snapshot"
MESHES = "nbdist.engine.meshes"
MODELS = "nbdist.engine.models"
NAMESPACE = "nbdist.engine.namespace"
OUT_OF_MEMORY = "nbdist.engine.out_of_memory"
SCRIPT = "nbdist.engine.script"
SIZES = "nbdist.engine.parallel.sizes"
STRATEGY = "nbdist.engine.parallel.registry"
SWITCH = "nbdist.engine.parallel.switch"
SYNC = "nbdist.engine.sync"
TRACE = "nbdist.engine.trace"
VARIABLES = "nbdist.engine.variables"


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


def measure(call: Caller, engine: int, op: str, size_bytes: int, limit_s: float) -> Future[Timing]:
    """Time one collective at one size. On every rank at once."""
    return call(engine, f"{BANDWIDTH}:measure", op, size_bytes, limit_s)


def begin_measuring(call: Caller, engine: int) -> Future[dict[str, int]]:
    """Get the rank ready for `measure`: what is free of the memory of its host, and of its GPU."""
    return call(engine, f"{BANDWIDTH}:begin")


def rejoin(  # mirrors the engine's function
    call: Caller, engine: int, plan: Topology, rank: int, generation: int, made: Sequence[MadeGroup]
) -> Future[None]:
    """Let a process that replaces another into its groups, while the others recover theirs."""
    return call(engine, f"{RUNTIME}:rejoin", plan, rank, generation, made)


def names(call: Caller, engine: int) -> Future[tuple[str, ...]]:
    """The names that the user's code has defined on the rank."""
    return call(engine, f"{NAMESPACE}:names")


def group_names(call: Caller, engine: int) -> Future[dict[str, str]]:
    """Variable -> torch's name of the process groups that the user's variables hold."""
    return call(engine, f"{NAMESPACE}:group_names")


def name_groups(call: Caller, engine: int, variables: Mapping[str, str]) -> Future[None]:
    """Give the rank's process groups these variables."""
    return call(engine, f"{NAMESPACE}:name_groups", variables)


def mesh_names(call: Caller, engine: int) -> Future[dict[str, MadeMesh]]:
    """Variable -> mesh of the device meshes that the user's variables hold."""
    return call(engine, f"{MESHES}:mesh_names")


def name_meshes(
    call: Caller, engine: int, known: Sequence[Mapping[str, MadeMesh]]
) -> Future[tuple[str, ...]]:
    """Give the rank these meshes, built of its process groups."""
    return call(engine, f"{MESHES}:name_meshes", known)


def recover(call: Caller, engine: int, generation: int, dead: tuple[int, ...]) -> Future[Recovered]:
    """Give the process groups new connections. On every living rank at once."""
    return call(engine, f"{GROUPS}:recover", generation, dead)


def groups_made(call: Caller, engine: int) -> Future[tuple[MadeGroup, ...]]:
    """The process groups that the user's code made on this rank."""
    return call(engine, f"{GROUPS}:groups_made")


def checksums(call: Caller, engine: int) -> Future[dict[str, str]]:
    """Model -> checksum of its values on this rank."""
    return call(engine, f"{MODELS}:checksums")


def catching_up(call: Caller, engine: int, is_on: bool) -> Future[None]:
    """Let a rank that replaces another build its models alone."""
    return call(engine, f"{MODELS}:catching_up", is_on)


def take_script(
    call: Caller, engine: int, path: str, text: str, arguments: Sequence[str]
) -> Future[None]:
    """Keep a program for the cell RUN_SCRIPT."""
    return call(engine, f"{SCRIPT}:take", path, text, tuple(arguments))


def sync_model(call: Caller, engine: int, source: int) -> Future[list[str]]:
    """Make the DDP models equal to those of a rank. On every rank at once."""
    return call(engine, f"{SYNC}:sync_model", source)


def current_strategy(call: Caller, engine: int) -> Future[Choice]:
    """The strategy under which the rank prepares models."""
    return call(engine, f"{STRATEGY}:current")


def prepared_sizes(call: Caller, engine: int) -> Future[tuple[tuple[str, int, int], ...]]:
    """The prepared models of one rank: name, number of parameters and their bytes, each whole."""
    return call(engine, f"{SIZES}:sizes")


def set_strategy(call: Caller, engine: int, choice: Choice) -> Future[None]:
    """Let the rank prepare models under a strategy from now on; models that it has stay."""
    return call(engine, f"{STRATEGY}:set_choice", choice)


def switch_strategy(call: Caller, engine: int, choice: Choice) -> Future[Switched]:
    """Put the live models under another strategy. On every rank at once."""
    return call(engine, f"{SWITCH}:switch", choice)


def complete(
    call: Caller, engine: int, code: str, cursor: int
) -> Future[tuple[Reply, dict[str, str]]]:
    """IPython's completions on the rank, and the rank's names with their types."""
    return call(engine, f"{COMPLETION}:complete", code, cursor)


def inspected(call: Caller, engine: int, code: str, cursor: int, detail: int) -> Future[Reply]:
    """What IPython on the rank says of the name at the cursor."""
    return call(engine, f"{COMPLETION}:inspected", code, cursor, detail)


def lacking(call: Caller, engine: int, names: Sequence[str]) -> Future[dict[str, tuple[str, ...]]]:
    """Those of the names that the rank has not -> close names that it has."""
    return call(engine, f"{VARIABLES}:lacking", tuple(names))


def send(  # mirrors the engine's function
    call: Caller, engine: int, names: Sequence[str], folders: Sequence[str],
    keeps: bool, is_whole: bool,
) -> Future[Parcel]:  # fmt: skip
    """The rank's values of variables. On every rank at once where DTensors are gathered."""
    return call(engine, f"{VARIABLES}:send", tuple(names), tuple(folders), keeps, is_whole)


def receive(call: Caller, engine: int, token: str, parcel: Parcel) -> Future[None]:
    """Let the rank make the values of a push, and keep them for `bind`."""
    return call(engine, f"{VARIABLES}:receive", token, parcel)


def bind(call: Caller, engine: int, token: str) -> Future[None]:
    """Give the user's code on the rank what it has received."""
    return call(engine, f"{VARIABLES}:bind", token)


def drop(call: Caller, engine: int, token: str) -> Future[None]:
    """Let the rank forget what it has received."""
    return call(engine, f"{VARIABLES}:drop", token)


def begin_trace(call: Caller, engine: int, options: TraceOptions, token: str) -> Future[None]:
    """Let the rank record the cell that brings the same token."""
    return call(engine, f"{TRACE}:begin", options, token)


def finish_trace(call: Caller, engine: int, folders: Sequence[str]) -> Future[Parcel]:
    """What the rank has recorded."""
    return call(engine, f"{TRACE}:finish", tuple(folders))


def trace_text(call: Caller, engine: int, folders: Sequence[str]) -> Future[Parcel]:
    """The file of what the rank has recorded."""
    return call(engine, f"{TRACE}:text", tuple(folders))


def begin_memory(call: Caller, engine: int, options: MemoryOptions, token: str) -> Future[None]:
    """Let the rank record the memory of the cell that brings the same token."""
    return call(engine, f"{MEMORY}:begin", options, token)


def finish_memory(call: Caller, engine: int, folders: Sequence[str]) -> Future[Parcel]:
    """The memory that the rank has recorded."""
    return call(engine, f"{MEMORY}:finish", tuple(folders))


def memory_now(call: Caller, engine: int, folders: Sequence[str]) -> Future[Parcel]:
    """Whose the rank's memory is."""
    return call(engine, f"{MEMORY}:now", tuple(folders))


def shortage(call: Caller, engine: int) -> Future[Shortage | None]:
    """What the rank's last cell lacked, where its memory ran out."""
    return call(engine, f"{OUT_OF_MEMORY}:last")


def keep_state(call: Caller, engine: int) -> Future[tuple[str, ...]]:
    """Let the rank copy what training changes; the names of its live models."""
    return call(engine, f"{COMPARED}:keep")


def clear_made(call: Caller, engine: int) -> Future[None]:
    """Let the rank forget what a compared cell has made."""
    return call(engine, f"{COMPARED}:clear")


def restore_state(call: Caller, engine: int) -> Future[None]:
    """Put back what `keep_state` has copied."""
    return call(engine, f"{COMPARED}:restore")


def drop_state(call: Caller, engine: int) -> Future[None]:
    """Forget what `keep_state` has copied."""
    return call(engine, f"{COMPARED}:drop")


def watch_memory(call: Caller, engine: int) -> Future[None]:
    """Watch the rank's memory from now on."""
    return call(engine, f"{COMPARED}:watch")


def watched_memory(call: Caller, engine: int) -> Future[Watched]:
    """What the rank's memory came to meanwhile."""
    return call(engine, f"{COMPARED}:watched")


def box_problem(call: Caller, engine: int) -> Future[str]:
    """Why the rank's black box cannot be read from outside; empty when it can."""
    return call(engine, f"{BLACKBOX}:problem")


def ping(ask: Caller, engine: int) -> Future[str]:
    """The name of the engine's thread that answers."""
    return ask(engine, "ping")


def look(ask: Caller, engine: int) -> Future[Look]:
    """What the rank's main thread is doing."""
    return ask(engine, "look")


def newest(ask: Caller, engine: int) -> Future[Mapping[str, CxxCall]]:
    """Group name -> newest collective in the rank's flight recorder."""
    return ask(engine, "newest")


def stacks(ask: Caller, engine: int) -> Future[str]:
    """Python stacks of the rank's threads; empty while it is idle."""
    return ask(engine, "stacks")


def abort(ask: Caller, engine: int, generation: int) -> Future[int]:
    """Break off the collectives in which the rank waits. On every rank."""
    return ask(engine, "abort", generation)


def snapshot(ask: Caller, engine: int) -> Future[tuple[float, bytes | None]]:
    """(now by the clock of the rank's host, the rank's black box)."""
    return ask(engine, "snapshot")


def usage(ask: Caller, engine: int, is_remote: bool) -> Future[Answer]:
    """What the rank uses of its host and GPU; of one on this host torch's numbers alone."""
    return ask(engine, "usage", is_remote)


def attributes(ask: Caller, engine: int, path: tuple[str, ...]) -> Future[dict[str, str]]:
    """Name -> type of what an object on the rank has; of its variables without a path."""
    return ask(engine, "attributes", path)


def glance(ask: Caller, engine: int, path: tuple[str, ...]) -> Future[Reply]:
    """What can be said of a name without running anything of the user's."""
    return ask(engine, "glance", path)


def _of(module: str, *functions: Callable[..., Future[Any]]) -> dict[Callable[..., Any], str]:
    """Functions that have the same name there as here."""
    return {one: f"{module}:{one.__name__}" for one in functions}


# Each function of this page that runs in the engine's main thread, between its cells, with the
# engine's function that it calls.
REMOTE_FUNCTIONS: dict[Callable[..., Future[Any]], str] = {
    **_of(FACTS, describe),
    **_of(SYNC, sync_model),
    **_of(RUNTIME, prepare, open_store, reachable, join_by_plan, adopt_notebook, memory_bytes),
    **_of(RUNTIME, barrier, rejoin),
    **_of(NAMESPACE, names, group_names, name_groups),
    **_of(MESHES, mesh_names, name_meshes),
    **_of(GROUPS, recover, groups_made),
    **_of(MODELS, checksums, catching_up),
    **_of(COMPLETION, complete, inspected),
    **_of(VARIABLES, lacking, send, receive, bind, drop),
    box_problem: f"{BLACKBOX}:problem",
    measure: f"{BANDWIDTH}:measure",
    begin_measuring: f"{BANDWIDTH}:begin",
    current_strategy: f"{STRATEGY}:current",
    prepared_sizes: f"{SIZES}:sizes",
    set_strategy: f"{STRATEGY}:set_choice",
    switch_strategy: f"{SWITCH}:switch",
    take_script: f"{SCRIPT}:take",
    begin_trace: f"{TRACE}:begin",
    finish_trace: f"{TRACE}:finish",
    trace_text: f"{TRACE}:text",
    begin_memory: f"{MEMORY}:begin",
    finish_memory: f"{MEMORY}:finish",
    memory_now: f"{MEMORY}:now",
    shortage: f"{OUT_OF_MEMORY}:last",
    keep_state: f"{COMPARED}:keep",
    clear_made: f"{COMPARED}:clear",
    restore_state: f"{COMPARED}:restore",
    drop_state: f"{COMPARED}:drop",
    watch_memory: f"{COMPARED}:watch",
    watched_memory: f"{COMPARED}:watched",
}

# The source of a cell that runs the program that `take_script` has brought.
RUN_SCRIPT = f"__import__({SCRIPT!r}, fromlist=['run']).run(globals())"

# Each function that the engine's control thread answers at any time (`Channel.ask`), with its
# name in the table of nbdist/engine/responder.py.
CONTROL_FUNCTIONS: dict[Callable[..., Future[Any]], str] = {
    one: one.__name__
    for one in (ping, look, newest, stacks, abort, snapshot, usage, attributes, glance)
}
