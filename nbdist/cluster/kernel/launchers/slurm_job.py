"""A run's Slurm job: asked for, waited for, watched while it runs, and cancelled."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nbdist.cluster import slurm
from nbdist.cluster.slurm import HostShare, Job, Partition, SlurmOptions
from nbdist.core.progress import Reporter
from nbdist.errors import OptionError, StartError
from nbdist.rpc.kernel import sigint

ASK_DEADLINE_S = 30.0
# A pending job is looked at this often, at first more; the queue, for its place, more seldom.
PENDING_S = 2.0
FIRST_S = 0.2
QUEUE_S = 20.0
# Slurm's controller may be started again meanwhile.
SILENCE_S = 300.0
RUNNING_S = 20.0
# Slurm reports why a job ends a moment after its processes have ended.
REASON_S = 5.0
REASON_PAUSE_S = 0.2
WARN_S = 300.0
# Slurm's variables that say where Slurm is; its others belong to a job or ask for one.
WHERE_SLURM_IS = frozenset({"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS", "SLURM_JWT"})


@dataclass(frozen=True, slots=True)
class SlurmAnswer:
    """The result of one of Slurm's programs."""

    code: int
    text: str
    errors: str


def environment() -> dict[str, str]:
    """Return the kernel's environment without a surrounding job's, which srun would obey."""
    prefixes = ("SLURM_", "SRUN_", "SQUEUE_", "SINFO_", "SCONTROL_", "SCANCEL_")
    return {
        name: value
        for name, value in os.environ.items()
        if name in WHERE_SLURM_IS or not name.startswith(prefixes)
    } | {"LC_ALL": "C"}


def ask(*words: str, deadline_s: float = ASK_DEADLINE_S) -> SlurmAnswer:
    """Run one of Slurm's programs.

    Raises:
        OptionError: If this machine has none.
        StartError: If it has not ended before the deadline.
    """
    try:
        done = subprocess.run(  # noqa: S603  # Slurm's, with words of our own
            words,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=deadline_s,
            check=False,
            env=environment(),
            start_new_session=True,  # an interrupt in a terminal is not for it
        )
    except FileNotFoundError as error:
        raise OptionError(
            f"No Slurm here: {words[0]} is not on PATH. Start Jupyter on a machine of the cluster, "
            "such as its login node, or choose another --profile."
        ) from error
    except subprocess.TimeoutExpired as error:
        raise StartError(f"Slurm did not answer in {deadline_s:.0f} s ({words[0]}).") from error
    return SlurmAnswer(done.returncode, done.stdout, done.stderr)


def cancelling(name: str) -> list[str]:
    """The command that cancels every job of a run, also one that was submitted just now."""
    program = shutil.which("scancel") or "scancel"
    return [program, "--quiet", f"--name={name}", f"--user={os.getuid()}"]


def look(number: int) -> Job | None:
    """The job as it is now, an ended one too; None where Slurm does not know it any more.

    Raises:
        StartError: If Slurm does not answer.
    """
    answer = ask(
        "squeue",
        "--noheader",
        "--states=all",
        f"--jobs={number}",
        f"--format={slurm.SQUEUE_FORMAT}",
    )
    if answer.code and "Invalid job id" not in answer.errors:
        raise StartError(f"Slurm does not answer: {answer.errors.strip()}")
    return next((job for job in slurm.jobs(answer.text) if job.number == number), None)


def _pending(partition: str) -> list[Job]:
    answer = ask(
        "squeue",
        "--noheader",
        "--states=PENDING",
        f"--partition={partition}",
        f"--format={slurm.SQUEUE_FORMAT}",
    )
    return slurm.jobs(answer.text)


def _partitions() -> list[Partition]:
    return slurm.partitions(
        ask("sinfo", "--exact", "--noheader", f"--format={slurm.SINFO_FORMAT}").text
    )


def submit(options: SlurmOptions, world_size: int, name: str, without: Sequence[str] = ()) -> int:
    """Ask Slurm for a job that holds hosts for so many ranks; its number.

    Raises:
        StartError: If Slurm refuses it, with its words and what there is to choose.
        OptionError: If there is no Slurm here, or --sbatch cannot be read.
    """
    # Broken off in between, the job may be there or not.
    with sigint.deferred_sigint() as pressed:
        answer = ask(*slurm.submission(options, world_size, name, without=without))
    pressed.check()
    if answer.code:
        raise StartError(slurm.refusal(answer.errors, options, _partitions()))
    return slurm.job_number(answer.text)


class StillPending(StartError):
    """A job did not start in time, and waits on; the message says for what."""


def wait(number: int, options: SlurmOptions, progress: Reporter, limit_s: float = math.inf) -> Job:
    """Return the job once it has its hosts; while it is queued, `progress` is called.

    Raises:
        StartError: If it ends, or can never start, with Slurm's words.
        StillPending: After `limit_s`.
    """
    queue: list[Job] = []
    pause_s, queue_s, end_s = FIRST_S, -math.inf, time.monotonic() + limit_s
    while (job := _look_patiently(number, progress)).state != "RUNNING":
        if job.is_over:
            raise StartError(f"{reason(number, job).end}. It had not started.")
        if job.state == "PENDING" and slurm.NEVER_STARTS.match(job.reason):
            raise StartError(slurm.refusal(job.reason, options, _partitions()))
        if time.monotonic() - queue_s >= QUEUE_S:
            queue, queue_s = _pending(job.partition), time.monotonic()
        if time.monotonic() > end_s:
            raise StillPending(slurm.waiting(job, queue))
        progress(slurm.waiting(job, queue))
        time.sleep(pause_s)
        pause_s = min(PENDING_S, pause_s * 2)
    return job


def _look_patiently(number: int, progress: Reporter) -> Job:
    """The job, also where Slurm's controller does not answer for a while."""
    end_s = time.monotonic() + SILENCE_S
    while True:
        try:
            job = look(number)
        except StartError as error:
            if time.monotonic() > end_s:
                raise
            progress(f"Slurm job {number}: {error}")
            time.sleep(PENDING_S)
            continue
        if job is None:
            raise StartError(f"Slurm does not know job {number} any more.")
        return job


def reason(number: int, job: Job) -> Job:
    """Wait for the job with the reason of its end, which Slurm does not have while it is ending."""
    end_s = time.monotonic() + REASON_S
    newest: Job | None = job
    while newest is not None and newest.state == "COMPLETING" and time.monotonic() < end_s:
        time.sleep(REASON_PAUSE_S)
        job, newest = newest, look(number)
    return newest or job


def shares(number: int) -> tuple[HostShare, ...]:
    """The job's share of each host.

    Raises:
        StartError: If Slurm does not answer.
    """
    details = ask("scontrol", "--details", "--oneliner", "show", "job", str(number)).text
    lists = slurm.host_lists(details)
    if not lists:
        raise StartError(f"Slurm does not tell which hosts job {number} has: {details.strip()!r}")
    return slurm.shares(details, {hosts: hostnames(hosts) for hosts in lists})


def hostnames(hosts: str) -> list[str]:
    """The hosts that Slurm writes as n[1-2]."""
    return ask("scontrol", "show", "hostnames", hosts).text.split() if hosts else []


@dataclass(frozen=True, slots=True)
class Allocation:
    """A job that has its hosts.

    Attributes:
        is_ours: It was submitted for this run, and ends with it.
    """

    number: int
    shares: tuple[HostShare, ...]
    is_ours: bool


def surrounding() -> Allocation | None:
    """The job that this kernel runs in itself (salloc, a notebook in a job); None outside of one.

    Raises:
        OptionError: If it is over, or Slurm's programs are not here.
    """
    number = os.environ.get("SLURM_JOB_ID", "")
    if not number.isdigit():
        return None
    job = look(int(number))
    if job is None or job.is_over:
        raise OptionError(
            f"SLURM_JOB_ID says that this notebook runs in job {number}, which Slurm does not have "
            "any more. Remove it from the environment, or ask for another job with one of "
            f"{', '.join(slurm.FLAGS)}."
        )
    return Allocation(job.number, shares(job.number), is_ours=False)


def default_ranks(allocation: Allocation) -> int:
    """How many ranks a job is for: one per GPU, or one per task that it was asked for, or 2."""
    tasks = os.environ.get("SLURM_NTASKS", "")
    n_tasks = int(tasks) if tasks.isdigit() else min(2, sum(s.cpus for s in allocation.shares))
    return sum(share.gpus for share in allocation.shares) or n_tasks


def allocate(
    options: SlurmOptions,
    world_size: int,
    name: str,
    promise: Callable[[Sequence[str]], object],
    progress: Reporter,
) -> Allocation:
    """A new job of this name with hosts for so many ranks.

    `promise` is handed the command that cancels it, before it is submitted: after a failure
    here, the guardian has to run it.

    Raises:
        StartError: If Slurm refuses the job, or ends it while it waits.
        OptionError: If there is no Slurm here.
    """
    promise(cancelling(name))
    progress("asking Slurm for a job")
    number = submit(options, world_size, name)
    wait(number, options, progress)
    return Allocation(number, shares(number), is_ours=True)


class JobWatch:
    """Looks at a running job now and then, and says once what its user has to know.

    Attributes:
        end: Why the job is over, as a sentence without its full stop; "" while it lasts.
    """

    def __init__(self, number: int, hosts: Sequence[str], tell: Callable[[str], object]):
        """Watch a job that has these hosts; `tell` is called with lines, from a thread."""
        self.number = number
        self.end = ""
        self._hosts = set(hosts)
        self._gone: dict[str, str] = {}
        self._tell = tell
        self._left_s, self._seen_s = math.nan, time.monotonic()
        self._is_warned = self._is_suspended = False
        self._closed = threading.Event()
        self._looking = threading.Lock()
        threading.Thread(target=self._run, name="nbdist-slurm", daemon=True).start()

    @property
    def left_s(self) -> float:
        """Until the job's time limit; inf without one, nan where it is not known."""
        left_s = self._left_s - (time.monotonic() - self._seen_s)
        return 0.0 if left_s < 0 else left_s

    @property
    def text(self) -> str:
        """The job and its time, as one line."""
        if self.end:
            return self.end
        left_s = self.left_s
        if math.isfinite(left_s):
            return f"Slurm job {self.number}, {slurm.duration(left_s)} left"
        return f"Slurm job {self.number}" + (", no time limit" if left_s == math.inf else "")

    def why_lost(self, host: str, wait_s: float = REASON_S) -> str:
        """Why a host of the job is lost, as a sentence without its full stop; "" if unknown.

        It asks Slurm now, and again for `wait_s` as long as Slurm does not know.
        """
        end_s = time.monotonic() + wait_s
        while True:
            self.look()
            if why := self.end or self._gone.get(host, ""):
                return why
            if state := _unusable([host]).get(host):
                return f"Slurm lists {host} as {state}"
            if time.monotonic() > end_s:
                return ""
            time.sleep(REASON_PAUSE_S)

    def look(self) -> None:
        """Ask Slurm, and report news of the job."""
        with self._looking:
            if self.end or self._closed.is_set():
                return
            try:
                job = look(self.number)
                lines = self._ended(job) if job is None or job.is_over else self._changed(job)
            except StartError:
                return  # its controller may be started again; the ranks do not need it
            for line in lines:
                self._tell(line)

    def close(self) -> None:
        """Tell nothing any more."""
        self._closed.set()

    def _run(self) -> None:
        while not self.end and not self._closed.is_set():
            self.look()
            until_warning_s = self.left_s - WARN_S if self.left_s > WARN_S else RUNNING_S
            self._closed.wait(min(RUNNING_S, max(1.0, until_warning_s)))

    def _ended(self, job: Job | None) -> list[str]:
        gone = f"Slurm does not know job {self.number} any more"
        self.end = gone if job is None else reason(self.number, job).end
        return [f"{self.end}."]

    def _changed(self, job: Job) -> list[str]:
        lines = self._lost(job)
        self._left_s, self._seen_s = job.left_s, time.monotonic()
        was_warned, self._is_warned = self._is_warned, job.left_s <= WARN_S
        if self._is_warned and not was_warned:
            left = slurm.duration(job.left_s)
            lines.append(
                f"Slurm ends job {job.number} in {left}, at its time limit: save with %dist_save "
                "what must not be lost."
            )
        was_suspended, self._is_suspended = self._is_suspended, job.state == "SUSPENDED"
        if was_suspended != self._is_suspended:
            has_done = "has suspended" if self._is_suspended else "has resumed"
            lines.append(f"Slurm {has_done} job {job.number}.")
        return lines

    def _lost(self, job: Job) -> list[str]:
        """Hosts that Slurm has taken out of the job, which goes on without them."""
        hosts = hostnames(job.hosts)
        lost = sorted(self._hosts.difference(hosts)) if hosts else []
        self._hosts.difference_update(lost)
        states = _unusable(lost) if lost else {}
        for host in lost:
            self._gone[host] = f"Slurm took {host} out of job {job.number}"
            self._gone[host] += f" ({states[host]})" if host in states else ""
        return [f"{self._gone[host]}." for host in lost]


def _unusable(hosts: Sequence[str]) -> dict[str, str]:
    answer = ask(
        "sinfo",
        "--Node",
        "--noheader",
        f"--nodes={','.join(hosts)}",
        f"--format={slurm.NODE_FORMAT}",
    )
    return slurm.unusable_hosts(answer.text)
