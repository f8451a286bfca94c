"""The kernel of ranks on hosts with agents, without a notebook: a program instead of engines.

`python -m tests.support.kept_hosts start RUN_DIR LAUNCHER HOSTS N KEEP_S` starts N ranks on hosts
(`a:2,b:1`) by a launcher of this module, and keeps them; settings of the launcher may follow, as
JSON. `attach RUN_DIR` finds them again. Either says the processes of the ranks, as JSON, and then
what each line of Python that it reads is, where `launcher` is the launcher.
"""

import asyncio
import inspect
import json
import logging
import pickle
import sys
from pathlib import Path
from typing import Any

from traitlets.config import Config

from nbdist.cluster.hosts import parse_hosts
from nbdist.cluster.kernel import ipp_cluster
from nbdist.cluster.kernel.launchers.agent_set import AgentEngineSetLauncher
from nbdist.cluster.kernel.launchers.pretended import PretendedHostSetLauncher
from nbdist.cluster.kernel.launchers.slurm import SlurmRankSetLauncher
from nbdist.cluster.kernel.launchers.ssh import SSHRankSetLauncher

# Tells, by what it has written last, who it is and how often it was interrupted.
CODE = """
import os, signal, time
signal.signal(signal.SIGINT, lambda *_: print("interrupted", flush=True))
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], flush=True)
while True:
    time.sleep(300)
"""


class _Program(AgentEngineSetLauncher):
    def _argv(self, rank: int) -> list[str]:
        return ["-c", CODE]


class Pretended(_Program, PretendedHostSetLauncher):
    """Ranks on hosts in name only."""


class SSH(_Program, SSHRankSetLauncher):
    """Ranks by ssh."""


class Slurm(_Program, SlurmRankSetLauncher):
    """Ranks in a job."""


async def start(
    run_dir: Path, kind: str, hosts: str, n: int, keep_s: float, settings: dict[str, Any]
) -> AgentEngineSetLauncher:
    """The launcher of new ranks, which are kept where `keep_s` is not 0."""
    config = Config(SlurmRankSetLauncher=settings)
    config.AgentEngineSetLauncher.hosts = [(h.name, h.places) for h in parse_hosts(hosts)]
    cluster = ipp_cluster.cluster(config, run_dir, logging.getLogger("tests.kept_hosts"))
    cluster.engine_launcher_class = f"tests.support.kept_hosts.{kind}"
    await cluster.start_engines(n)
    launcher: AgentEngineSetLauncher = cluster.engine_set
    if keep_s:
        launcher.keep(keep_s)
    save(launcher)
    return launcher


def save(launcher: AgentEngineSetLauncher) -> None:
    """Leave what another kernel needs, as `Cluster.keep` does."""
    launcher.parent.update_cluster_file()
    (launcher.run_dir / "config.pickle").write_bytes(pickle.dumps(launcher.parent.config))


async def attach(run_dir: Path) -> AgentEngineSetLauncher:
    """The launcher of ranks that another kernel has left, by what is in the run's folder."""
    config = pickle.loads((run_dir / "config.pickle").read_bytes())
    log = logging.getLogger("tests.kept_hosts")
    launcher: AgentEngineSetLauncher = ipp_cluster.reopen(
        config, run_dir, log, lambda _pid: False
    ).engine_set
    await launcher.attach()
    return launcher


def pids(launcher: AgentEngineSetLauncher) -> dict[int, int]:
    """Rank -> process, as the agents that can be reached have it."""
    agents = [agent for agent in launcher.agents.values() if not agent.lost]
    return {rank: pid for agent in agents for rank, pid in agent.pids(20.0).items()}


def say(value: Any) -> None:
    """Write one line."""
    sys.stdout.write(json.dumps(value, default=repr) + "\n")
    sys.stdout.flush()


async def main() -> None:
    """Be the kernel, until it is killed or its input ends."""
    do, run_dir, *words = sys.argv[1:]
    if do == "attach":
        launcher = await attach(Path(run_dir))
    else:
        kind, hosts, n, keep_s, *settings = words
        given = json.loads(settings[0]) if settings else {}
        launcher = await start(Path(run_dir), kind, hosts, int(n), float(keep_s), given)
    say(await asyncio.to_thread(pids, launcher))
    while line := await asyncio.to_thread(sys.stdin.readline):
        value = eval(line, {"launcher": launcher})  # the test's
        say(await value if inspect.isawaitable(value) else value)


if __name__ == "__main__":
    asyncio.run(main())
