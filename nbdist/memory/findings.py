"""Rules that find why ranks need so much memory: the finding, its reason, and a remedy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from nbdist.core.finding import Finding, Rule, RuleHit, on_ranks
from nbdist.core.units import size
from nbdist.memory.call_site import frame_text
from nbdist.memory.peak import RankPeak, Site, sites
from nbdist.memory.snapshot import (
    ACTIVATION,
    CATEGORIES,
    GRADIENT,
    OPTIMIZER,
    PARAMETER,
    STEPPING,
    TEMPORARY,
    RankMemory,
    Snapshot,
)
from nbdist.memory.timeline import is_in_use

# Held by the allocator and in no block. It rounds blocks up and keeps some pieces in any program.
FRAGMENTED = 0.2
# Below this no remedy is worth a line of code.
LEAST_BYTES = 1_000_000
# Of the peak.
MOST_ACTIVATIONS = 0.5
MOST_OPTIMIZER = 1 / 3
STEPPING_COPIES = 0.1
# How much more than the middle of all ranks one rank needs.
IMBALANCE = 0.15
# The allocator's share of the device. Other processes and libraries need the rest.
NEAR_LIMIT = 0.9
# Steps whose ends are compared; in the first two the optimizer makes its state, DDP its buckets.
WARM_STEPS = 2
LEAST_STEPS = 3
# Of the peak, over all compared steps.
GROWTH = 0.01
# Lines that a finding shows.
MOST_PLACES = 3
_SPLIT = ("fsdp", "fsdp1", "zero1", "deepspeed")


@dataclass(frozen=True, slots=True)
class MemoryContext:
    """The input of a rule: one rank's memory, and the peaks of all ranks.

    Attributes:
        snapshot: The snapshot of all ranks.
        peaks: The peaks of all ranks that have blocks.
        rank, peak: The rank's own memory, and its peak.
    """

    snapshot: Snapshot
    peaks: tuple[RankPeak, ...]
    rank: RankMemory
    peak: RankPeak

    def part(self, size_bytes: float) -> float:
        """Bytes as a share of the rank's peak."""
        return size_bytes / max(1, self.peak.size_bytes)

    @property
    def whole(self) -> str:
        """Name of the whole that shares are of, as people read it."""
        if self.peak.phase:
            return f"the peak of rank {self.peak.rank}"
        return f"what rank {self.peak.rank} has in use"

    def of_category(self, category: int) -> int:
        """Bytes at the peak."""
        return self.peak.parts[category].total


def near_limit(context: MemoryContext) -> RuleHit | None:
    """An allocation failed, or the next larger batch will."""
    peak, failures = context.peak, context.rank.failures
    if failures:
        last = failures[-1]
        asked = f"{len(failures)} {'allocation' if len(failures) == 1 else 'allocations'} failed"
        free = f" with {size(last.free_bytes)} free" if last.free_bytes >= 0 else ""
        return RuleHit(
            f"{asked} on rank {peak.rank}; the last requested {size(last.size_bytes)}{free}",
            share=1.0,
        )
    if not peak.limit_bytes or peak.need_bytes <= NEAR_LIMIT * peak.limit_bytes:
        return None
    return RuleHit(
        f"rank {peak.rank} needs {size(peak.need_bytes)} of {size(peak.limit_bytes)} "
        f"({peak.need_bytes / peak.limit_bytes:.0%})",
        share=peak.need_bytes / peak.limit_bytes,
    )


def fragmented(context: MemoryContext) -> RuleHit | None:
    """The allocator holds much that no block uses, even at the peak."""
    peak = context.peak
    if peak.unused_bytes <= max(FRAGMENTED * peak.reserved_bytes, LEAST_BYTES):
        return None
    return RuleHit(
        f"at its peak rank {peak.rank} holds {size(peak.reserved_bytes)}, of which "
        f"{size(peak.unused_bytes)} ({peak.unused_bytes / peak.reserved_bytes:.0%}) is unused",
        share=context.part(peak.unused_bytes),
    )


def activations(context: MemoryContext) -> RuleHit | None:
    """Tensors that forward keeps for backward are most of the peak."""
    size_bytes = context.of_category(ACTIVATION)
    if context.part(size_bytes) <= MOST_ACTIVATIONS or size_bytes <= LEAST_BYTES:
        return None
    lines = [site for site in context.peak.sites if site.category == ACTIVATION]
    return RuleHit(
        f"activations are {context.part(size_bytes):.0%} of {context.whole} "
        f"({size(size_bytes)} of {size(context.peak.size_bytes)})",
        share=context.part(size_bytes),
        places=_places(lines),
    )


def optimizer_state(context: MemoryContext) -> RuleHit | None:
    """Every rank keeps the whole optimizer's state, and that is much."""
    n_ranks = len(context.peaks)
    size_bytes = context.of_category(OPTIMIZER)
    is_split = context.snapshot.strategy.replace(",", " ").split()[:1]
    if n_ranks < 2 or any(name in _SPLIT for name in is_split) or size_bytes <= LEAST_BYTES:
        return None
    if context.part(size_bytes) <= MOST_OPTIMIZER:
        return None
    gives = size_bytes - -(-size_bytes // n_ranks)
    rest = sum(context.of_category(category) for category in (PARAMETER, GRADIENT))
    more = rest - -(-rest // n_ranks)
    return RuleHit(
        f"optimizer state is {context.part(size_bytes):.0%} of {context.whole} "
        f"({size(size_bytes)}); sharded over {n_ranks} ranks it would need {size(gives)} less, "
        f"and parameters and gradients {size(more)} less",
        share=context.part(gives),
    )


def imbalance(context: MemoryContext) -> RuleHit | None:
    """One rank needs more than the others do, and sets what all can do."""
    sizes = [peak.size_bytes for peak in context.peaks]
    peak = context.peak
    middle = float(np.median(sizes))
    more = peak.size_bytes - middle
    if len(sizes) < 2 or peak.size_bytes < max(sizes) or more <= LEAST_BYTES:
        return None
    if more <= IMBALANCE * middle:
        return None
    return RuleHit(
        f"rank {peak.rank} needs {size(peak.size_bytes)}, the median rank "
        f"{size(middle)}{_has_more(context)}",
        share=context.part(more),
    )


def growth(context: MemoryContext) -> RuleHit | None:
    """The memory in use at the ends of successive steps becomes more and more."""
    rank = context.rank
    ends_ns = rank.step_ends_ns[WARM_STEPS:]
    if len(ends_ns) < LEAST_STEPS:
        return None
    sizes = [
        int(rank.blocks.size_bytes[is_in_use(rank.blocks, end_ns)].sum()) for end_ns in ends_ns
    ]
    gained = sizes[-1] - sizes[0]
    if gained <= max(GROWTH * context.peak.size_bytes, LEAST_BYTES) or min(np.diff(sizes)) <= 0:
        return None
    per_step = gained / (len(sizes) - 1)
    return RuleHit(
        f"each step leaves {size(per_step)} more in use on rank {rank.rank} "
        f"({size(sizes[0])} after step {WARM_STEPS}, "
        f"{size(sizes[-1])} after step {WARM_STEPS + len(sizes) - 1})",
        share=context.part(gained),
        places=_places(_growth_sites(rank, ends_ns[0], ends_ns[-1])),
    )


def stepping(context: MemoryContext) -> RuleHit | None:
    """The peak is in the optimizer's step, where copies for all parameters at once are made."""
    peak = context.peak
    size_bytes = context.of_category(TEMPORARY)
    if peak.phase != STEPPING or context.part(size_bytes) <= STEPPING_COPIES:
        return None
    if size_bytes <= LEAST_BYTES:
        return None
    return RuleHit(
        f"the peak of rank {peak.rank} is in the optimizer's step, with {size(size_bytes)} "
        f"({context.part(size_bytes):.0%}) that are freed within it",
        share=context.part(size_bytes),
        places=_places([site for site in peak.sites if site.category == TEMPORARY]),
    )


def _places(sites: Sequence[Site]) -> tuple[str, ...]:
    """The lines that allocated the most, each once, whatever operators they called."""
    sums: dict[str, list[int]] = {}
    for site in sites:
        lines = [frame_text(line) for line in (site.line, site.via) if line]
        if lines:
            each = sums.setdefault(" via ".join(lines), [0, 0])
            each[0] += site.size_bytes
            each[1] += site.count
    most = sorted(sums.items(), key=lambda item: -item[1][0])[:MOST_PLACES]
    return tuple(
        f"{line} ({size(size_bytes)}, {count} {'block' if count == 1 else 'blocks'})"
        for line, (size_bytes, count) in most
    )


def _growth_sites(rank: RankMemory, first_ns: int, last_ns: int) -> list[Site]:
    """The growth of each line up to the later moment, the most bytes first."""
    blocks = rank.blocks
    was = {
        replace(site, count=0, size_bytes=0): site
        for site in sites(rank, is_in_use(blocks, first_ns), len(blocks))
    }
    more = []
    for site in sites(rank, is_in_use(blocks, last_ns), len(blocks)):
        before = was.get(replace(site, count=0, size_bytes=0))
        count, size_bytes = (before.count, before.size_bytes) if before else (0, 0)
        grown = replace(site, count=site.count - count, size_bytes=site.size_bytes - size_bytes)
        more += [grown] if grown.size_bytes > 0 else []
    return sorted(more, key=lambda site: -site.size_bytes)


def _has_more(context: MemoryContext) -> str:
    """In which category the rank has most more than the others."""
    others = [peak for peak in context.peaks if peak.rank != context.peak.rank]
    more = [
        context.peak.parts[at].total - float(np.median([peak.parts[at].total for peak in others]))
        for at in range(len(CATEGORIES))
    ]
    at = int(np.argmax(more))
    return f"; it has {size(more[at])} more of {CATEGORIES[at]}" if more[at] > 0 else ""


RULES = (
    Rule(
        "little memory left",
        near_limit,
        "a batch of another shape, another process or a library may not find enough memory",
        "use a smaller batch per rank with accelerator.accumulate, or a strategy that needs less: "
        "%dist_plan lists them",
    ),
    Rule(
        "fragmentation",
        fragmented,
        "the allocator holds free pieces that no later block fits into",
        "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True before the ranks start, so that "
        "segments can grow; use batches of one shape, so that freed pieces fit again",
    ),
    Rule(
        "activations",
        activations,
        "every block of the model keeps its activations from forward until its backward",
        "%dist_strategy ... --checkpoint full keeps only the blocks' inputs and recomputes the "
        "rest in backward; --bf16 halves them; so does half the batch",
    ),
    Rule(
        "optimizer state on every rank",
        optimizer_state,
        "each rank keeps the same state and updates all parameters with it",
        "%dist_strategy zero1 shards the optimizer state, %dist_strategy fsdp also parameters and "
        "gradients",
    ),
    Rule(
        "one rank needs more",
        imbalance,
        "the batch and the model have to fit on the rank that needs the most",
        "use batches of equal size and length on all ranks; under pp, stages of equal work; keep "
        "nothing on rank 0 alone (collected outputs, an evaluation)",
    ),
    Rule(
        "more with every step",
        growth,
        "something keeps memory of each step, until none is left",
        "look at the lines below: losses and outputs kept in a list keep their graph (use "
        "loss.item() or .detach()), and so do hooks, caches and retain_graph",
    ),
    Rule(
        "copies in the optimizer's step",
        stepping,
        "foreach updates all parameters at once and makes temporary copies of all of them",
        "use fused=True where the optimizer has it (%dist_strategy ... --fused), or "
        "foreach=False, which is slower",
    ),
)


def findings(snapshot: Snapshot, peaks: Sequence[RankPeak]) -> tuple[Finding, ...]:
    """Findings of `RULES`, the largest first; empty where no rule finds anything."""
    ranks = {rank.rank: rank for rank in snapshot.ranks}
    contexts = {
        peak.rank: MemoryContext(snapshot, tuple(peaks), ranks[peak.rank], peak) for peak in peaks
    }
    return on_ranks(RULES, contexts)
