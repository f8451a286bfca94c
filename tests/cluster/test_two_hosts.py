"""Ranks on two hosts: network namespaces with addresses of their own, on one machine."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(
        os.getuid() != 0 or shutil.which("ip") is None or sys.platform != "linux",
        reason="needs root and iproute2 on Linux",
    ),
]
PREFIX = f"nd{os.getpid() % 10000}"
HEAD, FIRST, SECOND, SWITCH = (f"{PREFIX}-{name}" for name in ("head", "a", "b", "sw"))
ADDRESSES = {HEAD: "10.79.0.1", FIRST: "10.79.0.2", SECOND: "10.79.0.3"}

# Started in turns on the second and the first host, and numbered as they happen to register:
# the engines' numbers say nothing about ranks.
PROFILE = f"""
from ipyparallel.cluster.launcher import LocalEngineLauncher, LocalEngineSetLauncher


class InNamespace(LocalEngineLauncher):
    def find_args(self):
        host = "{FIRST}" if int(self.identifier) % 2 else "{SECOND}"
        return ["ip", "netns", "exec", host, *super().find_args()]


class TwoHosts(LocalEngineSetLauncher):
    launcher_class = InNamespace
    delay = 0


c = get_config()
c.Cluster.engine_launcher_class = TwoHosts
c.Cluster.controller_ip = "{ADDRESSES[HEAD]}"
c.Cluster.controller_location = "{ADDRESSES[HEAD]}"
c.Cluster.delay = 0
c.Cluster.controller_args = [
    "--HeartMonitor.period=200", "--HeartMonitor.max_heartmonitor_misses=150"
]
"""

# Run on the head; prints one JSON line at its end.
SCRIPT = """
import json, sys
import nbdist
from nbdist.diagnostics import kernel as links
from nbdist.diagnostics.view import topology as view
from pathlib import Path

session = nbdist.start(4, profile="twohosts", timeout_s=90)
result = session.run(
    "import os\\n"
    "x = torch.ones(1) * (rank + 1)\\n"
    "dist.all_reduce(x)\\n"
    "print(x.item(), local_rank, os.environ['GLOO_SOCKET_IFNAME'])"
)
model = session.run(
    "model = accelerator.prepare(torch.nn.Linear(2, 2))\\n"
    "model(torch.full((1, 2), rank + 1.0)).sum().backward()\\n"
    "print(model.module.weight.grad.tolist())"
)
whole = session.strategy.switch("fsdp")
hybrid = session.strategy.switch("fsdp", shard="hybrid")
step = session.run(
    "model.zero_grad()\\n"
    "model(torch.full((1, 2), rank + 1.0)).sum().backward()\\n"
    "weight = model.weight\\n"
    "print(weight.grad.full_tensor().tolist(), weight.device_mesh['dp_shard'].mesh.tolist())"
)
seen = links.picture(session, session.strategy.current())
networks = session.run("print(os.readlink('/proc/self/ns/net'))")
files = Path(session.cluster.run_dir, "profile/security").glob("ipcontroller-*-engine.json")
facts = {
    "hosts": session.topology.n_hosts,
    "networks": [rank.text.strip() for rank in networks.ranks],
    "engines": [place.engine_id for place in session.topology.ranks],
    "node_ranks": [place.node_rank for place in session.topology.ranks],
    "printed": [rank.text.strip() for rank in result.ranks],
    "gradients": [rank.text.strip() for rank in model.ranks],
    "notes": [whole.notes, hybrid.notes],
    "mesh": str(hybrid.after.degrees),
    "steps": [rank.text.strip() for rank in step.ranks],
    "chosen": [host.chosen for host in seen.hosts],
    "crossing": {axis.axis: axis.crossing for axis in seen.axes},
    "picture": view(seen).text,
    "is_encrypted": [bool(json.loads(file.read_text())["curve_serverkey"]) for file in files],
    "pids": [place.pid for place in session.topology.ranks],
}
print(json.dumps(facts), flush=True)
sys.stdin.readline()
session.stop()
"""


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)


@pytest.fixture(scope="module")
def lan() -> Iterator[None]:
    """Three hosts on one switch, taken down again."""
    hosts = []
    try:
        for host in (SWITCH, *ADDRESSES):
            _ip("netns", "add", host)
            hosts.append(host)
        _ip("-n", SWITCH, "link", "add", "br0", "type", "bridge")
        _ip("-n", SWITCH, "link", "set", "br0", "up")
        for host, address in ADDRESSES.items():
            _ip("-n", host, "link", "set", "lo", "up")
            peer = ("peer", "name", "eth0", "netns", host)
            _ip("-n", SWITCH, "link", "add", f"p-{host}"[:15], "type", "veth", *peer)
            _ip("-n", SWITCH, "link", "set", f"p-{host}"[:15], "master", "br0", "up")
            _ip("-n", host, "addr", "add", f"{address}/24", "dev", "eth0")
            _ip("-n", host, "link", "set", "eth0", "up")
            # A second one without a cable, which has an address all the same.
            _ip("-n", host, "link", "add", "eth1", "type", "veth", "peer", "name", "unplugged")
            _ip("-n", host, "addr", "add", address.replace("10.79", "10.78") + "/24", "dev", "eth1")
            _ip("-n", host, "link", "set", "eth1", "up")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
    else:
        yield
    finally:
        for host in hosts:
            _ip("netns", "del", host)


@pytest.fixture(scope="module")
def facts(lan: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the script has found, and who listens on the hosts meanwhile."""
    profile = tmp_path_factory.mktemp("ipython") / "profile_twohosts"
    profile.mkdir()
    (profile / "ipcluster_config.py").write_text(PROFILE)
    environment = {**os.environ, "IPYTHONDIR": str(profile.parent), "OMP_NUM_THREADS": "1"}
    command = ["ip", "netns", "exec", HEAD, sys.executable, "-c", SCRIPT]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        lines = [process.stdout.readline()]
        while not lines[-1].startswith("{"):
            lines.append(process.stdout.readline())
            assert lines[-1], "the script ended without a result:\n" + "".join(lines)
        listeners = "".join(_listeners(host) for host in (FIRST, SECOND))
        process.stdin.close()
        process.wait(30)
    return {**json.loads(lines[-1]), "listeners": listeners}


def test_ranks_on_two_hosts(facts: dict[str, Any]) -> None:
    """Ranks are assigned by host, add up over the network, and open no port to all addresses."""
    assert facts["hosts"] == 2
    assert facts["node_ranks"] == [0, 0, 1, 1]
    assert sorted(facts["engines"]) == [0, 1, 2, 3]
    assert [host == facts["networks"][0] for host in facts["networks"]] == [
        True,
        True,
        False,
        False,
    ]
    assert facts["printed"] == [f"10.0 {rank % 2} eth0" for rank in range(4)]
    assert facts["gradients"] == ["[[2.5, 2.5], [2.5, 2.5]]"] * 4  # the mean of 1, 2, 3 and 4
    assert facts["is_encrypted"] == [True]
    assert facts["listeners"]
    assert "0.0.0.0:" not in facts["listeners"]
    assert "*:" not in facts["listeners"]


def test_hybrid_sharding_keeps_a_copy_on_each_host(facts: dict[str, Any]) -> None:
    """Parameters are gathered within a host, the copies have one gradient; fsdp says it before."""
    whole, hybrid = facts["notes"]
    assert "--shard hybrid gathers them within a host, with 2 copies" in whole[-1]
    assert not [note for note in hybrid if "over the network" in note]
    assert "dp_replicate=2, dp_shard=2" in facts["mesh"]
    mean = "[[2.5, 2.5], [2.5, 2.5]]"
    assert facts["steps"] == [f"{mean} [0, 1]"] * 2 + [f"{mean} [2, 3]"] * 2
    assert facts["crossing"] == {"dp_replicate": [[0, 2], [1, 3]], "dp_shard": []}


def test_the_picture_names_the_interface_with_a_link(facts: dict[str, Any]) -> None:
    """By the way to rank 0's store; the one without a link is listed, and not used."""
    assert facts["chosen"] == [["eth0"], ["eth0"]]
    store = facts["picture"].partition("the way to rank 0's store at ")[2].split()[0]
    assert store in {ADDRESSES[FIRST], ADDRESSES[SECOND]}
    assert "interface eth1: 10.78.0.2, virtual, no link" in facts["picture"]
    assert "interface eth0: 10.79.0.3, virtual, up, used by the ranks" in facts["picture"]
    assert "TCP sockets: Gloo has nothing else" in facts["picture"]


def _listeners(host: str) -> str:
    """Address and port of every listening TCP socket on a host, a line each."""
    answer = subprocess.run(
        ["ip", "netns", "exec", host, "ss", "-ltnH"],
        check=True, capture_output=True, text=True, timeout=20,
    )  # fmt: skip
    return "".join(f"{line.split()[3]}\n" for line in answer.stdout.splitlines())
