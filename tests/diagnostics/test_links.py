"""What a host has, from a folder like /sys, and what NCCL writes, from real logs."""

import ctypes
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest

from nbdist.core.gpus import GpuReadings
from nbdist.diagnostics import links, rank
from nbdist.diagnostics.links import (
    EFA,
    INFINIBAND,
    ROCE,
    Interface,
    NcclLog,
    RdmaPort,
    parse_nccl_log,
    read_links,
)


def write(folder: Path, values: Mapping[str, str]) -> None:
    """Files as the kernel has them; "" is a folder, and `-> x` a link to a folder beside it."""
    for name, value in values.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if value.startswith("-> "):
            target = folder.parent / value[3:]
            target.mkdir(parents=True, exist_ok=True)
            path.symlink_to(target)
        elif value:
            path.write_text(f"{value}\n")
        else:
            path.mkdir()


def address(text: str) -> SimpleNamespace:
    """As psutil lists it."""
    family = socket.AF_INET6 if ":" in text else socket.AF_INET
    return SimpleNamespace(family=family, address=text)


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host of its own: no interface, no device, no plugin."""
    monkeypatch.setattr(links, "SYS", tmp_path / "sys")
    monkeypatch.setattr(links, "LINKER_CACHE", tmp_path / "ld.so.cache")
    return tmp_path


def test_interfaces_are_told_apart(system: Path) -> None:
    """Devices with speed and driver, what only containers have, and a port without a cable."""
    net = system / "sys/class/net"
    write(net, {
        "lo/type": "772", "lo/operstate": "unknown",
        "docker0/type": "1", "docker0/operstate": "up", "docker0/bridge": "",
        "veth7/type": "1", "veth7/operstate": "up", "veth7/speed": "10000",
        "eth0/type": "1", "eth0/operstate": "up", "eth0/speed": "25000",
        "eth0/device/driver": "-> drivers/ena",
        "eth1/type": "1", "eth1/operstate": "down", "eth1/speed": "-1",
        "eth1/device/driver": "-> drivers/ixgbe",
        "ib0/type": "32", "ib0/operstate": "up", "ib0/device/driver": "-> drivers/mlx5_core",
        "bonding_masters": "bond0",
    })  # fmt: skip
    entries = {
        "lo": [address("127.0.0.1"), address("::1")],
        "docker0": [address("172.17.0.1")],
        "eth0": [address("10.0.0.5"), address("fe80::1%eth0")],
        "wg0": [address("10.8.0.2")],  # of a kernel that hides /sys
    }
    read = {i.name: i for i in read_links(entries, {}, GpuReadings()).interfaces}

    assert read["eth0"] == Interface("eth0", ("10.0.0.5",), True, 25000, "Ethernet", "ena")
    assert read["eth1"] == Interface("eth1", (), False, None, "Ethernet", "ixgbe")
    assert read["ib0"] == Interface("ib0", (), True, None, "InfiniBand", "mlx5_core")
    assert read["lo"] == Interface("lo", ("127.0.0.1", "::1"), True, None, "loopback")
    # The speed of a virtual one is a number that somebody wrote down.
    assert read["veth7"] == Interface("veth7", (), True, None, "virtual")
    assert read["docker0"].kind == "bridge"
    assert read["wg0"] == Interface("wg0", ("10.8.0.2",), True, None, "virtual")
    assert [name for name, i in read.items() if i.leads_out] == [
        "eth0", "eth1", "ib0", "veth7", "wg0",
    ]  # fmt: skip


def test_rdma_devices_are_told_apart(system: Path) -> None:
    """EFA by its driver, RoCE by its link layer; and an EFA whose driver is missing."""
    write(system / "sys/class/infiniband", {
        "mlx5_0/ports/1/state": "4: ACTIVE", "mlx5_0/ports/1/link_layer": "InfiniBand",
        "mlx5_0/ports/1/rate": "400 Gb/sec (4X NDR)",
        "mlx5_1/ports/1/state": "1: DOWN", "mlx5_1/ports/1/link_layer": "Ethernet",
        "rdmap16s27/ports/1/state": "4: ACTIVE", "rdmap16s27/ports/1/link_layer": "Unspecified",
        "rdmap16s27/device/driver": "-> drivers/efa",
    })  # fmt: skip
    write(system / "sys/bus/pci/devices", {
        "0000:00:1e.0/vendor": "0x1d0f", "0000:00:1e.0/device": "0xefa2",
        "0000:00:1f.0/vendor": "0x1d0f", "0000:00:1f.0/device": "0xefa2",
        "0000:00:1f.0/driver": "-> drivers/efa",
        "0000:00:05.0/vendor": "0x1d0f", "0000:00:05.0/device": "0xec20",
    })  # fmt: skip
    read = read_links({}, {"NCCL_IB_DISABLE": "1", "HOME": "/x"}, GpuReadings())

    assert read.rdma == (
        RdmaPort("mlx5_0", 1, INFINIBAND, "ACTIVE", "400 Gb/sec (4X NDR)"),
        RdmaPort("mlx5_1", 1, ROCE, "DOWN"),
        RdmaPort("rdmap16s27", 1, EFA, "ACTIVE"),
    )
    assert read.n_efa_without_driver == 1
    assert read.variables == {"NCCL_IB_DISABLE": "1"}


def test_plugins_are_found_as_the_linker_finds_them(system: Path) -> None:
    """In the folders of LD_LIBRARY_PATH, and in the linker's cache."""
    folder = system / "lib"
    folder.mkdir()
    (folder / "libnccl-net-ofi.so").touch()
    (folder / "libnccl.so.2").touch()
    (system / "ld.so.cache").write_bytes(
        b"glibc-ld.so.cache1.1\0libnccl-net.so\0/opt/x/libnccl-net.so\0/usr/lib/libnccl.so.2\0"
    )
    read = read_links({}, {"LD_LIBRARY_PATH": f":{folder}:/nowhere"}, GpuReadings())

    assert read.plugins == (f"{folder}/libnccl-net-ofi.so", "/opt/x/libnccl-net.so")


def test_this_machine_is_read() -> None:
    """The real /sys, on any Linux: loopback is there and up."""
    import psutil

    read = {i.name: i for i in read_links(psutil.net_if_addrs(), {}, GpuReadings()).interfaces}

    loopback = next(i for i in read.values() if "127.0.0.1" in i.addresses)
    assert (loopback.is_up, loopback.leads_out, loopback.is_device) == (True, False, False)


# Lines that users have shown of NCCL 2.10, 2.21 and 2.27.
_OFI = """
ip-10-3-35-83:362:362 [0] NCCL INFO NET/OFI Selected Provider is efa (found 4 nics)
ip-10-3-35-83:362:362 [0] NCCL INFO Using network AWS Libfabric
ip-10-3-35-83:362:397 [0] NCCL INFO Channel 00/0 : 7[7] -> 8[0] [send] via NET/AWS Libfabric/0
ip-10-3-35-83:362:397 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM
"""
_SOCKET = """
n1:51:73 [1] NCCL INFO NET/IB : No device found.
n1:51:73 [1] NCCL INFO Failed to initialize NET plugin IB
n1:51:73 [1] NCCL INFO NET/Socket : Using [0]net1:10.10.100.241<0>
n1:51:73 [1] NCCL INFO Using network Socket\x20
n1:51:80 [1] NCCL INFO Channel 01/0 : 1[1] -> 2[0] [send] via NET/Socket/0
n1:51:80 [1] NCCL INFO Channel 01 : 0[0] -> 1[1] via SHM/direct/direct
"""


@pytest.mark.parametrize(
    ("text", "log"),
    [
        (_OFI, NcclLog("AWS Libfabric", ("NET/AWS Libfabric", "P2P"))),
        (_SOCKET, NcclLog("Socket", ("NET/Socket", "SHM"))),
        ("n1:1:1 [0] NCCL INFO Using network IB\n" + _SOCKET.replace("Socket", "IB"),
         NcclLog("IB", ("NET/IB", "SHM"))),
        ("n1:1:1 [0] NCCL INFO Bootstrap : Using eth0:10.0.0.5<0>\n", NcclLog()),
        ("", NcclLog()),
    ],
)  # fmt: skip
def test_nccls_log_says_its_network(text: str, log: NcclLog) -> None:
    """Of the newest communicator, and how ranks are connected as far as they are."""
    assert parse_nccl_log(text) == log


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="files in memory are Linux's")
def test_what_a_library_writes_to_nccls_file_is_read_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Opened as NCCL does, by C's fopen; no child process has the variables afterwards."""
    for name in ("NCCL_DEBUG", "NCCL_DEBUG_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(rank, "_log", None)
    libc = ctypes.CDLL(None)
    libc.fopen.restype = ctypes.c_void_p
    libc.fputs.argtypes = (ctypes.c_char_p, ctypes.c_void_p)
    libc.fflush.argtypes = (ctypes.c_void_p,)
    before = rank.read_nccl_log()
    with rank.captured_nccl_log(is_wanted=True):
        level = os.environ["NCCL_DEBUG"]
        file = libc.fopen(os.environ["NCCL_DEBUG_FILE"].encode(), b"w")
        empty = rank.read_nccl_log()
    libc.fputs(_SOCKET.encode(), file)  # it goes on writing
    libc.fflush(file)
    child = "import os; print([n for n in os.environ if n.startswith('NCCL_DEBUG')])"
    printed = subprocess.run(
        [sys.executable, "-c", child], capture_output=True, text=True, check=True, timeout=30
    )

    assert before is None
    assert (level, empty) == ("INFO", NcclLog())
    assert rank.read_nccl_log() == NcclLog("Socket", ("NET/Socket", "SHM"))
    assert printed.stdout == "[]\n"


@pytest.mark.parametrize(
    ("environ", "is_wanted"),
    [({"NCCL_DEBUG": "WARN"}, True), ({"NCCL_DEBUG_FILE": "/x"}, True), ({}, False)],
)
def test_a_users_nccl_debug_is_left_alone(
    environ: dict[str, str], is_wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the network is not known."""
    for name in ("NCCL_DEBUG", "NCCL_DEBUG_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(rank, "_log", None)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with rank.captured_nccl_log(is_wanted=is_wanted):
        inside = {name: value for name, value in os.environ.items() if name.startswith("NCCL_DEB")}

    assert inside == environ
    assert os.environ.get("NCCL_DEBUG") == environ.get("NCCL_DEBUG")
    assert rank.read_nccl_log() is None
