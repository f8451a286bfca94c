"""What each rule of `memory.finding_records` looks for on a rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from nbdist.core.units import size
from nbdist.memory.call_site import written
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
# Of the device, what the allocator holds. Other processes and libraries need the rest.
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
class Scene:
    """One rank, and what is known of all.

    Attributes:
        snapshot: All of it.
        peaks: Of all ranks that have blocks.
        rank: The rank's own memory.
        own: Its peak.
    """

    snapshot: Snapshot
    peaks: tuple[RankPeak, ...]
    rank: RankMemory
    own: RankPeak

    def part(self, size_bytes: float) -> float:
        """Bytes as a share of the rank's peak."""
        return size_bytes / max(1, self.own.size_bytes)

    @property
    def whole(self) -> str:
        """What shares are of, as people read it."""
        if self.own.phase:
            return f"the peak of rank {self.own.rank}"
        return f"what rank {self.own.rank} has in use"

    def of_category(self, category: int) -> int:
        """Bytes at the peak."""
        return self.own.parts[category].total


@dataclass(frozen=True, slots=True)
class Hit:
    """A rule has found something on a rank.

    Attributes:
        found: What, with its numbers, as a clause.
        share: Of the rank's peak, what could be given back.
        places: Lines to look at, the most bytes first.
    """

    found: str
    share: float
    places: tuple[str, ...] = ()


Look = Callable[[Scene], Hit | None]


def near_limit(scene: Scene) -> Hit | None:
    """An allocation failed, or the next larger batch will."""
    own, failures = scene.own, scene.rank.failures
    if failures:
        last = failures[-1]
        asked = f"{len(failures)} {'allocation' if len(failures) == 1 else 'allocations'} failed"
        free = f", {size(last.free_bytes)} were free" if last.free_bytes >= 0 else ""
        return Hit(f"{asked} on rank {own.rank}, the last of {size(last.size_bytes)}{free}", 1.0)
    if not own.limit_bytes or own.need_bytes <= NEAR_LIMIT * own.limit_bytes:
        return None
    return Hit(
        f"rank {own.rank} needs {size(own.need_bytes)} of {size(own.limit_bytes)} "
        f"({own.need_bytes / own.limit_bytes:.0%})",
        own.need_bytes / own.limit_bytes,
    )


def fragmented(scene: Scene) -> Hit | None:
    """The allocator holds much that no block uses, even at the peak."""
    own = scene.own
    if own.unused_bytes <= max(FRAGMENTED * own.reserved_bytes, LEAST_BYTES):
        return None
    return Hit(
        f"at the peak rank {own.rank} holds {size(own.reserved_bytes)}, of which "
        f"{size(own.unused_bytes)} ({own.unused_bytes / own.reserved_bytes:.0%}) are in no block",
        scene.part(own.unused_bytes),
    )


def activations(scene: Scene) -> Hit | None:
    """What forward keeps for backward is most of the peak."""
    size_bytes = scene.of_category(ACTIVATION)
    if scene.part(size_bytes) <= MOST_ACTIVATIONS or size_bytes <= LEAST_BYTES:
        return None
    lines = [one for one in scene.own.sites if one.category == ACTIVATION]
    return Hit(
        f"activations are {scene.part(size_bytes):.0%} of {scene.whole} "
        f"({size(size_bytes)} of {size(scene.own.size_bytes)})",
        scene.part(size_bytes),
        _places(lines),
    )


def optimizer_state(scene: Scene) -> Hit | None:
    """Every rank keeps the whole optimizer's state, and that is much."""
    n_ranks = len(scene.peaks)
    size_bytes = scene.of_category(OPTIMIZER)
    is_split = scene.snapshot.strategy.replace(",", " ").split()[:1]
    if n_ranks < 2 or any(name in _SPLIT for name in is_split) or size_bytes <= LEAST_BYTES:
        return None
    if scene.part(size_bytes) <= MOST_OPTIMIZER:
        return None
    gives = size_bytes - -(-size_bytes // n_ranks)
    rest = sum(scene.of_category(one) for one in (PARAMETER, GRADIENT))
    more = rest - -(-rest // n_ranks)
    return Hit(
        f"the optimizer's state is {scene.part(size_bytes):.0%} of {scene.whole} "
        f"({size(size_bytes)}); split over {n_ranks} ranks it would be {size(gives)} less, "
        f"and parameters and gradients {size(more)} less",
        scene.part(gives),
    )


def imbalance(scene: Scene) -> Hit | None:
    """One rank needs more than the others do, and sets what all can do."""
    sizes = [one.size_bytes for one in scene.peaks]
    own = scene.own
    middle = float(np.median(sizes))
    more = own.size_bytes - middle
    if len(sizes) < 2 or own.size_bytes < max(sizes) or more <= LEAST_BYTES:
        return None
    if more <= IMBALANCE * middle:
        return None
    return Hit(
        f"rank {own.rank} needs {size(own.size_bytes)}, the middle of all ranks is "
        f"{size(middle)}{_has_more(scene)}",
        scene.part(more),
    )


def growth(scene: Scene) -> Hit | None:
    """What is in use at the ends of successive steps becomes more and more."""
    rank = scene.rank
    ends_ns = rank.step_ends_ns[WARM_STEPS:]
    if len(ends_ns) < LEAST_STEPS:
        return None
    sizes = [int(rank.blocks.size_bytes[is_in_use(rank.blocks, one)].sum()) for one in ends_ns]
    gained = sizes[-1] - sizes[0]
    if gained <= max(GROWTH * scene.own.size_bytes, LEAST_BYTES) or min(np.diff(sizes)) <= 0:
        return None
    per_step = gained / (len(sizes) - 1)
    return Hit(
        f"at the end of each step rank {rank.rank} has {size(per_step)} more in use than at "
        f"the end of the one before ({size(sizes[0])} after step {WARM_STEPS}, "
        f"{size(sizes[-1])} after step {WARM_STEPS + len(sizes) - 1})",
        scene.part(gained),
        _places(_grown(rank, ends_ns[0], ends_ns[-1])),
    )


def stepping(scene: Scene) -> Hit | None:
    """The peak is in the optimizer's step, where copies for all parameters at once are made."""
    own = scene.own
    size_bytes = scene.of_category(TEMPORARY)
    if own.phase != STEPPING or scene.part(size_bytes) <= STEPPING_COPIES:
        return None
    if size_bytes <= LEAST_BYTES:
        return None
    return Hit(
        f"the peak of rank {own.rank} is in the optimizer's step, with {size(size_bytes)} "
        f"({scene.part(size_bytes):.0%}) that are freed within it",
        scene.part(size_bytes),
        _places([one for one in own.sites if one.category == TEMPORARY]),
    )


def _places(found: Sequence[Site]) -> tuple[str, ...]:
    """The lines that allocated the most, each once, whatever operators they called."""
    sums: dict[str, list[int]] = {}
    for one in found:
        lines = [written(line) for line in (one.own, one.via) if line]
        if lines:
            each = sums.setdefault(" via ".join(lines), [0, 0])
            each[0] += one.size_bytes
            each[1] += one.count
    most = sorted(sums, key=lambda line: -sums[line][0])[:MOST_PLACES]
    return tuple(f"{line} ({size(sums[line][0])}, {_blocks(sums[line][1])})" for line in most)


def _blocks(count: int) -> str:
    return "1 block" if count == 1 else f"{count} blocks"


def _grown(rank: RankMemory, first_ns: int, last_ns: int) -> list[Site]:
    """What each line has more in use at the later moment, the most bytes first."""
    blocks = rank.blocks
    was = {
        replace(one, count=0, size_bytes=0): one
        for one in sites(rank, is_in_use(blocks, first_ns), len(blocks))
    }
    more = []
    for one in sites(rank, is_in_use(blocks, last_ns), len(blocks)):
        before = was.get(replace(one, count=0, size_bytes=0))
        count, size_bytes = (before.count, before.size_bytes) if before else (0, 0)
        grown = replace(one, count=one.count - count, size_bytes=one.size_bytes - size_bytes)
        more += [grown] if grown.size_bytes > 0 else []
    return sorted(more, key=lambda one: -one.size_bytes)


def _has_more(scene: Scene) -> str:
    """In which category the rank has most more than the others."""
    others = [one for one in scene.peaks if one.rank != scene.own.rank]
    more = [
        scene.own.parts[at].total - float(np.median([one.parts[at].total for one in others]))
        for at in range(len(CATEGORIES))
    ]
    at = int(np.argmax(more))
    return f"; it has {size(more[at])} more of {CATEGORIES[at]}" if more[at] > 0 else ""
