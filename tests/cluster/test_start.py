"""A start either gives ranks, or says what is wrong with the choices, and leaves nothing."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ipyparallel
import pytest
from ipyparallel.cluster.launcher import LocalProcessLauncher

from nbdist.cluster.hosts import Host
from nbdist.cluster.kernel import rank_server
from nbdist.cluster.kernel import start as kernel_start
from nbdist.cluster.kernel.launcher import RankEngineLauncher
from nbdist.cluster.kernel.start import StartOptions
from nbdist.cluster.slurm import SlurmOptions
from nbdist.core import topology
from nbdist.errors import NbdistError, OptionError, StartError
from nbdist.notebook.session import start as start_session
from nbdist.strategy.choose import StrategySpec
from tests.support import processes
from tests.support.gpus import Card, Driver, play, smi_text
from tests.support.kernel import notebook_env
from tests.support.ranks import processes_under, session_of, silent

CARDS = (Card("GPU-11111111-aaaa"), Card("GPU-22222222-bbbb"))


def test_the_environment_says_what_was_not_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    """NBDIST_RANKS stands for -n, NBDIST_GPUS for --gpus, each by itself; typed ones win."""
    monkeypatch.setenv("NBDIST_RANKS", "4")
    monkeypatch.setenv("NBDIST_GPUS", "none")
    with_environment = kernel_start._with_environment

    assert with_environment(StartOptions()) == StartOptions(4, gpus="none")
    assert with_environment(StartOptions(2)) == StartOptions(2, gpus="none")
    assert with_environment(StartOptions(gpus="0,1")) == StartOptions(4, gpus="0,1")
    monkeypatch.setenv("NBDIST_RANKS", "two")
    with pytest.raises(OptionError, match="NBDIST_RANKS is 'two', which is not a number of ranks"):
        begin()
    assert with_environment(StartOptions(2)) == StartOptions(2, gpus="none")


def begin(progress: Callable[[str], None] = lambda _: None, **options: Any) -> None:
    start_session(StartOptions(**options), silent, progress)


@pytest.fixture
def no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a GPU, whatever this one has."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.fixture
def at_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_server: None
) -> Callable[[str], None]:
    """Source that every process of a run executes before anything else."""

    def put(code: str) -> None:
        folder = tmp_path / "site"
        folder.mkdir()
        (folder / "sitecustomize.py").write_text("import os, sys\n" + textwrap.dedent(code))
        monkeypatch.setenv("PYTHONPATH", str(folder))

    return put


@pytest.fixture
def two_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with two GPUs whose NVML does not answer."""
    play(monkeypatch, tmp_path, None, smi_text(CARDS))


# What works.


def test_plain_python_gets_ranks(tmp_path: Path) -> None:
    """nbdist.start() works in a script, prints one table, and the ranks end with the script."""
    code = """
        import sys, nbdist
        session = nbdist.start(1, seed=7)
        result = session.run("import torch\\nprint(rank, world_size, torch.initial_seed())")
        assert nbdist.session() is session
        assert "torch" not in sys.modules
        print("RUN", session.cluster.run_dir)
    """
    folder = tmp_path / "tmp"
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=notebook_env({"TMPDIR": str(folder), "CUDA_VISIBLE_DEVICES": ""}),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("1 rank on 1 host")
    assert done.stdout.count("rank  host  device  backend  threads") == 1
    assert "Gloo on the CPU: no rank sees a GPU." in done.stdout
    assert "say nothing about scaling" in done.stdout
    assert "0 1 7" in done.stdout
    assert "<" not in done.stdout.split("RUN")[0]
    assert done.stderr == ""
    assert processes.processes_of_run(done.stdout.split("RUN ")[1].strip()) == []
    assert list(folder.iterdir()) == []


def test_a_torch_without_distributed_is_refused(
    no_gpus: None, own_server: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the ranks, which import it, with its version, and with what to install."""
    torch_folder = tmp_path / "torch"
    (torch_folder / "distributed").mkdir(parents=True)
    (torch_folder / "version.py").write_text("__version__ = '2.16.0.dev20261120'\n")
    (torch_folder / "__init__.py").write_text(
        "from torch.version import __version__\nfrom torch import distributed\n"
    )
    (torch_folder / "distributed/__init__.py").write_text("def is_available(): return False\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(StartError) as caught:
        begin()

    assert "torch 2.16.0.dev20261120 of " in str(caught.value)
    assert "was built without torch.distributed, which nbdist needs. Install" in str(caught.value)


def test_without_options_two_ranks_start_on_the_cpu(no_gpus: None, runs: Path) -> None:
    """Two ranks, their threads a share of the cores, and a progress line for each step."""
    steps: list[str] = []
    started = start_session(StartOptions(), silent, steps.append)
    plan = started.session.topology
    results = started.session.run("print(torch.get_num_threads(), flush=True)")
    started.session.stop()
    started.session.stop()

    assert [place.rank for place in plan.ranks] == [0, 1]
    assert {place.device for place in plan.ranks} == {"cpu"}
    assert (plan.backend, plan.is_scaling) == ("gloo", False)
    assert [result.text for result in results.ranks] == ["1\n", "1\n"]  # OMP_NUM_THREADS wins
    assert steps[0] == "starting the controller and the engines"
    assert steps[-1] == "2 of 2 ranks ready, preparing"


# What is refused before anything starts.


def test_ranks_come_though_the_controller_was_not_heard(
    no_gpus: None, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it tells while nobody has subscribed to it yet is lost."""
    monkeypatch.setattr(ipyparallel.Client, "_register_engine", lambda _client, _message: None)

    with session_of(StartOptions(2, deadline_s=20.0)) as session:
        assert session.cluster.channel is not None
        assert session.cluster.channel.engine_ids == (0, 1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"profile": "nope"}, ["no profile 'nope'", "local", "ipcluster_config.py"]),
        ({"profile": "../local"}, ["no profile '../local'"]),
        ({"backend": "mpi"}, ["no backend 'mpi'", "auto", "nccl", "gloo"]),
        ({"backend": "nccl"}, ["no rank sees a GPU", "--backend gloo"]),
        ({"gpus": "3"}, ["GPU 3 does not exist", "no GPU", "--gpus none"]),
        ({"gpus": "x"}, ["'x' does not name GPUs"]),
        ({"world_size": 0}, ["-n 0", "1 or more"]),
        ({"world_size": -2}, ["-n -2", "1 or more"]),
        ({"world_size": "2"}, ["'2' is not a valid number of ranks"]),
        ({"gpus": [0, 1]}, ['"0,1"', "not [0, 1]"]),
        ({"deadline_s": -1.0}, ["-1 s", "more than 0"]),
        ({"profile": "ssh"}, ["No host is named", "--hosts n1:4,n2:4"]),
        (
            {"profile": "pretended", "hosts": (Host("a", 1), Host("b", 1)), "world_size": 5},
            ["-n 5 cannot be started on hosts with 2 places (a:1, b:1)"],
        ),
        (
            {"slurm": SlurmOptions(partition="gpu")},
            ["'local' are not started by Slurm", "--gpus-per-node", "Add --profile slurm"],
        ),
        ({"profile": "ssh", "world_size": 0}, ["-n 0 starts no rank"]),
        ({"profile": "ssh", "gpus": "first"}, ["'first'", "GPUs"]),
        ({"profile": "mpi", "gpus": "none"}, ["--gpus does not work", "CUDA_VISIBLE_DEVICES"]),
        (
            {"profile": "slurm", "hosts": (Host("a", 3),)},
            ["those of its job", "--hosts works with the profiles ssh"],
        ),
        (
            {
                "profile": "pretended",
                "hosts": (Host("a", 3), Host("b", 1)),
                "strategy": StrategySpec("fsdp", (("shard", "hybrid"),)),
            },
            ["there are 3 ranks on a, 1 rank on b", "--shard full", "--replicas"],
        ),
    ],
)
def test_a_wrong_option_is_refused_with_the_choices(
    options: dict[str, Any], words: list[str], no_gpus: None, runs: Path
) -> None:
    """A choice that cannot be met names what there is, and starts nothing."""
    with pytest.raises(OptionError) as caught:
        begin(**options)

    assert [word for word in words if word not in str(caught.value)] == [], caught.value
    assert processes.open_run_dirs(runs) == []


# Ranks that do not come up.


_DIES = """
    if os.environ.get("RANK") == "1":
        print("no such luck", flush=True)
        os._exit(3)
"""
_NO_PORT = """
    if sys.orig_argv[2:3] and sys.orig_argv[2].endswith("/cluster/controller/hub.py"):
        print("no port for me", flush=True)
        os._exit(4)
"""
_NO_TORCH = """
    class Broken:
        def find_spec(self, name, path=None, target=None):
            if name == "torch":
                raise ImportError("libtorch_cpu.so: cannot open shared object file")
    if os.environ.get("RANK") == "1":
        sys.meta_path.insert(0, Broken())
"""


@pytest.mark.parametrize(
    ("code", "words", "most_s"),
    [
        # At once, though the others would wait for it.
        (
            _DIES,
            ["rank 1 ended before it was ready (exit code 3)", "no such luck"],
            10,
        ),
        (_NO_TORCH, ["rank 1", "ImportError: libtorch_cpu.so: cannot open shared object"], 60),
        (
            _NO_PORT,
            ["controller ended before it was ready (exit code 4)", "no port for me"],
            10,
        ),
    ],
)
def test_a_process_that_does_not_come_up_is_named_with_the_reason(
    at_start: Callable[[str], None],
    runs: Path,
    code: str,
    words: list[str],
    most_s: float,
) -> None:
    """Exit code and last words, or the error with its place."""
    at_start(code)
    began_s = time.monotonic()
    with pytest.raises(StartError) as caught:
        begin(world_size=2)

    assert [word for word in words if word not in str(caught.value)] == [], caught.value
    assert time.monotonic() - began_s < most_s


@pytest.mark.parametrize(
    ("variables", "number", "deadline_s", "words"),
    [
        ({"GLOO_SOCKET_IFNAME": "nonsense0"}, 0, 60, ["rank 1 could not join", "nonsense0"]),
        # The rank that hangs is named, not the one that waited for it.
        ({}, signal.SIGSTOP, 5, ["rank 1 did not come", "after 5 s", "--timeout"]),
    ],
)
def test_a_rank_that_does_not_join_is_named(
    monkeypatch: pytest.MonkeyPatch,
    runs: Path,
    variables: dict[str, str],
    number: int,
    deadline_s: float,
    words: list[str],
) -> None:
    """What failed on its way into the group, or that it did not come in time."""
    fork = rank_server.RankServer.fork

    def altered(self: Any, argv: list[str], env: dict[str, str], *args: str) -> Any:
        is_meant = env.get("RANK") == "1"
        process = fork(self, argv, {**env, **variables} if is_meant else env, *args)
        if is_meant:
            process.send_signal(number)
        return process

    assert asyncio.run(rank_server.obtain(dict(os.environ), rank_server.text_path()))
    monkeypatch.setattr(rank_server.RankServer, "fork", altered)
    with pytest.raises(StartError) as caught:
        begin(world_size=2, deadline_s=deadline_s)

    assert [word for word in words if word not in str(caught.value)] == [], caught.value


def test_a_profile_with_wrong_settings_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runs: Path
) -> None:
    """A launcher that does not exist is told before a run folder or a process is made."""
    folder = tmp_path / "ipython" / "profile_broken"
    folder.mkdir(parents=True)
    monkeypatch.setenv("IPYTHONDIR", str(folder.parent))
    config = folder / "ipcluster_config.py"
    config.write_text("c = get_config()\nc.Cluster.engine_launcher_class = 'nonsense'\n")
    with pytest.raises(OptionError, match="nonsense"):
        begin(profile="broken")
    config.write_text("1 / 0\n")
    with pytest.raises(OptionError, match=r"'broken' .* cannot be read: ZeroDivisionError"):
        begin(profile="broken")

    assert processes.open_run_dirs(runs) == []


# Interrupts.


@pytest.mark.parametrize("step", ["starting the controller", "waiting for the", "preparing"])
def test_an_interrupted_start_leaves_nothing(step: str, runs: Path) -> None:
    """An interrupt at any step of a start ends what has been started so far."""

    def press(text: str) -> None:
        if step in text:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        begin(press, world_size=2)

    assert processes_under(runs) == []
    assert not runs.exists()


def test_an_interrupt_between_two_engines_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, runs: Path
) -> None:
    """Engines that the launcher starts after the interrupt has come are ended too."""
    spawn = LocalProcessLauncher.start

    def slow(self: RankEngineLauncher) -> Any:
        result = spawn(self)
        if self.identifier == "0":
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.5)  # as on a busy machine: the main thread goes on meanwhile
        return result

    monkeypatch.setattr(RankEngineLauncher, "start", slow)
    with pytest.raises(KeyboardInterrupt):
        begin(world_size=3)

    assert processes_under(runs) == []
    assert not runs.exists()


# Versions, systems, memory.


def test_an_old_torch_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runs: Path
) -> None:
    """A torch that is too old is named with the version that is needed and how to get it."""
    info, package = tmp_path / "torch-1.0.dist-info", tmp_path / "torch"
    info.mkdir()
    package.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 1.0\n")
    (package / "version.py").write_text("__version__ = '1.0'\n")
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(StartError) as caught:
        begin(world_size=1)

    assert "torch 1.0 is too old" in str(caught.value)
    assert f"{sys.executable} -m pip install 'torch>=2.11'" in str(caught.value)
    assert processes.open_run_dirs(runs) == []


def test_a_full_shared_memory_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, runs: Path
) -> None:
    """The machine's own /dev/shm is what is checked."""
    usage = namedtuple("usage", "total used free")  # noqa: PYI024  # shutil's own kind
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage(2**26, 2**26, 0))
    with pytest.raises(StartError, match=r"/dev/shm has 0 MiB free of 64; 2 ranks need 8 MiB"):
        begin(world_size=2)

    assert processes.open_run_dirs(runs) == []


@pytest.mark.parametrize(("n", "is_told"), [(4, False), (5, True)])
def test_ranks_that_share_a_core_are_told(
    n: int, is_told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Among what is said of the machine at the start."""
    monkeypatch.setattr(kernel_start, "usable_cores", lambda: 1)
    reports = topology.local_reports(n, hostname="here", gpus=(), cores=1)
    notes = kernel_start._local_notes(topology.plan(reports, "auto"), StartOptions(world_size=n))

    assert any(f"{n} ranks share 1 core" in note for note in notes) == is_told


def test_a_base_folder_of_somebody_else_is_refused(runs: Path) -> None:
    """Keys are not put into a folder that others may enter."""
    runs.rmdir()
    runs.mkdir(mode=0o755)
    runs.chmod(0o755)
    with pytest.raises(StartError, match="only you can enter"):
        begin(world_size=1)
    runs.rmdir()
    runs.write_text("a file in the way")
    with pytest.raises(StartError, match="only you can enter"):
        begin(world_size=1)


# GPUs that the driver tells of.


def test_a_gpu_that_does_not_exist_is_refused_with_those_that_do(
    two_gpus: None, runs: Path
) -> None:
    """The ids that can be typed are listed with their names."""
    with pytest.raises(OptionError) as caught:
        begin(gpus="7")

    assert "GPU 7 does not exist" in str(caught.value)
    assert "0 (NVIDIA H100 80GB HBM3), 1 (NVIDIA H100 80GB HBM3)" in str(caught.value)


def test_more_ranks_than_gpus_cannot_use_nccl(two_gpus: None, runs: Path) -> None:
    """The number of ranks that NCCL could take is named."""
    with pytest.raises(OptionError, match=r"4 ranks share 2 GPUs.*-n 2"):
        begin(backend="nccl", world_size=4)


def test_ranks_fall_back_to_the_cpu_where_torch_has_no_cuda(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runs: Path
) -> None:
    """One rank for each slice that is there, which it alone sees; they are on the CPU, and why."""
    play(monkeypatch, tmp_path, Driver(Card(slices=2)), None)
    torch = pytest.importorskip("torch")
    if torch.version.cuda is not None:
        pytest.skip("this torch has CUDA")
    with session_of(StartOptions()) as session:
        plan = session.topology
        variables = "os.environ['CUDA_DEVICE_ORDER'], os.environ['CUDA_VISIBLE_DEVICES']"
        results = session.run(f"import os; print({variables})").ranks

    assert [result.text.split() for result in results] == [
        ["PCI_BUS_ID", "MIG-8c2a1f-0"],
        ["PCI_BUS_ID", "MIG-8c2a1f-1"],
    ]
    assert [place.device for place in plan.ranks] == ["cpu", "cpu"]
    assert plan.backend == "gloo"
    assert plan.why == f"Gloo on the CPU: PyTorch {torch.__version__} cannot use CUDA."


def test_nccl_without_cuda_in_torch_is_refused_by_the_ranks(two_gpus: None, runs: Path) -> None:
    """What only the ranks can find out reaches the notebook as one sentence."""
    torch = pytest.importorskip("torch")
    if torch.version.cuda is not None:
        pytest.skip("this torch has CUDA")
    with pytest.raises(NbdistError) as caught:
        begin(backend="nccl", world_size=1)

    assert "NCCL needs a GPU for each rank" in str(caught.value)
    assert "cannot use CUDA" in str(caught.value)
    assert "Traceback" not in str(caught.value)
