"""Where the time of a recorded cell went: shares, steps, the slowest rank, operations, traffic."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RankShares:
    """How one rank spent the time that is looked at: its whole steps, or all where there are none.

    compute + exposed + copy + data + idle = window: each nanosecond counts once, for the first
    of these that goes on then.

    Attributes:
        rank: Whose.
        window_ns: How long that is.
        compute_ns: Something computes.
        exposed_ns: Communication, and nothing computes.
        copy_ns: Copies between host and device, and neither of these.
        data_ns: The next batch is being fetched, and nothing of these.
        idle_ns: Nothing of these.
        overlap_ns: Communication while something computes; a part of compute_ns.
        waited_ns: The part of exposed_ns before the last rank of a collective had come.
        steps_ns: Duration of each step, in order.
    """

    rank: int
    window_ns: int
    compute_ns: int
    exposed_ns: int
    copy_ns: int
    data_ns: int
    idle_ns: int
    overlap_ns: int
    waited_ns: int
    steps_ns: tuple[int, ...]

    @property
    def communication_ns(self) -> int:
        """Collectives under way, whether something computes meanwhile or not."""
        return self.exposed_ns + self.overlap_ns


@dataclass(frozen=True, slots=True)
class Operation:
    """All calls of one name on all ranks.

    Attributes:
        name: As the profiler calls it.
        kind: Place in core.trace.KINDS.
        count: Calls.
        self_ns: Their time without that of events inside them on the same lane.
        share: Of the self time of all that is not a mark.
    """

    name: str
    kind: int
    count: int
    self_ns: int
    share: float


@dataclass(frozen=True, slots=True)
class Traffic:
    """One collective of one size in one group, per rank and step.

    Attributes:
        name: "all-reduce".
        group: As the user calls it.
        size_bytes: Of one message: the whole that all ranks of the group make or get.
        count: Calls of a rank per step (of all, where there are no steps).
        sent_bytes: What a rank sends for them per step on a ring (core.footprint.CALLS).
        median_ns: Half of the calls took less, the wait for the last rank included.
    """

    name: str
    group: str
    size_bytes: int
    count: float
    sent_bytes: float
    median_ns: int


@dataclass(frozen=True, slots=True)
class Slowest:
    """The rank for which the others wait the longest.

    Attributes:
        rank: Which.
        cost_ns: Per step: how much sooner the others could have gone on; see `slowest`.
        share: The same of a step's duration: 0.12 is "without it a step would be 12 % faster".
        is_alone: Whether no other rank costs half as much, so that it is this rank and not chance.
    """

    rank: int
    cost_ns: int
    share: float
    is_alone: bool


@dataclass(frozen=True, slots=True)
class Shares:
    """What a trace says in numbers.

    Attributes:
        ranks: In rank order.
        step_ns: Median over steps of the longest duration on any rank; 0 without steps.
        slowest: None on one rank, or where nobody waits.
        operations: The most expensive first, at most `TOP`.
        traffic: The most bytes first.
        sent_bytes: What a rank sends per step (of all, without steps), over all its traffic.
        formula_bytes: What the strategy's formula gives for the same; None where it is unknown.
        formula: The formula in words, a phrase each; empty where it is unknown.
        notes: What the numbers leave out, as sentences.
    """

    ranks: tuple[RankShares, ...]
    step_ns: int
    slowest: Slowest | None
    operations: tuple[Operation, ...]
    traffic: tuple[Traffic, ...]
    sent_bytes: float
    formula_bytes: float | None = None
    formula: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
