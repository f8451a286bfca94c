"""Links of a host to others: interfaces, RDMA devices, NCCL's plugin, and NCCL's word.

Read from files that Linux keeps, without torch. Elsewhere there are none, and lists are empty.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nbdist.core import procfs
from nbdist.core.gpus import GpuReadings
from nbdist.core.interface import INNER_INTERFACE, InterfaceChoice

SYS = Path("/sys")
LINKER_CACHE = Path("/etc/ld.so.cache")
# Where installers put AWS's plugin; other folders are the dynamic linker's.
_PLUGIN_FOLDERS = (
    "/opt/amazon/ofi-nccl/lib",
    "/opt/amazon/ofi-nccl/lib64",
    "/opt/aws-ofi-nccl/lib",
)
_PLUGIN = "libnccl-net*.so*"
# The kernel's numbers in /sys/class/net/NAME/type.
_TYPES = {"1": "Ethernet", "32": "InfiniBand", "772": "loopback"}
# PCI numbers of Amazon's Elastic Fabric Adapter.
_EFA_VENDOR, _EFA_DEVICE = "0x1d0f", re.compile(r"0xefa[0-9a-f]")
# Variables that change which network NCCL takes.
NETWORK_VARIABLES = ("NCCL_NET", "NCCL_NET_PLUGIN", "NCCL_IB_DISABLE", "NCCL_IB_HCA", "FI_PROVIDER")

EFA, INFINIBAND, ROCE = "EFA", "InfiniBand", "RoCE"
# NCCL's name of the network that it falls back to.
SOCKET = "Socket"
# NCCL writes the first once for each communicator, in these words since 2.4; the second when it
# connects two ranks. Read in the sources of 2.4 to 2.27 and in logs that users have shown.
_NETWORK = re.compile(r"NCCL INFO Using network (.+?)\s*$", re.MULTILINE)
_VIA = re.compile(r"NCCL INFO Channel .* via (P2P|SHM|NET/[^/\n]+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Interface:
    """One network interface of a host.

    Attributes:
        addresses: IPv4 and IPv6, those of the link alone left out.
        is_up: It is switched on and has a link.
        speed_mbps: As its driver tells; None of virtual ones, and where it does not tell.
        kind: "Ethernet", "InfiniBand" (IP over it), "loopback", "bridge", or "virtual": without
            a device, as containers have.
    """

    name: str
    addresses: tuple[str, ...] = ()
    is_up: bool = True
    speed_mbps: int | None = None
    kind: str = "Ethernet"
    driver: str = ""

    @property
    def is_device(self) -> bool:
        """Whether a device is behind it, of this machine or of its hypervisor."""
        return self.kind in {"Ethernet", "InfiniBand"}

    @property
    def leads_out(self) -> bool:
        """Whether another host may be behind it."""
        return self.kind != "loopback" and not INNER_INTERFACE.match(self.name)


@dataclass(frozen=True, slots=True)
class RdmaPort:
    """One port of a device that reads and writes another host's memory.

    Attributes:
        device: As in /sys/class/infiniband: "mlx5_0", "rdmap16s27".
        kind: EFA, INFINIBAND or ROCE.
        state: "ACTIVE", "DOWN", "INIT", as the subnet manager has left it.
        rate: As the kernel writes it: "400 Gb/sec (4X NDR)".
    """

    device: str
    port: int
    kind: str
    state: str
    rate: str = ""


@dataclass(frozen=True, slots=True)
class NcclLog:
    """Summary of NCCL's log on one rank.

    Attributes:
        network: Between hosts: "Socket", "IB", "Libfabric", a plugin's; "" before a communicator.
        ways: How it reaches other ranks, as far as it has connected: "P2P", "SHM", "NET/Socket".
    """

    network: str = ""
    ways: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RankLinks:
    """Links of its host that one rank sees, and those it uses.

    Attributes:
        n_efa_without_driver: EFA devices that no driver serves.
        plugins: Files of NCCL's network plugins that the dynamic linker would find.
        variables: Those of NETWORK_VARIABLES that are set in its process.
        chosen: Its interface; None where all ranks are on the kernel's host.
        nccl: None where NCCL has not been asked, or does not run.
    """

    interfaces: tuple[Interface, ...] = ()
    rdma: tuple[RdmaPort, ...] = ()
    n_efa_without_driver: int = 0
    plugins: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    gpus: GpuReadings = field(default_factory=GpuReadings)
    chosen: InterfaceChoice | None = None
    nccl: NcclLog | None = None


def read_links(
    entries: Mapping[str, Sequence[Any]], environ: Mapping[str, str], gpus: GpuReadings
) -> RankLinks:
    """Read the links of this host; `entries` are addresses as by psutil.net_if_addrs."""
    families = {socket.AF_INET, socket.AF_INET6}
    addresses = {
        name: [e.address for e in its if e.family in families and "%" not in e.address]
        for name, its in entries.items()
    }
    return RankLinks(
        interfaces=tuple(_interfaces(addresses)),
        rdma=tuple(_rdma_ports()),
        n_efa_without_driver=_efa_without_driver(),
        plugins=tuple(_plugins(environ.get("LD_LIBRARY_PATH", ""))),
        variables={name: environ[name] for name in NETWORK_VARIABLES if name in environ},
        gpus=gpus,
    )


def parse_nccl_log(text: str) -> NcclLog:
    """Read NCCL's network from its log; of several communicators the newest."""
    networks = _NETWORK.findall(text)
    return NcclLog(networks[-1] if networks else "", tuple(sorted(set(_VIA.findall(text)))))


def _interfaces(addresses: Mapping[str, Sequence[str]]) -> Iterator[Interface]:
    folders = {path.name: path for path in _entries(SYS / "class/net")}
    for name in sorted({*folders, *addresses}):
        folder = folders.get(name, SYS / "class/net" / name)
        kind = _TYPES.get(_value(folder / "type"), "virtual")
        has_device = (folder / "device").exists()
        if kind == "Ethernet" and not has_device:
            kind = "bridge" if (folder / "bridge").is_dir() else "virtual"
        # "unknown" is what loopback and some virtual ones say while they work.
        state, speed = _value(folder / "operstate") or "unknown", _value(folder / "speed")
        yield Interface(
            name,
            tuple(addresses.get(name, ())),
            state in {"up", "unknown"},
            int(speed) if has_device and speed.isdigit() else None,
            kind,
            _driver(folder),
        )


def _rdma_ports() -> Iterator[RdmaPort]:
    for device in _entries(SYS / "class/infiniband"):
        for port in _entries(device / "ports"):
            layer = _value(port / "link_layer")
            kind = ROCE if layer == "Ethernet" else INFINIBAND
            kind = EFA if _driver(device) == "efa" else kind
            state = _value(port / "state").rpartition(": ")[2]  # "4: ACTIVE"
            yield RdmaPort(device.name, int(port.name), kind, state, _value(port / "rate"))


def _efa_without_driver() -> int:
    return sum(
        _value(device / "vendor") == _EFA_VENDOR
        and bool(_EFA_DEVICE.fullmatch(_value(device / "device")))
        and not (device / "driver").exists()
        for device in _entries(SYS / "bus/pci/devices")
    )


def _plugins(library_path: str) -> Iterator[str]:
    """Search where the dynamic linker does: the folders of LD_LIBRARY_PATH, then its cache."""
    for folder in (*filter(None, library_path.split(":")), *_PLUGIN_FOLDERS):
        yield from map(str, sorted(Path(folder).glob(_PLUGIN)))
    # The cache is a table of C strings.
    names = re.findall(r"/[^\0]*/libnccl-net[^/\0]*\.so[^/\0]*", procfs.text(LINKER_CACHE))
    yield from dict.fromkeys(names)


def _driver(folder: Path) -> str:
    return procfs.link(folder / "device/driver").rpartition("/")[2]


def _value(path: Path) -> str:
    return procfs.text(path).strip()


def _entries(folder: Path) -> list[Path]:
    """The folders in it: beside interfaces lies a file, bonding_masters."""
    return sorted(path for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
