"""What nbdist adds to ipyparallel's own launchers: settings, words of commands, and their ends."""

import json
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from ipyparallel.cluster.launcher import (
    BatchEngineSetLauncher,
    LocalEngineSetLauncher,
    MPIEngineSetLauncher,
    PBSEngineSetLauncher,
    SlurmEngineSetLauncher,
    SSHEngineSetLauncher,
)
from traitlets.config import Config

from nbdist.cells.kernel.cell_outcome import CellOutcome, still_aborting_message
from nbdist.cluster.hosts import Host
from nbdist.cluster.kernel import ipp_cluster, ipp_launchers, profiles
from nbdist.cluster.kernel.cluster import LOST, Cluster
from nbdist.cluster.kernel.launchers.rank_set import OTHER, RankSet
from nbdist.cluster.kernel.processes import Exit
from nbdist.cluster.kernel.ranks import Ranks
from nbdist.core import topology
from nbdist.errors import OptionError, RankGone, StartError
from nbdist.hang import recovery
from nbdist.hang.kernel import restart as hang_restart
from tests.support import batch_stubs

KEY = "c0ffee-secret"
# The oldest and the newest Kubernetes that the validator and most clusters have.
KUBERNETES = ("1.30", "1.36")


@pytest.fixture
def stubs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of commands that stand in for batch systems, alone in PATH but for the shell's."""
    folder = tmp_path / "batch"
    programs = batch_stubs.install(folder, "kubectl", "qsub", "qdel", "qstat")
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    return folder


def pbs(tmp_path: Path, **settings: Any) -> Any:
    """An unstarted launcher of PBS's, as a cluster would make it."""
    config = Config({"PBSEngineSetLauncher": settings})
    ipp_launchers.keep_scripts(config, tmp_path)
    return ipp_launchers.watched(PBSEngineSetLauncher)(config=config, profile_dir=str(tmp_path))


def test_a_profile_that_leaves_heartbeats_open_gets_short_ones() -> None:
    """A cut host is told after seconds; what the profile sets itself stays, said either way."""
    appended, in_a_section = Config(), Config()
    appended.Cluster.controller_args.append("--HeartMonitor.period=7")
    in_a_section.HeartMonitor.period = 7
    for config in (empty := Config(), appended, in_a_section):
        ipp_launchers.complete(config)

    assert empty.Cluster.controller_args == [*ipp_launchers.HEARTBEAT]
    assert appended.Cluster.controller_args == [
        "--HeartMonitor.period=7",
        "--HeartMonitor.max_heartmonitor_misses=5",
    ]
    assert "controller_args" not in in_a_section.Cluster


def test_hosts_become_mpiexecs() -> None:
    """After the profile's own arguments; launchers that find hosts by themselves take none."""
    config = profiles.load("mpi")
    given = list(config.MPIEngineSetLauncher.mpi_args)
    engines, hosts = ipp_cluster.launchers(config)[1], [Host("n1", 2), Host("n2")]
    ipp_launchers.spread(config, engines, "mpi", hosts)

    assert engines(config=config).mpi_args == [*given, "--host", "n1:2,n2:1"]
    with pytest.raises(OptionError, match=r"--hosts works with the profiles ssh, mpi and pretend"):
        ipp_launchers.spread(Config(), SlurmEngineSetLauncher, "far", hosts)


@pytest.mark.parametrize(
    "launcher",
    [LocalEngineSetLauncher, SSHEngineSetLauncher, MPIEngineSetLauncher, SlurmEngineSetLauncher],
)
def test_launchers_of_ipyparallels_have_the_plain_answers(launcher: type, tmp_path: Path) -> None:
    """They only start engines; of theirs the local one alone starts all of them here."""
    engine_set = ipp_launchers.rank_set(launcher)(profile_dir=str(tmp_path))

    assert isinstance(engine_set, RankSet)
    assert (engine_set.kind, engine_set.engine_launchers(), engine_set.ending()) == (
        OTHER,
        {},
        None,
    )
    assert engine_set.take_notes() == engine_set.status_lines() == []
    assert engine_set.is_on_this_machine is (launcher is LocalEngineSetLauncher)
    assert ipp_launchers.rank_set(type(engine_set)) is type(engine_set)


def test_a_machine_without_the_command_says_so_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """No scheduler here, or no mpiexec: with the command's name, and no file is left."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for launcher, command in (
        (SlurmEngineSetLauncher, "sbatch"),
        (MPIEngineSetLauncher, "mpiexec"),
    ):
        with pytest.raises(StartError, match=rf"'{command}', by which the profile 'far' starts"):
            ipp_launchers.check_command(Config(), [launcher], "far")

    assert list(tmp_path.iterdir()) == []


def test_a_refused_submission_has_the_commands_own_words(stubs: Path, tmp_path: Path) -> None:
    """ipyparallel lets stderr go to the notebook's, and raises the exit status alone."""
    (stubs / batch_stubs.REFUSAL).write_text("qsub: Unknown queue gpu")
    launcher = pbs(tmp_path)
    with pytest.raises(subprocess.CalledProcessError) as caught:
        launcher.start(2)
    said = ipp_launchers.explain(caught.value)

    assert said.startswith("`qsub ")
    assert said.endswith("` failed (exit status 1):\n    qsub: Unknown queue gpu")
    assert not ipp_launchers.has_job(launcher)
    assert ipp_launchers.state(Config(), launcher) == ""


def test_a_batch_script_lies_in_the_runs_folder(
    stubs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not in the notebook's, where ipyparallel would leave it."""
    notebooks = tmp_path / "notebooks"
    notebooks.mkdir()
    monkeypatch.chdir(notebooks)
    (stubs / batch_stubs.REFUSAL).write_text("no")
    with pytest.raises(subprocess.CalledProcessError):
        pbs(tmp_path).start(2)

    assert list(notebooks.iterdir()) == []
    assert "#PBS -t 1-2" in (tmp_path / "engines.batch").read_text()


def test_a_command_that_hangs_is_given_up(
    stubs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its name and how long it was waited for."""
    monkeypatch.setattr(ipp_launchers, "COMMAND_DEADLINE_S", 0.2)
    with pytest.raises(subprocess.TimeoutExpired) as caught:
        pbs(tmp_path, submit_command=["tail", "-f"]).start(2)

    said = ipp_launchers.explain(caught.value)
    assert said == f"`tail -f {tmp_path / 'engines.batch'}` did not end in 0.2 s."


def test_other_errors_of_a_launcher_have_their_kind() -> None:
    """A template that names what there is not, for example."""
    assert ipp_launchers.explain(NameError("name 'x' is not defined")) == (
        "NameError: name 'x' is not defined"
    )


def test_the_state_of_a_job_is_the_batch_systems_own_words(stubs: Path, tmp_path: Path) -> None:
    """By the launcher's kind, or by the profile's own command."""
    launcher = pbs(tmp_path)
    launcher.job_id = "4711"
    config = Config({"Nbdist": {"state_command": ["qstat", "job={job}"]}})
    absent = Config({"Nbdist": {"state_command": ["no-such-command", "{job}"]}})

    assert ipp_launchers.state(Config(), launcher) == (
        "qstat 4711:\nJob ID  S  Queue\n4711[].head  Q  batch"
    )
    assert ipp_launchers.state(config, launcher).startswith("qstat job=4711:\n")
    assert "No such file" in ipp_launchers.state(absent, launcher)


def test_mpiexecs_last_sentence_is_found(tmp_path: Path) -> None:
    """Below what ranks have printed, on one line, whatever bytes there are."""
    log = tmp_path / "log"
    log.write_bytes(
        b"\xff some line\n"
        + b"-" * 74
        + b"\nPrimary job  terminated normally\n"
        + b"-" * 74
        + b"\n"
        b"\n"
        + b"-"
        * 74
        + b"\nmpiexec noticed that process rank 1 with PID 0\n  on node vm exited "
        b"on signal 9 (Killed).\n" + b"-" * 74 + b"\n"
    )
    launcher: Any = ipp_launchers.watched(MPIEngineSetLauncher)(output_file=str(log))
    launcher.get_output(remove=True)  # as ipyparallel does at the end

    assert ipp_launchers.last_words(launcher) == (
        "mpiexec noticed that process rank 1 with PID 0 on node vm exited on signal 9 (Killed)."
    )
    assert not log.exists()
    assert ipp_launchers.last_words(SimpleNamespace(output_file=str(log))) == ""


def test_the_kubernetes_manifest_fits_the_schema_and_has_the_key_in_its_secret_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An Indexed Job and its Secret, for GPUs and for CPUs, as API servers check them."""
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    for gpus in (1, 0):
        import kubernetes_validate  # late: two seconds (of rfc3987_syntax)

        put_kubernetes(tmp_path, gpus)
        config = profiles.load("kubernetes")
        ipp_launchers.keep_scripts(config, tmp_path)
        launcher: Any = ipp_launchers.watched(ipp_cluster.launchers(config)[1])(
            config=config, profile_dir=str(tmp_path), cluster_id="1795216635-76nq"
        )
        launcher.environment["IPP_CONNECTION_INFO"] = json.dumps({"key": KEY, "n": 'é"{}'})
        launcher.write_batch_script(3)
        text = (tmp_path / "engines.batch").read_text()
        secret, job = yaml.safe_load_all(text)
        [container] = job["spec"]["template"]["spec"]["containers"]
        for entry in (secret, job):
            for version in KUBERNETES:
                kubernetes_validate.validate(entry, version, strict=True)

        assert json.loads(secret["stringData"]["IPP_CONNECTION_INFO"])["key"] == KEY
        assert KEY not in json.dumps(job)
        assert (job["spec"]["completionMode"], job["spec"]["completions"]) == ("Indexed", 3)
        assert container["resources"]["limits"].get("nvidia.com/gpu", 0) == gpus


def put_kubernetes(ipython_dir: Path, gpus: int) -> None:
    """Copy the shipped profile and set its image, as a user does."""
    text = (profiles.shipped_profiles()["kubernetes"] / profiles.CONFIG_FILE).read_text()
    folder = ipython_dir / "profile_kubernetes"
    folder.mkdir(exist_ok=True)
    text = text.replace('IMAGE = ""', 'IMAGE = "registry/nbdist:1"').replace(
        "GPUS = 1", f"GPUS = {gpus}"
    )
    (folder / profiles.CONFIG_FILE).write_text(text)


def test_the_kubernetes_profile_refuses_without_an_image() -> None:
    """With what to do, and no process started."""
    with pytest.raises(OptionError, match=r"profiles/kubernetes/.*set IMAGE in the copy"):
        profiles.load("kubernetes")


def test_a_manifest_of_which_a_part_was_refused_can_be_deleted(
    stubs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kubectl has made the Secret, and the Job was refused: the stop deletes by their name."""
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    put_kubernetes(tmp_path, 0)
    config = profiles.load("kubernetes")
    ipp_launchers.keep_scripts(config, tmp_path)
    (stubs / batch_stubs.REFUSAL).write_text("Error from server (Forbidden): exceeded quota")
    launcher: Any = ipp_launchers.watched(BatchEngineSetLauncher)(
        config=config, profile_dir=str(tmp_path), cluster_id="17-x"
    )
    with pytest.raises(subprocess.CalledProcessError) as caught:
        launcher.start(2)

    assert "exceeded quota" in ipp_launchers.explain(caught.value)
    assert launcher.job_id == "nbdist-17-x"
    assert "ImagePullBackOff" in ipp_launchers.state(config, launcher)
    assert launcher.stop() == 'secret "nbdist-17-x" deleted\n'


def test_the_notes_name_the_file_and_what_the_profile_cannot_do() -> None:
    """Of mpiexec that all ranks end together; of any profile what it says itself."""
    with_note = Config({"Nbdist": {"note": "Untried."}})
    file = profiles.shipped_profiles()["mpi"] / profiles.CONFIG_FILE

    assert profiles.place("mpi") == f"Profile mpi: {os.path.relpath(file)}"
    assert ipp_launchers.notes(Config(), MPIEngineSetLauncher) == [ipp_launchers.ENDS_ALL, ""]
    assert ipp_launchers.notes(with_note, PBSEngineSetLauncher) == ["", "Untried."]


def test_an_exit_says_who_ended_the_ranks_or_that_only_the_connection_is_lost() -> None:
    """Mpiexec's code is not a rank's."""
    assert Exit(1, 137, starter="mpiexec", words="It was rank 0.").how == (
        'mpiexec ended all ranks, exit code 137: "It was rank 0."'
    )
    assert Exit(1, None, LOST).how.startswith("its connection is lost: ")


@pytest.fixture
def two_ranks() -> Ranks:
    """Two ranks of a launcher that starts none again; the connection of rank 1 was lost."""
    cluster = Cluster.__new__(Cluster)
    cluster.processes = SimpleNamespace(exits={1: Exit(1, None, LOST)}, engine_set=RankSet())
    cluster.channel = SimpleNamespace(engine_ids=(0,))
    cluster.run_dir = Path("/nowhere")
    reports = topology.local_reports(2, hostname="here", gpus=(), cores=2)
    return Ranks(cluster, topology.plan(reports))


def test_where_nothing_can_be_restarted_no_text_says_dist_restart(
    two_ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the refusal of a cell, nor a recovery, nor a cell that does not come back."""
    monkeypatch.setattr(Cluster, "why_gone", "")
    with pytest.raises(RankGone) as caught:
        two_ranks.check_alive([0, 1])
    [line] = recovery.notes(
        {0: recovery.RecoveryResult({"a": (0, 1)}, {}, {})}, two_ranks.restart_verb
    )
    [held] = still_aborting_message([0], {0}, is_interrupted=False, can_restart=False)
    with pytest.raises(OptionError, match="%dist_reset restarts all ranks"):
        hang_restart.check_launcher(two_ranks)
    outcome = CellOutcome("", True, None, can_restart=False)

    assert str(caught.value).startswith(f"rank 1 has ended (rank 1: {LOST}). %%rank [0] runs on")
    assert str(caught.value).endswith("%dist_reset restarts all ranks.")
    assert line.endswith("until rank 1 is back: %dist_reset")
    assert outcome._replacing([0]) == "%dist_reset restarts all ranks"
    assert "%dist_restart" not in f"{caught.value}{line}{held}"
