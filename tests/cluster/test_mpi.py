"""Ranks by a real mpiexec on this machine; cluster/hosts/test_mpi_hosts.py has several."""

import os
import shutil
import signal
from pathlib import Path

import pytest

from nbdist.cluster.kernel.ipp_launchers import ENDS_ALL
from nbdist.cluster.kernel.start import StartOptions
from nbdist.errors import RankGone, StartError
from nbdist.notebook.session import start as start_session
from tests.support.ranks import processes_under, session_of, silent, until

# mpiexec refuses to be root's, as these tests may be.
ROOT_MAY = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
CELL = (
    "import os\n"
    "x = torch.ones(1) * (rank + 1)\n"
    "dist.all_reduce(x)\n"
    "cores = len(os.sched_getaffinity(0)) == os.cpu_count()\n"
    "print(x.item(), rank == int(os.environ['OMPI_COMM_WORLD_RANK']), cores)"
)

needs_mpiexec = pytest.mark.skipif(
    shutil.which("mpiexec") is None, reason="mpiexec is not installed"
)


@pytest.fixture
def mpi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shipped profile, on this machine."""
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("NBDIST_PRELOAD", "0")
    for name, value in ROOT_MAY.items():
        monkeypatch.setenv(name, value)


@needs_mpiexec
@pytest.mark.usefixtures("mpi")
def test_ranks_by_mpiexec_work_and_end_together(runs: Path) -> None:
    """Its numbers are the ranks', all cores are theirs; a death is told in mpiexec's own words."""
    started = start_session(StartOptions(2, profile="mpi"), silent, lambda _: None)
    session = started.session
    try:
        result = session.run(CELL)
        victim = next(place.pid for place in session.topology.ranks if place.rank == 1)
        os.kill(victim, signal.SIGKILL)
        assert until(lambda: session.health.dead == (0, 1))
        with pytest.raises(RankGone) as caught:
            session.run("print(rank)")
    finally:
        session.stop()

    assert [rank.text for rank in result.ranks] == ["3.0 True True\n"] * 2
    assert ENDS_ALL in started.notes
    assert any(note.startswith("Profile mpi: ") for note in started.notes)
    assert "mpiexec ended all ranks, exit code 137" in str(caught.value)
    assert "mpiexec noticed that process rank 1" in str(caught.value)
    assert "%dist_restart" not in str(caught.value)
    assert processes_under(runs) == []


@needs_mpiexec
@pytest.mark.usefixtures("mpi", "runs")
def test_too_few_slots_are_told_in_mpiexecs_own_words() -> None:
    """At once, not after the start's deadline."""
    with (
        pytest.raises(StartError) as caught,
        session_of(StartOptions(1000, profile="mpi")),
    ):
        pass

    assert str(caught.value).startswith("mpiexec ended before it was ready (")
    assert "There are not enough slots available in the system to satisfy the 1000" in str(
        caught.value
    )
