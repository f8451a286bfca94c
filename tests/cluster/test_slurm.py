"""What is asked of Slurm, and what its programs answer: text of the real ones, version 22.05."""

import math
from dataclasses import replace

import pytest

from nbdist.cluster import slurm
from nbdist.cluster.slurm import HostShare, Job, SlurmOptions
from nbdist.commands.cluster import VERBS, start_options
from nbdist.errors import OptionError
from nbdist.notebook.verb import parse

QUEUE = """\
9|PENDING|gpu|4294901752|UNLIMITED|2026-11-23T15:41:28||Resources
10|PENDING|gpu|4294901751|UNLIMITED|N/A||Priority
8|RUNNING|gpu|4294901753|59:57|2026-11-23T14:41:28|h5n[1-2]|None
13|PREEMPTED|gpu|4294901748|59:58|2026-11-23T14:43:36|h5n[1-3]|None
4|PENDING|phys|4294901756|UNLIMITED|N/A||Job's account not known, so it can't use this partition \
(phys allows physics)
14|PENDING|gpu|4294901760|1-02:03:04|N/A||Dependency
15_[1-3]|PENDING|gpu|4294901760|1:00:00|N/A||Priority
7|NODE_FAIL|gpu|4294901753|59:55|2026-11-23T14:41:28|h5n1|NodeDown
"""
# Two kinds of share: 2 CPUs and 2 GPUs on each of two hosts, 5 CPUs and no GPU on a third.
DETAILS = (
    "JobId=8 JobName=nbdist-x UserId=root(0) JobState=RUNNING Reason=None NodeList=h5n[1-3] "
    "BatchHost=h5n1 NumNodes=3 NumCPUs=9 NumTasks=4 CPUs/Task=1 JOB_GRES=gpu:a100:4   "
    "Nodes=h5n[1-2] CPU_IDs=2-3 Mem=0 GRES=gpu:a100:2(IDX:0-1),shard:4(IDX:0-3)   "
    "Nodes=h5n3 CPU_IDs=0-3,6 Mem=4000 GRES= MinCPUsNode=2 MinMemoryNode=0"
)
HOSTS = {"h5n[1-2]": ["h5n1", "h5n2"], "h5n3": ["h5n3"]}
SINFO = """\
gpu*|3|0/2/1/3|4|gpu:2|1-infinite|infinite|up
small|1|0/1/0/1|8|(null)|1|10:00|up
old|2|0/0/2/2|4|gpu:k80:1|1-4|1-00:00:00|down
"""


def job(number: int) -> Job:
    return next(job for job in slurm.jobs(QUEUE) if job.number == number)


def test_a_queue_is_read() -> None:
    """Each job with its numbers; an array of somebody else's is passed over."""
    assert [job.number for job in slurm.jobs(QUEUE)] == [9, 10, 8, 13, 4, 14, 7]
    assert job(8) == Job(
        8, "RUNNING", "gpu", 4294901753, 3597.0, "2026-11-23T14:41:28", "h5n[1-2]", "None"
    )
    assert (
        job(4).reason
        == "Job's account not known, so it can't use this partition (phys allows physics)"
    )
    assert [job.number for job in slurm.jobs(QUEUE) if job.is_over] == [13, 7]
    assert slurm.jobs("slurm_load_jobs error: Invalid job id specified\n") == []


def test_how_a_job_ended_is_said_in_words_and_in_slurms() -> None:
    """The reason is only there where it says more."""
    assert job(13).end == (
        "Slurm ended job 13: a job of higher priority took its hosts (preemption) (PREEMPTED)"
    )
    assert job(7).end == "Slurm ended job 7: one of its hosts failed (NODE_FAIL, NodeDown)"


def test_a_word_that_is_not_known_does_not_end_a_job() -> None:
    """A later Slurm may have more states: nobody's ranks are given up for one."""
    assert not replace(job(8), state="EXPEDITING").is_over


def test_the_place_in_the_queue_counts_what_comes_first() -> None:
    """By priority, then by number; what waits for another job does not come first."""
    queue = slurm.jobs(QUEUE)

    assert slurm.place(job(9), queue) == (1, 2)
    assert slurm.place(job(10), queue) == (2, 2)
    assert slurm.place(replace(job(10), priority=job(9).priority), queue) == (2, 2)
    assert slurm.place(job(4), queue) == (1, 1)
    assert slurm.waiting(job(9), queue) == (
        "Slurm job 9 is PENDING: place 1 of 2 in partition gpu, reason: Resources, expected to "
        "start at 2026-11-23 15:41:28"
    )
    assert slurm.waiting(job(10), queue) == (
        "Slurm job 10 is PENDING: place 2 of 2 in partition gpu, reason: Priority"
    )


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("59:57", 3597), ("0:09", 9), ("2:00:00", 7200), ("1-02:03:04", 93784),
        ("364-23:59:54", 31535994), ("UNLIMITED", math.inf),
    ],
)  # fmt: skip
def test_a_time_is_read(text: str, value: float) -> None:
    """As squeue writes what is left."""
    assert slurm.seconds(text) == value


def test_a_time_that_is_not_known_is_none() -> None:
    """Neither 0, which would be told as the end, nor no limit."""
    assert all(math.isnan(slurm.seconds(text)) for text in ("INVALID", "NOT_SET", "N/A", ""))


@pytest.mark.parametrize(
    ("value_s", "text"), [(7261.0, "2 h 1 min"), (3599.0, "59 min"), (299.6, "4 min"), (40, "40 s")]
)
def test_a_time_left_is_written(value_s: float, text: str) -> None:
    """In the two units that say something."""
    assert slurm.duration(value_s) == text


def test_reasons_that_nothing_will_change() -> None:
    """They end the wait; a queue, a reservation or a start of hosts do not."""
    never = (
        "PartitionTimeLimit", "PartitionNodeLimit", "PartitionConfig", "BadConstraints",
        "QOSMaxGRESPerJob", "AssocMaxWallDurationPerJobLimit", "InvalidAccount", job(4).reason,
    )  # fmt: skip
    sometime = (
        "Priority", "Resources", "None", "Dependency", "QOSMaxGRESPerUser", "AssocGrpGRES",
        "ReqNodeNotAvail, UnavailableNodes:n2", "PartitionDown", "Reservation", "BeginTime",
    )  # fmt: skip

    assert [word for word in never if not slurm.NEVER_STARTS.match(word)] == []
    assert [word for word in sometime if slurm.NEVER_STARTS.match(word)] == []


def test_what_a_job_has_of_each_host() -> None:
    """CPUs and GPUs by host, in Slurm's order; other resources than GPUs do not count."""
    assert slurm.host_lists(DETAILS) == ["h5n[1-2]", "h5n3"]
    assert slurm.shares(DETAILS, HOSTS) == (
        HostShare("h5n1", 2, 2), HostShare("h5n2", 2, 2), HostShare("h5n3", 5, 0),
    )  # fmt: skip
    assert slurm.shares("slurm_load_jobs error: Invalid job id specified", {}) == ()


@pytest.mark.parametrize(
    ("shares", "n", "places"),
    [
        ([("a", 8, 8), ("b", 8, 8)], 16, {"a": 8, "b": 8}),
        ([("a", 8, 8), ("b", 8, 8)], 12, {"a": 6, "b": 6}),
        ([("a", 8, 8), ("b", 8, 8)], 3, {"a": 2, "b": 1}),
        ([("a", 3, 0), ("b", 1, 0)], 4, {"a": 3, "b": 1}),  # as Slurm has laid 4 tasks
        ([("a", 8, 0), ("b", 8, 0)], 4, {"a": 2, "b": 2}),  # whole hosts, for 4 tasks
        ([("a", 9, 1), ("b", 9, 4)], 5, {"a": 1, "b": 4}),
        ([("a", 9, 0), ("b", 9, 4)], 2, {"b": 2}),  # a host without GPUs among such that have
        ([("a", 8, 8), ("b", 8, 8)], 1, {"a": 1}),
    ],
)
def test_ranks_are_spread_over_a_jobs_hosts(
    shares: list[tuple[str, int, int]], n: int, places: dict[str, int]
) -> None:
    """As equal as they can be, none beyond what the job has there, a rank's GPU its own."""
    assert slurm.places([HostShare(*share) for share in shares], n) == places


def test_more_ranks_than_a_job_has_places_for() -> None:
    """Refused with what each host has."""
    shares = [HostShare("a", 8, 2), HostShare("b", 8, 1)]
    with pytest.raises(OptionError, match=r"-n 4: the job has 3 GPUs \(a: 2, b: 1\)\. Use -n 3 or"):
        slurm.places(shares, 4)


def test_the_command_that_asks_for_a_job() -> None:
    """Hosts by the GPUs of each; what was typed for sbatch comes last, so it wins."""
    options = SlurmOptions(8, "gpu", "physics", "2:00:00", '--constraint="h100 a" -N 3')
    words = slurm.submission(options, 12, "nbdist-run-x", without=["n7"])

    assert words == [
        "sbatch", "--parsable", "--no-requeue", "--no-kill", "--output=/dev/null", "--chdir=/",
        "--nodes=2", "--ntasks-per-node=6", "--gpus-per-node=8", "--partition=gpu",
        "--account=physics", "--time=2:00:00", "--exclude=n7", "--constraint=h100 a", "-N", "3",
        # The last: by this name the job is cancelled, whatever --sbatch names it.
        "--job-name=nbdist-run-x", "--wrap=exec sleep infinity",
    ]  # fmt: skip
    assert "--ntasks=5" in slurm.submission(SlurmOptions(), 5, "x")
    with pytest.raises(OptionError, match="No closing quotation"):
        slurm.submission(SlurmOptions(sbatch="--comment='x"), 5, "x")


def test_the_jobs_number_is_read() -> None:
    """Alone, with a cluster's name, and after lines of the site's own."""
    assert slurm.job_number("12\n") == 12
    assert slurm.job_number("12;east\n") == 12
    assert slurm.job_number("Welcome to 3 clusters\n12;east\n") == 12
    with pytest.raises(ValueError, match="Submitted"):
        slurm.job_number("Submitted")


def test_a_refusal_has_slurms_words_and_the_choices() -> None:
    """An unknown partition: all of them; too much: the limits of the one that was named."""
    partitions = slurm.partitions(SINFO)
    unknown = slurm.refusal(
        "sbatch: error: invalid partition specified: gpuu\n"
        "sbatch: error: Batch job submission failed: Invalid partition name specified\n",
        SlurmOptions(partition="gpuu"),
        partitions,
    )
    too_long = slurm.refusal("PartitionTimeLimit", SlurmOptions(partition="small"), partitions)
    account = slurm.refusal(
        "sbatch: error: Batch job submission failed: Invalid account or account/partition "
        "combination specified\n",
        SlurmOptions(),
        (),
    )

    assert unknown == (
        "Slurm refused the job: invalid partition specified: gpuu; Batch job submission failed: "
        "Invalid partition name specified. There is no partition 'gpuu'. Did you mean gpu?\n"
        "What there is to choose:\n"
        "    gpu (the default): 3 hosts of 4 CPUs and gpu:2 each, 1 of them out of order, time "
        "limit infinite\n"
        "    small: 1 host of 8 CPUs each, hosts of a job: 1, time limit 10:00\n"
        "    old: 2 hosts of 4 CPUs and gpu:k80:1 each, 2 of them out of order, hosts of a job: "
        "1-4, time limit 1-00:00:00, not up"
    )
    assert too_long == (
        "Slurm refused the job: PartitionTimeLimit.\nWhat there is to choose:\n"
        "    small: 1 host of 8 CPUs each, hosts of a job: 1, time limit 10:00"
    )
    assert account.endswith(
        "combination specified. Choose yours with --account; the site's own pages name it."
    )


def test_hosts_that_cannot_be_used() -> None:
    """Each once, with Slurm's reason; a busy one is none of them, one without an answer is."""
    text = "n1|mixed|none\nn2|down|tested by hand\nn2|down|tested by hand\nn3|idle*|none\n"

    assert slurm.unusable_hosts(text) == {
        "n2": "down: tested by hand",
        "n3": "idle, not responding",
    }


def test_the_options_as_they_are_typed() -> None:
    """Each of them reaches the job; without any the defaults count."""
    verb = next(verb for verb in VERBS if verb.name == "dist_init")
    typed = (
        "--profile slurm -n 16 --gpus-per-node 8 --partition gpu --account physics "
        "--time 2:00:00 --sbatch '--constraint=h100 -N 2'"
    )
    options = start_options(parse(verb, typed).values)

    assert (options.profile, options.world_size) == ("slurm", 16)
    assert options.slurm == SlurmOptions(8, "gpu", "physics", "2:00:00", "--constraint=h100 -N 2")
    assert start_options(parse(verb, "-n 2").values).slurm == slurm.DEFAULTS
