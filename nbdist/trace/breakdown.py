"""Breakdown of a cell's time: shares, steps, the slowest rank, operations, traffic."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from nbdist.core import units
from nbdist.core.failures import ranks_phrase
from nbdist.core.units import shown_lines
from nbdist.strategy.footprint import CALLS
from nbdist.trace import intervals, straggler
from nbdist.trace.intervals import Integers
from nbdist.trace.match_collectives import match_collectives
from nbdist.trace.spans import Spans, common_steps, is_inside, spans
from nbdist.trace.trace import COMMUNICATION, KINDS, MARK, WAIT, Events, RankTrace, Trace


@dataclass(frozen=True, slots=True)
class RankBreakdown:
    """How one rank spent the time that is looked at: its whole steps, or all where there are none.

    compute + exposed + copy + data + idle = window: each nanosecond counts once, for the first
    of these that goes on then.

    Attributes:
        window_ns: How long that is.
        compute_ns: Something computes.
        exposed_ns: Communication, and nothing computes.
        copy_ns: Copies between host and device, or devices, and neither of these.
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
        name: The profiler's name.
        kind: Place in trace.trace.KINDS.
        count: Calls.
        self_ns: Their time without that of events inside them on the same lane.
        share: Of the self time of all operations; what only waits for others is none.
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
        group: The user's name of the group.
        size_bytes: Of one message: the whole that all ranks of the group make or get; the mean
            where a group has more than `SIZES` sizes, as tokens have that go to their experts.
        count: Calls of a rank per step (of all, where there are no steps).
        sent_bytes: Bytes that a rank sends for them per step on a ring (strategy.footprint.CALLS).
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
        cost_ns: Per step: how much sooner the others could have gone on; see `straggler.costs`.
        share: The same of a step's duration: 0.12 is "without it a step would be 12 % faster".
        late_steps: In how many steps it costs the others the most.
        spread_ns: How far apart the middle half of the steps is in what it costs.
        doubt: Why it may be chance and not this rank; empty where it is the rank.
    """

    rank: int
    cost_ns: int
    share: float
    late_steps: int
    spread_ns: int
    doubt: str = ""


@dataclass(frozen=True, slots=True)
class TimeBreakdown:
    """The numbers of a trace.

    Attributes:
        ranks: In rank order.
        step_ns: Median over steps of the longest duration on any rank; 0 without steps.
        slowest: None on one rank, or where nobody waits.
        operations: The most expensive first, at most `TOP`.
        traffic: The most bytes first.
        sent_bytes: Bytes that a rank sends per step (in all, without steps), over all its traffic.
        formula_bytes: The same by the strategy's formula; None where it is unknown.
        formula: The formula in words, a phrase each; empty where it is unknown.
        notes: Sentences on parts that the numbers leave out.
    """

    ranks: tuple[RankBreakdown, ...]
    step_ns: int
    slowest: Slowest | None
    operations: tuple[Operation, ...]
    traffic: tuple[Traffic, ...]
    sent_bytes: float
    formula_bytes: float | None = None
    formula: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


# Operations that are listed.
TOP = 12
# The most sizes of one collective in one group that are listed separately.
SIZES = 8
# A first step this much longer than the others is no measure of them.
FIRST_STEP = 1.5
# From fewer steps nothing can be said of their spread.
LEAST_STEPS = 3
# Beside those of strategy.footprint, of which ranks send nothing, or as much as of a broadcast.
_SENT = {"reduce": "broadcast", "gather": "broadcast", "scatter": "broadcast"}


def breakdown(trace: Trace) -> TimeBreakdown:
    """Say in numbers where the time of a recorded cell went.

    Only steps that all ranks have recorded are counted; without steps, all that was recorded.
    Ranks without a recording are left out, and named in the notes.
    """
    traces = [rank for rank in trace.ranks if len(rank.events)]
    n_steps = common_steps(trace)
    spans_of = [spans(rank, n_steps) for rank in traces]
    calls = match_collectives(traces)
    waited = straggler.waits(traces, calls)
    ranks = tuple(
        _rank(rank, rank_spans, waited.get(place), n_steps)
        for place, (rank, rank_spans) in enumerate(zip(traces, spans_of, strict=True))
    )
    # Each step is as long as on the rank that took longest.
    step_durations_ns = zip(*(rank.steps_ns for rank in ranks), strict=True)
    longest_ns = [max(durations_ns) for durations_ns in step_durations_ns]
    step_ns = int(np.median(longest_ns)) if longest_ns else 0
    traffic = _traffic(traces, spans_of, n_steps)
    return TimeBreakdown(
        ranks=ranks,
        step_ns=step_ns,
        slowest=_slowest(traces, ranks, straggler.costs(traces, calls, spans_of, n_steps), step_ns),
        operations=_operations(traces, spans_of),
        traffic=traffic,
        sent_bytes=sum(row.sent_bytes for row in traffic),
        formula_bytes=trace.formula_bytes,
        formula=trace.formula,
        notes=_notes(trace, [rank.steps_ns for rank in ranks]),
    )


def _rank(
    trace: RankTrace, rank_spans: Spans, waited: Integers | None, n_steps: int
) -> RankBreakdown:
    sets = [
        rank_spans.window,
        rank_spans.compute,
        rank_spans.communication,
        rank_spans.copy,
        rank_spans.data,
    ]
    cut, (inside, computes, communicates, copies, fetches) = intervals.pieces(sets)
    long_ns = cut[:, 1] - cut[:, 0]
    is_uncounted = inside.copy()
    parts_ns = []
    for going_on in (computes, communicates, copies, fetches):
        parts_ns.append(int(long_ns[is_uncounted & going_on].sum()))
        is_uncounted &= ~going_on
    waits = np.empty((0, 2), np.int64) if waited is None else waited
    compute_ns, exposed_ns, copy_ns, data_ns = parts_ns
    return RankBreakdown(
        rank=trace.rank,
        window_ns=intervals.length(rank_spans.window),
        compute_ns=compute_ns,
        exposed_ns=exposed_ns,
        copy_ns=copy_ns,
        data_ns=data_ns,
        idle_ns=int(long_ns[is_uncounted].sum()),
        overlap_ns=int(long_ns[inside & computes & communicates].sum()),
        waited_ns=intervals.length(intervals.intersection(rank_spans.exposed, waits)),
        steps_ns=tuple(step.end_ns - step.start_ns for step in trace.steps[:n_steps]),
    )


def _slowest(
    traces: Sequence[RankTrace],
    ranks: Sequence[RankBreakdown],
    costs: Mapping[int, Integers],
    step_ns: int,
) -> Slowest | None:
    totals_ns = {place: int(cost.sum()) for place, cost in costs.items()}
    place = max(totals_ns, key=lambda candidate: totals_ns[candidate], default=-1)
    whole_ns = step_ns or max((rank.window_ns for rank in ranks), default=0)
    if not totals_ns.get(place) or not whole_ns:
        return None
    others = [other for other in costs if other != place]
    margins_ns = costs[place] - np.max([0 * costs[place], *(costs[o] for o in others)], axis=0)
    # Of three steps these are the least and the most.
    low_ns = int(np.quantile(margins_ns, 0.25, method="lower"))
    spread_ns = int(np.quantile(margins_ns, 0.75, method="higher")) - low_ns
    late_steps, n_steps = int((margins_ns > 0).sum()), len(margins_ns)
    usual = f"{late_steps} of {n_steps} steps (spread {units.duration(spread_ns)})"
    doubts = (
        (straggler.share_cpus(traces), "this may be chance, as the ranks share cores"),
        (n_steps < LEAST_STEPS, f"this may be chance: fewer than {LEAST_STEPS} steps"),
        (
            2 * max((totals_ns[other] for other in others), default=0) >= totals_ns[place],
            "others cost at least half as much",
        ),
        (low_ns <= spread_ns, f"this may be chance: last in {usual}"),
    )
    cost_ns = totals_ns[place] // n_steps
    return Slowest(
        ranks[place].rank, cost_ns, cost_ns / whole_ns, late_steps, spread_ns,
        doubt=next((text for is_so, text in doubts if is_so), ""),
    )  # fmt: skip


def _operations(traces: Sequence[RankTrace], spans_of: Sequence[Spans]) -> tuple[Operation, ...]:
    counts: Counter[tuple[str, int]] = Counter()
    times_ns: Counter[tuple[str, int]] = Counter()
    for trace, rank_spans in zip(traces, spans_of, strict=True):
        events = trace.events
        chosen = is_inside(trace, rank_spans) & ~np.isin(events.kind, (MARK, WAIT))
        codes = events.name[chosen].astype(np.int64) * len(KINDS) + events.kind[chosen]
        size = len(trace.names) * len(KINDS)
        counted = np.bincount(codes, minlength=size)
        spent_ns = np.bincount(codes, self_ns(events)[chosen].astype(np.float64), minlength=size)
        for code in np.flatnonzero(counted):
            key = (trace.names[code // len(KINDS)], int(code % len(KINDS)))
            counts[key] += int(counted[code])
            times_ns[key] += int(spent_ns[code])
    whole_ns = max(1, sum(times_ns.values()))
    return tuple(
        Operation(name, kind, counts[name, kind], spent, spent / whole_ns)
        for (name, kind), spent in times_ns.most_common(TOP)
    )


def self_ns(events: Events) -> Integers:
    """The duration of each event without that of events right inside it on its lane."""
    remaining_ns = events.duration_ns.copy()
    for lane in np.unique(events.lane):
        on = np.flatnonzero(events.lane == lane)
        depth = events.depth[on]
        for level in range(1, int(depth.max(initial=0)) + 1):
            inner, outer = on[depth == level], on[depth == level - 1]
            around = np.searchsorted(outer, inner) - 1
            has_outer = around >= 0
            np.subtract.at(
                remaining_ns, outer[around[has_outer]], events.duration_ns[inner[has_outer]]
            )
    return np.maximum(remaining_ns, 0)


def _traffic(
    traces: Sequence[RankTrace], spans_of: Sequence[Spans], n_steps: int
) -> tuple[Traffic, ...]:
    calls: dict[tuple[str, str, int], list[tuple[int, int]]] = defaultdict(list)
    for trace, rank_spans in zip(traces, spans_of, strict=True):
        events = trace.events
        for place in np.flatnonzero(is_inside(trace, rank_spans) & (events.kind == COMMUNICATION)):
            group = int(events.group[place])
            name = trace.names[events.name[place]]
            n_ranks = len(trace.group_ranks[group]) if group >= 0 else len(traces)
            call = int(events.size_bytes[place]), int(events.duration_ns[place])
            calls[name, trace.groups[group] if group >= 0 else "", n_ranks].append(call)
    per = max(1, n_steps) * max(1, len(traces))
    rows = [
        Traffic(
            name, group, sum(sizes) // len(sizes), len(alike) / per,
            sent_share(name, n_ranks) * sum(sizes) / per, int(np.median(durations_ns)),
        )
        for (name, group, n_ranks), of_group in calls.items()
        for alike in _by_size(of_group)
        for sizes, durations_ns in [tuple(zip(*alike, strict=True))]
    ]  # fmt: skip
    return tuple(sorted(rows, key=lambda row: (-row.sent_bytes, row.name, row.size_bytes)))


def _by_size(calls: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Calls of (size, duration), those of one size together; all of them if sizes are many."""
    by_size: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for call in calls:
        by_size[call[0]].append(call)
    return list(by_size.values()) if len(by_size) <= SIZES else [list(calls)]


def sent_share(name: str, n: int) -> float:
    """The share of a collective's message that one of n ranks sends, on a ring."""
    call = CALLS.get(_SENT.get(name, name))
    return call.share(n) if call is not None else 0.0


def _notes(trace: Trace, steps_ns: Sequence[Sequence[int]]) -> tuple[str, ...]:
    """Notes to read before the numbers; `steps_ns` are the steps that count."""
    traces = [rank for rank in trace.ranks if len(rank.events)]
    parts = [
        trace.notes,
        (f"Rank {rank.rank}: {rank.problem}" for rank in trace.ranks if rank.problem),
    ]
    if traces:
        names = {
            trace.names[name]
            for trace in traces
            for name in np.unique(trace.events.name[trace.events.kind == COMMUNICATION])
        }
        of_machine = chain(
            _host_clock_note(traces), _first_step_note(steps_ns), _cpu_notes(traces, names)
        )
        parts += [_step_notes(traces), () if names else ("No collective was recorded.",)]
        parts += [shown_lines(of_machine)]
    return tuple(chain.from_iterable(parts))


def _step_notes(traces: Sequence[RankTrace]) -> Iterator[str]:
    counts = {trace.rank: len(trace.steps) for trace in traces}
    without_steps = [rank for rank, count in counts.items() if not count]
    if without_steps:
        where = "" if len(without_steps) == len(counts) else f" on {ranks_phrase(without_steps)}"
        yield (
            f"No step ended{where}, so the numbers cover the whole recording. A step ends "
            "at optimizer.step(), or where the cell calls nbdist.step()."
        )
    elif len(set(counts.values())) > 1:
        numbers = ", ".join(f"rank {rank}: {count}" for rank, count in counts.items())
        first = min(counts.values())
        yield f"Ranks recorded different step counts ({numbers}); the first {first} are counted."


def _host_clock_note(traces: Sequence[RankTrace]) -> Iterator[str]:
    by_host = [
        trace.rank
        for trace in traces
        if trace.steps and trace.device != "cpu" and not trace.has_device_steps
    ]
    if by_host:
        yield (
            f"Steps are cut by the host's clock on {ranks_phrase(by_host)}, as the trace does not "
            "tell when the GPU came to each: a step is when its work was launched."
        )


def _first_step_note(steps_ns: Sequence[Sequence[int]]) -> Iterator[str]:
    later_ns = [ns for each in steps_ns for ns in each[1:]]
    first_ns = max((each[0] for each in steps_ns if each), default=0)
    if later_ns and first_ns > FIRST_STEP * np.median(later_ns):
        yield (
            f"The first step took {first_ns / np.median(later_ns):.1f} times as long as the "
            "others: it allocates memory and selects kernels. --steps leaves it out."
        )


def _cpu_notes(traces: Sequence[RankTrace], names: Collection[str]) -> Iterator[str]:
    if all(trace.device != "cpu" for trace in traces):
        return
    yield "On a CPU, idle time includes Python between two operators."
    if "reduce-scatter" in names:
        yield "Gloo runs a reduce-scatter as an all-reduce, which sends twice the bytes shown."
