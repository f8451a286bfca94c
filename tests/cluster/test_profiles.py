"""Kinds of cluster: the user's own profile first, and any launcher of ipyparallel's."""

import queue
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil
import pytest
from traitlets.utils.importstring import import_item

from nbdist.cluster.kernel import ipp_cluster, profiles, start
from nbdist.cluster.kernel.launchers import rank_set
from nbdist.cluster.kernel.processes import Exit, Processes
from nbdist.cluster.kernel.start import StartOptions
from nbdist.core import topology
from nbdist.errors import DistributedError, OptionError, RankGone, StartError
from nbdist.notebook.session import Session
from nbdist.rpc.kernel.channel import Message, failure_of
from tests.support import processes
from tests.support.ranks import processes_under, session_of, temporary_folder, until

PLAIN = """
c = get_config()
c.Cluster.engine_launcher_class = "local"
c.Cluster.delay = 0
c.LocalEngineSetLauncher.delay = 0
c.LocalEngineSetLauncher.environment = {"OF_THE_PROFILE": "yes"}
c.Cluster.controller_args = [
    "--HeartMonitor.period=200",
    "--HeartMonitor.max_heartmonitor_misses=150",
    "--IPController.use_threads=True",
]
"""


@pytest.fixture
def ipython_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "ipython"
    path.mkdir()
    monkeypatch.setenv("IPYTHONDIR", str(path))
    return path


def put(ipython_dir: Path, name: str, text: str) -> None:
    folder = ipython_dir / f"profile_{name}"
    folder.mkdir(exist_ok=True)
    (folder / profiles.CONFIG_FILE).write_text(text)


def test_the_shipped_profile_is_found_without_an_own_one(ipython_dir: Path) -> None:
    """`local` is there from the start, and gives ranks itself."""
    config = profiles.load("local")

    assert profiles.user_profiles() == {}
    assert ipp_cluster.kind_of(config) == rank_set.LOCAL


def test_an_own_profile_wins_over_the_shipped_one(ipython_dir: Path) -> None:
    """A profile_local of the user's is the one that is read."""
    put(ipython_dir, "local", "c = get_config()\nc.Cluster.engine_launcher_class = 'mpi'\n")
    config = profiles.load("local")

    assert config.Cluster.engine_launcher_class == "mpi"
    assert ipp_cluster.kind_of(config) == rank_set.OTHER


def test_an_unknown_profile_names_both_kinds(ipython_dir: Path) -> None:
    """Shipped and own profiles are listed, and no folder is made for the unknown one."""
    put(ipython_dir, "mine", PLAIN)
    (ipython_dir / "profile_default").mkdir()
    with pytest.raises(OptionError) as caught:
        profiles.load("slrm")

    assert "Shipped with nbdist: kubernetes, local, mpi, pretended, slurm, ssh." in str(
        caught.value
    )
    assert f"in {ipython_dir}: mine." in str(caught.value)
    assert sorted(path.name for path in ipython_dir.iterdir()) == [
        "profile_default",
        "profile_mine",
    ]


def test_a_profile_is_read_afresh_each_time(ipython_dir: Path) -> None:
    """A profile that was corrected in its file needs no new kernel."""
    put(ipython_dir, "mine", "c = get_config()\nc.Cluster.delay = 1\n")
    first = profiles.load("mine")
    put(ipython_dir, "mine", "c = get_config()\nc.Cluster.delay = 2\n")

    assert (first.Cluster.delay, profiles.load("mine").Cluster.delay) == (1, 2)


@pytest.mark.parametrize("launcher", ["ssh", "slurm", "mpi", "pbs"])
def test_other_launchers_are_not_judged_by_this_machine(launcher: str, ipython_dir: Path) -> None:
    """Only the shipped launcher gives ranks; all others are asked what they have."""
    put(ipython_dir, "far", f"c = get_config()\nc.Cluster.engine_launcher_class = '{launcher}'\n")

    assert ipp_cluster.kind_of(profiles.load("far")) == rank_set.OTHER


def over_a_port(*args: Any, find_store: Any = start.find_store) -> Any:
    """Where the ranks meet if they see no file of the notebook's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(start, "is_this_host", lambda hosts: False)
        return find_store(*args)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    """Two ranks of ipyparallel's own local launcher, which knows of no ranks, without a file."""
    folder = tmp_path_factory.mktemp("plain")
    (folder / "ipython").mkdir()
    put(folder / "ipython", "plain", PLAIN)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IPYTHONDIR", str(folder / "ipython"))
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        patch.setenv("NBDIST_PRELOAD", "0")
        patch.setattr(start, "find_store", over_a_port)
        with (
            temporary_folder(folder / "tmp"),
            session_of(StartOptions(2, profile="plain", seed=3)) as session,
        ):
            yield session
        assert processes_under(folder) == []


def test_engines_that_report_get_ranks_and_a_group(plain: Session) -> None:
    """Ranks are assigned from reports, and collectives over them are right."""
    result = plain.run(
        "import os, sys\n"
        "total = torch.tensor([rank + 1.0])\ndist.all_reduce(total)\n"
        "print(rank, world_size, local_rank, total.item(), os.environ['RANK'])\n"
        "print(os.getcwd(), os.environ['OF_THE_PROFILE'], torch.initial_seed())"
    )

    assert [rank.text for rank in result.ranks] == [
        f"{rank} 2 {rank} 3.0 {rank}\n{Path.cwd()} yes 3\n" for rank in (0, 1)
    ]


def test_engines_of_other_launchers_hide_the_key_from_children(plain: Session) -> None:
    """ipyparallel puts its key into their environment; cells do not hand it on."""
    result = plain.run(
        "import subprocess\nprint('IPP_CONNECTION_INFO' in subprocess.getoutput('env'))"
    )

    assert [rank.text for rank in result.ranks] == ["False\n", "False\n"]


def test_every_rank_has_its_own_process_id(plain: Session) -> None:
    """Interrupts and exits go to the engine that is meant, whatever its launcher's number."""
    result = plain.run("import os\nprint(os.getpid())")
    reported = {place.rank: place.pid for place in plain.topology.ranks}
    started = {
        plain.topology.rank_of_engine(e): pid for e, pid in plain.cluster.processes.pids().items()
    }

    assert {rank.rank: int(rank.text) for rank in result.ranks} == reported == started


def test_a_signal_by_way_of_the_nanny_reaches_the_engine(plain: Session) -> None:
    """Engines on other hosts are signalled through their nanny, which others do without."""
    channel, engine = plain.cluster.channel, plain.topology.engine_of_rank(1)
    assert channel is not None
    done: queue.SimpleQueue[Any] = queue.SimpleQueue()
    code = "print('runs', flush=True)\nimport time\ntime.sleep(60)"

    def hear(message: Message) -> None:
        if message["header"]["msg_type"] == "stream":
            channel.signal(engine, signal.SIGINT)

    channel.execute(engine, code, {}, hear, done.put)
    failure = failure_of(done.get(timeout=20))

    assert failure is not None
    assert failure[0] == "KeyboardInterrupt"


def test_a_launchers_number_is_translated_to_the_engine() -> None:
    """Engines may register in another order than they were started in."""
    of_run = Processes(Mock())
    of_run._started = {0: psutil.Process(1), 1: psutil.Process()}
    exits: list[Exit] = []
    of_run.on_exit = exits.append
    of_run._note_end(1, {"exit_code": -9})
    of_run.identify({0: psutil.Process().pid, 1: 1})
    of_run._note_end(0, {"exit_code": 3})

    assert of_run.exits == {0: Exit(0, -9), 1: Exit(1, 3)}
    assert exits[-1] == Exit(1, 3)


def test_over_a_port_the_store_listens_on_one_address(plain: Session) -> None:
    """Where no file is shared, rank 0 opens a port on the one address that all reach."""
    result = plain.run(
        "total = torch.tensor([rank + 1.0])\ndist.all_reduce(total)\n"
        "store = dist.distributed_c10d._get_default_store()\n"
        "while hasattr(store, 'underlying_store'):\n    store = store.underlying_store\n"
        "print(total.item(), type(store).__name__, store.port)"
    )
    marked = processes.processes_of_run(str(plain.cluster.run_dir))
    listeners = processes.tcp_listeners(marked)
    waited = plain.sync()

    ports = {int(rank.text.split()[2]) for rank in result.ranks}
    assert [rank.text.split()[:2] for rank in result.ranks] == [["3.0", "TCPStore"]] * 2
    assert [listener.address for listener in listeners if listener.port in ports] == ["127.0.0.1"]
    assert {listener.address for listener in listeners} <= {"127.0.0.1", "::1"}
    assert len(waited) == 2


def test_an_address_that_cannot_be_used_is_followed_by_the_next() -> None:
    """Candidates that rank 0 cannot open, or others not reach, are told when none is left."""
    first = topology.EngineReport(0, "a", addresses=(("eth0", "10.0.0.1"), ("eth1", "10.0.0.2")))
    other = topology.EngineReport(1, "b", addresses=(("eth0", "10.0.0.3"),))
    plan = topology.plan((first, other))
    reached = {"10.0.0.2"}

    def call(target: int, name: str, /, *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        if name.endswith(":reachable"):
            future.set_result(tuple(reached) if target == 1 else args[0])
        elif args[0] == "10.0.0.1":
            future.set_exception(OSError("Cannot assign requested address"))
        else:
            future.set_result(4711)
        return future

    ask = partial(start.find_store, None, call, plan, {0: first, 1: other}, time.monotonic() + 5)
    address = ask()
    reached.clear()
    with pytest.raises(StartError) as caught:
        ask()

    assert address == ("", "10.0.0.2", 4711)
    assert "Cannot assign requested address" in str(caught.value)
    assert "10.0.0.2: not from rank 1" in str(caught.value)


def test_a_copied_profile_may_name_the_launcher_as_it_was() -> None:
    """Profiles that users copied from an earlier version name nbdist.client.launcher."""
    former = import_item("nbdist.client.launcher.RankEngineSetLauncher")

    assert former is import_item("nbdist.cluster.kernel.launcher.RankEngineSetLauncher")


def test_a_dead_engine_of_another_launcher_is_the_rank_that_is_named(plain: Session) -> None:
    """The rank whose process was killed is told, the other works, and a stop leaves nothing.

    Of engines on other hosts no exit is seen: that they are not registered is enough. The last
    test of this file, as it ends the ranks.
    """
    victim, last = sorted(plain.topology.ranks, key=lambda place: place.rank)
    psutil.Process(victim.pid).kill()
    assert until(lambda: victim.engine_id in plain.cluster.processes.exits)
    with pytest.raises(RankGone, match=r"rank 0 has ended \(rank 0: signal SIGKILL"):
        plain.run("print(rank)")
    alive = plain.run("print(rank)", ranks=[1])
    with pytest.raises(DistributedError, match="rank 1 raised ValueError"):
        plain.run("raise ValueError", ranks=[1])
    channel = plain.cluster.channel
    assert channel is not None
    psutil.Process(last.pid).kill()
    assert until(lambda: channel.engine_ids == ())
    plain.cluster.processes.exits.clear()
    for _ in range(2):
        with pytest.raises(RankGone, match="rank 1"):
            plain.run("print(rank)", ranks=[1])

    assert alive.ranks[0].text == "1\n"
    plain.stop()
    assert processes.processes_of_run(str(plain.cluster.run_dir)) == []
