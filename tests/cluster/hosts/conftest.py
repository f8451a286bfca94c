"""Hosts that the tests of a module share. A test that cuts, fills or kills puts it right again."""

from collections.abc import Iterator

import pytest

from tests.support.hosts import Hosts, missing

SSH = ("ssh", "sshd", "ssh-keygen")
SLURM = ("slurmctld", "slurmd", "srun", "sbatch", "munged")


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    """A head and three nodes with sshd."""
    skip_without(*SSH)
    with Hosts() as up:
        up.start_sshd()
        yield up


@pytest.fixture(scope="module")
def slurm() -> Iterator[Hosts]:
    """A head and three nodes with sshd and Slurm, two false GPUs each."""
    skip_without(*SSH, *SLURM)
    with Hosts() as up:
        up.start_sshd()
        up.start_slurm()
        yield up


def skip_without(*programs: str) -> None:
    """Skip the test where hosts cannot be made or a program is not installed, by its name."""
    if reason := missing(*programs):
        pytest.skip(reason)
