"""One rank: its place, its device, its process group, and the names that cells find.

Every function here but `join_at_start` is called from the notebook by name
(the kernel declares them as RankFunctions); what they return crosses the wire as plain records.
"""

from __future__ import annotations

import json
import os
import pickle
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from IPython import get_ipython

from nbdist.cluster import nccl_env, run_owner
from nbdist.core import host, topology
from nbdist.core.interface import INTERFACE_VARIABLES, InterfaceChoice, choose_interface
from nbdist.core.rank import Rank, joined, this_rank
from nbdist.core.ranks import rank_label
from nbdist.core.topology import (
    EngineReport,
    Gpu,
    RankPlace,
    StoreAt,
    Topology,
)
from nbdist.core.versions import check_torch
from nbdist.diagnostics import rank as diagnostics_rank
from nbdist.engine import (
    child_sockets,
    default_group,
    facts,
    host_staging,
    idle_imports,
    journal,
    partial_state,
    responder,
    shell_hooks,
)
from nbdist.errors import NbdistError, StartError
from nbdist.hang.rank import (
    call_log,
    common_store,
    debug_checks,
    device_health,
    gloo_abort,
    graph_capture,
    process_groups,
    rendezvous,
)
from nbdist.hang.recovery import GroupSpec
from nbdist.lints.rank import watch
from nbdist.memory.rank import oom_hook
from nbdist.parallel.accelerator import torch_clip, torch_grad
from nbdist.parallel.accelerator.lazy import AcceleratorProxy
from nbdist.parallel.base import events
from nbdist.recording.rank import cell_hook
from nbdist.rpc.rank import cell_hooks, crash_files
from nbdist.strategy.choice import Strategy

# The backends asked of torch by name: with NCCL, tensors on the CPU still have a group.
TORCH_BACKENDS = {"gloo": "gloo", "nccl": "cpu:gloo,cuda:nccl"}
# torch's own (10 minutes with NCCL, 30 with Gloo) ends the wait for a peer that only computes for
# long. Waiting in vain is seen from outside, in seconds.
GROUP_TIMEOUT = timedelta(days=1)
# Around each cell, the outermost first: the journal has all that the others say, and the box says
# that a cell has ended once all that belongs to it has, looking at lints and ending the profiler
# too; memory is looked at while it is recorded.
CELL_HOOKS = (
    journal.around_cell,
    call_log.around_cell,
    watch.around_cell,
    cell_hook.around_cell,
    oom_hook.around_cell,
    shell_hooks.top_level_await,
)


def join_at_start(run_dir: Path, start: dict[str, Any]) -> None:
    """Join the local cluster's group before anything else runs in this process.

    Collective: every rank. The rank comes from the launcher. A failure is written to
    `failed.RANK` in the run folder, where the notebook reads it, and ends the process.
    """
    rank = int(os.environ["RANK"])
    try:
        check_torch(str(torch.__version__), sys.executable)
        store = dist.FileStore(str(run_dir / "store"), start["world_size"])
        world_size = start["world_size"]
        report = replace(
            facts.describe(rank), rank_hint=rank, size_hint=world_size, local_hint=rank, job_id=""
        )
        if not report.has_cuda:
            # Then torch sees no GPU; the machine's GPUs show the reason.
            report = replace(report, gpus=tuple(Gpu(*gpu) for gpu in start["gpus"]))
        (run_dir / f"arrived.{rank}").touch()
        reports = exchange_reports(store, report, world_size, start["deadline_s"])
        plan = topology.plan(reports, start["backend"], threads=torch.get_num_threads())
        join(plan, rank, store)
    except Exception as error:  # noqa: BLE001  # any reason at all is to reach the notebook
        failure = {
            "kind": type(error).__name__,
            "message": str(error),
            "is_explained": isinstance(error, NbdistError),
            "traceback": traceback.format_exc(),
        }
        (run_dir / f"failed.{rank}").write_text(json.dumps(failure))
        traceback.print_exc(file=sys.__stderr__)  # into the log: nobody hears the engine yet
        sys.exit(1)


def exchange_reports(
    store: dist.Store, report: EngineReport, world_size: int, deadline_s: float
) -> list[EngineReport]:
    """Every rank's report, by way of the store. Collective: every rank.

    Raises:
        StartError: After the deadline, naming the ranks that have not come.
    """
    keys = [f"report/{rank}" for rank in range(world_size)]
    # Bytes are taken too; torch's type annotation knows only text.
    store.set(f"report/{report.engine_id}", pickle.dumps(report))  # type: ignore[arg-type]
    if missing := rendezvous.await_keys(store, keys, deadline_s):
        raise StartError(
            f"rank {report.engine_id} waited {deadline_s:.0f} s for rank(s) "
            f"{rank_label(missing)} to join the group"
        )
    # The file is in a folder that only this user can read, written by the other ranks.
    return [pickle.loads(store.get(key)) for key in keys]  # noqa: S301


def join(
    plan: Topology,
    rank: int,
    store: dist.Store,
    generation: int = 0,
    user_groups: Sequence[GroupSpec] = (),
    interface: InterfaceChoice | None = None,
) -> None:
    """Form the process group that the plan asks for.

    Collective: every rank. With a generation: this process takes a dead rank's place, and the
    others are in `process_groups.recover` with the same one meanwhile. It says how often the
    groups have been recovered once this is done, and the others have these groups of the user's
    (hang.recovery.merge_groups).

    Raises:
        NbdistError: With a generation, when other ranks do not come.
    """
    place = plan.ranks[rank]
    # ipyparallel's key: user code would hand it to every child process.
    os.environ.pop("IPP_CONNECTION_INFO", None)
    _set_torchrun_variables(place, plan)
    os.environ.update(nccl_env.environment(os.environ))  # read when the group is made
    options = _use_device(place, plan.backend)
    # All before the first group, which they are to know.
    gloo_abort.install()
    gloo_abort.admit(plan.addresses)
    process_groups.install()
    debug_checks.install()
    common = process_groups.generation_store(store, generation)
    common_store.announce(common, rank)
    if generation:
        process_groups.announce_groups(common, rank, user_groups)
        process_groups.meet(common, rank, range(plan.world_size))
        gloo_abort.outdate(generation)
        device_health.refuse_broken(common, place, range(plan.world_size))
    # Within one host NCCL uses no network.
    with diagnostics_rank.captured_nccl_log(is_wanted=plan.backend == "nccl" and plan.n_hosts > 1):
        dist.init_process_group(
            TORCH_BACKENDS[plan.backend],
            store=common,
            rank=rank,
            world_size=plan.world_size,
            timeout=GROUP_TIMEOUT,
            **options,
        )
    joined(Rank(place, plan, store, interface))
    common_store.note_others(common, range(plan.world_size))
    process_groups.rejoin(user_groups)
    if generation:
        process_groups.agree_on_groups(common, range(plan.world_size))
    call_log.install(call_log.open_log(run_folder(), rank))
    call_log.reset(generation)


def _set_torchrun_variables(place: RankPlace, plan: Topology) -> None:
    variables = {
        "RANK": place.rank,
        "LOCAL_RANK": place.local_rank,
        "WORLD_SIZE": plan.world_size,
        "LOCAL_WORLD_SIZE": place.local_world_size,
        "GROUP_RANK": place.node_rank,
        "GROUP_WORLD_SIZE": plan.n_hosts,
        "ROLE_NAME": "default",
        "ROLE_RANK": place.rank,
        "ROLE_WORLD_SIZE": plan.world_size,
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_MAX_RESTARTS": 0,
        "TORCHELASTIC_RUN_ID": "none",
    }
    os.environ.update({name: str(value) for name, value in variables.items()})
    if place.device == "cpu":
        # Accelerate would take a visible GPU although the ranks agreed on the CPU.
        os.environ["ACCELERATE_USE_CPU"] = "true"
    if "OMP_NUM_THREADS" not in os.environ:
        os.environ["OMP_NUM_THREADS"] = str(place.threads)
        torch.set_num_threads(place.threads)


def _use_device(place: RankPlace, backend: str) -> dict[str, Any]:
    """Take the rank's GPU, if it has one; what `init_process_group` has to know of it."""
    if place.device == "cpu":
        return {}
    torch.cuda.set_device(place.device)
    host_staging.install()
    graph_capture.install()
    if backend != "nccl":
        host_staging.replace_functional_collectives()
        return {}
    # Bound to its device the communicator is made now and not in the first collective,
    # where it could not be aborted. torch does this for the GPU's half of the pair.
    return {"device_id": torch.device(place.device)}


def prepare(seed: int | None = None) -> Topology:
    """Give cells their names (`rank`, `accelerator`, ...) and return the plan as it is.

    On every rank, in the engine's main thread, once the group is formed.
    """
    this = this_rank()
    place = this.place
    if place.device != "cpu":
        torch.cuda.set_device(place.device)  # the current device belongs to a thread
    if seed is not None:
        from accelerate.utils import set_seed

        set_seed(seed)
    default_group.install()
    torch_clip.install()
    torch_grad.install()
    partial_state.install(torch.device(place.device).type, this.topology.backend)
    del sys.argv[
        1:
    ]  # the engine's, which it has read: a pasted program's parser takes its defaults
    shell = get_ipython()
    shell_hooks.install(shell)
    cell_hook.install(shell)
    _install_lints()
    call_log.name_cells(shell)
    cell_hooks.install(shell.kernel, CELL_HOOKS)
    responder.install(shell.kernel)
    run_dir = run_folder()
    if run_dir is not None:
        crash_files.arm(run_dir, place.rank)
        child_sockets.use(run_dir, place.rank)
    crash_files.note_cells(shell.compile, run_dir, place.rank)
    shell.push(
        {
            "rank": place.rank,
            "world_size": this.topology.world_size,
            "local_rank": place.local_rank,
            "device": torch.device(place.device),
            "gpu_id": torch.device(place.device).index,
            "torch": torch,
            "dist": dist,
            "accelerator": AcceleratorProxy(),
        },
        interactive=False,
    )

    def has_run() -> bool:
        return bool(shell.execution_count > 1)

    idle_imports.settle(has_run)
    idle_imports.begin(has_run)
    return this.topology


def _install_lints() -> None:
    watch.install()
    if _look_for_room not in events.before_build:
        events.before_build.append(_look_for_room)


def _look_for_room(model: torch.nn.Module, choice: Strategy) -> None:
    """Before a model is built; the planner is imported with the first one, not at the start."""
    from nbdist.planner.rank import shortage

    shortage.look(model, choice)


def run_folder() -> Path | None:
    """The run's folder on this rank's own host; None where there is none.

    A file system that hosts share may show the notebook's, on another host: the boxes in it are
    mapped, which works within one host only, and their times are by one host's clock.
    """
    folder = Path(os.environ.get("NBDIST_RUN", ""))
    if not folder.name or not folder.is_dir():
        return None
    try:
        owner = run_owner.read(folder / run_owner.FILE)
    except (OSError, ValueError, TypeError, KeyError):
        return folder  # an agent's, which is of this host
    return folder if owner.machine.boot == host.this_machine().boot else None


def reachable(addresses: tuple[str, ...], port: int, deadline_s: float = 2.0) -> tuple[str, ...]:
    """Return the addresses at which this engine can reach the port."""
    reached = []
    for address in addresses:
        try:
            socket.create_connection((address, port), deadline_s).close()
        except OSError:
            continue
        reached.append(address)
    return tuple(reached)


def join_by_plan(plan: Topology, rank: int, store_at: StoreAt) -> None:
    """Join a group whose ranks were assigned from reports. Collective: every rank.

    The store is a file that all ranks see (one host), else a port.
    """
    interface = _choose_interface(plan.ranks[rank].host, *store_at)
    join(plan, rank, _find_store(plan, interface, *store_at), interface=interface)


def rejoin(
    plan: Topology,
    rank: int,
    store_at: StoreAt,
    generation: int,
    user_groups: Sequence[GroupSpec],
) -> None:
    """Take the place of a rank that has ended.

    On a new process, while every other rank is in `process_groups.recover` with the same
    generation, or in this as well. The plan has the new processes in it, and those that stay have
    taken it (`take_plan`, which says where the store is); else as `join`.
    """
    interface = _choose_interface(plan.ranks[rank].host, *store_at)
    store = _find_store(plan, interface, *store_at)
    join(plan, rank, store, generation, user_groups, interface)


def _choose_interface(hostname: str, path: str, address: str, _port: int) -> InterfaceChoice:
    """The interface toward the store, which Gloo and NCCL take unless the user names another.

    Gloo looks its own name up otherwise, which on Debian gives 127.0.1.1, where no other host can
    reach it.
    """
    own_address = "127.0.0.1" if path else host.address_toward(address)
    interface = choose_interface(
        hostname,
        {name: stats.isup for name, stats in psutil.net_if_stats().items()},
        facts.addresses(), own_address, "" if path else address, os.environ,
    )  # fmt: skip
    os.environ.update(zip(INTERFACE_VARIABLES, (interface.gloo, interface.nccl), strict=True))
    return interface


def _find_store(
    plan: Topology, interface: InterfaceChoice, path: str, address: str, port: int
) -> dist.Store:
    if path:
        return dist.FileStore(path, plan.world_size)
    common_store.reserve(interface.address, plan.addresses)
    return common_store.connect(address, port, plan.world_size)


def take_plan(plan: Topology, gone: Sequence[int]) -> tuple[str, int]:
    """Take a plan that gives ranks that are gone new places.

    Returns address and port at which the new ones find the store; ("", 0) where it is a file.

    Called on each rank that stays, before `process_groups.recover`.

    Raises:
        NbdistError: If the store was with a rank that is gone, and the next one cannot be reached.
    """
    gloo_abort.admit(plan.addresses)
    common_store.admit(plan.addresses)
    common_store.leave(gone)
    this = this_rank()
    place = plan.ranks[this.place.rank]
    joined(Rank(place, plan, this.store, this.interface))
    _set_torchrun_variables(place, plan)
    return common_store.where()


def adopt_notebook(sys_path: list[str], folder: str) -> None:
    """Use the notebook's sys.path and working folder, on an engine of the same host."""
    os.chdir(folder)
    sys.path[:] = sys_path


def barrier(key: str, deadline_s: float) -> float:
    """Wait for all ranks and return how long this one waited, in seconds.

    Collective: every rank, with the same new key. It goes through the store, which names who
    is missing and leaves no collective hanging when a rank does not come.

    Raises:
        NbdistError: After the deadline, naming the ranks that have not come.
    """
    this = this_rank()
    began_s = time.monotonic()
    keys = [f"sync/{key}/{rank}" for rank in range(this.topology.world_size)]
    this.store.set(keys[this.place.rank], "here")
    if missing := rendezvous.await_keys(this.store, keys, deadline_s):
        raise NbdistError(
            f"rank {this.place.rank} waited {deadline_s:.0f} s at %dist_sync for rank(s) "
            f"{rank_label(missing)}"
        )
    return time.monotonic() - began_s
