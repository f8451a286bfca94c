"""Hosts and links as findings and as a picture, from records made by hand."""

import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from typing import Any

import pytest

from nbdist.core.finding import OK, WARN
from nbdist.core.gpus import GpuReading, GpuReadings
from nbdist.core.interface import InterfaceChoice
from nbdist.core.topology import EngineReport, Gpu, plan
from nbdist.core.units import compared
from nbdist.core.view import View
from nbdist.diagnostics.links import (
    EFA,
    INFINIBAND,
    ROCE,
    Interface,
    NcclLog,
    RankLinks,
    RdmaPort,
)
from nbdist.diagnostics.topology import HostLinks, LinkPicture, examine, picture
from nbdist.diagnostics.view import topology as topology_view
from nbdist.strategy.choose import choose
from tests.strategy.test_hosts import on

ETH0 = Interface("eth0", ("10.0.0.5",), True, 10_000, "Ethernet", "ena")
CHOSEN = InterfaceChoice("eth0", "=eth0", "10.0.0.5", "the way to rank 0's store goes through it")
NODE = RankLinks(
    interfaces=(
        Interface("docker0", ("172.17.0.1",), True, None, "bridge"),
        ETH0,
        Interface("eth1", (), False, None, "Ethernet", "ixgbe"),
        Interface("lo", ("127.0.0.1",), True, None, "loopback"),
        Interface("veth1", (), True, None, "virtual"),
    ),
    chosen=CHOSEN,
)
EFA_PORT = RdmaPort("rdmap0s6", 1, EFA, "ACTIVE", "100 Gb/sec (4X EDR)")
IB_PORT = RdmaPort("mlx5_0", 1, INFINIBAND, "ACTIVE", "400 Gb/sec (4X NDR)")


def gpu(host: str, index: int) -> Gpu:
    return Gpu(index, f"GPU-{host}-{index}", "NVIDIA H100")


def seen(
    *sizes: int, backend: str = "nccl", strategy: str = "ddp", tp: int | None = None, **facts: Any
) -> LinkPicture:
    """Hosts n1, n2, ... of so many ranks, alike in `facts`, each rank with its own GPU."""
    nodes = on(*sizes)
    settings = {} if tp is None else {"tp": tp}
    reports = [
        EngineReport(
            rank, node.name, boot_id=node.name, has_cuda=True,
            gpus=(gpu(node.name, place),) if backend == "nccl" else (),
        )
        for node in nodes
        for place, rank in enumerate(node.ranks)
    ]  # fmt: skip
    choice = choose(strategy, settings, sum(sizes), ranks_on=nodes)
    return picture(plan(reports, backend), [replace(NODE, **facts)] * sum(sizes), choice)


def told(network: str) -> NcclLog:
    return NcclLog(network, (f"NET/{network}", "P2P"))


@pytest.mark.parametrize(
    ("facts", "expected", "advice"),
    [
        (
            {"rdma": (EFA_PORT,), "nccl": told("Socket")},
            "NET/Socket although EFA is there (rdmap0s6)", "install the plugin aws-ofi-nccl",
        ),
        (
            {"rdma": (EFA_PORT,), "nccl": told("Socket"), "plugins": ("/x/libnccl-net.so",)},
            "NET/Socket although EFA", "the plugin is there (/x/libnccl-net.so)",
        ),
        (
            {"rdma": (IB_PORT,), "nccl": told("Socket")},
            "NET/Socket although InfiniBand is there (mlx5_0)", "ulimit -l unlimited",
        ),
        (
            {"rdma": (IB_PORT,), "nccl": told("Socket"), "variables": {"NCCL_IB_DISABLE": "1"}},
            "NET/Socket although InfiniBand", "look at NCCL_IB_DISABLE=1, which may keep",
        ),
        (
            {"rdma": (replace(IB_PORT, kind=ROCE),), "nccl": told("Socket")},
            "NET/Socket although RoCE", "if this port leads to the other hosts",
        ),
        (
            {"rdma": (replace(IB_PORT, state="INIT"),), "nccl": told("Socket")},
            "mlx5_0:1 is INIT", "subnet manager",
        ),
        ({"n_efa_without_driver": 2}, "2 devices without a driver", "Amazon's EFA driver"),
        (
            {"interfaces": (ETH0, replace(ETH0, name="eth2", speed_mbps=100_000))},
            "eth0 with 10 Gb/s, while eth2 with 100 Gb/s is up", "GLOO_SOCKET_IFNAME=eth2",
        ),
    ],
)  # fmt: skip
def test_a_faster_network_that_is_not_used_is_told_with_what_to_do(
    facts: dict[str, Any], expected: str, advice: str
) -> None:
    """Once of all hosts where it is so."""
    (finding,) = [finding for finding in examine(seen(2, 2, **facts)) if finding.verdict == WARN]

    assert finding.name.endswith(" on n1 and n2")
    assert expected in finding.found
    assert advice in finding.what
    assert finding.why


@pytest.mark.parametrize(
    ("sizes", "facts", "expected"),
    [
        # NCCL uses what there is, or there is nothing else.
        ((2, 2), {"rdma": (EFA_PORT,), "nccl": told("Libfabric")}, ["NCCL uses Libfabric"]),
        ((2, 2), {"rdma": (IB_PORT,), "nccl": told("IB")}, ["NCCL uses IB"]),
        ((2, 2), {"nccl": told("Socket")},
         ["NCCL uses TCP sockets: no host has EFA, InfiniBand or RoCE"]),
        # What cannot be known is said.
        ((2, 2), {"rdma": (EFA_PORT,)}, ["not known of n1 and n2"]),
        ((2, 2), {"nccl": NcclLog()}, ["not known of n1 and n2"]),
        ((1, 1), {"backend": "gloo"}, ["TCP sockets: Gloo has nothing else"]),
        ((1, 1), {"backend": "gloo", "rdma": (EFA_PORT, IB_PORT)},
         ["TCP sockets: Gloo has nothing else, and EFA and InfiniBand can be used by NCCL alone"]),
        # Within one host there is no network; another interface's speed says nothing there.
        ((4,), {"rdma": (EFA_PORT,), "nccl": told("Socket")}, []),
        ((4,), {"interfaces": (ETH0, replace(ETH0, name="eth2", speed_mbps=100_000))}, []),
    ],
)  # fmt: skip
def test_what_is_well_is_no_warning(
    sizes: tuple[int, ...], facts: dict[str, Any], expected: list[str]
) -> None:
    """A faster interface counts where it is up, has an address and leads out."""
    idle = (
        Interface("docker0", ("172.17.0.1",), True, 100_000, "bridge"),
        Interface("eth2", ("10.1.0.5",), False, 100_000),
        Interface("eth3", (), True, 100_000),
    )
    facts = {"interfaces": (ETH0, *idle), **facts}
    findings = examine(seen(*sizes, **facts))

    assert [finding.found for finding in findings] == expected
    assert {finding.verdict for finding in findings} <= {OK}


def test_hosts_with_different_networks_are_told() -> None:
    """One has the plugin, the other has not."""
    alike = seen(1, 1, nccl=told("Libfabric"))
    first, second = alike.hosts
    other = replace(second, links=(replace(NODE, nccl=told("Socket")),))
    (finding,) = examine(replace(alike, hosts=(first, other)))

    assert finding.found == "Libfabric on n1 and Socket on n2"
    assert finding.verdict == WARN


def test_a_mesh_that_crosses_hosts_is_told() -> None:
    """With the degree that does not."""
    (finding,) = examine(seen(3, 3, strategy="tp", tp=2, nccl=told("IB")))[1:]

    assert "tp crosses hosts n1 and n2: ranks 2-3 share each layer" in finding.found
    assert finding.what == "--tp 3 stays within a host"


def reading(index: int, host: str) -> GpuReading:
    return GpuReading(index, f"GPU-{host}-{index}", "NVIDIA H100")


def shapes(view: View) -> list[str]:
    """All texts of the view's drawing, which is well formed."""
    drawing = view.html[view.html.index("<svg") : view.html.index("</svg>") + 6]
    return [element.text or "" for element in ET.fromstring(drawing).iter("text")]


def test_the_picture_says_what_the_text_says() -> None:
    """Ranks with their interface and why, links of GPUs, where the axes lie; hosts in both."""
    view = topology_view(
        seen(
            2, 2, strategy="fsdp", tp=2, nccl=told("IB"), rdma=(IB_PORT,),
            gpus=GpuReadings((reading(0, "n1"), reading(1, "n1")), links=((0, 1, "NV"),)),
        )
    )  # fmt: skip
    lines = view.text.splitlines()

    assert lines[0] == "4 ranks on 2 hosts, nccl, fsdp x tp, dp 2 x tp 2"
    why = "the way to rank 0's store goes through it"
    assert " ".join(lines[2].split()) == f"0 n1 cuda:0 NVIDIA H100 eth0 10.0.0.5 {why}"
    first = lines.index("host n1: ranks 0-1") + 1
    assert lines[first : first + 8] == [
        "  interface docker0: 172.17.0.1, bridge, up, passed over: it leads to no other host",
        "  interface eth0: 10.0.0.5, Ethernet (ena), up, 10 Gb/s, used by the ranks",
        "  interface eth1: no address, Ethernet (ixgbe), no link",
        "  interface lo: 127.0.0.1, loopback, up, passed over: it leads to no other host",
        "  and 1 virtual interface without an address",
        "  InfiniBand mlx5_0, port 1: ACTIVE 400 Gb/sec (4X NDR)",
        "  NCCL uses IB between hosts; ranks connected through NET/IB, P2P",
        "  GPU 0 NVIDIA H100, rank 0",
    ]
    assert "  between all GPUs: NVLink" in lines
    rows = [" ".join(line.split()) for line in lines if line.startswith(("dp_shard", "tp "))]
    assert rows == [
        "dp_shard 2 2 all between n1 and n2 ranks 0,2",
        "tp 2 2 each within a host ranks 0-1",
    ]
    drawn = shapes(view)
    assert [text for text in drawn if text.startswith("rank ")] == [f"rank {n}" for n in range(4)]
    assert drawn.count("IB eth0 10 Gb/s") == 2
    assert "ranks of one colour are one group along tp" in drawn
    assert not view.is_bad


def test_a_group_that_crosses_is_red() -> None:
    """And the key says so."""
    view = topology_view(seen(3, 3, strategy="fsdp", tp=2, nccl=told("IB")))

    assert view.html.count('fill="#d62728"') == 2  # ranks 2 and 3
    assert "red: they are on several hosts" in shapes(view)[-1]


def test_unlike_links_are_a_table() -> None:
    """As `nvidia-smi topo -m` has it, with what the words mean."""
    links = ((0, 1, "NV"), (0, 2, "SYS"), (1, 2, "SYS"))
    gpus = GpuReadings(tuple(reading(n, "n1") for n in range(3)), links=links)
    here = LinkPicture((HostLinks(on(0)[0], (), (replace(NODE, gpus=gpus),)),))
    view = topology_view(here)
    lines = view.text.splitlines()

    assert lines[0] == (
        "No ranks run in this notebook: this machine alone. %dist_init starts some."
    )
    first = lines.index("         0    1    2")
    assert [line.split() for line in lines[first + 1 : first + 4]] == [
        ["0", "-", "NV", "SYS"],
        ["1", "NV", "-", "SYS"],
        ["2", "SYS", "SYS", "-"],
    ]
    assert lines[first + 4] == "  NV: NVLink, SYS: the link between CPUs"
    assert "slowest link of GPUs: the link between CPUs (0 and 2)" in shapes(view)


def test_a_scheduler_that_shows_each_rank_its_own_gpu_hides_none() -> None:
    """The rank that sees most is believed for its host."""
    both = seen(2)
    host = both.hosts[0]
    nodes = [replace(NODE, gpus=GpuReadings((reading(n, "n1"),))) for n in range(2)]
    wide = replace(nodes[1], gpus=GpuReadings((reading(0, "n1"), reading(1, "n1"))))

    assert len(replace(host, links=(nodes[0], wide)).gpus.gpus) == 2


def test_stored_outputs_have_no_facts_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """They compare as equal everywhere: hosts, interfaces and findings do not count."""
    monkeypatch.setenv("NBDIST_TEST", "1")
    view = topology_view(seen(2, 2, strategy="tp", tp=4, rdma=(EFA_PORT,), nccl=told("Socket")))

    assert re.search(r"tp +4 +1 +all between # and # +ranks 0-3", compared(view.text))
    texts = [compared(view.text), compared(view.html)]
    assert not [
        word for word in ("n1", "eth0", "rdmap", "Socket", "<svg") if word in "".join(texts)
    ]
    assert "<svg" in view.html
