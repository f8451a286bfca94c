"""Ranks on hosts with agents: what a slow, silent or unfit host does to the others."""

import asyncio
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nbdist.cluster.hosts import Host
from nbdist.cluster.kernel.agents import RankExit
from nbdist.cluster.kernel.launchers.pretended import PretendedHostSetLauncher


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


def test_a_slow_reason_for_the_end_of_a_rank_loses_no_host(
    make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch system that answers late is asked beside the connection, and not for ever."""
    monkeypatch.setattr("nbdist.cluster.kernel.agents.SILENT_S", 1.5)
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
        for _ in range(2000):
            if ends:
                break
            await asyncio.sleep(0.01)
        lost = launcher.agents["a"].lost
        answered.set()
        await launcher.stop()
        return lost, ends

    lost, ends = asyncio.run(run())

    assert lost == ""
    assert [end["exit_code"] for end in ends] == [-signal.SIGKILL]
