"""Ranks on two hosts, by a profile of the user's own."""

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.cluster.hosts.conftest import SSH, skip_without
from tests.support.hosts import Hosts

# Started in turns on the second and the first host, and numbered as they happen to register:
# the engines' numbers say nothing about ranks.
PROFILE = """
import shlex

from ipyparallel.cluster.launcher import LocalEngineLauncher, LocalEngineSetLauncher


class OnHost(LocalEngineLauncher):
    def find_args(self):
        host = "node1" if int(self.identifier) % 2 else "node2"
        env = {**self.get_env(), "NBDIST_PRELOAD": "0"}
        variables = [f"{name}={value}" for name, value in env.items()]
        return ["ssh", host, shlex.join(["env", *variables, *super().find_args()])]


class TwoHosts(LocalEngineSetLauncher):
    launcher_class = OnHost
    delay = 0


c = get_config()
c.Cluster.engine_launcher_class = TwoHosts
c.Cluster.controller_ip = "ADDRESS"
c.Cluster.controller_location = "ADDRESS"
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

session = nbdist.start(3, profile="twohosts", timeout_s=90)
result = session.run(
    "import os\\n"
    "x = torch.ones(1) * (rank + 1)\\n"
    "dist.all_reduce(x)\\n"
    "print(x.item(), local_rank, os.environ['GLOO_SOCKET_IFNAME'])"
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
    "chosen": [host.chosen for host in seen.hosts],
    "picture": view(seen).text,
    "is_encrypted": [bool(json.loads(file.read_text())["curve_serverkey"]) for file in files],
    "pids": [place.pid for place in session.topology.ranks],
}
print(json.dumps(facts), flush=True)
sys.stdin.readline()
session.stop()
"""


@pytest.fixture(scope="module")
def facts() -> dict[str, Any]:
    """What the script has found, and who listens on the hosts meanwhile."""
    skip_without(*SSH)
    with Hosts(2, dead_interface=("node1", "node2")) as hosts:
        hosts.start_sshd()
        profile = hosts.path("head", "/root/.ipython/profile_twohosts/ipcluster_config.py")
        profile.parent.mkdir(parents=True)
        profile.write_text(PROFILE.replace("ADDRESS", hosts.address("head")))
        # Engines of such a profile read the run's folder, so it is one that all hosts see.
        process = hosts.popen(
            "head", [sys.executable, "-c", SCRIPT],
            env={"OMP_NUM_THREADS": "1", "TMPDIR": str(hosts.shared)},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        lines = [process.stdout.readline()]
        while not lines[-1].startswith("{"):
            lines.append(process.stdout.readline())
            assert lines[-1], "the script ended without a result:\n" + "".join(lines)
        listeners = {host: hosts.listeners(host) for host in hosts.nodes}
        addresses = {host: hosts.address(host) for host in hosts.nodes}
        process.stdin.close()
        process.wait(30)
    return {**json.loads(lines[-1]), "listeners": listeners, "addresses": addresses}


def test_ranks_on_two_hosts(facts: dict[str, Any]) -> None:
    """Ranks are assigned by host, add up over the network, and open no port to all addresses."""
    assert facts["hosts"] == 2
    node_ranks, networks = facts["node_ranks"], facts["networks"]
    assert node_ranks in ([0, 0, 1], [0, 1, 1])  # whose engine registers first
    assert sorted(facts["engines"]) == [0, 1, 2]
    assert [*map(networks.index, networks)] == [*map(node_ranks.index, node_ranks)]
    local_ranks = [node_ranks[:rank].count(node) for rank, node in enumerate(node_ranks)]
    assert facts["printed"] == [f"6.0 {local_rank} eth0" for local_rank in local_ranks]
    assert facts["is_encrypted"] == [True]
    for sockets in facts["listeners"].values():
        ranks = set(sockets) - {"0.0.0.0:22", "[::]:22"}
        assert ranks
        assert not any(socket.startswith(("0.0.0.0:", "*:", "[::]:")) for socket in ranks)


def test_the_picture_names_the_interface_that_leads_somewhere(facts: dict[str, Any]) -> None:
    """By the way to rank 0's store; the first one, which leads nowhere, is listed and not used."""
    picture, addresses = facts["picture"], facts["addresses"]
    assert facts["chosen"] == [["eth0"], ["eth0"]]
    store = picture.partition("the way to rank 0's store at ")[2].split()[0]
    assert store in addresses.values()
    assert "interface eno1: 10.80.0.2, virtual" in picture
    assert f"interface eth0: {addresses['node2']}, virtual, up, used by the ranks" in picture
    assert "TCP sockets: Gloo has nothing else" in picture
