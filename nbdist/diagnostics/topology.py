"""Hosts and links judged: which network the ranks use, and which faster one they could."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from nbdist.core.finding import OK, WARN, Finding
from nbdist.core.gpus import GpuReadings
from nbdist.core.topology import HostRanks, RankPlace, Topology
from nbdist.core.units import shown_host
from nbdist.diagnostics.links import (
    EFA,
    INFINIBAND,
    ROCE,
    SOCKET,
    Interface,
    RankLinks,
    RdmaPort,
)
from nbdist.strategy import hosts
from nbdist.strategy.choice import Strategy
from nbdist.strategy.hosts import AxisPlace
from nbdist.strategy.options import listed

# How GPUs are connected, slowest last, and what that means.
LINKS = {
    "NV": "NVLink",
    "PIX": "one PCIe switch",
    "PXB": "several PCIe switches",
    "PHB": "the CPU's PCIe",
    "NODE": "PCIe bridges of one CPU",
    "SYS": "the link between CPUs",
}


@dataclass(frozen=True, slots=True)
class HostLinks:
    """One host of the picture.

    Attributes:
        host: Its name, and its ranks; none where no ranks run.
        places: Of its ranks.
        links: What each of them sees, in their order; of the kernel where no ranks run.
    """

    host: HostRanks
    places: tuple[RankPlace, ...]
    links: tuple[RankLinks, ...]

    @property
    def any_rank(self) -> RankLinks:
        """Links of one rank, for facts equal on all: interfaces and RDMA devices."""
        return self.links[0]

    @property
    def gpus(self) -> GpuReadings:
        """Return what the rank with most visible GPUs reads: a scheduler may hide others' GPUs."""
        return max((its.gpus for its in self.links), key=lambda readings: len(readings.gpus))

    @property
    def chosen(self) -> tuple[str, ...]:
        """The interfaces that its ranks use, each once; mostly one."""
        names = [its.chosen.gloo for its in self.links if its.chosen is not None]
        return tuple(dict.fromkeys(name for text in names for name in text.split(",")))

    @property
    def networks(self) -> tuple[str, ...]:
        """NCCL's networks of its ranks, each once; none where they are not known."""
        names = [its.nccl.network for its in self.links if its.nccl is not None]
        return tuple(dict.fromkeys(filter(None, names)))

    def active(self, kind: str) -> tuple[RdmaPort, ...]:
        """Return the host's ports of a kind that work."""
        ports = self.any_rank.rdma
        return tuple(port for port in ports if port.kind == kind and port.state == "ACTIVE")


@dataclass(frozen=True, slots=True)
class LinkPicture:
    """Hosts, links, and how a mesh lies on them.

    Attributes:
        backend: "nccl", "gloo"; empty where no ranks run.
        strategy: The one that counts; None where no ranks run.
    """

    hosts: tuple[HostLinks, ...]
    backend: str = ""
    strategy: Strategy | None = None

    @property
    def ranks_on(self) -> tuple[HostRanks, ...]:
        """The hosts as the rules of meshes take them."""
        return tuple(its.host for its in self.hosts)

    @property
    def axes(self) -> tuple[AxisPlace, ...]:
        """Places of the mesh's axes on the hosts."""
        return () if self.strategy is None else hosts.places(self.strategy, self.ranks_on)


def picture(topology: Topology, links: Sequence[RankLinks], strategy: Strategy) -> LinkPicture:
    """Group the ranks' reports by their hosts; `links` is in rank order."""
    return LinkPicture(
        tuple(
            HostLinks(
                host,
                tuple(topology.ranks[rank] for rank in host.ranks),
                tuple(links[rank] for rank in host.ranks),
            )
            for host in topology.hosts
        ),
        topology.backend,
        strategy,
    )


def examine(seen: LinkPicture) -> tuple[Finding, ...]:
    """Findings on links: first of the hosts, equal ones merged, then of all together."""
    hosts_of: dict[Finding, list[str]] = {}
    for check in HOST_CHECKS if len(seen.hosts) > 1 else (devices,):
        for its in seen.hosts:
            for finding in check(its):
                hosts_of.setdefault(finding, []).append(shown_host(its.host.name))
    return (
        *(replace(f, name=f"{f.name} on {listed(names)}") for f, names in hosts_of.items()),
        *network(seen),
        *mesh(seen),
    )


def interface(its: HostLinks) -> Iterator[Finding]:
    """Whether a faster interface than the ranks' stands idle."""
    by_name = {interface.name: interface for interface in its.any_rank.interfaces}
    used = [by_name[name] for name in its.chosen if name in by_name]
    speeds = [interface.speed_mbps for interface in used if interface.speed_mbps]
    others = [i for i in by_name.values() if _can_carry(i) and i not in used]
    best = max(others, key=lambda interface: interface.speed_mbps or 0, default=None)
    if speeds and best is not None and (best.speed_mbps or 0) > max(speeds):
        names = ", ".join(f"{i.name} with {speed(i)}" for i in used)
        yield Finding(
            "interface",
            f"{names}, while {best.name} with {speed(best)} is up",
            WARN,
            "what goes over sockets goes through the slower one",
            f"where all hosts reach each other by it, set GLOO_SOCKET_IFNAME={best.name} and "
            f"NCCL_SOCKET_IFNAME={best.name} where the engines start",
        )


def _can_carry(interface: Interface) -> bool:
    return bool(interface.is_up and interface.addresses and interface.leads_out)


def speed(interface: Interface) -> str:
    """`25 Gb/s`, `100 Mb/s`; empty where it is not told."""
    if interface.speed_mbps is None:
        return ""
    mbps = interface.speed_mbps
    return f"{mbps / 1000:g} Gb/s" if mbps >= 1000 else f"{mbps} Mb/s"


def devices(its: HostLinks) -> Iterator[Finding]:
    """RDMA devices that are there and do not work."""
    if count := its.any_rank.n_efa_without_driver:
        yield Finding(
            "EFA",
            f"{count} device{'s' if count > 1 else ''} without a driver",
            WARN,
            "between hosts NCCL cannot use them and takes sockets",
            "install Amazon's EFA driver (the package efa), or choose an image that has it",
        )
    ports = [port for port in its.any_rank.rdma if port.kind == INFINIBAND]
    if ports and not its.active(INFINIBAND):
        yield Finding(
            "InfiniBand",
            listed(f"{port.device}:{port.port} is {port.state}" for port in ports),
            WARN,
            "no port is ACTIVE, so between hosts NCCL takes sockets",
            "look at the cable and at the subnet manager: ibstat on that host",
        )


# RDMA -> what NCCL needs for it, and what to do where it has taken sockets.
_REMEDIES: Mapping[str, Callable[[RankLinks], str]] = {
    EFA: lambda its: (
        f"the plugin is there ({its.plugins[0]}): NCCL_DEBUG=INFO where the engines start says why "
        "it was not taken (often another libfabric, or NCCL of another major version)"
        if its.plugins
        else "install the plugin aws-ofi-nccl, and have LD_LIBRARY_PATH name its lib folder where "
        "the engines start"
    ),
    INFINIBAND: lambda _its: (
        "install libibverbs (rdma-core) there, allow locked memory (ulimit -l unlimited), and in a "
        "container pass /dev/infiniband; NCCL_DEBUG=INFO says which it is"
    ),
    ROCE: lambda _its: (
        "if this port leads to the other hosts: install libibverbs (rdma-core) there and allow "
        "locked memory (ulimit -l unlimited); NCCL_DEBUG=INFO says why it was not taken"
    ),
}


def network(seen: LinkPicture) -> Iterator[Finding]:
    """Which network is used between hosts, beside what the hosts have."""
    if len(seen.hosts) < 2:
        return
    if seen.backend != "nccl":
        kinds = [kind for kind in _REMEDIES if any(its.active(kind) for its in seen.hosts)]
        unused = f", and {listed(kinds)} can be used by NCCL alone" if kinds else ""
        yield Finding("network", f"TCP sockets: Gloo has nothing else{unused}")
        return
    yield from _networks(seen)


def _networks(seen: LinkPicture) -> Iterator[Finding]:
    """Network by NCCL's word, and the hosts where it is not known."""
    names_of: dict[str, list[str]] = {}
    for its in seen.hosts:
        for name in its.networks or ("",):
            names_of.setdefault(name, []).append(shown_host(its.host.name))
    if unknown := names_of.pop("", None):
        why = (
            "NCCL_DEBUG is set there and the log is in the engines' output, or NCCL has formed no "
            "communicator yet"
        )
        yield Finding("network", f"not known of {listed(unknown)}", OK, why)
    if len(names_of) > 1:
        each = listed(f"{name} on {listed(names)}" for name, names in names_of.items())
        why = "hosts reach each other by a network that both have, so by sockets or not at all"
        what = "install the same plugin and drivers on all hosts"
        yield Finding("network", each, WARN, why, what)
    elif names_of and SOCKET not in names_of:
        yield Finding("network", f"NCCL uses {next(iter(names_of))}")
    elif names_of and not any(its.active(kind) for its in seen.hosts for kind in _REMEDIES):
        yield Finding("network", "NCCL uses TCP sockets: no host has EFA, InfiniBand or RoCE")


def fallback(its: HostLinks) -> Iterator[Finding]:
    """NET/Socket although there is something faster."""
    if SOCKET not in its.networks:
        return
    for kind, remedy in _REMEDIES.items():
        if not (ports := its.active(kind)):
            continue
        settings = its.any_rank.variables
        what = remedy(its.any_rank)
        if settings:
            typed = listed(f"{name}={value}" for name, value in settings.items())
            what = f"look at {typed}, which may keep NCCL from it; else {what}"
        names = listed(dict.fromkeys(port.device for port in ports))
        yield Finding(
            "network",
            f"NET/Socket although {kind} is there ({names})",
            WARN,
            "collectives between hosts go through the CPU and TCP, many times slower",
            what,
        )
        return


def mesh(seen: LinkPicture) -> Iterator[Finding]:
    """Findings on axes of the strategy that cross hosts and need not."""
    if seen.strategy is None:
        return
    for sentence in hosts.notes(seen.strategy, seen.ranks_on):
        fact, _, what = sentence.rstrip(".").partition("; ")
        yield Finding("mesh", fact, WARN, "the network is slower than what is within a host", what)


# What each host says by itself.
HOST_CHECKS: tuple[Callable[[HostLinks], Iterator[Finding]], ...] = (interface, devices, fallback)
