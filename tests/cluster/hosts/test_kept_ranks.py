"""Ranks on several hosts that outlive their kernel, and the kernel that finds them again."""

import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from nbdist.cluster.kernel import keep, profiles, runs
from nbdist.cluster.kernel import run_dir as run_dir_of_kernel
from nbdist.cluster.kernel.cluster import run_in_loop
from nbdist.cluster.kernel.controller import Connection
from nbdist.cluster.kernel.launchers import agent_set
from nbdist.cluster.run_owner import Keep
from nbdist.core.host import Machine
from nbdist.core.versions import VERSION
from nbdist.errors import StartError
from tests.cluster.hosts.conftest import SLURM, SSH, skip_without
from tests.support import kept_hosts, processes
from tests.support.cells import Cell
from tests.support.host_kernel import HostKernel
from tests.support.hosts import SHARED, Hosts, wait_for
from tests.support.ranks import until

# A cell that prints many lines, and then waits for a file.
CELL = """%%distributed
import pathlib, time
mine = rank + 1
for number in range(200):
    print("line", number)
while not pathlib.Path("/srv/go").exists():
    time.sleep(0.02)
print("went on with", mine)
"""
START_S = 60.0
VARIABLES = {
    "TMPDIR": str(SHARED), "IPYTHONDIR": f"{SHARED}/ipython", "HF_HUB_OFFLINE": "1",
    "MPLCONFIGDIR": f"{SHARED}/matplotlib", "OMP_NUM_THREADS": "1",
}  # fmt: skip
ROOT = Path(__file__).resolve().parents[3]
Begin = Callable[..., dict[int, int]]


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a run; the hosts' temporary folder is beside it."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    (tmp_path / "run-x").mkdir()
    return tmp_path / "run-x"


@pytest.fixture
def begin(run_dir: Path) -> Iterator[Begin]:
    """A kernel starts ranks on host-a and host-b, says their processes, and is killed."""
    kernels = []

    def begin(
        keep_s: float, meanwhile: Callable[[dict[int, int]], object] = dict
    ) -> dict[int, int]:
        words = ["start", run_dir, "Pretended", "host-a:2,host-b:2", "3", keep_s]
        kernels.append(
            subprocess.Popen(
                [sys.executable, "-m", "tests.support.kept_hosts", *map(str, words)],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        )
        assert kernels[-1].stdout is not None
        pids = {int(rank): pid for rank, pid in json.loads(kernels[-1].stdout.readline()).items()}
        meanwhile(pids)
        kernels[-1].kill()
        kernels[-1].wait(20)
        return pids

    yield begin
    for kernel in kernels:
        for pipe in (kernel.stdin, kernel.stdout):
            assert pipe is not None
            pipe.close()


def test_ranks_of_a_killed_kernel_are_found_again(begin: Begin, run_dir: Path) -> None:
    """The same processes, the end of one that died meanwhile; all that a kernel does works."""
    pids = begin(300.0)
    os.kill(pids[1], 15)

    async def run() -> None:
        launcher = await kept_hosts.attach(run_dir)
        first, second, third = (launcher.launchers[str(rank)] for rank in range(3))
        assert [first.pid, second.pid, third.pid] == [pids[n] for n in range(3)]
        assert [first.state, third.state] == ["running"] * 2
        assert await asyncio.to_thread(until, lambda: second.state == "after")
        assert second.stop_data["exit_code"] == -15
        assert [check.name for check in launcher.checks] == ["host-a", "host-b"]

        first.signal(2)
        said = "rank 0 of 3\ninterrupted\n"
        assert await asyncio.to_thread(until, lambda: first.get_output() == said)
        again = await launcher.start_one(1, {})
        assert await asyncio.to_thread(until, lambda: again.get_output() == "rank 1 of 3\n")
        third.end()
        assert await asyncio.to_thread(until, lambda: third.state == "after")
        await launcher.stop()

    run_in_loop(run(), 60)
    assert processes.wait_gone(pids.values()) == []
    assert [path.name for path in run_dir.parent.iterdir()] == [run_dir.name]


def test_a_lost_host_of_kept_ranks_leaves_none(
    begin: Begin, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One agent was killed meanwhile: its rank is unreachable, comes back, and all are kept again.

    The kernel that has found them lets go, and a third one ends them.
    """
    monkeypatch.setattr(agent_set, "RETRY_S", 0.0)
    pids = begin(300.0, lambda pids: psutil.Process(pids[2]).parent().kill())  # type: ignore[union-attr]

    async def second() -> int:
        launcher = await kept_hosts.attach(run_dir)
        lost = launcher.launchers["2"]
        reason = lost.stop_data["unreachable"]
        assert lost.stop_data["exit_code"] is None
        assert reason.startswith("host-b cannot be reached: its agent has ended")
        again = await launcher.start_one(2, {})
        assert again.agent.host == "host-b"
        assert await asyncio.to_thread(until, lambda: again.pid > 0)
        kept_hosts.save(launcher)
        launcher.leave()
        return int(again.pid)

    async def third() -> dict[str, int]:
        launcher = await kept_hosts.attach(run_dir)
        pids_after = {rank: engine.pid for rank, engine in launcher.launchers.items()}
        await launcher.stop()
        return pids_after

    newest = run_in_loop(second(), 60)
    assert run_in_loop(third(), 60) == {"0": pids[0], "1": pids[1], "2": newest}
    assert processes.wait_gone([*pids.values(), newest]) == []
    assert [*run_dir.parent.glob("nbdist-*")] == []


@pytest.mark.parametrize(
    ("profile", "host", "interface", "why"),
    [
        ("local", "", "127.0.0.1", "Ranks of {} are processes of elsewhere"),
        ("pretended", "host-a", "127.0.0.1", "Ranks of {} are processes of elsewhere"),
        ("ssh", "localhost", "10.0.0.1", "Ranks of {} are processes of elsewhere"),
        ("ssh", "n1", "127.0.0.1", "{} was started without --keep, so its controller listens on"),
    ],
)
def test_ranks_that_are_not_reached_from_here_are_left_alone(
    profile: str, host: str, interface: str, why: str, tmp_path: Path, monkeypatch: Any
) -> None:
    """A run folder that several machines see: refused before the kernel that holds it is told."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    config = profiles.load(profile)
    config.AgentEngineSetLauncher.hosts = [(host, 1)]
    client = json.dumps({"interface": f"tcp://{interface}"})
    connection = Connection({Path("ipcontroller-x-client.json"): client}, Path())
    folder = run_dir_of_kernel.create()
    start = {"machine": Machine("elsewhere", "", ""), "config": config, "connection": connection}
    start["topology"] = None
    run_dir_of_kernel.write_start(folder, start)
    run_dir_of_kernel.write_keep(folder, Keep(1.0, "", (), VERSION, ""))
    owner = (folder / "owner.json").read_text()
    with pytest.raises(StartError, match=why.format(folder.name)):
        keep.attach(runs.read(folder), takes=True)

    assert (folder / "owner.json").read_text() == owner


class Kernel:
    """A process on a host that has started ranks, or attached to them."""

    def __init__(self, hosts: Hosts, host: str, *words: object) -> None:
        command = [sys.executable, "-m", "tests.support.kept_hosts", *words]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = hosts.popen(host, command, cwd=ROOT, **pipes)
        self.pids = self._answer()

    def ask(self, code: str) -> Any:
        """What a line of Python is over there."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{code}\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the process has ended"
        return json.loads(line)

    def kill(self) -> None:
        """As the system kills one that takes too much memory."""
        self.process.kill()
        self.process.wait(20)


def wait_until_left(hosts: Hosts, nodes: Sequence[str]) -> None:
    """Wait until nothing of the ranks is left on the nodes."""
    for node in nodes:
        what = f"{node} to be left clean"
        folder = hosts.path(node, "/tmp")
        wait_for(what, lambda n=node, f=folder: not hosts.pids(n, "-c") and not [*f.glob("nb*")])


def work_as_before(hosts: Hosts, first: Kernel, run_dir: Path) -> Kernel:
    """Another kernel finds the ranks of one that was killed, with rank 1 dead, and uses them."""
    hosts.kill("node1", first.pids["1"], 15)
    second = Kernel(hosts, "head", "attach", run_dir)
    assert second.pids == first.pids
    assert second.ask("[e.state for e in launcher.launchers.values()]") == [
        "running", "after", "running",
    ]  # fmt: skip
    assert second.ask("launcher.launchers['1'].stop_data['exit_code']") == -15
    second.ask("launcher.launchers['2'].signal(2)")
    wait_for("the interrupt", lambda: "interrupted" in second.ask("launcher.get_output()"))
    second.ask("launcher.start_one(1, {})")
    wait_for("rank 1", lambda: second.ask("launcher.launchers['1'].get_output()"))
    return second


def test_ranks_by_ssh_are_found_again(hosts: Hosts) -> None:
    """The kernel is killed, and one ssh with it: neither ends a rank that is kept."""
    run_dir = Path("/tmp/run-x")
    hosts.path("head", run_dir).mkdir()
    first = Kernel(hosts, "head", "start", run_dir, "SSH", "node1:2,node2:1", 3, 300)
    connections = hosts.pids("head", "ssh -T")
    first.kill()
    [to_second] = [pid for pid, line in connections.items() if "-- node2" in line]
    hosts.kill("head", to_second)
    second = work_as_before(hosts, first, run_dir)
    second.ask("launcher.stop()")
    wait_until_left(hosts, hosts.nodes)
    wait_for("all connections to end", lambda: not hosts.pids("head", "ssh -T"))


@pytest.mark.more_hosts
def test_hosts_that_were_cut_off_keep_no_rank_twice(hosts: Hosts) -> None:
    """Ranks that a kernel has given up on are ended, before others take their place and at the end.

    Agents that keep them wait behind the cut; without the order of their kernel for hours.
    """
    run_dir, nodes = Path("/tmp/run-y"), ["node1", "node2"]
    hosts.path("head", run_dir).mkdir()
    kernel = Kernel(hosts, "head", "start", run_dir, "SSH", "node1:2,node2:1", 3, 3600)
    try:
        for node in nodes:
            hosts.cut(node)
        states = "{e.state for e in launcher.launchers.values()}"
        wait_for("the hosts to be lost", lambda: kernel.ask(f"{states} == {{'after'}}"))
    finally:
        for node in nodes:
            hosts.heal(node)
    programs = hosts.pids("node1", "-c").keys()
    kernel.ask("launcher.start_one(0, {})")
    wait_for("rank 0", lambda: kernel.ask("launcher.launchers['0'].get_output()"))
    assert not programs & hosts.pids("node1", "-c").keys()
    assert kernel.pids["2"] in hosts.pids("node2")
    kernel.ask("launcher.stop()")
    wait_until_left(hosts, nodes)


@pytest.mark.more_hosts
def test_ranks_in_a_job_are_found_again(slurm: Hosts) -> None:
    """By a second kernel while the first one lives: it loses them, and ends no step with that."""
    run_dir = Path("/tmp/run-x")
    slurm.path("head", run_dir).mkdir()
    words = ["--parsable", "--nodelist=node1,node2", "--nodes=2", "--exclusive"]
    submit = ["sbatch", *words, "--output=/dev/null", "--wrap", "sleep 1000"]
    job = int(slurm.run("head", submit, cwd="/srv").stdout)
    state = ["squeue", "--noheader", "--format=%T", f"--jobs={job}"]
    wait_for("the job", lambda: slurm.run("head", state).stdout.strip() == "RUNNING")
    settings = {"job": job, "job_name": "kept", "cpus": {"node1": 4, "node2": 4}}
    words = [run_dir, "Slurm", "node1:2,node2:1", 3, 300, json.dumps(settings)]
    first = Kernel(slurm, "head", "start", *words)
    steps = slurm.pids("head", "srun")
    second = work_as_before(slurm, first, run_dir)
    lost = "[agent.lost for agent in launcher.agents.values()]"
    wait_for("the first kernel to lose the hosts", lambda: all(first.ask(lost)))
    first.kill()
    assert slurm.pids("head", "srun").items() >= steps.items()
    assert second.ask("[e.state for e in launcher.launchers.values()]") == ["running"] * 3
    second.ask("launcher.stop()")
    wait_until_left(slurm, slurm.nodes)
    wait_for("all connections to end", lambda: not slurm.pids("head", "srun"))
    slurm.run("head", ["scancel", str(job)])


STARTS = {
    "ssh": "%dist_init --hosts node1:1,node2:1 --keep 1h",
    "slurm": "%dist_init --profile slurm -n 2 --gpus none --time 10 --keep 1h",
}


@contextlib.contextmanager
def notebook(hosts: Hosts, host: str) -> Iterator[HostKernel]:
    """A notebook's kernel on a host."""
    with HostKernel(hosts, host, VARIABLES) as kernel:
        kernel.run("%load_ext nbdist")
        yield kernel


def check(cell: Cell) -> str:
    """What a cell shows that has to end well."""
    assert cell.status == "ok", cell.visible
    return cell.visible


@pytest.fixture(scope="module")
def lab() -> Iterator[Hosts]:
    """A head and three nodes with sshd and Slurm, whose homes are the same."""
    skip_without(*SSH, *SLURM)
    with Hosts(shares_homes=True) as up:
        up.start_sshd(up.names)
        up.start_slurm()
        yield up


@pytest.mark.more_hosts
@pytest.mark.slow
@pytest.mark.parametrize("profile", ["ssh", "slurm"])
def test_a_notebook_of_another_host_takes_the_ranks_over(profile: str, lab: Hosts) -> None:
    """The first kernel is killed in a cell; the second shows all of it, and its ranks go on.

    The run's folder is on a file system that the hosts share. The controller stays where it is, on
    the first kernel's host. In a job a third kernel, there, has them last, and ends them; by ssh
    they end when somebody removes the run's folder.
    """
    go = lab.path("head", SHARED / "go")
    go.unlink(missing_ok=True)
    with notebook(lab, "head") as first:
        check(first.run(STARTS[profile], START_S))
        first.wait_output(first.start(CELL), "line 199", START_S)
        os.kill(first.pid, 9)
    with notebook(lab, "node3") as second:
        attaching = second.start("%dist_attach")
        second.wait_output(attaching, "line 199", START_S)
        go.touch()
        shown = check(second.finish(attaching, START_S))
        assert "[0] went on with 1\n[1] went on with 2" in shown, shown
        assert shown.count("] line 7\n") == 1
        shown = check(second.run("%%distributed\nmine *= 10\nprint(mine)"))
        assert shown.splitlines() == ["[0] 10", "[1] 20"]
        check(second.run("%dist_detach"))
    if profile == "slurm":
        with notebook(lab, "head") as third:
            check(third.run("%dist_attach", START_S))
            shown = check(third.run("%%distributed\nprint(mine)"))
            assert shown.splitlines() == ["[0] 10", "[1] 20"]
            check(third.run("%dist_shutdown", START_S))
    for folder in lab.path("head", SHARED).glob("nbdist-*/run-*"):
        shutil.rmtree(folder)
    wait_until_left(lab, ["node1", "node2"])
    for host in ("head", "node3"):
        wait_for(f"{host} to be left", lambda h=host: not lab.pids(h, "nbdist"))
    assert [*lab.path("head", SHARED).glob("nbdist-*")] == []
    assert lab.run("head", ["squeue", "--noheader"]).stdout == ""
