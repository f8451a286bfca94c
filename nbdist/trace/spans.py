"""When something of each kind went on, on one rank."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nbdist.trace import intervals
from nbdist.trace.intervals import Integers
from nbdist.trace.trace import COMMUNICATION, COMPUTE, COPY, DATA, WAIT, RankTrace, Trace


@dataclass(frozen=True, slots=True)
class Spans:
    """Disjoint intervals in order, (n, 2), inside the window.

    Attributes:
        window: Where it begins and ends: one interval.
        compute: Without what a lane only waits for inside an operator.
        communication: Collectives under way.
        copy: Copies between host and device.
        data: The next batch is being fetched.
    """

    window: Integers
    compute: Integers
    communication: Integers
    copy: Integers
    data: Integers

    @property
    def exposed(self) -> Integers:
        """Communication while nothing computes."""
        return intervals.difference(self.communication, self.compute)


def common_steps(trace: Trace) -> int:
    """How many steps all ranks have recorded that have recorded anything."""
    return min((len(rank.steps) for rank in trace.ranks if len(rank.events)), default=0)


def spans(trace: RankTrace, n_steps: int) -> Spans:
    """What went on when, within the first steps of a rank; within everything where that is 0."""
    window = window_of(trace, n_steps)
    return Spans(
        window,
        intervals.intersection(_computing(trace), window),
        *(
            intervals.intersection(_of_kind(trace, kind), window)
            for kind in (COMMUNICATION, COPY, DATA)
        ),
    )


def window_of(trace: RankTrace, n_steps: int) -> Integers:
    """From the first step's start to the last one's end; all that was recorded without steps."""
    events = trace.events
    if n_steps:
        return np.array([[trace.steps[0].start_ns, trace.steps[n_steps - 1].end_ns]])
    if not len(events):
        return np.empty((0, 2), np.int64)
    return np.array([[events.start_ns.min(), (events.start_ns + events.duration_ns).max()]])


def _of_kind(trace: RankTrace, kind: int, lane: int | None = None) -> Integers:
    events = trace.events
    chosen = events.kind == kind
    if lane is not None:
        chosen &= events.lane == lane
    starts = events.start_ns[chosen]
    return intervals.union(starts, starts + events.duration_ns[chosen])


def _computing(trace: RankTrace) -> Integers:
    """A lane that waits inside an operator does not compute meanwhile."""
    waiting = np.unique(trace.events.lane[trace.events.kind == WAIT])
    lanes = np.unique(trace.events.lane[trace.events.kind == COMPUTE])
    parts = []
    for lane in lanes:
        computes = _of_kind(trace, COMPUTE, lane)
        is_waiting = lane in waiting
        parts.append(
            intervals.difference(computes, _of_kind(trace, WAIT, lane)) if is_waiting else computes
        )
    return intervals.union_of(parts)
