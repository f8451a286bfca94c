"""Bringing ranks up: checks first, then processes, then groups, then names for cells."""

from __future__ import annotations

import os
import shutil
import socket
import sys
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import psutil
from traitlets.config import Config

from nbdist.cluster import capacity, nccl_env, shm
from nbdist.cluster.hosts import Host, clock_notes, parse_hosts, share_ranks
from nbdist.cluster.kernel import ipp_cluster, ipp_launchers, launcher, profiles, run_dir
from nbdist.cluster.kernel.cluster import Cluster
from nbdist.cluster.kernel.launchers import slurm as slurm_launcher
from nbdist.cluster.kernel.launchers.rank_set import LOCAL, OTHER, SLURM
from nbdist.cluster.kernel.ranks import adopt_notebook, prepare, set_strategy
from nbdist.cluster.peer_filter import OpenPort
from nbdist.cluster.slurm import DEFAULTS, FLAGS, SlurmOptions
from nbdist.core import gpus, host, topology, versions
from nbdist.core.failures import ranks_phrase
from nbdist.core.host import usable_cores
from nbdist.core.option import duration, option, positive_number, rank_count
from nbdist.core.progress import Reporter
from nbdist.core.ranks import is_all, parse_numbers
from nbdist.core.topology import BACKENDS, EngineReport, Gpu, HostRanks, StoreAt, Topology
from nbdist.errors import OptionError, StartError, no_such
from nbdist.rpc.kernel.functions import Caller, RankFunction
from nbdist.strategy import hosts
from nbdist.strategy.choice import described
from nbdist.strategy.choose import StrategySpec

# Variables that count where neither -n nor --gpus is typed.
RANKS, GPUS = "NBDIST_RANKS", "NBDIST_GPUS"
DEFAULT_DEADLINE_S = 120.0
DEFAULT_GRACE_S = 5.0
DEFAULT_KEEP_S = 8 * 3600.0
# The same as in profiles/local, which says why; agents report ends, so heartbeats may be slow. A
# profile's own arguments stand behind, and win.
CONTROLLER_ARGS = (
    "--HeartMonitor.period=200",
    "--HeartMonitor.max_heartmonitor_misses=150",
    "--IPController.use_threads=True",
    "--IPController.db_class=NoDB",
)

describe: RankFunction[[int, str], EngineReport] = RankFunction("nbdist.engine.facts:describe")
open_store: RankFunction[[str, int, tuple[str, ...]], int] = RankFunction(
    "nbdist.hang.rank.common_store:open_store"
)
reachable: RankFunction[[tuple[str, ...], int], tuple[str, ...]] = RankFunction(
    "nbdist.engine.join:reachable"
)
join_by_plan: RankFunction[[Topology, int, StoreAt], None] = RankFunction(
    "nbdist.engine.join:join_by_plan"
)
open_ports: RankFunction[[], tuple[OpenPort, ...]] = RankFunction("nbdist.engine.facts:open_ports")
log_problem: RankFunction[[], str] = RankFunction("nbdist.hang.rank.call_log:problem")


def _grace(text: str) -> float:
    """Seconds, or 0 for at once."""
    return 0.0 if text.strip("0.") == "" and "0" in text else positive_number(text)


@dataclass(frozen=True, slots=True)
class StartOptions:
    """The options of %dist_init; its ranks end with the notebook's kernel if keep_s is 0.

    Attributes:
        strategy: The strategy under which models are prepared; None for Accelerate's ddp.
        slurm: The job to be asked for, of profiles whose ranks Slurm starts.
    """

    world_size: int | None = option(
        "number of ranks (default: NBDIST_RANKS, or one per GPU, or 2 on the CPU)",
        "N", rank_count, flags=("-n", "--num-processes"),
    )  # fmt: skip
    profile: str = option(
        "kind of cluster (default: local, or ssh with --hosts)",
        "NAME", default="local", choices=profiles.available,
    )  # fmt: skip
    gpus: str | None = option(
        "GPUs such as 0,1, or none for the CPU (default: NBDIST_GPUS, or all)",
        "IDS", flags=("-g", "--gpus", "--gpu-ids"), choices=("none",),
    )  # fmt: skip
    backend: str = option(
        "auto, nccl or gloo (default: auto)", "NAME", default="auto", choices=BACKENDS
    )
    seed: int | None = option("seed all ranks' random generators alike", "S", int)
    deadline_s: float = option(
        f"longest time the start may take, in seconds (default: {DEFAULT_DEADLINE_S:.0f})",
        "S", positive_number, DEFAULT_DEADLINE_S, flags=("--timeout",),
    )  # fmt: skip
    grace_s: float = option(
        "seconds from reporting a certain deadlock to aborting it "
        f"(default: {DEFAULT_GRACE_S:.0f}; 0 aborts at once)",
        "S", _grace, DEFAULT_GRACE_S, flags=("--grace",),
    )  # fmt: skip
    debug: str = option(
        "torch's own checks of every collective: off, info or detail (default: off)",
        "LEVEL", default="off", choices=launcher.DEBUG_LEVELS,
    )  # fmt: skip
    strategy: StrategySpec | None = None
    hosts: tuple[Host, ...] = option(
        "hosts with their ranks, n1:4,n2:4, or a file of them (profiles: ssh, mpi)",
        "HOSTS", parse_hosts, (),
    )  # fmt: skip
    slurm: SlurmOptions = DEFAULTS
    keep_s: float = option(
        "let the ranks go on so long without this notebook, 8h if no time is given",
        "TIME", duration, 0.0, flags=("--keep",), implied=DEFAULT_KEEP_S,
    )  # fmt: skip
    save: str = option("a checkpoint that is written when that time is over", "PATH", default="")


def start(options: StartOptions, progress: Reporter) -> tuple[Cluster, Topology, tuple[str, ...]]:
    """Bring ranks up; their cluster, which engine has which rank, and what there is to say of it.

    Raises:
        OptionError: If an option cannot be met on this machine; nothing has been started.
        StartError: If a process did not come up; everything has been ended again.
    """
    notes = [versions.check_system(sys.platform)]
    options = _with_environment(options)
    _check_values(options)
    config, kind = _load_profile(options)
    _check_keep(options, kind)
    # If the driver fails here, the ranks report what they find.
    available = topology.filter_visible(
        gpus.read_once().devices, os.environ.get("CUDA_VISIBLE_DEVICES")
    )
    world_size, expected, chosen = options.world_size, None, available
    if kind == LOCAL:
        chosen = topology.select_gpus(available, options.gpus)
        expected = _expected_plan(chosen, options)
        notes += _local_notes(expected, options)
        world_size = expected.world_size
    elif kind == OTHER:
        notes += _complete_profile(config, options)
        world_size = _world_size(options, available)
    else:
        notes += _configure_agents(config, options)
    cluster = Cluster(config, partial(_find_hosts, config, options, kind, progress))
    end_s = time.monotonic() + options.deadline_s  # without the time in a batch system's queue
    try:
        if expected is not None:
            _configure_local(config, cluster, expected, chosen, options)
        n = cluster.start(world_size, options.deadline_s, progress)
        plan, rank_notes = _prepare(
            cluster, n, options, end_s, progress, is_local=expected is not None
        )
        run_dir.write_ranks(cluster.run_dir, [place.host for place in plan.ranks])
    except BaseException:
        cluster.stop(grace_s=0)
        raise
    notes += [*clock_notes(cluster.engine_set.checks), *rank_notes]
    return cluster, plan, tuple(filter(None, notes))


def _find_hosts(
    config: Config,
    options: StartOptions,
    kind: str,
    progress: Reporter,
    run: str,
    promise: Callable[[Sequence[str]], None],
) -> None:
    """Complete the config with the hosts that ranks start on; see Cluster."""
    if kind == SLURM:
        slurm_launcher.configure(
            config, options.slurm, options.world_size, f"nbdist-{run}", promise, progress
        )
    ipp_cluster.listen(config, _host_names(config, options), is_kept=options.keep_s > 0)


def _load_profile(options: StartOptions) -> tuple[Config, str]:
    """The profile with its kind; refuses options that its launcher knows nothing of."""
    config = profiles.load(options.profile)
    kind = ipp_cluster.kind_of(config)
    if kind == OTHER and options.debug != "off":
        raise OptionError(
            f"--debug does not work with the profile {options.profile!r}, whose ranks nbdist does "
            "not start itself. Set TORCH_DISTRIBUTED_DEBUG=DETAIL in the environment in which its "
            "engines start."
        )
    if kind == OTHER and options.gpus is not None and not is_all(options.gpus):
        raise OptionError(
            f"--gpus does not work with the profile {options.profile!r}, whose ranks nbdist does "
            f"not start itself. Leave it out, and {GPUS} too, and set CUDA_VISIBLE_DEVICES in the "
            "environment in which its engines start."
        )
    if kind == LOCAL and options.hosts:
        raise OptionError(
            f"The ranks of the profile {options.profile!r} are on this machine. --hosts works with "
            "the profiles ssh, mpi and pretended."
        )
    if kind != SLURM and options.slurm != DEFAULTS:
        raise OptionError(
            f"The ranks of the profile {options.profile!r} are not started by Slurm: "
            f"{', '.join(FLAGS[:-1])} and {FLAGS[-1]} work with the profile slurm. Add --profile "
            "slurm, or leave them out."
        )
    if kind == SLURM and options.hosts:
        raise OptionError(
            f"The hosts of the profile {options.profile!r} are those of its job. --hosts works "
            "with the profiles ssh, mpi and pretended."
        )
    if kind != LOCAL and options.strategy:
        places = {host.name: host.places for host in options.hosts if host.places}
        is_known = bool(places) and len(places) == len(options.hosts)
        shares = share_ranks(places, options.world_size) if is_known else {}
        ranks_on = [HostRanks(name, ranks) for name, ranks in shares.items()]
        if world_size := sum(map(len, shares.values())) or options.world_size:
            options.strategy.choose(world_size, ranks_on=ranks_on)
    return config, kind


def _host_names(config: Config, options: StartOptions) -> list[str]:
    """The hosts that are known before the start, by --hosts or the profile."""
    listed = config.AgentEngineSetLauncher.get("hosts", [])
    return [entry.name for entry in options.hosts] or [entry[0] for entry in listed]


def _world_size(options: StartOptions, available: tuple[Gpu, ...]) -> int:
    """How many ranks a launcher of ipyparallel's is to start: as many as places that are typed."""
    if options.world_size is not None:
        return options.world_size
    places = sum(entry.places or 1 for entry in options.hosts)
    return places or topology.default_world_size(available)


def _prepare(
    cluster: Cluster,
    world_size: int,
    options: StartOptions,
    end_s: float,
    progress: Reporter,
    *,
    is_local: bool,
) -> tuple[Topology, list[str]]:
    """Give cells on ranks their names, and ranks their strategy; what there is to say of it."""
    assert cluster.channel is not None
    call, engines = cluster.channel.call, tuple(range(world_size))
    if is_local:  # the groups are formed already
        progress(f"{world_size} of {world_size} ranks ready, preparing")
        _adopt_notebook(call, engines, end_s)  # again: IPython has added to sys.path
    else:
        engines = cluster.channel.engine_ids[:world_size]
        _form_group(cluster, call, engines, options, end_s, progress)
    plans = _all({e: prepare(call, e, options.seed) for e in engines}, end_s, "prepare")
    plan: Topology = plans[engines[0]]
    problems = {place.engine_id: log_problem(call, place.engine_id) for place in plan.ranks}
    # Why hangs of some ranks could not be explained, each reason once.
    notes = [*dict.fromkeys(_all(problems, end_s, "report on their call logs").values())]
    if plan.n_hosts > 1:
        lists = _all({e: open_ports(call, e) for e in engines}, end_s, "list their ports").values()
        ports = [port for ports in lists for port in ports]
        if ports:  # pretended hosts have none
            notes.append(ipp_cluster.open_traffic(plan, ports, is_encrypted=cluster.is_encrypted))
    if options.strategy is not None:
        choice = options.strategy.on(plan)
        answers = {p.engine_id: set_strategy(call, p.engine_id, choice) for p in plan.ranks}
        _all(answers, end_s, "set the strategy")
        notes += [f"strategy: {described(choice)}", *hosts.notes(choice, plan.hosts)]
    return plan, notes


def _with_environment(options: StartOptions) -> StartOptions:
    """The options, with the environment's number of ranks and GPUs where none are typed."""
    ranks, gpu_ids = os.environ.get(RANKS), os.environ.get(GPUS)
    if ranks and options.world_size is None:
        if not (ranks.isascii() and ranks.isdigit()):
            raise OptionError(
                f"{RANKS} is {ranks!r}, which is not a number of ranks. Set it to 1 or more, or "
                "remove it."
            )
        options = replace(options, world_size=int(ranks))
    if options.hosts and options.profile == "local":
        options = replace(options, profile="ssh")
    return replace(options, gpus=gpu_ids) if gpu_ids and options.gpus is None else options


def _check_keep(options: StartOptions, kind: str) -> None:
    """Refuse to keep ranks that no kernel could attach to, and a save that never happens."""
    if kind == OTHER and options.keep_s:
        raise OptionError(
            f"--keep does not work with the profile {options.profile!r}, whose ranks nbdist does "
            "not start itself. It works with the profiles local, ssh, slurm and pretended."
        )
    if options.save and not options.keep_s:
        raise OptionError(
            "--save says where a checkpoint is written when kept ranks end. Add --keep, or save "
            "now with %dist_save."
        )


def _check_values(options: Any) -> None:
    """Refuse what Python callers can pass and the magics cannot."""
    if options.backend not in topology.BACKENDS:
        raise no_such("backend", options.backend, topology.BACKENDS)
    if not isinstance(options.world_size, int | None):
        raise OptionError(f"{options.world_size!r} is not a valid number of ranks. Use 1 or more.")
    if options.world_size is not None and options.world_size < 1:
        raise OptionError(f"-n {options.world_size} starts no rank. Use 1 or more.")
    if not isinstance(options.gpus, str | None):
        raise OptionError(f'gpus must be a string such as "0,1" or "none", not {options.gpus!r}.')
    if options.deadline_s <= 0:
        raise OptionError(f"The start's deadline is {options.deadline_s:g} s. Use more than 0.")
    if not isinstance(options.grace_s, int | float) or not options.grace_s >= 0:
        raise OptionError(
            f"The grace period cannot be {options.grace_s!r} s. Use 0 (abort at once) or more."
        )
    if options.debug not in tuple(launcher.DEBUG_LEVELS):  # also of what cannot be hashed
        raise no_such("--debug", options.debug, launcher.DEBUG_LEVELS)


def _expected_plan(chosen: tuple[Gpu, ...], options: StartOptions) -> Topology:
    """The plan of the local cluster that would be started: refuses what cannot work."""
    asked = options.world_size
    world_size = topology.default_world_size(chosen) if asked is None else asked
    reports = topology.local_reports(
        world_size, hostname=socket.gethostname(), gpus=chosen, cores=usable_cores()
    )
    expected = topology.plan(reports, options.backend)
    if options.strategy is not None:
        options.strategy.on(expected)
    return expected


def _local_notes(expected: Topology, options: StartOptions) -> list[str]:
    """Notes on this machine, and on the environment that its ranks will have."""
    noted = ipp_cluster.installed_version("torch")
    torch_version, folder = versions.torch_on_path()
    second = versions.second_torch(torch_version, folder, noted)
    versions.check_torch(torch_version or noted, sys.executable, second)
    cores = usable_cores()
    capacity.check(psutil.virtual_memory().available, expected.world_size, cores)
    uses_nccl = expected.backend == "nccl"
    notes = [second, capacity.crowding(expected.world_size, cores)]
    if uses_nccl:
        notes += [
            *nccl_env.conflicts(os.environ),
            nccl_env.backend_note(torch_version or "", os.environ),
        ]
    if os.path.isdir(shm.SHM):  # noqa: PTH112
        usage = shutil.disk_usage(shm.SHM)
        free, total = usage.free, usage.total
        notes.insert(0, shm.check(free, total, expected.world_size, uses_nccl=uses_nccl))
    return notes


def _complete_profile(config: Config, options: StartOptions) -> list[str]:
    """Set what the profile of another launcher leaves open; what there is to say of it."""
    launchers, name = ipp_cluster.launchers(config), options.profile
    ipp_launchers.check_command(config, launchers, name)
    ipp_launchers.spread(config, launchers[1], name, options.hosts)
    ipp_launchers.complete(config)
    return [profiles.place(name), *ipp_launchers.notes(config, launchers[1])]


def _configure_local(
    config: Config,
    cluster: Cluster,
    expected: Topology,
    chosen: tuple[Gpu, ...],
    options: StartOptions,
) -> None:
    """Tell launcher and engines their ranks, threads and GPUs before anything reports."""
    common = launcher.local_environment(
        cluster.run_dir, expected.world_size, expected.ranks[0].threads, options.debug
    )
    if options.gpus is not None:
        common["CUDA_VISIBLE_DEVICES"] = ",".join(str(gpu.index) for gpu in chosen)
    config.RankEngineSetLauncher.common_environment = common
    # Variables that torchrun would set for a rank of this machine. A process sees one MIG slice.
    has_slices = any(gpu.is_slice for gpu in chosen)
    config.RankEngineSetLauncher.rank_environment = {
        str(place.rank): {"RANK": str(place.rank), "LOCAL_RANK": str(place.rank)}
        | ({"CUDA_VISIBLE_DEVICES": place.device_uuid} if has_slices else {})
        for place in expected.ranks
    }
    start = {
        "world_size": expected.world_size,
        "backend": options.backend,
        "deadline_s": options.deadline_s,
        "gpus": [(gpu.index, gpu.uuid, gpu.name) for gpu in chosen],
    }
    run_dir.write_notebook(cluster.run_dir, list(sys.path), start)


def _configure_agents(config: Config, options: StartOptions) -> list[str]:
    """Give the launcher of other hosts their names and their ranks' environment.

    Returns notes on the profile.
    """
    # Agents wait for the controller's connection file: both come up side by side, and the key is in
    # no environment.
    config.Cluster.send_engines_connection_env = False
    config.Cluster.delay = 0
    args = ipp_launchers.controller_args(config)
    config.Cluster.controller_args = [*CONTROLLER_ARGS, *args]
    section = config.AgentEngineSetLauncher
    if options.hosts:
        section.hosts = [(host.name, host.places) for host in options.hosts]
    environment = {}
    if options.gpus is not None and not is_all(options.gpus):
        is_none = options.gpus.strip().lower() == "none"
        numbers = () if is_none else parse_numbers(options.gpus, "GPUs")
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, numbers))
    if level := launcher.DEBUG_LEVELS[options.debug]:
        environment["TORCH_DISTRIBUTED_DEBUG"] = level
    section.common_environment = {**section.get("common_environment", {}), **environment}
    return [profiles.place(options.profile)]


def _form_group(
    cluster: Cluster,
    call: Caller,
    engines: Sequence[int],
    options: StartOptions,
    end_s: float,
    progress: Reporter,
) -> None:
    """Ask the engines what they are, assign ranks, form the groups."""
    progress("asking the engines where they are")
    address = host.address_toward(host.ELSEWHERE)
    reports = _all(
        {e: describe(call, e, e, address) for e in engines}, end_s, "describe themselves"
    )
    hosts = {report.hostname for report in reports.values()}
    if is_this_host(hosts):
        cluster.processes.identify({engine: report.pid for engine, report in reports.items()})
    plan = topology.plan(tuple(reports.values()), options.backend)
    progress(f"forming a group of {plan.world_size} ranks on {plan.n_hosts} host(s)")
    store_at = find_store(cluster, call, plan, reports, end_s)
    if is_this_host(hosts):
        _adopt_notebook(call, engines, end_s)
    _all(
        {
            place.engine_id: join_by_plan(call, place.engine_id, plan, place.rank, store_at)
            for place in plan.ranks
        },
        end_s,
        "join the group",
    )


def _adopt_notebook(call: Caller, engines: Iterable[int], end_s: float) -> None:
    folder = os.getcwd()  # noqa: PTH109  # a string for the wire
    futures = {e: adopt_notebook(call, e, list(sys.path), folder) for e in engines}
    _all(futures, end_s, "switch to the notebook's folder")


def find_store(
    cluster: Cluster,
    call: Caller,
    plan: Topology,
    reports: dict[int, EngineReport],
    end_s: float,
) -> StoreAt:
    """A file on one host that is this one, a port for several."""
    if plan.n_hosts == 1 and is_this_host({place.host for place in plan.ranks}):
        return store_file(cluster)
    first = plan.engine_of_rank(0)
    candidates = topology.store_addresses(plan, tuple(reports.values()))
    tried: dict[str, str] = {}
    for address in candidates:
        opened = open_store(call, first, address, plan.world_size, plan.addresses)
        try:
            port = _all({first: opened}, end_s, "open a port")[first]
        except StartError as error:  # an address of a gateway, which rank 0 itself has not
            tried[address] = str(error)
            continue
        reached = _all(
            {e: reachable(call, e, (address,), port) for e in reports}, end_s, "reach rank 0"
        )
        missing = sorted(plan.rank_of_engine(e) for e, ok in reached.items() if not ok)
        if not missing:
            return "", address, port
        tried[address] = f"not from {ranks_phrase(missing)}"
    table = "; ".join(f"{address}: {why}" for address, why in tried.items())
    raise StartError(
        f"No address of rank 0 can be reached from every rank ({table}). Allow connections between "
        "the hosts, or choose hosts that can reach each other."
    )


def store_file(cluster: Cluster) -> StoreAt:
    """The store where all ranks see this host's files."""
    return str(cluster.run_dir / "store"), "", 0


def is_this_host(hosts: Collection[str]) -> bool:
    """Whether every rank runs on the kernel's own host, and so sees its files."""
    return set(hosts) == {socket.gethostname()}


def _all(futures: dict[int, Future[Any]], end_s: float, what: str) -> dict[int, Any]:
    """The engines' answers, or a StartError that names the first that failed or is late."""
    answers = {}
    for engine, future in futures.items():
        try:
            answers[engine] = future.result(max(0.0, end_s - time.monotonic()))
        except TimeoutError as error:
            late = [number for number, f in futures.items() if not f.done()]
            raise StartError(f"engines {late} did not {what} before the deadline") from error
        except Exception as error:
            reason = f"{getattr(error, 'ename', type(error).__name__)}: "
            reason += str(getattr(error, "evalue", error))
            if "No module named 'nbdist" in reason:
                reason += ". Install nbdist for the Python that the engines run."
            raise StartError(f"engine {engine} could not {what}: {reason}") from error
    return answers
