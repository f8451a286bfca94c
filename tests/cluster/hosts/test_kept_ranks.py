"""Ranks on several hosts that outlive their kernel, and the kernel that finds them again."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from nbdist.cluster.kernel.cluster import run_in_loop
from nbdist.cluster.kernel.launchers import agent_set
from tests.support import kept_hosts, processes
from tests.support.ranks import until

ROOT = Path(__file__).resolve().parents[3]
Begin = Callable[..., dict[int, int]]


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a run; the hosts' temporary folder is beside it."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    (tmp_path / "run-x" / "profile" / "security").mkdir(parents=True)
    files = ("ipcontroller-engine.json", "ipcontroller--engine.json")
    for name in files:
        (tmp_path / "run-x" / "profile" / "security" / name).write_text("{}")
    return tmp_path / "run-x"


@pytest.fixture
def begin(run_dir: Path) -> Iterator[Begin]:
    """A kernel starts ranks on host-a and host-b, says their processes, and is killed."""
    kernels = []

    def begin(
        keep_s: float, meanwhile: Callable[[dict[int, int]], object] = dict
    ) -> dict[int, int]:
        words = [run_dir, "Pretended", "host-a:2,host-b:2", "3", keep_s]
        kernels.append(
            subprocess.Popen(
                [sys.executable, "-m", "tests.support.kept_hosts", *map(str, words)],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        )
        assert kernels[-1].stdout is not None
        pids = {int(rank): pid for rank, pid in json.loads(kernels[-1].stdout.readline()).items()}
        meanwhile(pids)
        kernels[-1].kill()
        kernels[-1].wait(20)
        return pids

    yield begin
    for kernel in kernels:
        for pipe in (kernel.stdin, kernel.stdout):
            assert pipe is not None
            pipe.close()


def test_ranks_of_a_killed_kernel_are_found_again(begin: Begin, run_dir: Path) -> None:
    """The same processes, the end of one that died meanwhile; all that a kernel does works."""
    pids = begin(300.0)
    os.kill(pids[1], 15)

    async def run() -> None:
        launcher = await kept_hosts.found(run_dir)
        first, second, third = (launcher.launchers[str(rank)] for rank in range(3))
        assert [first.pid, second.pid, third.pid] == [pids[n] for n in range(3)]
        assert [first.state, third.state] == ["running"] * 2
        assert await asyncio.to_thread(until, lambda: second.state == "after")
        assert second.stop_data["exit_code"] == -15
        assert [check.name for check in launcher.checks] == ["host-a", "host-b"]

        first.signal(2)
        said = "rank 0 of 3\ninterrupted\n"
        assert await asyncio.to_thread(until, lambda: first.get_output() == said)
        again = await launcher.start_one(1, {})
        assert await asyncio.to_thread(until, lambda: again.get_output() == "rank 1 of 3\n")
        third.end()
        assert await asyncio.to_thread(until, lambda: third.state == "after")
        await launcher.stop()

    run_in_loop(run(), 60)
    assert processes.wait_gone(pids.values()) == []
    assert [path.name for path in run_dir.parent.iterdir()] == [run_dir.name]


@pytest.mark.parametrize("keep_s", [0.0, 0.3])
def test_ranks_that_are_not_kept_end(keep_s: float, begin: Begin, run_dir: Path) -> None:
    """Without a word of keeping, or when the time is over, and that is told as the reason."""
    pids = begin(keep_s)
    assert processes.wait_gone(pids.values()) == []
    assert until(lambda: [path.name for path in run_dir.parent.iterdir()] == [run_dir.name])

    async def run() -> list[dict[str, Any]]:
        launcher = await kept_hosts.found(run_dir)
        ends = [rank.stop_data for rank in launcher.launchers.values()]
        launcher.detach()
        return ends

    ends = run_in_loop(run(), 60)
    assert [end["exit_code"] for end in ends] == [None] * 3
    assert ends[2]["unreachable"].startswith("host-b cannot be reached: its agent has ended")


def test_a_lost_host_of_kept_ranks_leaves_none(
    begin: Begin, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One agent was killed meanwhile: its rank is unreachable, comes back, and all are kept again.

    The kernel that has found them lets go, and a third one ends them.
    """
    monkeypatch.setattr(agent_set, "RETRY_S", 0.0)
    pids = begin(300.0, lambda pids: psutil.Process(pids[2]).parent().kill())  # type: ignore[union-attr]

    async def second() -> int:
        launcher = await kept_hosts.found(run_dir)
        lost = launcher.launchers["2"]
        assert "host-b cannot be reached" in lost.stop_data["unreachable"]
        again = await launcher.start_one(2, {})
        assert again.agent.host == "host-b"
        assert await asyncio.to_thread(until, lambda: again.pid > 0)
        launcher.detach()
        return int(again.pid)

    async def third() -> dict[str, int]:
        launcher = await kept_hosts.found(run_dir)
        found = {rank: engine.pid for rank, engine in launcher.launchers.items()}
        await launcher.stop()
        return found

    newest = run_in_loop(second(), 60)
    assert run_in_loop(third(), 60) == {"0": pids[0], "1": pids[1], "2": newest}
    assert processes.wait_gone([*pids.values(), newest]) == []
    assert [*run_dir.parent.glob("nbdist-*")] == []
