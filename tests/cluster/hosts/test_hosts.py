"""The hosts that other tests stand on: apart, reachable, and gone without a trace."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.cluster.hosts.conftest import SSH, skip_without
from tests.support.hosts import USER, HostError, Hosts, missing, wait_for

KINDS = ("net", "mnt", "pid", "uts")

# Ends by a signal in its middle, with services and a process that ignores what it can.
OWNER = """
import os, signal
from tests.support.hosts import Hosts

hosts = Hosts(2)
hosts.__enter__()
hosts.start_sshd()
hosts.popen("node1", ["sh", "-c", "trap '' TERM HUP INT; sleep 1000"])
print(os.getpid(), flush=True)
signal.pause()
"""

# MPI without a package for it: an addition over all ranks by the library itself.
MPI = """
import ctypes, socket

mpi = ctypes.CDLL("libmpi.so.40", ctypes.RTLD_GLOBAL)
world, integer, add = (
    ctypes.byref(ctypes.c_char.in_dll(mpi, name))
    for name in ("ompi_mpi_comm_world", "ompi_mpi_int", "ompi_mpi_op_sum")
)
mpi.MPI_Init(None, None)
rank, total = ctypes.c_int(), ctypes.c_int()
mpi.MPI_Comm_rank(world, ctypes.byref(rank))
mpi.MPI_Allreduce(ctypes.byref(rank), ctypes.byref(total), 1, integer, add, world)
print(socket.gethostname(), rank.value, total.value, flush=True)
mpi.MPI_Finalize()
"""


def _namespaces(folder: Path) -> dict[str, str]:
    return {kind: str((folder / "ns" / kind).readlink()) for kind in KINDS}


def _holders(spaces: set[str]) -> Iterator[str]:
    """Threads of this machine that are in one of these namespaces."""
    for task in Path("/proc").glob("[0-9]*/task/[0-9]*"):
        with contextlib.suppress(OSError):  # it ended, or is ending
            if spaces & set(_namespaces(task).values()):
                yield f"{task}: {(task / 'comm').read_text().strip()}"


def _spaces_of(threads: Iterable[Path]) -> set[str]:
    """All namespaces of these threads and their children that are not this process's own."""
    tasks = list(threads)
    children = " ".join((task / "children").read_text() for task in tasks).split()
    folders = [*tasks, *(Path("/proc", child) for child in children)]
    spaces = {space for folder in folders for space in _namespaces(folder).values()}
    return spaces - set(_namespaces(Path("/proc/self")).values())


def _spaces_of_hosts(hosts: Hosts) -> set[str]:
    pools = [hosts._switch, *(host.thread for host in hosts._hosts.values())]
    numbers = [pool.submit(threading.get_native_id).result() for pool in pools]
    return _spaces_of(Path("/proc/self/task", str(number)) for number in numbers)


def test_hosts_are_apart(hosts: Hosts) -> None:
    """Name, address, boot's processes, homes and /tmp are each host's own; /srv is everybody's."""
    facts = (
        "hostname; hostname -I; echo $HOME; ls -A /tmp $HOME | grep mine; touch /tmp/mine ~/mine"
    )
    for user, home in (("root", "/root"), (USER, f"/home/{USER}")):
        for host in hosts.names:
            words = hosts.run(host, ["sh", "-c", facts], user=user).stdout.split()
            assert words == [host, hosts.address(host), home]
            hosts.run(host, ["rm", "/tmp/mine"])
    hosts.path("node1", hosts.shared / "note").write_text("to all\n")
    assert hosts.run("node3", ["cat", hosts.shared / "note"]).stdout == "to all\n"
    assert not (hosts.shared / "note").exists()
    assert socket.gethostname() not in hosts.names

    process = hosts.popen("node1", ["sleep", "1000"])
    (pid,) = wait_for("sleep", lambda: hosts.pids("node1", "sleep 1000"))
    assert hosts.pids("node2", "sleep 1000") == {}
    hosts.kill("node1", pid)
    assert process.wait(10) == -signal.SIGKILL


def test_a_host_runs_this_python(hosts: Hosts) -> None:
    """The checkout and its Python are on every host, for an ordinary user too."""
    command = [sys.executable, "-c", "import nbdist, socket; print(socket.gethostname())"]
    assert hosts.run("node2", command, user=USER).stdout == "node2\n"


def test_a_failed_command_says_what_it_wrote(hosts: Hosts) -> None:
    """The error has host, command, status and output, after its time too."""
    with pytest.raises(HostError, match="node1: sh -c echo no >&2; exit 3\nended with 3\nno"):
        hosts.run("node1", ["sh", "-c", "echo no >&2; exit 3"])
    with pytest.raises(HostError, match=r"node1: sh -c sleep 1000; :\nstill ran after 0\.1 s"):
        hosts.run("node1", ["sh", "-c", "sleep 1000; :"], timeout_s=0.1)
    assert hosts.pids("node1", "sleep 1000") == {}


def test_no_zombie_stays(hosts: Hosts) -> None:
    """Process 1 of a host takes care of those whose parents have ended."""
    hosts.run("node1", ["sh", "-c", "sh -c 'sleep 0.01 & exec sleep 0' & exit"])
    wait_for("the orphans to end", lambda: not hosts.pids("node1", "sleep"))
    files = hosts.path("node1", "/proc").glob("[0-9]*/stat")
    assert [text for text in map(Path.read_text, files) if "(sleep)" in text] == []


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its name, so that a skipped test says what to install."""
    monkeypatch.setattr(os, "getuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda program, path: program == "ip")
    assert missing("sshd", "munged") == "not installed: sshd, munged"
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    assert missing("sshd") == "hosts need root"


@pytest.mark.parametrize("user", ["root", pytest.param(USER, marks=pytest.mark.more_hosts)])
def test_ssh_by_name(hosts: Hosts, user: str) -> None:
    """From the head, with a key and a known host; only nodes listen, and not on the machine."""
    for node in hosts.nodes:
        answer = hosts.run(
            "head", ["ssh", "-o", "BatchMode=yes", node, "hostname; id -un"], user=user
        )
        assert (answer.stdout, answer.stderr) == (f"{node}\n{user}\n", "")
    assert hosts.listeners("node1") == ["0.0.0.0:22", "[::]:22"]
    assert hosts.listeners("head") == []


@pytest.mark.more_hosts
def test_cut_and_heal(hosts: Hosts) -> None:
    """Without its cable a host is silent, and what runs there goes on."""
    ssh = ["ssh", "-o", "ConnectTimeout=1"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    connection = hosts.popen("head", ["ssh", "node2", "read line; echo $line"], **pipes)
    wait_for("the command on node2", lambda: hosts.pids("node2", "read line"))
    hosts.cut("node2")
    assert hosts.run("head", [*ssh, "node2", "true"], check=False).returncode == 255
    assert hosts.run("head", [*ssh, "node3", "hostname"]).stdout == "node3\n"
    hosts.heal("node2")
    assert connection.communicate("still here\n", 60)[0] == "still here\n"


@pytest.mark.more_hosts
def test_firewall(hosts: Hosts) -> None:
    """What is dropped gets no answer; ssh and what the host itself begins come through."""
    skip_without("nft")
    connect = "import socket, sys; socket.create_connection((sys.argv[1], 5000), timeout=1).recv(1)"
    serve = (
        "import socket; s = socket.create_server(('', 5000))\n"
        "for _ in range(2): s.accept()[0].close()"
    )
    server = hosts.popen("node1", [sys.executable, "-c", serve])
    wait_for("the server", lambda: "0.0.0.0:5000" in hosts.listeners("node1"))
    hosts.run("node2", [sys.executable, "-c", connect, "node1"])
    hosts.firewall_drop("node1")
    refused = hosts.run("node2", [sys.executable, "-c", connect, "node1"], check=False)
    assert refused.stderr.endswith("TimeoutError: timed out\n")
    assert hosts.run("head", ["ssh", "node1", "hostname"]).stdout == "node1\n"
    hosts.firewall_off("node1")
    hosts.run("node2", [sys.executable, "-c", connect, "node1"])
    assert server.wait(10) == 0


@pytest.mark.more_hosts
def test_a_full_disk(hosts: Hosts) -> None:
    """Writing fails with ENOSPC, until there is room again."""
    hosts.fill_disk("node1", "/tmp")
    failed = hosts.run("node1", ["cp", "/etc/hosts", "/tmp/file"], check=False)
    assert "No space left on device" in failed.stderr
    hosts.empty_disk("node1", "/tmp")
    hosts.run("node1", ["cp", "/etc/hosts", "/tmp/file"])


@pytest.mark.more_hosts
def test_what_may_be_wrong_with_a_host() -> None:
    """A clock an hour off, Debian's line for the own name, an interface that leads nowhere."""
    skip_without(*SSH, "faketime")
    with Hosts(
        2, clocks={"node1": "+1h"}, named_loopback=["node1"], dead_interface=["node2"],
        shares_homes=True,
    ) as hosts:  # fmt: skip
        hosts.start_sshd()
        true, wrong, wrong_by_ssh = (
            float(hosts.run(host, command).stdout)
            for host, command in (
                ("head", ["date", "+%s"]),
                ("node1", ["date", "+%s"]),
                ("head", ["ssh", "node1", "date", "+%s"]),
            )
        )
        assert 3600 <= wrong - true < 3700
        assert 3600 <= wrong_by_ssh - true < 3700
        resolved = {h: hosts.run(h, ["getent", "ahostsv4", "node1"]).stdout for h in hosts.names}
        assert resolved["node1"].startswith("127.0.1.1 ")
        assert resolved["node2"].startswith(hosts.address("node1"))
        addresses = hosts.run("node2", ["hostname", "-I"]).stdout.split()
        assert addresses == ["10.80.0.3", "10.79.0.3"]
        assert hosts.run("head", ["hostname", "-I"]).stdout.split() == ["10.79.0.1"]
        hosts.run("node1", ["sh", "-c", "echo mine > ~/file"], user=USER)
        assert hosts.run("node2", ["sh", "-c", "cat ~/file"], user=USER).stdout == "mine\n"


@pytest.mark.more_hosts
def test_mpi(hosts: Hosts) -> None:
    """mpiexec starts by ssh on three hosts, and its ranks reach each other."""
    skip_without("mpiexec", *SSH)
    hosts.path("head", hosts.shared / "mpi.py").write_text(MPI)
    places = ",".join(f"{node}:2" for node in hosts.nodes)
    command = ["mpiexec", "--host", places, "/usr/bin/python3", hosts.shared / "mpi.py"]
    lines = hosts.run("head", command, user=USER).stdout.splitlines()
    assert sorted(lines) == [f"node{rank // 2 + 1} {rank} 15" for rank in range(6)]


def test_nothing_is_left() -> None:
    """After the end no process, no thread and no name of it is on the machine."""
    skip_without(*SSH)
    before = _namespaces(Path("/proc/self"))
    mounts = Path("/proc/self/mounts").read_text()
    with Hosts(2) as hosts:
        hosts.start_sshd()
        hosts.popen("node1", ["sh", "-c", "trap '' TERM HUP INT; sleep 1000"])
        spaces = _spaces_of_hosts(hosts)
        assert len(spaces) == 2 + 3 * len(KINDS), sorted(
            spaces
        )  # 2: the switch's network and files
    wait_for("the threads to end", lambda: not list(_holders(spaces)))
    assert _namespaces(Path("/proc/self")) == before
    assert Path("/proc/self/mounts").read_text() == mounts


def test_nothing_is_left_of_a_killed_owner() -> None:
    """SIGKILL for the process that made the hosts ends them."""
    skip_without(*SSH)
    with subprocess.Popen(
        [sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True,
        cwd=Path(__file__).parents[3],
    ) as owner:  # fmt: skip
        assert owner.stdout is not None
        assert owner.stdout.readline() == f"{owner.pid}\n"
        spaces = _spaces_of(Path("/proc", str(owner.pid), "task").iterdir())
        assert len(list(_holders(spaces))) > 5
        owner.kill()
    wait_for("all processes of the hosts to end", lambda: not list(_holders(spaces)))


def test_a_host_that_cannot_be_made_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error in the middle takes down what was up."""
    skip_without()
    spaces: set[str] = set()
    hosts = Hosts(2)
    close = hosts.close

    def fail(host: object) -> None:
        raise HostError("no network")

    def look_and_close() -> None:
        spaces.update(_spaces_of_hosts(hosts))
        close()

    monkeypatch.setattr(hosts, "_configure_network", fail)
    monkeypatch.setattr(hosts, "close", look_and_close)
    with pytest.raises(HostError, match="no network"):
        hosts.__enter__()
    assert spaces
    wait_for("the threads to end", lambda: not list(_holders(spaces)))
