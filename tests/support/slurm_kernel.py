"""A notebook's kernel in what concerns Slurm, without ranks: asks for jobs, holds and watches one.

`python -m tests.support.slurm_kernel N OPTIONS...`, each as JSON of SlurmOptions: every job but the
last is to be refused. It writes what it is told as JSON lines, answers the names of hosts that it
reads with why they are lost, and cancels its job at the end of its input.
"""

import json
import sys
from typing import Any

from traitlets.config import Config

from nbdist.cluster.kernel import run_dir
from nbdist.cluster.kernel.guard import Guard
from nbdist.cluster.kernel.launchers import slurm
from nbdist.cluster.kernel.launchers.slurm_job import JobWatch
from nbdist.cluster.slurm import SlurmOptions
from nbdist.errors import NbdistError


def tell(kind: str, value: Any) -> None:
    """Write one line."""
    sys.stdout.write(json.dumps([kind, value]) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Be the kernel."""
    folder = run_dir.create()
    guard = Guard(folder)
    world_size, *options = map(json.loads, sys.argv[1:])
    try:
        for typed in options:
            config = Config()
            try:
                slurm.configure(
                    config,
                    SlurmOptions(**typed),
                    world_size,
                    f"nbdist-{folder.name}",
                    guard.promise,
                    lambda line: tell("progress", line),
                )
            except NbdistError as error:
                tell(type(error).__name__, str(error))
            else:
                hold(config)
    except KeyboardInterrupt:
        tell("interrupted", "")
    finally:
        guard.close()
    tell("closed", folder.exists())


def hold(config: Config) -> None:
    """Watch the job until the end of the input."""
    section, hosts = config.SlurmRankSetLauncher, dict(config.AgentEngineSetLauncher.hosts)
    tell("job", [section.job, hosts, section.is_own_job])
    watch = JobWatch(section.job, [*hosts], lambda line: tell("told", line))
    for line in sys.stdin:
        tell("lost", watch.why_lost(line.strip()))
        tell("status", watch.text)
    watch.close()


if __name__ == "__main__":
    main()
