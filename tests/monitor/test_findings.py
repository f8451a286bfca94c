"""Each rule of the monitor, just below and just above where it speaks."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from nbdist.core.finding import Finding
from nbdist.core.gpus import GpuReading
from nbdist.monitor import findings
from nbdist.monitor.process_usage import Usage
from nbdist.monitor.samples import Doing, Sample, SampleHistory

GIB = 2**30
GPU = GpuReading(0, "GPU-a", "H", 2 * GIB, 100 * GIB, 90.0, 30.0, 60.0, 300.0, 700.0, ())
DOING = Doing("running", "running cell [3]", 0.0, 100.0, "all_reduce(float32[3])", 0.5)
USAGE = Usage(1.0, GIB, GIB, 10 * GIB, 100 * GIB)
HEALTHY = Sample(0, 0.0, DOING, USAGE, 95.0, GPU)


def told(
    *ranks: Sample | Sequence[Sample], seconds: int = 41, is_past: bool = False
) -> tuple[Finding, ...]:
    """What is found when each rank looked like this all the time, or second by second."""
    history = SampleHistory()
    for second in range(seconds):
        looks = [look if isinstance(look, Sample) else look[second] for look in ranks]
        newest = [replace(x, rank=rank, time_s=float(second)) for rank, x in enumerate(looks)]
        history.append(newest)
    return findings.findings(history, newest, is_past=is_past)


def names(*ranks: Sample | Sequence[Sample]) -> list[str]:
    return [finding.rule for finding in told(*ranks)]


def with_gpu(**changed: object) -> Sample:
    return replace(HEALTHY, gpu=replace(GPU, **changed))  # type: ignore[arg-type]


def with_host(used: float, **changed: object) -> Sample:
    usage = replace(USAGE, host_used_bytes=int(used * 100 * GIB), **changed)  # type: ignore[arg-type]
    return replace(HEALTHY, usage=usage)


@pytest.mark.parametrize(
    ("under", "over", "rule", "clause"),
    [
        (with_gpu(busy_percent=80.0), with_gpu(busy_percent=79.9), "low utilisation", "80 % of"),
        (
            with_gpu(used_bytes=95 * GIB),
            with_gpu(used_bytes=95 * GIB + 1),
            "device memory",
            "95% of the GPU's memory",
        ),
        (with_host(0.95), with_host(0.951), "host memory", "95% of the machine's memory"),
        (
            with_host(0.95, is_group=True),
            with_host(0.99, is_group=True),
            "host memory",
            "99% of the control group's limit",
        ),
        (
            with_gpu(temperature_c=85.0, throttled=None),
            with_gpu(temperature_c=86.0, throttled=None),
            "heat",
            "rank 0: 86 C, the driver gives no reason",
        ),
        (
            with_gpu(temperature_c=95.0, throttled=("power limit",)),
            with_gpu(temperature_c=70.0, throttled=("power limit", "hardware thermal slowdown")),
            "heat",
            "70 C, clocks are lowered: hardware thermal slowdown",
        ),
    ],
)
def test_a_rule_speaks_just_above_its_bound(
    under: Sample, over: Sample, rule: str, clause: str
) -> None:
    """At the bound it is quiet; beyond it there is one finding with number, reason and remedy."""
    assert told(under) == ()
    (finding,) = told(over)

    assert finding.rule == rule
    assert clause in finding.found
    assert finding.ranks == (0,)
    assert finding.why
    assert finding.what


def test_a_rank_of_cores_has_its_share_of_them_for_utilisation() -> None:
    """Without a GPU the processor time counts."""
    bare = replace(HEALTHY, gpu=None)
    (finding,) = told(replace(bare, cpu_percent=40.0))

    assert told(replace(bare, cpu_percent=81.0)) == ()
    assert finding.found == (
        "the share of the cores of rank 0 is busy 40 % of the time in its cell"
    )


def test_idle_ranks_and_the_first_seconds_of_a_cell_have_no_utilisation() -> None:
    """A device that has nothing to do is not badly used."""
    lazy = with_gpu(busy_percent=1.0)
    idle = replace(lazy, doing=replace(DOING, state="idle", cell_s=0.0))

    assert told(idle) == ()
    assert told(replace(lazy, doing=replace(DOING, cell_s=9.9))) == ()
    assert names(replace(lazy, doing=replace(DOING, cell_s=10.0))) == ["low utilisation"]
    # Only what was seen in the cell counts: it has just begun to be busy.
    assert told([idle] * 20 + [HEALTHY] * 21) == ()


def test_the_last_cell_of_idle_ranks_is_judged_where_somebody_asks_about_it() -> None:
    """After the cell `%dist_monitor` still says what was in it; a panel that is live does not."""
    lazy = with_gpu(busy_percent=10.0)
    idle = replace(lazy, doing=replace(DOING, state="idle", cell_s=0.0))
    (finding,) = told([lazy] * 10 + [idle] * 31, is_past=True)

    assert finding.found == "the GPU of rank 0 is busy 10 % of the time in its cell"
    assert told([lazy] * 10 + [idle] * 31) == ()
    assert told([lazy] * 9 + [idle] * 32, is_past=True) == ()
    assert told([lazy] * 20 + [idle] * 605, seconds=625, is_past=True) == ()


def test_utilisation_is_a_mean_over_half_a_minute() -> None:
    """A pause between two steps is none; one that was longer ago is over."""
    pause = with_gpu(busy_percent=0.0)
    busy = with_gpu(busy_percent=100.0)

    assert told([busy] * 35 + [pause] * 6) == ()  # 25 of 31 rows: 80.6 %
    assert names([busy] * 34 + [pause] * 7) == ["low utilisation"]
    assert told([pause] * 10 + [busy] * 31) == ()


def test_ranks_that_differ() -> None:
    """Twenty points apart are noise; more is an imbalance, of utilisation or of memory."""
    high, near, far = (with_gpu(busy_percent=value) for value in (100.0, 80.0, 79.9))
    memory = with_gpu(used_bytes=22 * GIB), with_gpu(used_bytes=23 * GIB)
    (first, _) = told(high, far)

    assert told(high, near) == ()
    assert first.rule == "imbalance"
    assert first.found == "utilisation: rank 0 100 %, rank 1 80 % of the time"
    assert first.ranks == (0, 1)
    assert told(HEALTHY, memory[0]) == ()
    assert [finding.found for finding in told(HEALTHY, memory[1])] == [
        "device memory: rank 1 23 %, rank 0 2 % in use"
    ]
    # A rank that has no part in the cell is not compared.
    assert told(high, replace(far, doing=replace(DOING, state="idle"))) == ()


def hung(age_s: float, **changed: object) -> Sample:
    doing = replace(DOING, collective_age_s=age_s)
    gpu = replace(GPU, busy_percent=100.0, memory_busy_percent=0.0)
    return replace(HEALTHY, doing=doing, gpu=replace(gpu, **changed))  # type: ignore[arg-type]


def test_busy_gpus_of_ranks_that_do_not_progress() -> None:
    """Ten seconds without the end of a collective, and GPUs at full use: it may be a hang."""
    (finding,) = told(hung(11.0), hung(12.0))

    assert finding.rule == "busy without progress"
    assert finding.ranks == (0, 1)
    assert finding.found == (
        "the GPUs of ranks 0-1 are busy 100 % of the time, and no collective has ended on any "
        "rank for 11 s; their memory is busy 0 % of the time"
    )
    assert told(hung(10.0), hung(10.0)) == ()
    assert told(hung(11.0), hung(1.0)) == (), "one rank comes out of collectives"
    assert told(hung(11.0, busy_percent=94.0), hung(11.0, busy_percent=94.0)) == ()
    # A cell that has made no collective waits for none.
    alone = replace(hung(200.0), doing=replace(DOING, collective_age_s=200.0))
    assert told(alone) == ()
    assert told(replace(alone, doing=replace(DOING, collective_age_s=None))) == ()


def test_a_gpu_that_was_idle_a_moment_ago_is_not_spinning() -> None:
    """All of the last ten seconds count."""
    busy, idle = hung(11.0), hung(11.0, busy_percent=0.0)

    assert "busy without progress" not in names([busy] * 31 + [idle] + [busy] * 9)
    assert "busy without progress" in names([busy] * 29 + [idle] + [busy] * 11)


def test_what_is_not_known_says_nothing() -> None:
    """A machine that tells next to nothing has no findings, and the gravest ones come first."""
    nothing = Sample(0, 0.0, DOING)
    gpu = GpuReading(0, "GPU-a", "H")
    bad = replace(with_host(0.99), gpu=replace(GPU, used_bytes=99 * GIB, busy_percent=3.0))

    assert told(nothing, nothing) == ()
    assert told(replace(nothing, gpu=gpu)) == ()
    assert findings.findings(SampleHistory(), ()) == ()
    assert names(bad) == ["host memory", "device memory", "low utilisation"]
