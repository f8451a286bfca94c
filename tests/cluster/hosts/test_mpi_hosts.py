"""Ranks by a real mpiexec over ssh, on hosts that share neither files nor processes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.hosts import Hosts, missing, wait_for

ROOT = Path(__file__).resolve().parents[3]
# mpiexec refuses to be root's, as these tests are.
ROOT_MAY = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
CELL = (
    "import os\n"
    "x = torch.ones(1) * (rank + 1)\n"
    "dist.all_reduce(x)\n"
    "print(x.item(), rank == int(os.environ['OMPI_COMM_WORLD_RANK']))"
)

# Run on the head; a line of JSON for each question that comes as a line.
SCRIPT = f"""
import json, sys, time
from pathlib import Path
from nbdist.cluster.hosts import Host
from nbdist.cluster.kernel.start import StartOptions
from nbdist.errors import Deadlock, RankGone
from nbdist.notebook.session import start
from tests.support.ranks import silent

hosts = (Host("node1", 2), Host("node2", 2))
started = start(StartOptions(profile="mpi", hosts=hosts, deadline_s=80), silent, lambda _: None)
session = started.session
session.grace_s = 0.5
try:
    session.run("if rank: dist.all_reduce(torch.ones(1))", timeout_s=30)
except Deadlock as error:
    hang = str(error)
files = Path(session.cluster.run_dir, "profile/security").glob("ipcontroller-*-engine.json")
print(json.dumps({{
    "notes": started.notes,
    "hang": hang,
    "printed": [rank.text.strip() for rank in session.run({CELL!r}).ranks],
    "hosts": [place.host for place in session.topology.ranks],
    "is_encrypted": [bool(json.loads(file.read_text())["curve_serverkey"]) for file in files],
}}), flush=True)
sys.stdin.readline()
cut_s = time.monotonic()
while len(session.health.dead) < 2 and time.monotonic() < cut_s + 25:
    time.sleep(0.05)
try:
    session.run("print(rank)")
except RankGone as error:
    refused = str(error)
print(json.dumps({{
    "dead": session.health.dead,
    "after_s": round(time.monotonic() - cut_s, 1),
    "refused": refused,
    "printed": [rank.text for rank in session.run("print(rank)", ranks="0-1").ranks],
    "status": [rank.state for rank in session.status().ranks],
}}), flush=True)
sys.stdin.readline()
session.stop()
"""


@pytest.mark.more_hosts
def test_ranks_by_mpiexec_on_two_hosts_and_one_that_is_cut_off(hosts: Hosts) -> None:
    """By ssh, with private homes and /tmp; a cut host's ranks are lost after seconds, not more."""
    if reason := missing("mpiexec"):
        pytest.skip(reason)
    environment = {**ROOT_MAY, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with hosts.popen(
        hosts.head,
        [sys.executable, "-c", SCRIPT],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        facts = json.loads(process.stdout.readline())
        hosts.cut("node2")
        process.stdin.write("cut\n")
        process.stdin.flush()
        after = json.loads(process.stdout.readline())
        hosts.heal("node2")
        process.stdin.close()
        process.wait(60)
    # ipyparallel's nannies give the controller, which has ended, 3 s to hear of it.
    wait_for(
        "the ranks' processes to end",
        lambda: not any(hosts.pids(host, "ipyparallel") for host in hosts.names),
    )

    assert facts["printed"] == ["10.0 True"] * 4
    assert facts["hosts"] == ["node1", "node1", "node2", "node2"]
    assert facts["is_encrypted"] == [True]
    assert not any("black box" in note for note in facts["notes"])
    assert "ranks 1-3 wait in all_reduce" in facts["hang"]
    assert any("Between the 2 hosts" in note for note in facts["notes"])
    assert after["dead"] == [2, 3]
    assert after["refused"].startswith("ranks 2-3 have ended (ranks 2-3: its connection is lost: ")
    assert after["refused"].endswith("%dist_reset restarts all ranks.")
    assert after["printed"] == ["0\n", "1\n"]
