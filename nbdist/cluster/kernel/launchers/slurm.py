"""Ranks on the hosts of a Slurm job: one srun per host, which carries its agent."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, fields
from typing import Any

from traitlets import Bool, Dict, Integer, Unicode
from traitlets.config import Config

from nbdist.cluster import slurm
from nbdist.cluster.hosts import Host
from nbdist.cluster.kernel.launchers import slurm_job
from nbdist.cluster.kernel.launchers.agent_set import AgentEngineSetLauncher, remote_command
from nbdist.cluster.kernel.launchers.agents import RankExit
from nbdist.cluster.kernel.launchers.rank_set import SLURM
from nbdist.cluster.kernel.launchers.slurm_job import Allocation, JobWatch
from nbdist.cluster.slurm import DEFAULTS, SlurmOptions
from nbdist.core.progress import Reporter
from nbdist.errors import StartError

# How long ranks that have lost their host wait for another one. The job stays in the queue: the
# next %dist_restart waits for it again.
SPARE_S = 60.0
# srun's words for a program that is not there.
_NO_PYTHON = re.compile(r"execve\(\): .*No such file|No such file or directory")


class SlurmRankSetLauncher(AgentEngineSetLauncher):
    """Starts ranks on the hosts of a job that runs already; `configure` has found it."""

    kind = SLURM
    # --hosts is refused here.
    spare_advice = (
        "Let nbdist ask for a job of its own at the start (--partition, --time): it gets another "
        "host in the place of a lost one"
    )

    partition = Unicode(help="The partition, where --partition is not typed.").tag(config=True)
    account = Unicode(help="The account, where --account is not typed.").tag(config=True)
    time = Unicode(help="The time limit, where --time is not typed.").tag(config=True)
    sbatch = Unicode(help="More words for sbatch, where --sbatch is not typed.").tag(config=True)
    gpus_per_node = Integer(
        None, allow_none=True, help="GPUs of a host, where --gpus-per-node is not typed."
    ).tag(config=True)

    job = Integer(help="The job's number.").tag(config=True)
    job_name = Unicode(help="The name of every job of the run.").tag(config=True)
    is_own_job = Bool(help="It was submitted for this run.").tag(config=True)
    cpus: Dict[str, int] = Dict(help="Host -> the job's CPUs there.").tag(config=True, to_dict=True)
    job_of: Dict[str, int] = Dict(help="Host -> its job, where not the first.").tag(to_dict=True)
    spare_job = Integer(help="A job that waits to take a lost host's place; 0: none.").tag(
        to_dict=True
    )

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        self._notes: list[str] = []
        self.watches: dict[int, JobWatch] = {}

    async def start(self, n: int) -> list[int]:
        """Start the ranks, and watch the job from here on."""
        self._watch()
        started: list[int] = await super().start(n)
        return started

    async def attach(self) -> None:
        """Attach to the ranks, and watch all jobs of the run from here on."""
        self._watch()
        await super().attach()

    def _watch(self) -> None:
        hosts_of: dict[int, list[str]] = {}
        for host in self.cpus:
            hosts_of.setdefault(self._job(host), []).append(host)
        for number, names in hosts_of.items():
            self.watches[number] = JobWatch(number, names, self._notes.append)

    def _job(self, host: str) -> int:
        return self.job_of.get(host, self.job)

    def command(self, host: str) -> list[str]:
        """A step of the job on one host, with all that the job has there, beside other steps."""
        return [
            "srun",
            f"--jobid={self._job(host)}",
            "--overlap",
            "--nodes=1",
            "--ntasks=1",
            f"--nodelist={host}",
            f"--cpus-per-task={self.cpus[host]}",
            "--cpu-bind=none",
            "--mem=0",
            "--mpi=none",
            "--chdir=/",
            *remote_command(self.remote_python),
        ]

    def connection_environment(self) -> dict[str, str]:
        """Without the variables of a job around this kernel."""
        return slurm_job.environment()

    def explain(self, host: str, reason: str) -> str:
        """Why Slurm has ended the job or lost the host; the reason where it has not."""
        if self._is_closed or host not in self.cpus:
            return reason
        # An srun that has ended has a cause; of a host that is silent Slurm may not know yet.
        wait_s = slurm_job.REASON_S if "connection ended" in reason else 0.0
        why = self.watches[self._job(host)].why_lost(host, wait_s)
        if not why and _NO_PYTHON.search(reason):
            return (
                f"{reason.rstrip('.')}. {self.remote_python} is not there: name the hosts' own "
                "Python in the profile, c.AgentEngineSetLauncher.remote_python"
            )
        return why or reason

    def explain_exit(self, host: str, end: RankExit) -> str:
        """Why Slurm has ended a rank; "" where it was not Slurm."""
        if self._is_closed or end.code >= 0:
            return ""
        watch = self.watches[self._job(host)]
        watch.look()
        return watch.end

    def spare_hosts(self, lost: str) -> Iterator[Host]:
        """The hosts of another job, as large as the lost host's part.

        The job is submitted when its first host is asked for, and waited for.

        Raises:
            StartError: If Slurm refuses it, or it does not start in SPARE_S.
        """
        if not self.is_own_job:
            return
        options = SlurmOptions(**{f.name: getattr(self, f.name) for f in fields(SlurmOptions)})
        ranks = sum(1 for engine in self.launchers.values() if engine.agent.host == lost)
        if not self.spare_job:
            self.spare_job = slurm_job.submit(options, ranks, self.job_name, [lost])
        number = self.spare_job
        try:
            slurm_job.wait(number, options, lambda _line: None, SPARE_S)
        except slurm_job.StillPending as error:
            raise StartError(
                f"{error}. It was submitted in the place of {lost} and stays in the queue: "
                "%dist_restart takes its hosts once it runs."
            ) from None
        except StartError:
            self.spare_job = 0
            raise
        self.spare_job = 0
        shares = slurm_job.shares(number)
        for host, places in slurm.places(shares, ranks).items():
            self.places[host], self.job_of[host] = places, number
        self.cpus = {**self.cpus, **{share.host: share.cpus for share in shares}}
        names = [share.host for share in shares]
        self.watches[number] = JobWatch(number, names, self._notes.append)
        yield from map(Host, names)

    def take_notes(self) -> list[str]:
        """Return what Slurm has done or will do, each line once."""
        notes = self._notes[:]
        del self._notes[: len(notes)]
        return notes

    def status_lines(self) -> list[str]:
        """The jobs and the time that they have left."""
        return [watch.text for watch in self.watches.values()]

    def ending(self) -> list[str] | None:
        """None for a job of the run's own: it is cancelled, also where its ranks are not kept."""
        return None if self.is_own_job else super().ending()

    def close(self) -> None:
        """Watch no more, and end all agents; the guardian cancels the jobs."""
        for watch in self.watches.values():
            watch.close()
        super().close()


def configure(
    config: Config,
    typed: SlurmOptions,
    world_size: int | None,
    name: str,
    promise: Callable[[Sequence[str]], object],
    progress: Reporter,
) -> None:
    """Find the job that ranks start in, submitting one where needed, and tell the launcher.

    Where nothing of a job is typed and this kernel runs inside one, that one is taken.

    Args:
        config: The profile's settings, changed here. They count where nothing is typed.
        typed: The user's options.
        world_size: Ranks; None for the job's GPUs, or its tasks, or `gpus_per_node`, or 2.
        name: The name of a new job.
        promise: Handed the command that cancels it, before it is submitted.
        progress: Called with what the job waits for.

    Raises:
        OptionError: If there is no Slurm here, or the job is too small.
        StartError: If Slurm refuses the job, or ends it while it waits.
    """
    section, default = config.SlurmRankSetLauncher, asdict(DEFAULTS)
    chosen = {n: v if v != default[n] else section.get(n, v) for n, v in asdict(typed).items()}
    options = SlurmOptions(**chosen)
    allocation = slurm_job.surrounding() if typed == DEFAULTS else None
    if allocation is None:
        n = world_size or options.gpus_per_node or 2
        allocation = slurm_job.allocate(options, n, name, promise, progress)
    else:
        n = world_size or slurm_job.default_ranks(allocation)
    _tell(config, allocation, slurm.places(allocation.shares, n), options, name)


def _tell(
    config: Config, allocation: Allocation, places: dict[str, int], options: SlurmOptions, name: str
) -> None:
    section = config.SlurmRankSetLauncher
    section.update(asdict(options))
    section.job, section.job_name = allocation.number, name
    section.is_own_job = allocation.is_ours
    section.cpus = {share.host: share.cpus for share in allocation.shares}
    config.AgentEngineSetLauncher.hosts = list(places.items())
