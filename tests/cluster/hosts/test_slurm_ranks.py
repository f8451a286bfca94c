"""Ranks on the hosts of a real Slurm's job, from their start to every end that Slurm gives them."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.hosts import Hosts, missing, wait_for

ROOT = Path(__file__).resolve().parents[3]
FOLDER = "/srv/notebook"
# A notebook's kernel: runs the Python of each line that it reads, and writes what it came to.
KERNEL = """
import json, sys
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
        wait_for(f"{host}'s folder", lambda h=host: not [*slurm.path(h, "/tmp").glob("nbdist-*")])
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


def test_ranks_in_a_job_through_all_that_slurm_does(
    slurm: Hosts, kernel: "subprocess.Popen[str]"
) -> None:
    """They start, lose a host, come back in another job, lose that job, and end with the kernel."""
    where = "import os; print(os.uname().nodename, local_rank, os.environ['SLURM_JOB_ID'])"
    answer, shown = ask(kernel, "(session := begin(4, gpus_per_node=2, time='4'))")
    job = jobs(slurm)[0]
    assert "asking Slurm for a job" in shown, answer
    hosts, _ = ask(kernel, f"[r.text for r in session.run({where!r}).ranks]")
    assert hosts == [f"node{host} {n} {job}\n" for host in (1, 2) for n in (0, 1)]
    sums, _ = ask(kernel, SUM_HERE)
    assert sums == ["10\n"] * 4
    waits, _ = ask(kernel, "session.status().waits")
    assert f"Slurm job {job}, 3 min left" in waits

    # Slurm takes the second host away; the first one's ranks keep what they have.
    ask(kernel, "session.run('before = rank')")
    slurm.run("head", ["scontrol", "update", "nodename=node2", "state=down", "reason=tested"])
    lost, _ = ask(kernel, "session.run('import time; time.sleep(60)', ranks='2,3')")
    assert f"Slurm took node2 out of job {job}" in lost
    assert ask(kernel, "session.run('print(before)', ranks='0,1')[1].text")[0] == "1\n"
    back, _ = ask(kernel, "session.restart().ranks")
    assert back == [2, 3]
    hosts, shown = ask(kernel, f"[r.text for r in session.run({where!r}).ranks]")
    spare = next(number for number in jobs(slurm) if number != job)
    assert hosts == [f"node1 {n} {job}\n" for n in (0, 1)] + [
        f"node3 {n} {spare}\n" for n in (0, 1)
    ]
    assert ask(kernel, SUM_HERE)[0] == ["10\n"] * 4
    assert ask(kernel, "session.run('print(before)', ranks='0,1')[1].text")[0] == "1\n"

    # Somebody cancels the first job in the middle of a cell.
    code = f"__import__('subprocess').run(['scancel', '{job}'])"
    cancel = f"__import__('threading').Timer(2.0, lambda: {code}).start()"
    assert ask(kernel, cancel)[0] is None
    lost, shown = ask(kernel, "session.run('import time; time.sleep(30)')")
    assert f"Slurm ended job {job}: it was cancelled (CANCELLED)" in lost + shown

    # The kernel is killed: its guardian sees no process of the hosts, and cancels what is left.
    kernel.kill()
    wait_for("the other job to be cancelled", lambda: jobs(slurm) == [], 5.0)
    slurm.run("head", ["scontrol", "update", "nodename=node2", "state=resume"], check=False)


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
    assert done.stdout.rstrip().endswith("node1")
    assert jobs(slurm) == []
