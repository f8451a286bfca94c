"""A Slurm job as records: the command lines that ask for it, and what Slurm's programs answer."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from nbdist.core.option import option, options_of, rank_count
from nbdist.core.units import shown
from nbdist.errors import OptionError, did_you_mean

# One line a job; none of the fields has the separator in it.
SQUEUE_FORMAT = "%i|%T|%P|%Q|%L|%S|%N|%r"
SINFO_FORMAT = "%P|%D|%F|%c|%G|%s|%l|%a"
NODE_FORMAT = "%N|%T|%E"

# Slurm's word for a job that is over -> what it means, as the end of a sentence.
ENDS = {
    "BOOT_FAIL": "its hosts could not be booted",
    "CANCELLED": "it was cancelled",
    "COMPLETED": "its script ended",
    "COMPLETING": "it is ending",
    "DEADLINE": "its deadline was reached",
    "FAILED": "it failed",
    "NODE_FAIL": "one of its hosts failed",
    "OUT_OF_MEMORY": "it used more memory than it had asked for",
    "PREEMPTED": "a job of higher priority took its hosts (preemption)",
    "REVOKED": "another cluster took it over",
    "SPECIAL_EXIT": "it ended in a special state",
    "TIMEOUT": "its time limit was reached",
}
# Why a job is pending that no other job's end will start: what it asks for is not there.
NEVER_STARTS = re.compile(
    r"Partition(NodeLimit|TimeLimit|Config)|BadConstraints|Invalid(Account|QOS)|\w*PerJob(Limit)?$"
    r"|(Account|QOS)NotAllowed|Job's (account|QOS) not "
)
NO_TIME_LEFT = ("INVALID", "NOT_SET", "N/A", "")


@dataclass(frozen=True, slots=True)
class SlurmOptions:
    """Options of a job, beside its ranks, named as sbatch has them; "" for Slurm's own defaults.

    Words of `sbatch` win over the others, but for the job's name. Ranks are on CPUs where
    `gpus_per_node` is None.
    """

    gpus_per_node: int | None = option(
        "slurm: ranks of each host, each with a GPU", "N", rank_count
    )
    partition: str = option("slurm: the job's partition", "NAME", default="")
    account: str = option("slurm: the account that pays for the job", "NAME", default="")
    time: str = option("slurm: the job's time limit, such as 2:00:00", "TIME", default="")
    sbatch: str = option('slurm: more options for sbatch, "--constraint=h100"', "WORDS", default="")


DEFAULTS = SlurmOptions()
FLAGS = tuple(row.flags[0] for row in options_of(SlurmOptions))


@dataclass(frozen=True, slots=True)
class Job:
    """A job as squeue lists it.

    Attributes:
        state: Slurm's word, such as PENDING.
        reason: Slurm's word for why it is pending or has ended; "None" without.
        priority: A higher one starts first.
        left_s: Until its time limit; inf without one.
        start: When it starts or has started, in local time (2026-11-23T14:43:36); "N/A" if unknown.
        hosts: Slurm's list, n[1-2]; empty as long as the job has none.
    """

    number: int
    state: str
    partition: str
    priority: int
    left_s: float
    start: str
    hosts: str
    reason: str

    @property
    def is_over(self) -> bool:
        """Whether it has no hosts any more, and will get none."""
        return self.state in ENDS  # a word that a later Slurm has added does not end a job

    @property
    def end(self) -> str:
        """Why it is over, in words and in Slurm's own; a sentence without its full stop."""
        meaning = ENDS[self.state]
        words = ", ".join(dict.fromkeys(w for w in (self.state, self.reason) if w != "None"))
        return f"Slurm ended job {self.number}: {meaning} ({words})"


@dataclass(frozen=True, slots=True)
class HostShare:
    """A job's share of one host.

    Attributes:
        cpus, gpus: How many; 0 GPUs where it has none there.
    """

    host: str
    cpus: int
    gpus: int


@dataclass(frozen=True, slots=True)
class Partition:
    """A line of sinfo: hosts of one kind in one partition.

    Attributes:
        counts: Numbers of hosts: in use, free, out of order, all.
        gres: Slurm's word for what a host has beside CPUs, such as gpu:8; "(null)" without.
        job_hosts: How many hosts a job may have: "1-infinite".
        time_limit: The limit of one job: "infinite", "10:00".
    """

    name: str
    is_default: bool
    hosts: int
    counts: str
    cpus: str
    gres: str
    job_hosts: str
    time_limit: str
    is_up: bool

    @property
    def text(self) -> str:
        """One line of a list of partitions."""
        default = " (the default)" if self.is_default else ""
        gres = "" if self.gres == "(null)" else f" and {self.gres}"
        parts = [
            f"{self.hosts} host{'s' if self.hosts != 1 else ''} of {self.cpus} CPUs{gres} each"
        ]
        *_, missing, _all = self.counts.split("/")
        if missing != "0":
            parts.append(f"{missing} of them out of order")
        if self.job_hosts != "1-infinite":
            parts.append(f"hosts of a job: {self.job_hosts}")
        parts.append(f"time limit {self.time_limit}")
        return f"{self.name}{default}: {', '.join(parts)}" + ("" if self.is_up else ", not up")


def submission(
    options: SlurmOptions, world_size: int, name: str, *, without: Sequence[str] = ()
) -> list[str]:
    """The sbatch command for a job that only holds its hosts, for so many ranks.

    It writes no file, is not started again by Slurm after an end, and outlives the end of a host
    that is not its first. `without` names hosts that it must not get.

    Raises:
        OptionError: If the words for sbatch cannot be read.
    """
    per_host = options.gpus_per_node
    if per_host is None:
        size = [f"--ntasks={world_size}"]
    else:
        hosts = math.ceil(world_size / per_host)
        size = [
            f"--nodes={hosts}",
            f"--ntasks-per-node={math.ceil(world_size / hosts)}",
            f"--gpus-per-node={per_host}",
        ]
    named = {"partition": options.partition, "account": options.account, "time": options.time}
    try:
        more = shlex.split(options.sbatch)
    except ValueError as error:
        raise OptionError(f"--sbatch {options.sbatch!r}: {error}. Close the quotation.") from error
    return [
        "sbatch",
        "--parsable",
        "--no-requeue",
        "--no-kill",
        "--output=/dev/null",
        "--chdir=/",
        *size,
        *(f"--{word}={value}" for word, value in named.items() if value),
        *([f"--exclude={','.join(without)}"] if without else []),
        *more,
        f"--job-name={name}",  # after theirs: by it the job is cancelled
        "--wrap=exec sleep infinity",
    ]


def job_number(text: str) -> int:
    """The job's number in what `sbatch --parsable` prints: `12`, or `12;cluster`.

    Raises:
        ValueError: If there is none.
    """
    lines = [line for line in text.split() if re.fullmatch(r"\d+(;\S+)?", line)]
    return int((lines or [text])[-1].partition(";")[0])


def jobs(text: str) -> list[Job]:
    """The lines of squeue with SQUEUE_FORMAT; one that cannot be read is left out."""
    listed = []
    for line in text.splitlines():
        fields = line.strip().split("|", 7)
        if len(fields) == 8 and fields[0].isdigit():  # 12_[1-5]: an array of somebody else's
            number, state, partition, priority, left, start, hosts, reason = fields
            rank = int(priority) if priority.isdigit() else 0
            job = Job(int(number), state, partition, rank, seconds(left), start, hosts, reason)
            listed.append(job)
    return listed


def seconds(text: str) -> float:
    """A duration as Slurm writes it: 59:12, 2:00:00, 1-02:03:04; inf for UNLIMITED.

    nan where Slurm does not know.
    """
    if text == "UNLIMITED":
        return math.inf
    match = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text)
    if match is None:
        return math.nan
    days, hours, minutes, rest = (int(part or 0) for part in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + rest)


def duration(value_s: float) -> str:
    """`1 h 12 min`, `12 min`, `40 s`: a time that is left."""
    minutes = int(value_s // 60)
    if minutes < 1:
        return shown(f"{value_s:.0f} s")
    return shown(f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min")


def place(job: Job, pending: Iterable[Job]) -> tuple[int, int]:
    """(place, how many): which of its partition's pending jobs it is, by priority, then number.

    Jobs that wait for something else than hosts (another job, a day) are not counted.
    """
    others = [
        other
        for other in pending
        if other.number != job.number
        and (other.state, other.partition) == ("PENDING", job.partition)
        and other.reason not in {"Dependency", "BeginTime", "DependencyNeverSatisfied"}
        and not other.reason.startswith("JobHeld")
    ]
    ahead = [o for o in others if (-o.priority, o.number) < (-job.priority, job.number)]
    return len(ahead) + 1, len(others) + 1


def waiting(job: Job, pending: Iterable[Job]) -> str:
    """The reason why a job is pending, for the line of progress."""
    if job.state != "PENDING":
        return f"Slurm job {job.number} is {job.state} on {job.hosts or 'no host yet'}"
    place_in, of = place(job, pending)
    parts = [f"place {place_in} of {of} in partition {job.partition}"]
    if job.reason not in {"None", ""}:
        parts.append(f"reason: {job.reason}")
    if job.start not in NO_TIME_LEFT:
        parts.append(f"expected to start at {job.start.replace('T', ' ')}")
    return f"Slurm job {job.number} is PENDING: {', '.join(parts)}"


def shares(text: str, expand: Mapping[str, Sequence[str]]) -> tuple[HostShare, ...]:
    """Shares of a job's hosts in Slurm's order, from `scontrol --details --oneliner show job`.

    `expand` gives the hosts of each host list in it; `host_lists` says which are needed.
    """
    listed = []
    for hosts, cpus, gres in _details(text):
        gpus = sum(int(number) for number in re.findall(r"gpu(?::[^:,()]+)?:(\d+)", gres))
        listed += [HostShare(host, _count(cpus), gpus) for host in expand[hosts]]
    return tuple(listed)


def host_lists(text: str) -> list[str]:
    """The host lists in the details of a job, n[1-2], in Slurm's order."""
    return [hosts for hosts, _, _ in _details(text)]


def _details(text: str) -> list[tuple[str, str, str]]:
    rows = re.findall(r"\sNodes=(\S+) CPU_IDs=(\S+) Mem=\S+ GRES=(\S*)", text)
    return [(hosts, cpus, gres) for hosts, cpus, gres in rows]


def _count(ranges: str) -> int:
    """How many numbers `0-3,8` names."""
    ends = [part.split("-") for part in ranges.split(",")]
    return sum(int(part[-1]) - int(part[0]) + 1 for part in ends)


def capacity(share: HostShare, *, has_gpus: bool) -> int:
    """How many ranks a host of the job can have: one a GPU, or without any one a CPU."""
    return share.gpus if has_gpus else share.cpus


def places(shares_: Sequence[HostShare], world_size: int) -> dict[str, int]:
    """Ranks for each host of a job: as equal as they can be, none more than its capacity.

    Raises:
        OptionError: If the job is too small for them.
    """
    has_gpus = any(share.gpus for share in shares_)
    free = {share.host: capacity(share, has_gpus=has_gpus) for share in shares_}
    if world_size > sum(free.values()):
        noun = "GPU" if has_gpus else "CPU"
        each = ", ".join(f"{host}: {count}" for host, count in free.items())
        raise OptionError(
            f"-n {world_size}: the job has {sum(free.values())} {noun}s ({each}). Use -n "
            f"{sum(free.values())} or fewer, or a larger job."
        )
    counts = dict.fromkeys(free, 0)
    for _ in range(world_size):
        # The emptiest host; of equal ones the first.
        host = min((h for h in free if counts[h] < free[h]), key=lambda h: counts[h])
        counts[host] += 1
    return {host: count for host, count in counts.items() if count}


def partitions(text: str) -> list[Partition]:
    """The lines of sinfo with SINFO_FORMAT; one that cannot be read is left out."""
    listed = []
    for line in text.splitlines():
        fields = line.strip().split("|")
        if len(fields) == 8 and fields[1].isdigit():
            name, hosts, counts, cpus, gres, job_hosts, time_limit, available = fields
            listed.append(
                Partition(
                    name.rstrip("*"),
                    name.endswith("*"),
                    int(hosts),
                    counts,
                    cpus,
                    gres,
                    job_hosts,
                    time_limit,
                    available == "up",
                )
            )
    return listed


def refusal(words: str, options: SlurmOptions, partitions: Sequence[Partition]) -> str:
    """Why there is no job, in Slurm's own words, and what can be chosen.

    `words` are what sbatch has written, or squeue's reason for a job that will never start.
    """
    lines = [re.sub("^sbatch: (error: )?", "", line).strip() for line in words.splitlines()]
    said = "; ".join(filter(None, lines)).rstrip(".") or "it gave no reason"
    names = list(dict.fromkeys(partition.name for partition in partitions))
    head = f"Slurm refused the job: {said}."
    if options.partition and options.partition not in names and names:
        near = did_you_mean(options.partition, names)
        head = f"{head} There is no partition {options.partition!r}.{near}"
    elif re.search("account|qos", said, re.IGNORECASE):
        head = f"{head} Choose yours with --account; the site's own pages name it."
    asked = [partition for partition in partitions if partition.name == options.partition]
    listed = [f"    {partition.text}" for partition in asked or partitions]
    return "\n".join([head, "What there is to choose:", *listed]) if listed else head


def unusable_hosts(text: str) -> dict[str, str]:
    """Hosts that cannot be used -> Slurm's word and reason, by `sinfo --Node` with NODE_FORMAT."""
    listed = {}
    for line in text.splitlines():
        host, _, rest = line.strip().partition("|")
        state, _, reason = rest.partition("|")
        if re.match(r"down|drain|fail|error|no_respond|unk|.*\*$", state):
            state = state.replace("*", ", not responding")
            listed[host] = state if reason in {"none", ""} else f"{state}: {reason}"
    return listed
