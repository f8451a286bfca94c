"""Ranks on the hosts of a real Slurm's job, from their start to every end that Slurm gives them."""

import contextlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.hosts import HostError, Hosts, missing, wait_for

ROOT = Path(__file__).resolve().parents[3]
FOLDER = "/srv/notebook"
# A notebook's kernel: runs the Python of each line that it reads, and writes what it came to.
KERNEL = """
import json, sys
from nbdist.cluster.kernel.launchers import slurm as launcher
from nbdist.cluster.kernel.start import StartOptions
from nbdist.cluster.slurm import SlurmOptions
from nbdist.notebook.session import start
lines = []

class Sink:
    def draw(self, events):
        lines.extend(event.text for event in events if hasattr(event, "text"))
    def close(self, result):
        pass

def begin(n, **options):
    options = StartOptions(n, "slurm", gpus="none", slurm=SlurmOptions(**options))
    return start(options, lambda _request: Sink(), lines.append).session

for line in sys.stdin:
    try:
        answer = eval(line)
    except BaseException as error:
        answer = f"{type(error).__name__}: {error}"
    try:
        json.dumps(answer)
    except TypeError:
        answer = repr(answer)
    print("ANSWER " + json.dumps([answer, "".join(lines)]), flush=True)
    lines.clear()
"""
SUM = "x = torch.ones(1) * (rank + 1); dist.all_reduce(x); print(int(x.item()))"
WHERE = (
    "[r.text for r in session.run('import os; print(os.uname().nodename, local_rank, "
    "os.environ[\\'SLURM_JOB_ID\\'])').ranks]"
)
BEFORE = "session.run('print(before)', ranks='0,1')[1].text"
SUM_HERE = f"[r.text for r in session.run({SUM!r}).ranks]"


@pytest.fixture(scope="module")
def slurm() -> Iterator[Hosts]:
    """A head and three nodes with Slurm, each with 4 CPUs and two GPUs."""
    if reason := missing("slurmctld", "slurmd", "srun", "sbatch", "munged"):
        pytest.skip(reason)
    with Hosts() as up:
        up.path("head", FOLDER).mkdir()
        up.start_slurm()
        yield up


@pytest.fixture
def kernel(slurm: Hosts) -> "Iterator[subprocess.Popen[str]]":
    """A kernel on the head; nothing of it may be left, on any host and in its folder."""
    process = slurm.popen(
        "head",
        [sys.executable, "-c", KERNEL],
        env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        cwd=FOLDER,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    yield process
    process.kill()
    wait_for("its jobs to be gone", lambda: jobs(slurm) == [])
    for host in slurm.names:
        wait_for(f"its ranks on {host} to be gone", lambda h=host: not slurm.pids(h, "nbdist"))
        if host != "node2":  # whose agent had no time to tidy up: Slurm took the host away
            folder = slurm.path(host, "/tmp")
            with contextlib.suppress(HostError):
                wait_for("", lambda folder=folder: not [*folder.glob("nbdist-*")], 10.0)
            assert [*folder.glob("nbdist-*/**/*"), *folder.glob("nbdist-*")] == []
    assert list(slurm.path("head", FOLDER).iterdir()) == []


def jobs(hosts: Hosts) -> list[str]:
    """The jobs that wait or run, by number."""
    return hosts.run("head", ["squeue", "--noheader", "--format=%i"]).stdout.split()


def ask(kernel: "subprocess.Popen[str]", code: str) -> tuple[Any, str]:
    """(What an expression is in the kernel, what was shown meanwhile)."""
    assert kernel.stdin is not None
    assert kernel.stdout is not None
    kernel.stdin.write(f"{code}\n")
    kernel.stdin.flush()
    line = next((line for line in kernel.stdout if line.startswith("ANSWER ")), "")
    answer, shown = json.loads(line.removeprefix("ANSWER "))
    return answer, shown


@pytest.mark.more_hosts
def test_ranks_in_a_job_through_all_that_slurm_does(
    slurm: Hosts, kernel: "subprocess.Popen[str]"
) -> None:
    """They start, lose a host, come back in another job, lose that job, and end with the kernel."""
    answer, shown = ask(kernel, "(session := begin(4, gpus_per_node=2, time='4'))")
    assert "asking Slurm for a job" in shown, answer
    (job,) = jobs(slurm)
    assert ask(kernel, WHERE)[0] == [f"node{host} {n} {job}\n" for host in (1, 2) for n in (0, 1)]
    assert ask(kernel, SUM_HERE)[0] == ["10\n"] * 4
    waits, _ = ask(kernel, "session.status().waits")
    assert re.fullmatch(rf"Slurm job {job}, [34] min left", waits[-1])
    ask(kernel, "session.run('before = rank')")
    lose_a_host_and_come_back(slurm, kernel, job)

    # Somebody cancels the first job in the middle of a cell.
    code = f"__import__('subprocess').run(['scancel', '{job}'])"
    assert ask(kernel, f"__import__('threading').Timer(2.0, lambda: {code}).start()")[0] is None
    lost, shown = ask(kernel, "session.run('import time; time.sleep(8)')")
    assert f"Slurm ended job {job}: it was cancelled (CANCELLED)" in lost + shown

    # The kernel is killed: its guardian sees no process of the hosts, and cancels what is left.
    kernel.kill()
    wait_for("the other job to be cancelled", lambda: jobs(slurm) == [], 5.0)


def lose_a_host_and_come_back(slurm: Hosts, kernel: "subprocess.Popen[str]", job: str) -> None:
    """Slurm takes the second host away; the first one's ranks keep what they have."""
    down = ["scontrol", "update", "nodename=node2", "state=down", "reason=tested"]
    slurm.run("head", down)
    try:
        lost, _ = ask(kernel, "session.run('import time; time.sleep(60)', ranks='2,3')")
        assert f"Slurm took node2 out of job {job}" in lost
        assert ask(kernel, BEFORE)[0] == "1\n"
        hold = ["sbatch", "--parsable", "--nodelist=node3", "--exclusive", "--output=/dev/null"]
        other = slurm.run("head", [*hold, "--wrap", "sleep 1000"]).stdout.strip()
        ask(kernel, "setattr(launcher, 'SPARE_S', 2.0)")
        late, _ = ask(kernel, "session.restart().ranks")
        assert "It was submitted in the place of node2 and stays in the queue" in late
        slurm.run("head", ["scancel", other])
        back, _ = ask(kernel, "session.restart().ranks")
        assert back == [2, 3]
        spare = next(number for number in jobs(slurm) if number != job)
        places = [*((1, 0, job), (1, 1, job)), *((3, 0, spare), (3, 1, spare))]
        assert ask(kernel, WHERE)[0] == [f"node{host} {n} {at}\n" for host, n, at in places]
        assert ask(kernel, SUM_HERE)[0] == ["10\n"] * 4
        assert ask(kernel, BEFORE)[0] == "1\n"
    finally:
        slurm.run("head", [*down[:3], "state=resume"], check=False)  # it may be back by itself


def test_ranks_inside_a_job_that_runs_already(slurm: Hosts) -> None:
    """They take its hosts, and leave it as it is."""
    code = (
        "import nbdist; session = nbdist.start(profile='slurm', gpus='none'); "
        f"print('SUM', [r.text for r in session.run({SUM!r}).ranks]); session.stop(); "
        "import subprocess; subprocess.run(['srun', '--overlap', '--nodes=1', 'hostname'])"
    )
    allocation = ["salloc", "--quiet", "--nodes=2", "--gpus-per-node=1", "--mem-per-cpu=100"]
    done = slurm.run(
        "head",
        [*allocation, sys.executable, "-c", code],
        env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        cwd=FOLDER,
        timeout_s=90.0,
    )

    assert "SUM ['3\\n', '3\\n']" in done.stdout
    assert "node1" in done.stdout.splitlines()
    wait_for("the job to end with its command", lambda: jobs(slurm) == [])
