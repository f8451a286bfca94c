"""Rules for samples of ranks: what was found, why it matters, and what to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from nbdist.core import units
from nbdist.core.failures import ranks_phrase
from nbdist.core.finding import Finding, Rule, RuleHit
from nbdist.monitor.samples import STATES, Reals, Sample, SampleHistory, read_of

# A mean over less says nothing of a step, a longer one nothing of now.
WINDOW_S = 30.0
LEAST_S = 10.0
# A cell that ended longer ago is not what somebody asks about.
PAST_S = 600.0
# Nobody's steps take longer than this with a collective in each, or hardly anybody's.
NO_PROGRESS_S = 10.0
SPINNING_PERCENT = 95.0
LEAST_UTILISATION = 80.0
MOST_APART = 20.0
FULL = 0.95  # of memory, a GPU's or the host's
HOT_C = 85.0
# A power limit is where a GPU that works all the time is meant to be.
SLOWED = frozenset(
    {"hardware slowdown", "software thermal slowdown", "hardware thermal slowdown", "power brake"}
)
_AT_WORK = (float(STATES.index("running")), float(STATES.index("waiting")))


@dataclass(frozen=True, slots=True)
class MonitorContext:
    """All ranks, and what was recorded of them."""

    history: SampleHistory
    samples: tuple[Sample, ...]
    is_past: bool = False

    @property
    def at_work(self) -> tuple[Sample, ...]:
        """The ranks that run a cell."""
        return tuple(s for s in self.samples if s.doing.state in {"running", "waiting"})

    def utilisation(self) -> Mapping[int, float]:
        """Rank -> mean utilisation in its cell over the last WINDOW_S; only where that is known."""
        means = {}
        for sample in self.samples:
            values = self._in_cell(sample)
            if len(values):
                means[sample.rank] = float(values.mean())
        return means

    def _in_cell(self, sample: Sample) -> Reals:
        is_now = sample.doing.state in {"running", "waiting"}
        length_s = WINDOW_S if is_now else PAST_S
        values, states = self.history.window(sample.rank, length_s, "utilisation", "state")
        percents: Reals = values[np.isin(states, _AT_WORK) & ~np.isnan(values)]
        if is_now:
            return percents if sample.doing.cell_s >= LEAST_S else percents[:0]
        # One sample a second, as good as.
        is_judged = self.is_past and len(percents) >= LEAST_S
        return percents[-int(WINDOW_S) :] if is_judged else percents[:0]


def no_progress(context: MonitorContext) -> RuleHit | None:
    """GPUs that are busy all the time, and no rank has come out of a collective for long."""
    samples = context.at_work
    ages = [sample.doing.collective_age_s for sample in samples]
    # A cell without collectives has none to end.
    in_cell_s = [
        age
        for sample, age in zip(samples, ages, strict=True)
        if age is not None and age < sample.doing.cell_s
    ]
    if not in_cell_s or min(age for age in ages if age is not None) <= NO_PROGRESS_S:
        return None
    busy = {}
    for sample in samples:
        (values,) = context.history.window(sample.rank, NO_PROGRESS_S, "utilisation")
        if sample.gpu is not None and len(values) and not np.isnan(values).any():
            busy[sample.rank] = float(values.min())
    spinning = tuple(rank for rank, least in busy.items() if least >= SPINNING_PERCENT)
    if not spinning:
        return None
    readings = [read_of("gpu.memory_busy_percent")(s) for s in samples if s.rank in spinning]
    percents = [value for value in readings if value is not None]
    idle = f"; their memory is busy {max(percents):.0f} % of the time" if percents else ""
    gpus, are = ("GPUs", "are") if len(spinning) > 1 else ("GPU", "is")
    return RuleHit(
        f"the {gpus} of {ranks_phrase(spinning)} {are} busy "
        f"{min(busy[rank] for rank in spinning):.0f} % of the time, and no collective has ended on "
        f"any rank for {min(in_cell_s):.0f} s{idle}",
        spinning,
    )


def device_memory(context: MonitorContext) -> RuleHit | None:
    """A GPU's memory is nearly full."""
    full = [sample for sample in context.samples if (sample.device_part or 0.0) > FULL]
    worst = max(full, key=lambda sample: sample.device_part or 0.0, default=None)
    if worst is None or worst.gpu is None:
        return None
    used, total = worst.gpu.used_bytes or 0, worst.gpu.total_bytes or 0
    return RuleHit(
        f"{worst.device_part:.0%} of the GPU's memory is in use on rank {worst.rank} "
        f"({units.size(used)} of {units.size(total)})",
        tuple(sample.rank for sample in full),
    )


def host_memory(context: MonitorContext) -> RuleHit | None:
    """The host's memory, or the control group's, is nearly full."""
    full = [sample for sample in context.samples if (sample.host_part or 0.0) > FULL]
    worst = max(full, key=lambda sample: sample.host_part or 0.0, default=None)
    if worst is None or worst.usage is None:
        return None
    usage = worst.usage
    whose = "control group's limit" if usage.is_group else "machine's memory"
    return RuleHit(
        f"{worst.host_part:.0%} of the {whose} is in use on the host of rank {worst.rank} "
        f"({units.size(usage.host_used_bytes)} of {units.size(usage.host_limit_bytes)})",
        tuple(sample.rank for sample in full),
    )


def heat(context: MonitorContext) -> RuleHit | None:
    """A GPU is too hot, or its clocks are lowered by its hardware."""
    hot = {}
    for sample in context.samples:
        gpu = sample.gpu
        if gpu is None:
            continue
        slowed = sorted(SLOWED.intersection(gpu.throttled or ()))
        is_hot = gpu.throttled is None and (gpu.temperature_c or 0.0) > HOT_C
        if slowed or is_hot:
            lowered = f"clocks are lowered: {', '.join(slowed)}"
            why = lowered if slowed else "the driver gives no reason"
            heat_c = "" if gpu.temperature_c is None else f"{gpu.temperature_c:.0f} C, "
            hot[sample.rank] = f"rank {sample.rank}: {heat_c}{why}"
    return RuleHit("; ".join(hot.values()), tuple(hot)) if hot else None


def low_utilisation(context: MonitorContext) -> RuleHit | None:
    """Devices that do nothing for much of the time in which cells run."""
    means = context.utilisation()
    low = tuple(rank for rank, mean in means.items() if mean < LEAST_UTILISATION)
    if not low:
        return None
    worst = min(low, key=lambda rank: means[rank])
    has_gpu = any(sample.gpu is not None for sample in context.samples if sample.rank == worst)
    device = "the GPU" if has_gpu else "the share of the cores"
    return RuleHit(
        f"{device} of rank {worst} is busy {means[worst]:.0f} % of the time in its cell", low
    )


def imbalance(context: MonitorContext) -> RuleHit | None:
    """Ranks of one cell that differ."""
    means = context.utilisation()
    shares = {
        sample.rank: part for sample in context.at_work if (part := sample.device_part) is not None
    }
    both = (
        ("utilisation", means, "of the time"),
        ("device memory", {rank: 100 * part for rank, part in shares.items()}, "in use"),
    )
    for name, values, of in both:
        if len(values) < 2:
            continue
        least, most = min(values, key=lambda r: values[r]), max(values, key=lambda r: values[r])
        if values[most] - values[least] > MOST_APART:
            return RuleHit(
                f"{name}: rank {most} {values[most]:.0f} %, rank {least} {values[least]:.0f} % "
                f"{of}",
                (most, least),
            )
    return None


# What has to be acted on first, first.
RULES: tuple[Rule[MonitorContext], ...] = (
    Rule(
        "busy without progress",
        no_progress,
        "an NCCL collective that waits for a rank spins on the GPU, which looks busy and does "
        "nothing; one long computation without collectives looks the same",
        "%dist_status --stacks says where each rank is; an interrupt ends the cell",
    ),
    Rule(
        "host memory",
        host_memory,
        "when it is full, the system kills a process without warning, often a rank",
        "use fewer DataLoader workers, no datasets as Python lists, fewer ranks, or a larger limit",
    ),
    Rule(
        "device memory",
        device_memory,
        "the next larger batch, or a fragmented allocator, ends in an out-of-memory error",
        "use a smaller batch, --checkpoint, or a strategy that shards (%dist_plan says which fits)",
    ),
    Rule(
        "heat",
        heat,
        "a GPU that is too hot lowers its clocks, and every collective waits for the slowest one",
        "check cooling, fans and other jobs on the machine; the host's other GPUs show whether "
        "only this one is hot",
    ),
    Rule(
        "imbalance",
        imbalance,
        "all ranks meet in every step, so the most loaded one sets the pace of all",
        "give all ranks equal batches and lengths, and pipelines other cuts; %%dist_profile shows "
        "which rank the others wait for",
    ),
    Rule(
        "low utilisation",
        low_utilisation,
        "an idle device waits for data, for other ranks, or for Python to launch work",
        "%%dist_profile shows for which; larger batches and more DataLoader workers often help",
    ),
)


def findings(
    history: SampleHistory, samples: Sequence[Sample], *, is_past: bool = False
) -> tuple[Finding, ...]:
    """Apply `RULES`, in their order, to the newest samples of every rank.

    With `is_past` ranks that run no cell are judged by the utilisation in their last one.
    """
    context = MonitorContext(history, tuple(samples), is_past)
    return tuple(rule.finding(hit) for rule in RULES if (hit := rule.look(context)) is not None)
