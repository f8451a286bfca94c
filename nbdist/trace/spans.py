"""When something of each kind went on, on one rank."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nbdist.trace import intervals
from nbdist.trace.intervals import Integers
from nbdist.trace.trace import COMMUNICATION, COMPUTE, COPY, DATA, WAIT, RankTrace, Trace


@dataclass(frozen=True, slots=True)
class Spans:
    """Disjoint intervals in order, (n, 2), inside the window.

    Attributes:
        window: Where it begins and ends: one interval.
        compute: Computation, without waits of a lane inside an operator.
        communication: Collectives under way.
        copy: Copies between host and device, or between devices.
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
    """The spans within the first steps of a rank; within the whole recording where that is 0."""
    events, window = trace.events, np.empty((0, 2), np.int64)
    if n_steps:
        window = np.array([[trace.steps[0].start_ns, trace.steps[n_steps - 1].end_ns]])
    elif len(events):
        end_ns = (events.start_ns + events.duration_ns).max()
        window = np.array([[events.start_ns.min(), end_ns]])
    # A lane that waits inside an operator does not compute meanwhile.
    waiting = set(events.lane[events.kind == WAIT].tolist())
    computing = {
        lane: _of_kind(trace, COMPUTE, lane)
        for lane in set(events.lane[events.kind == COMPUTE].tolist())
    }
    for lane in computing.keys() & waiting:
        computing[lane] = intervals.difference(computing[lane], _of_kind(trace, WAIT, lane))
    return Spans(
        window,
        intervals.intersection(intervals.union_of(list(computing.values())), window),
        *(
            intervals.intersection(_of_kind(trace, kind), window)
            for kind in (COMMUNICATION, COPY, DATA)
        ),
    )


def is_inside(trace: RankTrace, rank_spans: Spans) -> npt.NDArray[np.bool_]:
    """Which events begin within the window."""
    [[start, end]] = rank_spans.window.tolist()
    inside: npt.NDArray[np.bool_] = (trace.events.start_ns >= start) & (trace.events.start_ns < end)
    return inside


def _of_kind(trace: RankTrace, kind: int, lane: int | None = None) -> Integers:
    events = trace.events
    chosen = events.kind == kind
    if lane is not None:
        chosen &= events.lane == lane
    starts = events.start_ns[chosen]
    return intervals.union(starts, starts + events.duration_ns[chosen])
