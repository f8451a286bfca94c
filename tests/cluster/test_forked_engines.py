"""`ipp.Cluster(engines="nbdist")`: plain ipyparallel engines are forks of one process, anywhere."""

import asyncio
import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import ipyparallel
import psutil
import pytest
from ipyparallel.cluster.launcher import LocalEngineSetLauncher

from nbdist.cluster.kernel import rank_server
from nbdist.cluster.kernel.launcher import ForkedEngineSetLauncher
from tests.support import processes
from tests.support.kernel import notebook_env

END_S = 20.0
# A program of its own, without a session of nbdist's; it ends when its input does.
PROGRAM_OF_A_USER = """
import json, sys
import ipyparallel as ipp

def look():
    import os, sys
    return dict(pid=os.getpid(), parent=os.getppid(), torch="torch" in sys.modules, path=sys.path,
                argv=sys.argv, folder=os.getcwd(), variable=os.environ.get("OF_THE_PROGRAM"))

cluster = ipp.Cluster(engines="nbdist", n=2, delay=0)
rc = cluster.start_and_connect_sync()
record = json.load(open(cluster.cluster_file))
seen = rc[:].apply_sync(look)
print(json.dumps([record["engines"]["class"], seen, cluster.cluster_file]), flush=True)
"""
STOPS = """
sys.stdin.readline()
rc.close()
cluster.stop_cluster_sync()
print("stopped", flush=True)
sys.stdin.readline()
"""
GOES_ON = """
sys.stdin.readline()
"""


def start(tmp_path: Path, then: str) -> tuple[subprocess.Popen[str], list[Any]]:
    """The program, and what it prints of its engines."""
    env = notebook_env({"IPYTHONDIR": str(tmp_path), "OF_THE_PROGRAM": "here"})
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM_OF_A_USER + then],
        env=env, cwd=tmp_path, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    return process, json.loads(process.stdout.readline())


def test_engines_of_any_program_are_forks_and_a_stop_leaves_nothing(tmp_path: Path) -> None:
    """They have torch, the program's environment and folder; the server ends with the last."""
    program, (name, engines, _) = start(tmp_path, STOPS)
    with program:
        [server] = {engine["parent"] for engine in engines}
        command = psutil.Process(server).cmdline()
        everything = processes.descendants(program.pid)
        program.stdin.write("stop\n")
        program.stdin.flush()
        assert program.stdout.readline() == "stopped\n"

        assert processes.wait_gone(everything, END_S) == []
        assert program.poll() is None
        program.stdin.close()
    assert name == "nbdist"
    assert str(rank_server.PROGRAM) in command
    assert server != program.pid
    assert {*(engine["pid"] for engine in engines), server} <= {p.pid for p in everything}
    for engine in engines:
        assert engine["torch"]
        assert engine["argv"][0].endswith("ipyparallel/engine/__main__.py")
        assert engine["folder"] == str(tmp_path)
        assert engine["variable"] == "here"


@pytest.mark.faults
def test_engines_outlive_a_killed_program_as_ipyparallels_do(tmp_path: Path) -> None:
    """Its server goes with it; whoever has the cluster's file uses and stops the rest."""
    program, (_, engines, cluster_file) = start(tmp_path, GOES_ON)
    with program:
        everything = processes.descendants(program.pid)
        program.kill()
    server = engines[0]["parent"]
    assert processes.wait_gone([server], END_S) == []
    cluster = ipyparallel.Cluster.from_file(cluster_file)
    with cluster.connect_client_sync() as client:
        answers = client[:].apply_sync(lambda: 7)
    cluster.stop_cluster_sync()

    assert answers == [7, 7]
    assert processes.wait_gone(everything, END_S) == []


def test_where_nothing_is_forked_the_log_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The engines are started as ipyparallel does, with an engine's command of one's own too."""
    started = []
    monkeypatch.setenv(rank_server.FORK, "0")
    monkeypatch.setattr(
        LocalEngineSetLauncher, "start", lambda self, n: started.append((self.server, n))
    )
    log = logging.getLogger("engines")
    engines = ForkedEngineSetLauncher(profile_dir=str(tmp_path), log=log)
    asyncio.run(engines.start(2))
    engines.engine_cmd = ["my-engine"]
    asyncio.run(engines.start(3))

    assert started == [(None, 2), (None, 3)]
    assert caplog.messages == ["Engines are not forked: NBDIST_FORK is 0"]
