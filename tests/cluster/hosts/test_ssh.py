"""Ranks by ssh: hosts are looked at before anything starts; ranks that end; a killed kernel."""

import contextlib
import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from nbdist.cluster.kernel.launchers.agents import BOOTSTRAP
from tests.support.hosts import Hosts, missing, wait_for

ROOT = Path(__file__).resolve().parents[3]
AGENT_WORDS = "sys.stdin.buffer.read"
ENGINE_WORDS = "nbdist.engine"

# Each line of the input is a Python expression, each line of the output its value as JSON.
DRIVER = """
import contextlib, io, json, os, sys
import nbdist
from nbdist.errors import NbdistError

def failure(**options):
    try:
        nbdist.start(timeout_s=30, **options)
    except NbdistError as error:
        return f"{type(error).__name__}: {error}"
    return "started"

def start(**options):
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        nbdist.start(timeout_s=60, **options)
    return shown.getvalue()

def run(code, **options):
    try:
        return [rank.text for rank in nbdist.session().run(code, **options).ranks]
    except NbdistError as error:
        return f"{type(error).__name__}: {error}"

for line in sys.stdin:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        value = eval(line)
    print(json.dumps(value, default=str), flush=True)
"""


class Notebook:
    """A Python on the head that starts ranks and tells what comes of it."""

    def __init__(self, hosts: Hosts, **env: str):
        pipe = subprocess.PIPE
        variables = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **env}
        self.process = hosts.popen(
            hosts.head, [sys.executable, "-c", DRIVER], env=variables, stdin=pipe, stdout=pipe
        )

    def ask(self, expression: str) -> Any:
        """The value of an expression there; a newline in it stands as \\n in a string."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(expression + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def close(self) -> None:
        """End it as a kernel ends: its ranks end with it."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(60)


@pytest.fixture
def notebook(hosts: Hosts) -> Iterator[Notebook]:
    started = Notebook(hosts)
    yield started
    if started.process.poll() is None:
        started.close()


@contextlib.contextmanager
def own_python(hosts: Hosts, path: str) -> Iterator[None]:
    """The user's own profile for ssh on the head, which names another Python."""
    profile = hosts.path("head", "/root/.ipython/profile_ssh")
    profile.mkdir(parents=True)
    shipped = (ROOT / "profiles/ssh/ipcluster_config.py").read_text()
    own = f"\nc.AgentEngineSetLauncher.remote_python = '{path}'\n"
    own += "c.AgentEngineSetLauncher.connect_s = 8\n"  # which a firewall takes
    (profile / "ipcluster_config.py").write_text(shipped + own)
    yield
    (profile / "ipcluster_config.py").unlink()
    profile.rmdir()


def wrapped(hosts: Hosts, host: str, path: str, *options: str, **variables: str) -> None:
    """Put a Python at `path` of a host that has these options and variables."""
    words = " ".join(f"{name}='{value}'" for name, value in variables.items())
    command = " ".join(["exec env", words, sys.executable, *options, '"$@"'])
    hosts.path(host, path).write_text(f"#!/bin/sh\n{command}\n")
    hosts.path(host, path).chmod(0o755)


def test_hosts_are_looked_at_before_anything_starts(hosts: Hosts, notebook: Notebook) -> None:
    """One table of all hosts, with what to do for each: wrong name, torch, disk, Python."""
    wrapped(hosts, "head", "/run/py")
    wrapped(hosts, "node1", "/run/py", "-S")  # without installed packages
    packages = hosts.path("node2", "/run/other")
    (packages / "torch-2.99.0.dist-info").mkdir(parents=True)
    metadata = "Metadata-Version: 2.1\nName: torch\nVersion: 2.99.0\n"
    (packages / "torch-2.99.0.dist-info" / "METADATA").write_text(metadata)
    wrapped(hosts, "node2", "/run/py", PYTHONPATH="/run/other")
    with own_python(hosts, "/run/py"):
        text = notebook.ask('failure(hosts="node1:1,node2:1,node3:1,nowhere:1,head:1")')

    rows = {line.split()[0]: line.split()[1:] for line in text.splitlines() if line.strip()}
    assert text.startswith("StartError: Nothing was started.")
    assert rows["node1"][2:4] == ["missing", "missing"]
    assert "- node1: torch is not installed for " in text
    assert "- node1: nbdist is not installed for " in text
    assert rows["node2"][3] == "2.99.0"
    assert rows["node3"] == rows["nowhere"] == ["no"]
    assert "- node3: " in text
    assert "c.AgentEngineSetLauncher.remote_python" in text
    assert "- nowhere: " in text
    assert "Could not resolve hostname nowhere" in text
    assert "The hosts have different versions of torch: " in text
    assert not any(hosts.pids(host, ENGINE_WORDS) for host in hosts.names)


def test_ranks_by_ssh(hosts: Hosts, notebook: Notebook) -> None:
    """Ranks lie on hosts in their order, add up, and leave nothing when the kernel is killed."""
    started = notebook.ask('nbdist.start(hosts="node1:1,node2:2", n=2, seed=1).topology.ranks')
    printed = notebook.ask(
        'run("import os, socket\\ntotal = torch.ones(1) * rank\\ndist.all_reduce(total)\\n'
        "print(socket.gethostname(), local_rank, os.environ['LOCAL_WORLD_SIZE'], total.item())\")"
    )
    ended = notebook.ask('run("import os\\nprint(rank, flush=True)\\nif rank == 1: os._exit(7)")')
    alive = notebook.ask('run("print(total.item())", ranks=[0])')
    agents = {host: len(hosts.pids(host, AGENT_WORDS)) for host in hosts.names}
    lines = [line for host in hosts.names for line in hosts.pids(host).values()]
    notebook.process.send_signal(signal.SIGKILL)
    notebook.process.wait(10)

    assert len(started) == 2
    assert printed == ["node1 0 1 1.0\n", "node2 0 1 1.0\n"]
    assert "rank 1 ended (exit code 7: " in ended
    assert alive == ["1.0\n"]
    assert agents["node3"] == 0
    assert not any('"key"' in line for line in lines)  # the controller's, in its connection file
    assert BOOTSTRAP in " ".join(lines)
    for host in hosts.names:
        wait_for(f"the end of all on {host}", partial(is_clean, hosts, host), 10)


def is_clean(hosts: Hosts, host: str) -> bool:
    words = (ENGINE_WORDS, AGENT_WORDS)
    try:
        is_empty = not list(hosts.path(host, "/tmp").glob("nbdist-*/*"))
    except FileNotFoundError:  # a folder went while it was read
        return False
    return is_empty and not any(hosts.pids(host, part) for part in words)


@pytest.mark.more_hosts
@pytest.mark.skipif(bool(missing("sshd", "faketime")), reason=missing("sshd", "faketime") or "-")
def test_hosts_that_are_not_as_they_should_be() -> None:
    """A closed port and a firewall are told with what to do; a wrong clock keeps nobody waiting."""
    with Hosts(3, clocks={"node3": "+1h"}) as hosts:
        hosts.start_sshd(["node2", "node3"])
        hosts.firewall_drop("node2", "22")
        hosts.fill_disk("node3", "/var/tmp")
        wrapped(hosts, "node3", "/run/py", TMPDIR="/var/tmp")
        notebook = Notebook(hosts)
        with own_python(hosts, "/run/py"):
            text = notebook.ask('failure(hosts="node1:1,node2:1,node3:1")')
        hosts.firewall_drop("head")
        hosts.firewall_off("node2")
        unanswered = notebook.ask('failure(hosts="node2:1")')
        hosts.firewall_off("head")
        shown = notebook.ask('start(hosts="node3:1")')
        notebook.close()

    assert "- node1: " in text
    assert "Connection refused. Start sshd there" in text
    assert "- node2: " in text
    assert "no firewall drops port 22" in text
    # Python passes over a TMPDIR in which nothing can be written.
    assert "\nnode3  yes  " in text
    assert "- node3: " not in text
    assert "It got no answer from the notebook's machine at 10." in unanswered
    clock = re.search(r"The clock of node3 is (\d+) s ahead of this machine's", shown)
    # Known to half of the time that asking has taken, which is seconds on a busy machine.
    assert clock, shown
    assert abs(int(clock[1]) - 3600) < 20
