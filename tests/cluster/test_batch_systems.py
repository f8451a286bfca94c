"""Ranks by ipyparallel's batch launchers, with commands that stand in and start real processes."""

import json
import os
import re
import signal
from pathlib import Path

import psutil
import pytest

from nbdist.cluster.kernel import profiles
from nbdist.cluster.kernel.start import StartOptions
from nbdist.errors import RankGone, StartError
from nbdist.notebook.session import Session, StartedSession
from nbdist.notebook.session import start as start_session
from tests.support import batch_stubs
from tests.support.ranks import processes_under, session_of, silent, until

HOSTS_PAGE = Path(__file__).resolve().parents[2] / "docs" / "hosts.md"
SUM = "x = torch.ones(1) * (rank + 1); dist.all_reduce(x); print(x.item())"


@pytest.fixture
def stubs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The stand-ins' folder; the notebook's folder is an empty one beside it."""
    folder, notebooks = tmp_path / "batch", tmp_path / "notebooks"
    programs = batch_stubs.install(folder, "kubectl", "qsub", "qdel", "qstat")
    notebooks.mkdir()
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("NBDIST_PRELOAD", "0")
    monkeypatch.chdir(notebooks)
    return folder


def put_profile(stubs: Path, name: str, text: str) -> None:
    folder = stubs.parent / f"profile_{name}"
    folder.mkdir()
    (folder / profiles.CONFIG_FILE).write_text(text)


def put_kubernetes(stubs: Path) -> None:
    """Copy the shipped profile and set its image, as a user does."""
    text = (profiles.shipped_profiles()["kubernetes"] / profiles.CONFIG_FILE).read_text()
    text = text.replace('IMAGE = ""', 'IMAGE = "registry/nbdist:1"')
    put_profile(stubs, "kubernetes", text.replace("GPUS = 1", "GPUS = 0"))


def put_pbs(stubs: Path, **replaced: str) -> None:
    """The profile that the page on hosts shows."""
    [text] = re.findall(
        r"```python\n(c = get_config.*?PBS.*?)```", HOSTS_PAGE.read_text(), re.DOTALL
    )
    for old, new in replaced.items():
        assert old in text
        text = text.replace(old, new)
    put_profile(stubs, "pbs", text)


def begin(profile: str) -> StartedSession:
    return start_session(StartOptions(2, profile=profile), silent, lambda _: None)


def lose_rank_1(session: Session) -> str:
    """Kill it; the refusal of a cell for both ranks."""
    os.kill(next(place.pid for place in session.topology.ranks if place.rank == 1), signal.SIGKILL)
    assert until(lambda: session.health.dead == (1,))
    with pytest.raises(RankGone) as caught:
        session.run("print(rank)")
    return str(caught.value)


def test_ranks_in_pods_of_an_indexed_job(stubs: Path, runs: Path) -> None:
    """The Job's numbers are the ranks; a lost one is told; the stop deletes Job and Secret."""
    put_kubernetes(stubs)
    started = begin("kubernetes")
    session = started.session
    try:
        sums = session.run(f"import os\n{SUM}\nprint(os.environ['JOB_COMPLETION_INDEX'])")
        refusal = lose_rank_1(session)
        alone = session.run("print(rank)", ranks=[0])
        job = json.loads((stubs / "objects.json").read_text())[1]["metadata"]["name"]
        pids = batch_stubs.pids(stubs, job)
    finally:
        session.stop()

    assert [rank.text for rank in sums.ranks] == ["3.0\n0\n", "3.0\n1\n"]
    assert "its connection is lost" in refusal
    assert refusal.endswith("%%rank [0] runs on the others; %dist_reset restarts all ranks.")
    assert alone.ranks[0].text == "0\n"
    assert any("not on a real cluster yet" in note for note in started.notes)
    assert batch_stubs.calls(stubs)[-1] == [
        "kubectl",
        *["delete", "--ignore-not-found", "--wait=false", "job,secret", job],
    ]
    assert batch_stubs.pids(stubs, job, "ended") == pids
    assert until(lambda: not any(map(psutil.pid_exists, pids)))
    assert processes_under(runs) == []
    assert list(Path.cwd().iterdir()) == []


@pytest.mark.more_hosts
def test_ranks_by_the_pbs_profile_of_the_page(stubs: Path, runs: Path) -> None:
    """ipyparallel's launcher renders its script, one task of the array is one rank."""
    put_pbs(stubs)
    with session_of(StartOptions(2, profile="pbs")) as session:
        sums = session.run(SUM)

    assert [rank.text for rank in sums.ranks] == ["3.0\n"] * 2
    assert [call[0] for call in batch_stubs.calls(stubs)] == ["qsub", "qdel"]
    assert "#PBS -t 1-2" in (stubs / "script").read_text()
    assert processes_under(runs) == []
    assert list(Path.cwd().iterdir()) == []


def test_a_refused_job_is_told_in_the_batch_systems_words(
    stubs: Path, runs: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Once, before any deadline; nothing is deleted that never was."""
    put_pbs(stubs)
    (stubs / batch_stubs.REFUSAL).write_text("qsub: would exceed queue's resource limits")
    with pytest.raises(StartError) as caught:
        begin("pbs")

    assert str(caught.value).startswith("The cluster could not start: `qsub ")
    assert str(caught.value).endswith(
        "failed (exit status 1):\n    qsub: would exceed queue's resource limits"
    )
    assert [call[0] for call in batch_stubs.calls(stubs)] == ["qsub"]
    assert capfd.readouterr().err == ""
    assert processes_under(runs) == []


def test_ranks_that_do_not_come_are_told_with_their_output_and_their_jobs_state(
    stubs: Path, runs: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """And the error of a stop that fails too is said beside it, not in its place."""
    put_pbs(stubs, **{"{program_and_args}": "/no/such/python {program_and_args}"})
    (stubs / "bin" / "qdel").write_text("#!/bin/sh\necho 'qdel: Server is down' >&2\nexit 3\n")
    options = StartOptions(2, profile="pbs", deadline_s=8)
    with pytest.raises(StartError) as caught:
        start_session(options, silent, lambda _: None)

    assert str(caught.value).startswith("0 of 2 ranks were ready after 8 s; ranks 0-1 did not come")
    assert "No such file or directory" in str(caught.value)
    assert "#PBS -t 1-2" in (stubs / "script").read_text()
    assert [call[0] for call in batch_stubs.calls(stubs)] == ["qsub", "qstat"]
    assert "qstat 4711:\n    Job ID" in str(caught.value)
    assert "qdel: Server is down" in capfd.readouterr().err
    assert processes_under(runs) == []
