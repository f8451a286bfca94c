"""Which rank the others wait for, and what that costs."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np

from nbdist.trace import intervals
from nbdist.trace.intervals import Integers
from nbdist.trace.match_collectives import MatchedCollective
from nbdist.trace.spans import Spans
from nbdist.trace.trace import RankTrace


def waits(traces: Sequence[RankTrace], calls: Sequence[MatchedCollective]) -> dict[int, Integers]:
    """Place of a rank -> when it was in a collective that another had not entered yet."""
    parts: dict[int, list[Integers]] = defaultdict(list)
    for collective in calls:
        starts = _starts(traces, collective)
        last = starts.max(axis=0)
        for place, rank_starts in zip(collective.ranks, starts, strict=True):
            parts[place].append(intervals.union(rank_starts, last))
    return {place: intervals.union_of(sets) for place, sets in parts.items()}


def costs(
    traces: Sequence[RankTrace],
    calls: Sequence[MatchedCollective],
    spans: Sequence[Spans],
    n_steps: int,
) -> dict[int, Integers]:
    """Place of a rank -> how much sooner the others would have been through each step without it.

    In ns; without steps one number, of all that was recorded.

    A rank that enters a collective last costs the others the time from the last of *them* to its
    own arrival, and only as far as they do nothing else then:

        cost(s) = min over others r of | U_k [max(a_rk, m_k), a_sk]  &  exposed_r |

    over the collectives k that s entered last; a_rk is when r entered, m_k when the last rank but s
    did, exposed_r when r communicates and computes nothing. The union counts time once where
    several collectives wait at once; the minimum is over the ranks that meet s anywhere, as the
    one that gains least still sets the pace.
    """
    lost: dict[int, dict[int, list[Integers]]] = defaultdict(lambda: defaultdict(list))
    for collective in calls:
        starts = _starts(traces, collective)
        ordered = np.sort(starts, axis=0)
        last, last_but_one = ordered[-1], ordered[-2]
        last_number = np.argmax(starts, axis=0)
        for number, late in enumerate(collective.ranks):
            is_late = last_number == number
            for other, rank_starts in zip(collective.ranks, starts, strict=True):
                if other != late:
                    begin = np.maximum(rank_starts, last_but_one)[is_late]
                    lost[late][other].append(intervals.union(begin, last[is_late]))
    exposed = {
        place: spans[place].exposed
        for place in {place for collective in calls for place in collective.ranks}
    }
    return {
        late: min(
            (
                _by_step(
                    intervals.intersection(intervals.union_of(sets), exposed[other]),
                    traces[other],
                    n_steps,
                )
                for other, sets in others.items()
            ),
            key=np.sum,
        )
        for late, others in lost.items()
    }


def share_cpus(traces: Sequence[RankTrace]) -> bool:
    """Whether ranks of one host have to take turns: more of them than the CPUs they may use."""
    ranks = Counter((trace.host, trace.cpus) for trace in traces if trace.cpus)
    return any(
        sum(n for (host, cpus), n in ranks.items() if host == of and set(cpus) <= set(all_cpus))
        > len(all_cpus)
        for of, all_cpus in ranks
    )


def _by_step(waits: Integers, trace: RankTrace, n_steps: int) -> Integers:
    """How long these intervals are in each step of a rank; in all where there are no steps."""
    if not n_steps:
        return np.array([intervals.length(waits)])
    times = np.array([(step.start_ns, step.end_ns) for step in trace.steps[:n_steps]])
    begun = np.searchsorted(waits[:, 0], times)
    whole = np.concatenate([[0], np.cumsum(waits[:, 1] - waits[:, 0])])[begun]
    ends = np.concatenate([[times.min()], waits[:, 1]])[begun]
    covered: Integers = whole - np.maximum(ends - times, 0)
    return covered[:, 1] - covered[:, 0]


def _starts(traces: Sequence[RankTrace], calls: MatchedCollective) -> Integers:
    """(rank, call): when it was entered."""
    entries = zip(calls.ranks, calls.events, strict=True)
    return np.stack([traces[place].events.start_ns[events] for place, events in entries])
