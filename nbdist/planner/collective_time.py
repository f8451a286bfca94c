"""Time of collectives: latency of their steps, and bytes over the slowest link of a ring."""

from __future__ import annotations

import math
from dataclasses import dataclass

from nbdist.planner.block_time import Speeds
from nbdist.planner.devices import PER_HOST, Device, link_of
from nbdist.strategy import footprint
from nbdist.strategy.choice import AXES, Strategy

# Seconds of a call, and of each step in a host over NVLink or PCIe, and between hosts: NCCL's own
# table of its rings and trees with the protocol for large messages (hwLat and baseLat in
# src/graph/tuning.cc of https://github.com/NVIDIA/nccl).
CALL_S = 8.4e-6
STEP_S = {"NVLink": 3.4e-6, "PCIe": 5.7e-6}
NETWORK_STEP_S = 14e-6
# Times that a call goes around its ring.
ROUNDS = {"all-reduce": 2, "send": 0, "all-to-all": 1}


@dataclass(frozen=True, slots=True)
class Ring:
    """Ranks that take part in a collective: how many, and how many of them are in each host."""

    size: int
    in_host: int

    @property
    def hosts(self) -> int:
        """Hosts that it goes through."""
        return math.ceil(self.size / self.in_host)


def ring_of(choice: Strategy, axes: tuple[str, ...], per_host: int = PER_HOST) -> Ring:
    """The ring of the ranks that differ in these axes alone; `per_host` neighbours share a host.

    Of rings that lie differently on hosts the one with the fewest ranks in a host. Ranks along ep
    are neighbours among those that see different data, and edp goes from one such group to others.
    """
    sizes = [getattr(choice.degrees, axis) for axis in AXES]
    size = footprint.axes_size(choice, axes)
    if size == 1:
        return Ring(1, 1)
    if axes in {("ep",), ("edp",)}:
        apart = choice.degrees.tp * (choice.degrees.ep if axes == ("edp",) else 1)
    else:
        used = [AXES.index(axis) for axis in axes if sizes[AXES.index(axis)] > 1]
        apart = math.prod(sizes[max(used) + 1 :])
    span, world_size = apart * size, choice.degrees.product
    if world_size <= per_host or per_host % span == 0:
        return Ring(size, size)
    whole = span % per_host or per_host
    least = whole if span == world_size else math.gcd(span, per_host)
    return Ring(size, min(size, max(1, least // apart)))


def ring_bytes_per_s(ring: Ring, device: Device, speeds: Speeds) -> float:
    """Compute a ring's bandwidth: its link in a host, or its ranks' part of the host's ports."""
    link = link_of(device, 1)
    if link is None or ring.size == 1:
        return math.inf
    within = link.bytes_per_s * (speeds.nvlink if link.name.startswith("NVLink") else speeds.pcie)
    if ring.hosts == 1:
        return within
    return min(within, device.ports_per_s * speeds.network * ring.in_host / device.per_host)


def all_to_all_bytes_per_s(ring: Ring, device: Device, speeds: Speeds) -> float:
    """At which a rank sends to all others at once, each an equal part of its bytes.

    Those in its host are reached over its link, all others over its own part of the host's ports.
    """
    within = ring_bytes_per_s(Ring(ring.in_host, ring.in_host), device, speeds)
    if ring.hosts == 1:
        return within
    outside = (ring.size - ring.in_host) / (ring.size - 1)
    return min(within, device.ports_per_s * speeds.network / device.per_host / outside)


def latency_s(call: str, ring: Ring, device: Device) -> float:
    """Latency of all steps of a ring, or of an all-reduce's tree where that is shorter."""
    link = link_of(device, 1)
    if link is None or ring.size == 1:
        return 0.0
    step = STEP_S["NVLink" if link.name.startswith("NVLink") else "PCIe"]
    if call == "send":
        return CALL_S + (step if ring.hosts == 1 else NETWORK_STEP_S)
    between = ring.hosts if ring.hosts > 1 else 0
    rounds = ROUNDS.get(call, 1)
    along_ring = rounds * ((ring.size - 1 - between) * step + between * NETWORK_STEP_S)
    if call != "all-reduce":
        return CALL_S + max(along_ring, step)
    levels = math.ceil(math.log2(ring.hosts)) if between else 0
    tree = 2 * ((ring.in_host - 1) * step + levels * NETWORK_STEP_S)
    return CALL_S + min(along_ring, tree) if between else CALL_S + along_ring
