"""Which engine becomes which rank, on which device, with which backend: decided here, purely.

Engines report what they see (`EngineReport`), `plan` turns the reports into a
`Topology`. A local cluster is planned the same way, from `local_reports`, before
any engine runs.
"""

from __future__ import annotations

import ipaddress
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from nbdist.core.failures import ranks_phrase
from nbdist.core.interface import INNER_INTERFACE
from nbdist.core.ranks import is_all, parse_numbers
from nbdist.core.versions import check_torch
from nbdist.errors import OptionError, StartError, no_such

BACKENDS = ("auto", "nccl", "gloo")
# Where the ranks' store is: the path of a file, or "" and then an address and a port.
StoreAt = tuple[str, str, int]


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU, or one MIG slice of a GPU."""

    index: int  # on the machine, as in nvidia-smi and --gpus; a slice has its GPU's
    uuid: str  # the only name that holds across processes and containers; never empty
    name: str

    @property
    def is_slice(self) -> bool:
        """Whether it is a MIG slice; of these a process sees one, the first that it may use."""
        return self.uuid.startswith("MIG-")


@dataclass(frozen=True, slots=True)
class EngineReport:
    """Report of one engine on itself, before it has a rank."""

    engine_id: int  # ipyparallel's; says nothing about the rank
    hostname: str  # containers may share one
    boot_id: str = ""
    network_namespace: str = ""
    pid: int = 0  # 0: not started yet
    addresses: tuple[tuple[str, str], ...] = ()  # (interface, ip)
    toward_controller: str = ""  # source address of packets to the controller
    cuda_visible_devices: str | None = None
    gpus: tuple[Gpu, ...] = ()  # as this process sees them: cuda:0 is the first
    cores: int = 1  # that this process may use
    rank_hint: int | None = None  # the launcher's, e.g. SLURM_PROCID
    size_hint: int | None = None
    local_hint: int | None = None
    job_id: str = ""
    python: str = ""
    torch_version: str = ""
    has_cuda: bool = False  # whether this process's torch can use CUDA


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Place of one rank; rank, local_rank and local_world_size are torchrun's."""

    engine_id: int
    rank: int
    local_rank: int
    local_world_size: int
    node_rank: int
    host: str
    pid: int  # 0: not started yet
    device: str  # "cpu" or "cuda:1", as the rank's own process counts
    device_name: str  # "" on a CPU, as is device_uuid
    device_uuid: str
    threads: int
    # Hostname, boot id, network namespace: whether another process is on the same host.
    host_key: tuple[str, str, str] = field(default=("", "", ""), compare=False)


@dataclass(frozen=True, slots=True)
class HostRanks:
    """One host of a topology by its name, and its ranks, ascending."""

    name: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Topology:
    """Every rank's place, and the backend that joins them."""

    ranks: tuple[RankPlace, ...]  # in rank order
    backend: str  # "nccl" or "gloo"
    why: str  # one sentence: why this backend
    is_scaling: bool  # False: ranks share a GPU or run on CPUs, timings say nothing about scaling
    n_hosts: int  # network namespaces count as hosts of their own
    is_launcher_order: bool = False  # False: sorted by host and device, not by the rank hints
    addresses: tuple[str, ...] = ()  # IPv4, of all hosts: from these ranks connect; () on one host

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return len(self.ranks)

    @property
    def hosts(self) -> tuple[HostRanks, ...]:
        """The hosts in the order of their ranks; two of one name are told apart by a number."""
        members: dict[int, list[RankPlace]] = {}
        for place in self.ranks:
            members.setdefault(place.node_rank, []).append(place)
        counts = Counter(places[0].host for places in members.values())
        return tuple(
            HostRanks(
                places[0].host + (f" ({number})" if counts[places[0].host] > 1 else ""),
                tuple(place.rank for place in places),
            )
            for number, places in members.items()
        )

    def rank_of_engine(self, engine_id: int) -> int:
        """Return the rank of an engine of this topology; KeyError for any other."""
        return {place.engine_id: place.rank for place in self.ranks}[engine_id]

    def engine_of_rank(self, rank: int) -> int:
        """Return ipyparallel's id of a rank of this topology; KeyError for any other."""
        if not 0 <= rank < len(self.ranks):
            raise KeyError(rank)
        return self.ranks[rank].engine_id


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """A backend, a sentence that says why, and whether timings on it are scaling numbers."""

    backend: str
    why: str
    is_scaling: bool


def plan(
    reports: Sequence[EngineReport], backend: str = "auto", threads: int | None = None
) -> Topology:
    """Give every engine a rank, a device and a share of its host's cores.

    Ranks are contiguous on each host, and the order of the reports changes nothing.
    All ranks get a GPU, or none does.

    Args:
        reports: One per engine; at least one.
        backend: `auto`, `nccl` or `gloo`.
        threads: CPU threads per rank; by default cores // ranks on the host.

    Raises:
        OptionError: If the backend is unknown or cannot join these ranks, or threads < 1.
        StartError: If a rank's torch is too old, or another one than other ranks have.
    """
    assert reports
    assert len({report.engine_id for report in reports}) == len(reports)
    if threads is not None and threads < 1:
        raise OptionError(f"A rank cannot run on {threads} threads. Use 1 or more.")
    is_launcher_order = _hints_are_usable(reports)
    ordered = sorted(
        reports, key=lambda r: (r.rank_hint,) if is_launcher_order else _sorted_order(r)
    )
    check_ranks_torch([(r.torch_version, r.python, r.hostname) for r in ordered])
    obstacle = _gpu_obstacle(ordered)
    places = _place(ordered, threads, uses_gpus=not obstacle)
    gpu_uuids = [] if obstacle else [place.device_uuid for place in places]
    choice = choose_backend(backend, gpu_uuids, obstacle)
    n_hosts = places[-1].node_rank + 1
    return Topology(
        places, choice.backend, choice.why, choice.is_scaling, n_hosts, is_launcher_order,
        _peer_addresses(reports),
    )  # fmt: skip


def replan(topology: Topology, reports: Mapping[int, EngineReport]) -> Topology:
    """The topology once new processes have taken the place of ranks, by rank what they report.

    Numbers of ranks and the backend stay. Back on its host a rank has its local rank and its GPU
    again; on another one the smallest local rank that is free there, and a GPU by it. A host that
    had no rank takes the smallest node rank that is free.

    Raises:
        StartError: If a rank came back where it sees no GPU, or has to share one under NCCL.
    """
    places = {place.rank: place for place in topology.ranks if place.rank not in reports}
    hosts = _renumber_hosts(topology, reports)

    def has_moved(rank: int) -> bool:
        return hosts[_host_key(reports[rank])] != topology.ranks[rank].node_rank

    for rank in sorted(reports, key=lambda rank: (has_moved(rank), rank)):
        former, report = topology.ranks[rank], reports[rank]
        node_rank = hosts[_host_key(report)]
        local_ranks = {p.local_rank for p in places.values() if p.node_rank == node_rank}
        free = next(n for n in range(topology.world_size) if n not in local_ranks)
        is_back = not has_moved(rank) and former.local_rank not in local_ranks
        local_rank = former.local_rank if is_back else free
        device, gpu = _device_again(former, report, local_rank)
        places[rank] = replace(
            former, engine_id=report.engine_id, local_rank=local_rank, node_rank=node_rank,
            host=report.hostname, pid=report.pid, device=device,
            device_name="" if gpu is None else gpu.name,
            device_uuid="" if gpu is None else gpu.uuid,
            threads=former.threads if is_back else 0, host_key=_host_key(report),
        )  # fmt: skip
    if topology.backend == "nccl":
        _refuse_shared_gpus([places[rank] for rank in range(topology.world_size)])
    sizes = Counter(place.node_rank for place in places.values())
    dense = {node_rank: index for index, node_rank in enumerate(sorted(sizes))}
    ordered = []
    for rank in range(topology.world_size):
        place, size = places[rank], sizes[places[rank].node_rank]
        threads = place.threads or max(1, reports[rank].cores // size)
        node_rank = dense[place.node_rank]
        ordered.append(replace(place, local_world_size=size, node_rank=node_rank, threads=threads))
    addresses = topology.addresses
    if len(reports) == topology.world_size:
        addresses = _peer_addresses([*reports.values()])
    elif addresses:  # those that stay have them too
        addresses = tuple(sorted({*addresses, *_addresses_v4(reports.values())}))
    return replace(topology, ranks=tuple(ordered), n_hosts=len(sizes), addresses=addresses)


def _renumber_hosts(
    topology: Topology, reports: Mapping[int, EngineReport]
) -> dict[tuple[str, str, str], int]:
    """Each host's node rank: those that had ranks keep theirs, also after another boot."""
    hosts = {place.host_key: place.node_rank for place in topology.ranks}
    in_use = {p.node_rank for p in topology.ranks if p.rank not in reports}
    in_use |= {hosts[key] for r in reports.values() if (key := _host_key(r)) in hosts}
    for _, report in sorted(reports.items()):
        key = _host_key(report)
        if key in hosts:
            continue
        left = {p.host: p.node_rank for p in topology.ranks if p.node_rank not in in_use}
        free = next(n for n in range(topology.world_size + 1) if n not in in_use)
        hosts[key] = left.get(report.hostname, free)
        in_use.add(hosts[key])
    return hosts


def _device_again(
    former: RankPlace, report: EngineReport, local_rank: int
) -> tuple[str, Gpu | None]:
    """Device and GPU of a rank's new process: its former one where it sees that."""
    if former.device == "cpu":
        return "cpu", None
    if not report.gpus or not report.has_cuda:
        raise StartError(
            f"rank {former.rank} came back on {report.hostname}, where it cannot use a GPU, and "
            "the ranks use GPUs all or none. Choose a host with GPUs; %dist_reset starts afresh."
        )
    uuids = [gpu.uuid for gpu in report.gpus]
    is_there = former.device_uuid in uuids
    index = uuids.index(former.device_uuid) if is_there else local_rank % len(uuids)
    return f"cuda:{index}", report.gpus[index]


def _refuse_shared_gpus(places: Sequence[RankPlace]) -> None:
    by_gpu: dict[str, list[RankPlace]] = {}
    for place in places:
        by_gpu.setdefault(place.device_uuid, []).append(place)
    for sharing in by_gpu.values():
        if len(sharing) > 1:
            raise StartError(
                f"{ranks_phrase([p.rank for p in sharing])} would share a GPU of "
                f"{sharing[0].host}, and NCCL takes one rank per GPU. Choose a host with a free "
                "GPU; %dist_reset with --backend gloo lets ranks share."
            )


# How ranks lie -> what "auto" takes, and what NCCL is refused with; both sentences are templates.
_SITUATIONS = {
    "own GPUs": (BackendChoice("nccl", "NCCL: each rank has its own GPU.", True), ""),
    "shared GPUs": (
        BackendChoice("gloo", "Gloo: {sharing}, and NCCL takes one rank per GPU.", False),
        "NCCL takes one rank per GPU, and {sharing}. Use --backend gloo, or -n {n_gpus}.",
    ),
    # NCCL up to 2.29 (torch 2.13) takes two slices of a GPU for one GPU twice, by its PCI number,
    # and refuses. 2.32 describes slices in its guide, as an experiment, without peer access.
    "MIG slices": (
        BackendChoice("gloo", "Gloo: {slices}, and ranks run on them.", False),
        "{slices}, and ranks run on them. Use --backend gloo, or whole GPUs.",
    ),
    "CPUs": (
        BackendChoice("gloo", "Gloo on the CPU: {obstacle}.", False),
        "NCCL needs a GPU for each rank, and {obstacle}. Use --backend gloo or --backend auto.",
    ),
}
_GLOO_ON_OWN_GPUS = "Gloo, as requested: each rank has its own GPU, so NCCL would work too."


def choose_backend(wanted: str, gpu_uuids: Sequence[str], obstacle: str = "") -> BackendChoice:
    """Return NCCL when each rank has a whole GPU of its own, else Gloo.

    Ranks that have no GPU run on CPUs, and `obstacle` is the clause that says why.

    Raises:
        OptionError: If the wanted backend is unknown, or is NCCL and cannot run here.
    """
    if wanted not in BACKENDS:
        raise no_such("backend", wanted, BACKENDS)
    n_gpus = len(set(gpu_uuids))
    gpus = "1 GPU" if n_gpus == 1 else f"{n_gpus} GPUs"
    facts = {
        "obstacle": obstacle or "no rank sees a GPU",
        "sharing": f"{len(gpu_uuids)} ranks share {gpus}",
        "n_gpus": n_gpus,
        "slices": "NCCL before 2.32 does not support MIG slices",
    }
    use = "own GPUs"
    if not gpu_uuids:
        use = "CPUs"
    elif any(uuid.startswith("MIG-") for uuid in gpu_uuids):
        use = "MIG slices"
    elif n_gpus < len(gpu_uuids):
        use = "shared GPUs"
    choice, nccl_error = _SITUATIONS[use]
    if wanted == "nccl" and nccl_error:
        raise OptionError(nccl_error.format_map(facts))
    if wanted == "gloo" and choice.backend == "nccl":
        return replace(choice, backend="gloo", why=_GLOO_ON_OWN_GPUS)
    return replace(choice, why=choice.why.format_map(facts))


def local_reports(
    n: int, *, hostname: str, gpus: tuple[Gpu, ...], cores: int
) -> tuple[EngineReport, ...]:
    """Return the reports of n engines that the local launcher would start: engine id = rank.

    `plan` of them checks `-n`, `--gpus` and `--backend` before anything starts. With MIG slices
    each engine sees one device, and the launcher has to say which.

    Raises:
        OptionError: If n < 1.
    """
    if n < 1:
        raise OptionError(f"-n {n} starts no rank. Use 1 or more.")
    sees_one = any(gpu.is_slice for gpu in gpus)
    return tuple(
        EngineReport(
            i, hostname, gpus=(gpus[i % len(gpus)],) if sees_one else gpus, cores=cores,
            rank_hint=i, size_hint=n, local_hint=i, has_cuda=True,
        )
        for i in range(n)
    )  # fmt: skip


def filter_visible(gpus: tuple[Gpu, ...], variable: str | None) -> tuple[Gpu, ...]:
    """The GPUs that a value of CUDA_VISIBLE_DEVICES leaves, in its order; None leaves all.

    As CUDA does, an entry that does not exist ends the list. The number of a GPU that is cut up
    stands for all of its slices. A slice that nobody lists is believed to exist where GPUs, but no
    slices, are listed, and there in CUDA's older form (MIG-GPU-8932f937.../1/0).
    """
    if variable is None:
        return gpus
    lists_slices = any(gpu.is_slice for gpu in gpus)
    left: list[Gpu] = []
    for entry in filter(None, (part.strip() for part in variable.split(","))):
        matches = [gpu for gpu in gpus if entry == str(gpu.index)]
        if entry.startswith(("GPU-", "MIG-")):
            matches = [gpu for gpu in gpus if gpu.uuid.startswith(entry)][:1]
        is_believed = bool(gpus) and ("/" in entry or not lists_slices)
        if entry.startswith("MIG-") and not matches and is_believed:
            matches = [Gpu(0, entry, "MIG slice")]
        if not matches:
            break
        left += matches
    return tuple(left)


def select_gpus(available: tuple[Gpu, ...], spec: str | None) -> tuple[Gpu, ...]:
    """Return the GPUs that `--gpus` names, in the order typed: the first is `cuda:0`.

    It is `0,1` or `0-3`; `none` for CPU ranks; None or `all` for every GPU of this machine. The
    number of a GPU that is cut up stands for all of its slices.

    Raises:
        OptionError: If an id does not exist or stands twice, or the spec has another form.
    """
    if spec is None or is_all(spec):
        return available
    if spec.strip().lower() == "none":
        return ()
    numbers = parse_numbers(spec, "GPUs")
    names = {gpu.index: gpu.name for gpu in available}
    for number, count in Counter(numbers).items():
        if number not in names:
            there = ", ".join(f"{index} ({name})" for index, name in names.items())
            existing = f"These do: {there}" if there else "This machine has no GPU"
            raise OptionError(
                f"GPU {number} does not exist. {existing}. Use --gpus none for ranks on the CPU."
            )
        if count > 1:
            raise OptionError(
                f"GPU {number} occurs {count} times in --gpus {spec}. "
                "Name each GPU once; with a larger -n the ranks share them."
            )
    return tuple(gpu for number in numbers for gpu in available if gpu.index == number)


def default_world_size(gpus: Sequence[Gpu]) -> int:
    """Return one rank per GPU, and 2 without a GPU."""
    return len(gpus) or 2


def store_addresses(topology: Topology, reports: Sequence[EngineReport]) -> tuple[str, ...]:
    """Return the addresses at which other hosts may reach rank 0, the likeliest first.

    On one host, and on pretended ones, that is loopback alone. Otherwise every rank must still try
    them: only a connection shows which one all hosts reach.

    Raises:
        StartError: If rank 0 has no address that another host could reach.
    """
    if topology.n_hosts == 1 or _share_network(reports):
        return ("127.0.0.1",)
    engine_id = topology.engine_of_rank(0)
    zero = next(report for report in reports if report.engine_id == engine_id)
    reachable = [ip for ip in _outer_addresses(zero) if not ipaddress.ip_address(ip).is_link_local]
    if not reachable:
        listed = ", ".join(f"{name} {ip}" for name, ip in zero.addresses) or "none"
        raise StartError(
            f"Rank 0 on {zero.hostname} has no address that the other hosts could reach; "
            f"its addresses: {listed}. Bring up its network, or start all ranks on one host."
        )
    return tuple(reachable)


def _share_network(reports: Sequence[EngineReport]) -> bool:
    """Whether all engines have one loopback interface, as on pretended hosts."""
    networks = {(report.boot_id, report.network_namespace) for report in reports}
    return len(networks) == 1 and "" not in networks.pop()


def _peer_addresses(reports: Sequence[EngineReport]) -> tuple[str, ...]:
    """From where the ranks of several hosts connect to each other; () where all are on one."""
    is_alone = len({_host_key(report) for report in reports}) == 1 or _share_network(reports)
    return () if is_alone else tuple(sorted(_addresses_v4(reports)))


def _addresses_v4(reports: Iterable[EngineReport]) -> set[str]:
    return {ip for report in reports for ip in _outer_addresses(report) if ":" not in ip}


def _outer_addresses(report: EngineReport) -> list[str]:
    """An engine's addresses toward other hosts, the one toward the controller first."""
    others = [ip for name, ip in report.addresses if not INNER_INTERFACE.match(name)]
    addresses = dict.fromkeys(ip for ip in (report.toward_controller, *others) if ip)
    return [ip for ip in addresses if not ipaddress.ip_address(ip).is_loopback]


def _host_key(report: EngineReport) -> tuple[str, str, str]:
    return report.hostname, report.boot_id, report.network_namespace


def _hints_are_usable(reports: Sequence[EngineReport]) -> bool:
    n = len(reports)
    by_hint = {report.rank_hint: report for report in reports}
    jobs = {report.job_id for report in reports}
    sizes = {report.size_hint for report in reports if report.size_hint is not None}
    if by_hint.keys() != set(range(n)) or len(jobs) > 1 or sizes - {n}:
        return False
    hosts = [_host_key(by_hint[rank]) for rank in range(n)]
    n_blocks = sum(1 for _ in groupby(hosts))
    return n_blocks == len(set(hosts))  # more blocks: the ranks of a host are not contiguous


def _sorted_order(report: EngineReport) -> tuple[object, ...]:
    host = (_natural(report.hostname), report.boot_id, report.network_namespace)
    local = (report.local_hint is None, report.local_hint or 0)
    first_device = (report.cuda_visible_devices or "").split(",")[0]
    return host, local, _natural(first_device), report.engine_id


def _natural(text: str) -> tuple[object, ...]:
    parts = re.split(r"([0-9]+)", text)  # every second part is a number: node2 before node10
    return tuple(int(part) if i % 2 else part for i, part in enumerate(parts))


def _gpu_obstacle(ordered: Sequence[EngineReport]) -> str:
    """Return why the ranks cannot all use GPUs, as a clause; "" when they can."""
    if not any(report.gpus for report in ordered):
        return "no rank sees a GPU"
    no_cuda = [rank for rank, report in enumerate(ordered) if not report.has_cuda]
    if no_cuda:
        versions = " and ".join(sorted({ordered[rank].torch_version for rank in no_cuda}))
        torch = f"PyTorch {versions}".rstrip()
        where = "" if len(no_cuda) == len(ordered) else f" of {_which(no_cuda, ordered)}"
        return f"{torch}{where} cannot use CUDA"
    no_gpu = [rank for rank, report in enumerate(ordered) if not report.gpus]
    if no_gpu:
        return f"no GPU is visible to {_which(no_gpu, ordered)}, and ranks use GPUs all or none"
    return ""


def _which(ranks: Sequence[int], ordered: Sequence[EngineReport]) -> str:
    hosts = ", ".join(dict.fromkeys(ordered[rank].hostname for rank in ranks))
    return f"{ranks_phrase(ranks)} ({hosts})"


def _place(
    ordered: Sequence[EngineReport], threads: int | None, *, uses_gpus: bool
) -> tuple[RankPlace, ...]:
    sizes = Counter(_host_key(report) for report in ordered)
    node_ranks = {host: node_rank for node_rank, host in enumerate(sizes)}
    places: list[RankPlace] = []
    for rank, report in enumerate(ordered):
        host = _host_key(report)
        node_rank = node_ranks[host]
        local_rank = sum(place.node_rank == node_rank for place in places)
        gpu_index = local_rank % len(report.gpus) if uses_gpus else None
        gpu = None if gpu_index is None else report.gpus[gpu_index]
        places.append(
            RankPlace(
                engine_id=report.engine_id,
                rank=rank,
                local_rank=local_rank,
                local_world_size=sizes[host],
                node_rank=node_rank,
                host=report.hostname,
                pid=report.pid,
                device="cpu" if gpu is None else f"cuda:{gpu_index}",
                device_name="" if gpu is None else gpu.name,
                device_uuid="" if gpu is None else gpu.uuid,
                threads=threads or max(1, report.cores // sizes[host]),
                host_key=host,
            )
        )
    return tuple(places)


def check_ranks_torch(of_ranks: Sequence[tuple[str, str, str]]) -> None:
    """Refuse ranks of which one has a torch that is too old, or another one than the others.

    By rank (version, Python, host); versions that are not known and a build's tag do not count.

    Raises:
        StartError: With the versions and whose they are.
    """
    by_version: dict[str, list[int]] = {}
    for rank, (version, python, _) in enumerate(of_ranks):
        if version:
            check_torch(version, python)
            by_version.setdefault(version.split("+")[0], []).append(rank)
    if len(by_version) > 1:
        listed = "; ".join(
            f"{version} on {ranks_phrase(ranks)} "
            f"({', '.join(dict.fromkeys(of_ranks[rank][2] for rank in ranks))})"
            for version, ranks in by_version.items()
        )
        raise StartError(
            f"The ranks have different versions of torch: {listed}. Install one on all."
        )
