"""Ranks on hosts with agents: what a slow, silent or unfit host does to the others."""

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import psutil
import pytest
from traitlets.config import Config

from nbdist.cluster.agent.agent import MARK, SOCKET
from nbdist.cluster.hosts import Host, HostCheck
from nbdist.cluster.kernel import start
from nbdist.cluster.kernel.cluster import Cluster, run_in_loop
from nbdist.cluster.kernel.launchers import agent_set
from nbdist.cluster.kernel.launchers.agents import HostAgent, RankExit
from nbdist.cluster.kernel.launchers.pretended import PretendedHostSetLauncher
from nbdist.cluster.kernel.launchers.slurm import SlurmRankSetLauncher
from nbdist.cluster.kernel.launchers.ssh import SSHRankSetLauncher
from nbdist.cluster.kernel.processes import Processes
from nbdist.cluster.kernel.start import StartOptions
from nbdist.core import host
from nbdist.errors import Interrupted, NbdistError, StartError
from tests.support import processes
from tests.support.ranks import until


class Launcher(PretendedHostSetLauncher):
    """Starts a program of the test's instead of an engine."""

    code = "import time; time.sleep(300)"

    @property
    def connection_files(self) -> dict[str, str]:
        return {"engine": str(self.run_dir / "engine.json")}

    def _argv(self, rank: int) -> list[str]:
        return ["-c", self.code]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Makes a launcher whose run and whose hosts' folders are the test's."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    (tmp_path / "run-x" / "profile").mkdir(parents=True)
    (tmp_path / "run-x" / "engine.json").write_text("{}")

    def make(launcher: type[Launcher], *hosts: Host, **settings: Any) -> Launcher:
        return launcher(
            profile_dir=str(tmp_path / "run-x" / "profile"),
            hosts=[(host.name, host.places) for host in hosts],
            **settings,
        )

    return make


def one_rank(make: Callable[..., Any]) -> tuple[Launcher, Processes]:
    """A launcher whose only rank runs, and the processes of its run."""
    launcher = make(Launcher, Host("a", 1))

    async def begin() -> None:
        await launcher.start(1)

    run_in_loop(begin(), 20)
    guard = Mock(sessions={})
    guard.watch = lambda pid: guard.sessions.update({pid: host.started(pid)})
    started = Processes(guard)
    started.watch_engine(0, launcher.launchers["0"])
    return launcher, started


def test_a_slow_reason_for_the_end_of_a_rank_loses_no_host(
    make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch system that answers late is asked beside the connection, and not for ever."""
    monkeypatch.setattr("nbdist.cluster.kernel.launchers.agents.SILENT_S", 1.5)
    answered = threading.Event()

    class Slow(Launcher):
        def explain_exit(self, host: str, end: RankExit) -> str:
            answered.wait(30)
            return "Slurm ended it"

    async def run() -> tuple[str, list[dict[str, Any]]]:
        launcher = make(Slow, Host("a", 2))
        await launcher.start(2)
        ends: list[dict[str, Any]] = []
        launcher.launchers["0"].on_stop(ends.append)
        launcher.launchers["0"].signal(signal.SIGKILL)
        assert await asyncio.to_thread(until, lambda: bool(ends))
        lost = launcher.agents["a"].lost
        answered.set()
        await launcher.stop()
        return lost, ends

    lost, ends = asyncio.run(run())

    assert lost == ""
    assert [end["exit_code"] for end in ends] == [-signal.SIGKILL]


def test_an_interrupted_connection_is_not_waited_for(make: Callable[..., Any]) -> None:
    """A start that is broken off ends the connections that are being made, ssh's timeout or not."""

    class Unreachable(Launcher):
        def command(self, host: str) -> list[str]:
            return ["sleep", "300"]

    async def run() -> list[HostAgent]:
        launcher = make(Unreachable, Host("a", 1), Host("b", 1), connect_s=5.0)
        starting = asyncio.create_task(launcher.start(2))
        assert await asyncio.to_thread(until, lambda: len(launcher.agents) == 2)
        agents = list(launcher.agents.values())
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        return agents

    agents = asyncio.run(run())
    assert until(lambda: all(agent.lost for agent in agents))
    assert [agent.lost for agent in agents] == ["the connection ended (signal SIGKILL)."] * 2


def test_a_host_that_answers_no_more_is_named(
    make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that says what it is, and then nothing: an error that names it, and nothing is left."""
    monkeypatch.setattr(agent_set, "ANSWER_S", 0.3)
    hello = json.dumps({
        "event": "hello", "hostname": "a", "pid": 1, "python": "3.11.2", "executable": "python3",
        "versions": {}, "gpus": 0, "cores": 1, "clock_s": 0.0, "temporary": "/tmp",
        "free_bytes": 1,
    })  # fmt: skip

    class Silent(Launcher):
        def command(self, host: str) -> list[str]:
            code = f"import sys; print({MARK + hello!r}, flush=True); sys.stdin.read()"
            return [sys.executable, "-c", code]

    async def run() -> dict[str, HostAgent]:
        launcher = make(Silent, Host("a", 1))
        with pytest.raises(StartError, match="a: its agent did not answer within"):
            await launcher.start(1)
        return launcher.agents

    assert asyncio.run(run()) == {}


def test_an_unfit_host_takes_no_rank_of_a_lost_one(
    make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other versions than the group's are refused, at every try, and the next host is asked."""
    monkeypatch.setattr(agent_set, "RETRY_S", 0.0)

    async def run() -> tuple[list[str], str]:
        launcher = make(Launcher, Host("a", 1), Host("b", 1), Host("c", 1))
        reach, refusals = launcher._reach, []

        def reach_unfit(host: str, loop: asyncio.AbstractEventLoop) -> HostCheck:
            check = reach(host, loop)
            if host not in unfit:
                return check
            assert check.facts is not None
            versions = {**check.facts.versions, "torch": "2.99"}
            return replace(check, facts=replace(check.facts, versions=versions))

        await launcher.start(1)
        launcher._reach, unfit = reach_unfit, {"a", "b", "c"}
        former = launcher.agents["a"]
        former.stop()
        assert await asyncio.to_thread(until, lambda: bool(former.lost))
        launcher.launchers["0"].finish(None, "", "cut off")
        for _ in range(2):
            with pytest.raises(StartError) as refused:
                await launcher.start_one(0, {})
            refusals.append(str(refused.value))
        unfit.remove("c")
        again = await launcher.start_one(0, {})
        await launcher.stop()
        return refusals, again.agent.host

    refusals, host = asyncio.run(run())

    assert all("different versions of torch: 2." in text for text in refusals), refusals
    assert host == "c"


def test_a_restart_that_looks_for_a_host_can_be_broken_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An interrupt is seen while hosts are tried; the deadline is told in words."""
    started = Cluster.__new__(Cluster)
    monkeypatch.setattr(started, "_unregister", lambda *_: None)
    monkeypatch.setattr(started, "_start_again", lambda *_: asyncio.sleep(60))
    ended: list[object] = []
    started.processes = SimpleNamespace(end_engines=ended.append)
    presses = iter([None, Interrupted("pressed")])

    def check() -> None:
        if pressed := next(presses, None):
            raise pressed

    with pytest.raises(Interrupted, match="pressed"):
        started.restart_engines([1], {}, 20.0, check=check)
    with pytest.raises(StartError, match=r"no host took rank 1 within 0 s \(--timeout\)"):
        started.restart_engines([1], {}, 0.1)

    assert ended == [[1], [1]]


def test_hosts_without_a_rank_are_left_clean(make: Callable[..., Any], tmp_path: Path) -> None:
    """Spare hosts were looked at, and have nothing of the run afterwards."""

    async def run() -> list[str]:
        launcher = make(Launcher, Host("a", 1), Host("b", 1))
        await launcher.start(1)
        await launcher.stop()
        return list(launcher.agents)

    assert asyncio.run(run()) == ["a"]
    assert until(lambda: not [*tmp_path.glob("nbdist-*/*")])


def test_hosts_without_places_have_one_for_each_gpu_that_is_chosen(
    make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of four GPUs two are typed as `--gpus 1-2`, which CUDA would read as 1 alone."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    config = Config()
    start._configure_agents(config, StartOptions(profile="ssh", gpus="1-2"))
    chosen = config.AgentEngineSetLauncher.common_environment

    async def run() -> int:
        launcher = make(Launcher, Host("a"), common_environment=chosen)
        await launcher.start(0)
        await launcher.stop()
        return launcher.world_size

    assert chosen == {"CUDA_VISIBLE_DEVICES": "1,2"}
    assert asyncio.run(run()) == 2


def test_a_rank_of_a_host_that_was_just_cut_off_counts_as_ended(
    make: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restart before the silence is noticed waits for that, and does not fail."""
    monkeypatch.setattr("nbdist.cluster.kernel.launchers.agents.SILENT_S", 1.5)
    monkeypatch.setattr("nbdist.cluster.kernel.processes.SILENT_S", 1.5)
    monkeypatch.setattr("nbdist.cluster.kernel.processes.END_SESSION_S", 1.5)
    launcher, started = one_rank(make)
    stopped = psutil.Process(launcher.agents["a"].pid)
    stopped.suspend()
    try:
        started.end_engines([0])
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):  # killed with the lost connection
            stopped.kill()
        launcher.close()

    assert "nothing was heard from it" in started.exits[0].how


def test_what_carries_a_connection_is_not_ended_with_an_old_controller(
    make: Callable[..., Any], tmp_path: Path
) -> None:
    """Before a new controller starts, what is left of the run here ends, and no host is lost."""
    launcher, started = one_rank(make)
    with subprocess.Popen(["sleep", "300"], start_new_session=True) as left:
        started.guard(left.pid)
        started.kill_others()

        assert left.wait(20) == -signal.SIGKILL
    assert processes.is_alive(psutil.Process(launcher.agents["a"].pid))
    launcher.close()


def test_ranks_are_kept_on_all_hosts_or_on_none(make: Callable[..., Any], tmp_path: Path) -> None:
    """One host's file system has no sockets: that is told, and the other's ranks end as ever."""

    async def run() -> tuple[str, list[int]]:
        launcher = make(Launcher, Host("a", 1), Host("b", 1))
        await launcher.start(2)
        pids = [agent.pids(10.0) for agent in launcher.agents.values()]
        await asyncio.to_thread(Path(launcher.agents["b"].folder, SOCKET).touch)
        with pytest.raises(NbdistError) as refused:
            await asyncio.to_thread(launcher.keep, 300.0)
        launcher.leave()
        return str(refused.value), [pid for ranks in pids for pid in ranks.values()]

    why, pids = asyncio.run(run())

    assert why.startswith("b cannot keep its ranks: b: OSError: ")
    assert processes.wait_gone(pids) == []
    assert until(lambda: not [*tmp_path.glob("nbdist-*/*")])


@pytest.mark.parametrize(
    ("reason", "is_missing"),
    [
        ("the connection ended (exit code 127). sh: 1: /x/python: not found", True),
        ("the connection ended (exit code 1). /x/python: Command not found.", True),
        ("[Errno 2] No such file or directory: '/x/python'", True),
        ("the connection ended (exit code 255). bash: module: command not found\nclosed", False),
    ],
)
def test_what_a_login_script_lacks_is_not_python(
    reason: str, tmp_path: Path, *, is_missing: bool
) -> None:
    """A host that is lost after hours is not said to have no Python."""
    launcher = SSHRankSetLauncher(profile_dir=str(tmp_path / "profile"))

    assert ("remote_python" in launcher.explain("n1", reason)) is is_missing


def test_no_option_is_named_that_the_profile_refuses() -> None:
    """A Slurm job has the hosts that it has; --hosts is refused with it."""
    assert "--hosts" in Launcher.spare_advice
    assert "--hosts" not in SlurmRankSetLauncher.spare_advice
