"""A job of a real Slurm, from asking for it to every end that it can have, without ranks."""

import contextlib
import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.hosts import Hosts, missing, wait_for

ROOT = Path(__file__).resolve().parents[3]
FOLDER = "/srv/notebook"
PARTITIONS = (
    "main Nodes=ALL Default=YES MaxTime=INFINITE PriorityTier=2",
    "small Nodes=node1 MaxNodes=1 MaxTime=10 PriorityTier=2",
    "spare Nodes=ALL MaxTime=INFINITE PriorityTier=1",
    "physics Nodes=ALL AllowAccounts=physics",
)
LIMITS = "small: 1 host of 4 CPUs and gpu:2 each, hosts of a job: 1, time limit 10:00"


@pytest.fixture(scope="module")
def slurm() -> Iterator[Hosts]:
    """A head and three nodes with Slurm, each with 4 CPUs and two GPUs."""
    if reason := missing("slurmctld", "slurmd", "srun", "sbatch", "munged"):
        pytest.skip(reason)
    with Hosts() as up:
        up.path("head", FOLDER).mkdir()
        up.start_slurm(partitions=PARTITIONS)
        yield up


class Kernel:
    """A running tests.support.slurm_kernel."""

    def __init__(self, hosts: Hosts, process: "subprocess.Popen[str]"):
        self.hosts = hosts
        self.process = process
        self.job = 0
        self.hosts_of_job: dict[str, int] = {}

    def until(self, *kinds: str) -> list[Any]:
        """[kind, value] of the next line of one of these kinds."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            kind, value = json.loads(line)
            if kind in kinds:
                return [kind, value]
        raise AssertionError(f"no {kinds} came")

    def lost(self, host: str) -> list[str]:
        """[what was told on its own, why the host is lost, the job's line for a status]."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{host}\n")
        self.process.stdin.flush()
        return [self.until(kind)[1] for kind in ("told", "lost", "status")]

    @property
    def state(self) -> str:
        """Slurm's word for the job now."""
        return state(self.hosts, self.job)


def state(hosts: Hosts, job: int) -> str:
    words = ["squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T"]
    return hosts.run("head", words).stdout.strip()


def jobs(hosts: Hosts) -> list[str]:
    """The jobs that wait or run."""
    return hosts.run("head", ["squeue", "--noheader", "--format=%i %j %T"]).stdout.splitlines()


@contextlib.contextmanager
def kernel(
    hosts: Hosts,
    world_size: int,
    *options: dict[str, Any],
    inside: tuple[str, ...] = (),
    **env: str,
) -> Iterator[Kernel]:
    """A kernel that asks for jobs; at the end nothing of it may be left, also in its folder."""
    program = [sys.executable, "-m", "tests.support.slurm_kernel", str(world_size)]
    process = hosts.popen(
        "head",
        [*inside, *program, *map(json.dumps, options)],
        env={"PYTHONPATH": str(ROOT), **env},
        cwd=FOLDER,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        yield Kernel(hosts, process)
        assert process.stdin is not None
        process.stdin.close()
        process.wait(30)
    finally:
        process.kill()
    wait_for("its jobs to be gone", lambda: not [j for j in jobs(hosts) if "nbdist-" in j])
    wait_for("its processes to be gone", lambda: not hosts.pids("head", "guardian.py"))
    assert list(hosts.path("head", FOLDER).iterdir()) == []


@contextlib.contextmanager
def running(hosts: Hosts, world_size: int, **options: Any) -> Iterator[Kernel]:
    """A kernel whose job runs."""
    with kernel(hosts, world_size, options) as started:
        started.job, started.hosts_of_job, is_ours = started.until("job")[1]
        assert is_ours
        yield started


def test_a_job_that_is_refused_or_can_never_start(slurm: Hosts) -> None:
    """Slurm's words, and what there is to choose; nothing is left in the queue."""
    refused = (
        ({"partition": "smal"}, ["Invalid partition name", "Did you mean small?", "main (the de"]),
        ({"partition": "small", "gpus_per_node": 2}, [LIMITS]),  # two hosts
        ({"partition": "small", "time": "1:00:00"}, [LIMITS]),
        ({"gpus_per_node": 3}, ["Requested node configuration is not available", "3 hosts of 4 "]),
        ({"sbatch": "--nodes=4"}, ["3 hosts of 4 CPUs and gpu:2 each"]),
        ({"partition": "physics", "account": "bio"}, ["account", "Choose yours with --account"]),
        ({"sbatch": "--constraint=h100"}, ["Invalid feature specification"]),
        ({"time": "soon"}, ["Invalid --time specification"]),
    )  # fmt: skip
    with kernel(slurm, 4, *(options for options, _ in refused)) as started:
        answers = [started.until("StartError", "job") for _ in refused]
    texts = [text for _, text in answers]

    assert [kind for kind, _ in answers] == ["StartError"] * len(refused)
    assert [(text, word) for text, (_, words) in zip(texts, refused, strict=True)
            for word in words if word not in text] == []  # fmt: skip
    assert jobs(slurm) == []


@pytest.mark.more_hosts
def test_a_machine_without_slurm(slurm: Hosts) -> None:
    """Its programs are not there: the profile is the wrong one, or the machine."""
    with kernel(slurm, 2, {}, PATH="/nonexistent") as started:
        kind, text = started.until("OptionError", "StartError", "job")
        assert kind == "OptionError"
        assert text.startswith("No Slurm here: sbatch is not on PATH.")


def test_a_pending_job_is_told_with_its_place_and_cancelled_by_an_interrupt(slurm: Hosts) -> None:
    """Behind others, with Slurm's reason; where somebody else cancels it the wait ends too."""
    hold = ["sbatch", "--parsable", "--nodes=3", "--exclusive", "--output=/dev/null"]
    holder, other = (
        int(slurm.run("head", [*hold, "--wrap", "sleep 1000"]).stdout) for _ in range(2)
    )
    wait_for("the hosts to be taken", lambda: state(slurm, holder) == "RUNNING")
    try:
        with kernel(slurm, 2, {"gpus_per_node": 1}) as started:
            line = ""
            while "place 2 of 2 in partition main" not in line or "reason: " not in line:
                line = started.until("progress")[1]
            started.job = int(line.split()[2])
            started.process.send_signal(signal.SIGINT)
            started.until("closed")
            assert started.state == "CANCELLED"
        with kernel(slurm, 2, {}) as started:
            line = ""
            while "PENDING" not in line:
                line = started.until("progress")[1]
            slurm.run("head", ["scancel", line.split()[2]])
            _, text = started.until("StartError")
            assert "it was cancelled (CANCELLED" in text
    finally:
        slurm.run("head", ["scancel", str(holder), str(other)])


@pytest.mark.more_hosts
def test_a_running_job_and_its_end(slurm: Hosts) -> None:
    """Its time is told before it ends; then who ended it: a host, another job, somebody."""
    with running(slurm, 4, gpus_per_node=2, time="4", partition="spare") as started:
        assert started.hosts_of_job == {"node1": 2, "node2": 2}
        line = rf"Slurm ends job {started.job} in [34] min, at its time limit: save with %dist_save"
        assert re.match(line, started.until("told")[1])
        down = ["scontrol", "update", "nodename=node2", "state=down", "reason=tested"]
        slurm.run("head", down)
        line, why, status = started.lost("node2")
        assert line == f"{why}."
        assert why.startswith(f"Slurm took node2 out of job {started.job}")
        assert re.fullmatch(rf"Slurm job {started.job}, [34] min left", status)
        assert started.state == "RUNNING"
        slurm.run("head", [*down[:3], "state=resume"], check=False)  # it may be back by itself
        wait_for("node2", lambda: slurm.slurm_states()["node2"] == "idle")
        taker = ["srun", "--partition=main", "--nodes=3", "--exclusive", "true"]
        slurm.run("head", taker)
        line, why, status = started.lost("node1")
        end = "a job of higher priority took its hosts (preemption) (PREEMPTED)"
        assert why == status == f"Slurm ended job {started.job}: {end}"
        assert line == f"{why}."
    with running(slurm, 2) as started:
        slurm.run("head", ["scancel", str(started.job)])
        _, why, _ = started.lost("node1")
        assert why == f"Slurm ended job {started.job}: it was cancelled (CANCELLED)"


@pytest.mark.more_hosts
@pytest.mark.timeout(240)
def test_a_job_whose_time_is_over(slurm: Hosts) -> None:
    """That it ends soon is told once, and then that its time was the reason."""
    with running(slurm, 1, time="1") as started:
        first, second = started.until("told")[1], started.until("told")[1]
        reason = "its time limit was reached (TIMEOUT, TimeLimit)"
        assert re.match(rf"Slurm ends job {started.job} in (1 min|\d\d s), at its time", first)
        assert second == f"Slurm ended job {started.job}: {reason}."


def test_a_killed_kernels_job_is_cancelled(slurm: Hosts) -> None:
    """By its guardian, which sees no process of the nodes: each has its own process table."""
    with running(slurm, 2, gpus_per_node=1) as started:
        assert started.state == "RUNNING"
        started.process.kill()
        wait_for("the job to be cancelled", lambda: started.state == "CANCELLED", 5.0)


@pytest.mark.more_hosts
def test_a_kernel_inside_a_job_takes_its_hosts_and_leaves_it_alone(slurm: Hosts) -> None:
    """Unless something is asked of a job: then it is another one."""
    allocation = ("salloc", "--quiet", "--nodes=2", "--ntasks-per-node=2", "--mem=100")
    with kernel(slurm, 2, {}, {"time": "9"}, inside=allocation) as started:
        job, nodes, is_ours = started.until("job")[1]
        assert (nodes, is_ours) == ({"node1": 1, "node2": 1}, False)
        assert state(slurm, job) == "RUNNING"
    # The end of its input ended both: the second was a job of its own.
    second, _, is_ours = started.until("job")[1]
    assert second != job
    assert is_ours
