"""Devices' memory, bandwidth, arithmetic and links, as their data sheets say."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from nbdist.bandwidth.links import LINKS, Link
from nbdist.core.topology import Topology
from nbdist.errors import OptionError, did_you_mean
from nbdist.monitor.samples import Sample

# The device to plan for where no other is known.
ASSUMED = "h100"
_GB = 1e9
_T = 1e12
# Ranks of one host, whatever the device: what HGX and DGX systems have.
PER_HOST = 8
# Of 454 runs none that was estimated below 80 % of the device's memory ran out of it: Fujii et
# al. 2024, https://arxiv.org/abs/2411.06465.
SAFE_SHARE = 0.8


@dataclass(frozen=True, slots=True)
class Device:
    """One kind of GPU.

    Attributes:
        memory_bytes: Decimal, as on the data sheet. The driver shows up to 7 % more.
        bandwidth: Memory bytes per second; 0 where only the memory was typed, as are:
        half_flops: Products of matrices in bf16 (fp16 where it has no bf16) without sparsity,
            operations per second.
        single_flops: In fp32, without TF32: torch's default.
        link: To the others of its host, a name of bandwidth.links.
        network: To other hosts, likewise: what such hosts commonly have at each port.
        driver: Words of the name under which the driver knows it.
        is_cpu: Ranks compute on a CPU; the memory is one rank's share of its host's.
        sms: Streaming multiprocessors: so many tiles of a product are made at a time; 0 where
            that is not known.
        sustained: The part of the peak that large products reach in training: under load clocks
            are below those of the data sheet.
        ports: Of a host to the network, which its ranks share.
        host_bytes_per_s: All ports together, where it was typed; 0 for `ports` times `network`.
        host_memory_bytes: A rank's share of its host's memory, to which states are offloaded; 0
            where nobody knows it.
        per_host: Ranks of one host.
        safe_share: Of the memory, below which a plan is safe; the rest is to stay free.
    """

    name: str
    title: str
    memory_bytes: float
    bandwidth: float = 0.0
    half_flops: float = 0.0
    single_flops: float = 0.0
    link: str = ""
    network: str = ""
    driver: tuple[str, ...] = ()
    source: str = ""
    has_bf16: bool = True
    is_cpu: bool = False
    sms: int = 0
    sustained: float = 0.7
    ports: int = 1
    host_bytes_per_s: float = 0.0
    host_memory_bytes: float = 0.0
    per_host: int = PER_HOST
    safe_share: float = SAFE_SHARE

    @property
    def ports_per_s(self) -> float:
        """Bytes per second of a host's ports together; inf where no network is known.

        A host with a port for each GPU has as many as ranks.
        """
        ports = self.ports if self.ports == 1 else self.ports * self.per_host / PER_HOST
        network = _LINKS.get(self.network)
        return self.host_bytes_per_s or (ports * network.bytes_per_s if network else math.inf)

    @property
    def usual_precision(self) -> str:
        """The precision in which people train there: bf16, else fp16; fp32 on a CPU."""
        if self.is_cpu:
            return "fp32"
        return "bf16" if self.has_bf16 else "fp16"

    def flops(self, precision: str) -> float:
        """Operations per second in fp32, bf16 or fp16."""
        return self.single_flops if precision == "fp32" else self.half_flops


_NVIDIA = "https://www.nvidia.com/en-us/data-center"
_DEVICES = (
    Device("b200", "NVIDIA B200", 180 * _GB, 8 * _T, 2250 * _T, 75 * _T, "NVLink 5",
           "InfiniBand NDR", ("b200",), f"{_NVIDIA}/dgx-b200 (1440 GB in 8), {_NVIDIA}/hgx"),
    Device("h200", "NVIDIA H200 SXM", 141 * _GB, 4.8 * _T, 989 * _T, 67 * _T, "NVLink 4",
           "InfiniBand NDR", ("h200",), f"{_NVIDIA}/h200"),
    Device("h100-pcie", "NVIDIA H100 PCIe", 80 * _GB, 2 * _T, 756 * _T, 51 * _T, "PCIe 5 x16",
           "InfiniBand NDR", ("h100", "pcie"), f"{_NVIDIA}/h100"),
    Device("h100", "NVIDIA H100 SXM", 80 * _GB, 3.35 * _T, 989 * _T, 67 * _T, "NVLink 4",
           "InfiniBand NDR", ("h100",), f"{_NVIDIA}/h100"),
    Device("a100-40gb", "NVIDIA A100 SXM 40 GB", 40 * _GB, 1.555 * _T, 312 * _T, 19.5 * _T,
           "NVLink 3", "InfiniBand HDR", ("a100", "40gb"), f"{_NVIDIA}/a100"),
    Device("a100-80gb", "NVIDIA A100 SXM 80 GB", 80 * _GB, 2.039 * _T, 312 * _T, 19.5 * _T,
           "NVLink 3", "InfiniBand HDR", ("a100", "80gb"), f"{_NVIDIA}/a100"),
    Device("l40s", "NVIDIA L40S", 48 * _GB, 0.864 * _T, 362 * _T, 91.6 * _T, "PCIe 4 x16",
           "100 Gb Ethernet", ("l40s",), f"{_NVIDIA}/l40s"),
    Device("a6000", "NVIDIA RTX A6000", 48 * _GB, 0.768 * _T, 154.8 * _T, 38.7 * _T,
           "PCIe 4 x16", "100 Gb Ethernet", ("a6000",),
           "https://www.nvidia.com/en-us/design-visualization/rtx-a6000"),
    Device("l4", "NVIDIA L4", 24 * _GB, 0.3 * _T, 121 * _T, 30.3 * _T, "PCIe 4 x16",
           "100 Gb Ethernet", ("l4",), f"{_NVIDIA}/l4"),
    Device("a10", "NVIDIA A10", 24 * _GB, 0.6 * _T, 125 * _T, 31.2 * _T, "PCIe 4 x16",
           "100 Gb Ethernet", ("a10",), f"{_NVIDIA}/products/a10-gpu"),
    Device("rtx-4090", "NVIDIA GeForce RTX 4090", 24 * _GB, 1.008 * _T, 165.2 * _T, 82.6 * _T,
           "PCIe 4 x16", "25 Gb Ethernet", ("4090",), "NVIDIA Ada GPU architecture, appendix A"),
    Device("rtx-3090", "NVIDIA GeForce RTX 3090", 24 * _GB, 0.936 * _T, 71 * _T, 35.6 * _T,
           "PCIe 4 x16", "25 Gb Ethernet", ("3090",),
           "NVIDIA Ampere GA102 GPU architecture, appendix A"),
    Device("v100", "NVIDIA V100 PCIe 16 GB", 16 * _GB, 0.9 * _T, 112 * _T, 14 * _T, "PCIe 3 x16",
           "25 Gb Ethernet", ("v100", "16gb"), f"{_NVIDIA}/v100", has_bf16=False),
    Device("t4", "NVIDIA T4", 16 * _GB, 0.3 * _T, 65 * _T, 8.1 * _T, "PCIe 3 x16",
           "25 Gb Ethernet", ("t4",), f"{_NVIDIA}/tesla-t4", has_bf16=False),
)  # fmt: skip
# Streaming multiprocessors (white papers of the architectures), the sustained part of the peak, and
# ports of a host. The part is fitted for a100 and h100 (docs/plan.md); h200 and b200 are taken to
# be as the h100, the others by their power: cards that reach their clocks under load (rtx), and
# those that do not (l4 and t4, 70 W). HGX and DGX hosts have a port for each GPU.
_BUILT: Mapping[str, tuple[int, float, int]] = {
    "b200": (148, 0.61, 8), "h200": (132, 0.61, 8), "h100-pcie": (114, 0.5, 1),
    "h100": (132, 0.61, 8), "a100-40gb": (108, 0.87, 8), "a100-80gb": (108, 0.87, 8),
    "l40s": (142, 0.55, 1), "a6000": (84, 0.7, 1), "l4": (58, 0.5, 1), "a10": (72, 0.6, 1),
    "rtx-4090": (128, 0.85, 1), "rtx-3090": (82, 0.85, 1), "v100": (80, 0.75, 1),
    "t4": (40, 0.5, 1),
}  # fmt: skip
DEVICES: Mapping[str, Device] = {
    device.name: replace(device, sms=sms, sustained=sustained, ports=ports)
    for device in _DEVICES
    for sms, sustained, ports in (_BUILT[device.name],)
}
_ALIASES = {"a100": "a100-80gb", "4090": "rtx-4090", "3090": "rtx-3090", "h100-sxm": "h100"}
_LINKS = {link.name: link for link in LINKS}


def device_of(name: str) -> Device:
    """The device of a name.

    Raises:
        OptionError: If the catalogue has none; the message names close ones.
    """
    word = name.lower().strip().replace(" ", "-").replace("_", "-").removeprefix("nvidia-")
    word = _ALIASES.get(word, word)
    if word in DEVICES:
        return DEVICES[word]
    hint = did_you_mean(word, [*DEVICES, *_ALIASES], 3)
    raise OptionError(
        f"There is no --gpu {name} in the catalogue.{hint} Choose one of {', '.join(DEVICES)}, or "
        "type its memory: --memory 24GB."
    )


def known_as(driver_name: str) -> Device | None:
    """The device that the driver calls so, such as `NVIDIA A100-SXM4-40GB`; None if unknown."""
    words = set(re.findall(r"[a-z0-9]+", driver_name.lower()))
    for device in DEVICES.values():
        if set(device.driver) <= words:
            return device
    return None


def with_memory(text: str) -> Device:
    """A device of which only the memory is known: `24GB`, `24` (GB) or `24GiB`.

    Raises:
        OptionError: If that is no size, or 0.
    """
    match = re.fullmatch(r"(\d{1,6}(?:\.\d+)?) ?(GB|GIB|G|TB|MB)?", text.strip().upper(), re.ASCII)
    units = {"GB": 1e9, "G": 1e9, "TB": 1e12, "MB": 1e6, "GIB": 2**30}
    size = float(match[1]) * units[match[2] or "GB"] if match else 0.0
    if not size:
        raise OptionError(
            f"--memory {text} is not a valid memory size. Write 24GB (10^9 bytes), 24GiB "
            "(2^30) or 500MB."
        )
    return Device("", "another device", size)


def link_of(device: Device, n_ranks: int) -> Link | None:
    """The slowest link between so many neighbouring ranks; None where none is known."""
    return _LINKS.get(device.link if n_ranks <= device.per_host else device.network)


def device_of_ranks(
    topology: Topology, samples: Sequence[Sample] = ()
) -> tuple[Device | None, tuple[str, ...]]:
    """The running ranks' device, and a note on it; None where its memory is not known.

    `samples` are the newest of the ranks: they have the memory of what is not in the catalogue.
    """
    first = topology.ranks[0]
    if first.device == "cpu":
        return _cpu_of_ranks(topology, samples)
    device = known_as(first.device_name)
    gpu = samples[0].gpu if samples else None
    if device is None and gpu is not None and gpu.total_bytes:
        device = Device("", first.device_name, gpu.total_bytes)
    if device is None:
        return None, (f"--gpu {ASSUMED}, as {first.device_name} is not in the catalogue",)
    host_bytes, _ = min(_host_shares(topology, samples), default=(0.0, 0))
    device = replace(device, host_memory_bytes=host_bytes)
    title = f"--gpu {device.name}" if device.name else device.title
    sharing = max(Counter(place.device_uuid for place in topology.ranks).values())
    if sharing == 1:
        return device, (f"{title}, as the ranks here have",)
    shared = replace(device, memory_bytes=device.memory_bytes / sharing)
    return shared, (f"{title}, which {sharing} ranks share here",)


def _cpu_of_ranks(
    topology: Topology, samples: Sequence[Sample]
) -> tuple[Device | None, tuple[str, ...]]:
    """A rank's share of its host, as a device; of the host where that is least."""
    shares = _host_shares(topology, samples)
    if not shares:
        return None, (f"--gpu {ASSUMED}, as the memory of the ranks' hosts is not known",)
    memory_bytes, limit_bytes = min(shares)
    device = Device("", "their host's CPU", memory_bytes, is_cpu=True)
    return device, (f"the CPU of the ranks' host ({limit_bytes / _GB:.1f} GB)",)


def _host_shares(topology: Topology, samples: Sequence[Sample]) -> list[tuple[float, int]]:
    """Each rank's share of its host's memory, or of its control group's limit; and all of that."""
    return [
        (sample.usage.host_limit_bytes / place.local_world_size, sample.usage.host_limit_bytes)
        for sample in samples
        if sample.usage is not None
        for place in (topology.ranks[sample.rank],)
    ]
