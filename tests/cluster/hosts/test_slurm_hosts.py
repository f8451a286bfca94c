"""The Slurm that other tests stand on: three nodes with two false GPUs each."""

import pytest

from tests.support.hosts import USER, Hosts, wait_for


def test_srun_over_all_nodes(slurm: Hosts) -> None:
    """Tasks of an ordinary user run on every node, each with a GPU of its own."""
    command = [
        "srun", "-N3", "--ntasks-per-node=2", "--gpus-per-task=1", "sh", "-c",
        "echo $(hostname) $CUDA_VISIBLE_DEVICES",
    ]  # fmt: skip
    lines = slurm.run("head", command, user=USER).stdout.splitlines()
    assert sorted(lines) == [f"{node} {gpu}" for node in slurm.nodes for gpu in (0, 1)]


@pytest.mark.more_hosts
def test_a_partition_with_limits_refuses(slurm: Hosts) -> None:
    """`small` has one node and ten minutes."""
    for option in ("--nodes=2", "--time=30"):
        command = ["sbatch", "-p", "small", option, "--wrap", "true"]
        answer = slurm.run("head", command, check=False)
        assert answer.returncode != 0
        assert "Batch job submission failed" in answer.stderr


@pytest.mark.more_hosts
def test_a_job_gives_way(slurm: Hosts) -> None:
    """A job in `spare` is cancelled when one in `main` needs its nodes."""
    submit = ["sbatch", "--parsable", "-N3", "--exclusive", "-o", "/dev/null"]
    first = slurm.run("head", [*submit, "-p", "spare", "--wrap", "sleep 1000"]).stdout.strip()
    state = ["squeue", "-h", "-o", "%T", "-t", "all", "-j"]
    wait_for("the first job", lambda: slurm.run("head", [*state, first]).stdout == "RUNNING\n")
    slurm.run("head", ["srun", "-N3", "--exclusive", "hostname"])
    assert slurm.run("head", [*state, first]).stdout == "PREEMPTED\n"
