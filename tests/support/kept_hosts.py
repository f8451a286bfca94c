"""The kernel of ranks on hosts with agents, without a notebook: a program instead of engines.

`python -m tests.support.kept_hosts RUN_DIR LAUNCHER HOSTS N KEEP_S` starts N ranks on hosts
(`a:2,b:1`) of a launcher of this module, keeps them, says so, and waits for the end of its input.
Settings of the launcher may follow, as JSON. `found` is what another kernel does.
"""

import asyncio
import json
import logging
import sys
from pathlib import Path
from typing import Any

import ipyparallel
from traitlets.config import Config

from nbdist.cluster.hosts import parse_hosts
from nbdist.cluster.kernel import ipp_cluster
from nbdist.cluster.kernel.launchers.agent_set import AgentEngineSetLauncher
from nbdist.cluster.kernel.launchers.pretended import PretendedHostSetLauncher
from nbdist.cluster.kernel.launchers.slurm import SlurmRankSetLauncher
from nbdist.cluster.kernel.launchers.ssh import SSHRankSetLauncher

# Counts how often it is interrupted, where its agent tells of it: in what it has written last.
CODE = """
import os, signal, time
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], flush=True)
signal.signal(signal.SIGINT, lambda *_: print("interrupted", flush=True))
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


def cluster(run_dir: Path, config: Config) -> Any:
    """Ipyparallel's object for a run in this folder, unstarted."""
    return ipp_cluster.cluster(config, run_dir, logging.getLogger("tests.kept_hosts"))


def left(run_dir: Path) -> Any:
    """The launcher of a run that another kernel has left, by what is in its folder."""
    [file] = run_dir.glob("profile/security/cluster-*.json")
    return ipyparallel.Cluster.from_file(str(file), load_profile=False).engine_set


async def found(run_dir: Path) -> Any:
    """The same, attached."""
    launcher = left(run_dir)
    await launcher.attach()
    return launcher


async def main() -> None:
    """Be the kernel."""
    run_dir, kind, hosts, n, keep_s, *settings = sys.argv[1:]
    config = Config(AgentEngineSetLauncher=json.loads(settings[0]) if settings else {})
    config.AgentEngineSetLauncher.hosts = [(h.name, h.places) for h in parse_hosts(hosts)]
    config.SlurmRankSetLauncher = config.AgentEngineSetLauncher
    started = cluster(Path(run_dir), config)
    started.engine_launcher_class = f"tests.support.kept_hosts.{kind}"
    await started.start_engines(int(n))
    launcher = started.engine_set
    if float(keep_s):
        launcher.keep(float(keep_s))
    pids = {}
    for agent in launcher.agents.values():
        pids.update(await asyncio.to_thread(agent.pids, 20.0))
    sys.stdout.write(json.dumps(pids) + "\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main())
