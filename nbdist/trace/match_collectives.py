"""Which events of different ranks are the same collective."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nbdist.trace.trace import COMMUNICATION, RankTrace

# No rank is through before all have come. In a broadcast or a send some may be.
TOGETHER = frozenset({"all-reduce", "all-gather", "reduce-scatter", "all-to-all", "barrier"})


@dataclass(frozen=True, slots=True)
class MatchedCollective:
    """Calls of one collective and size in one group, each on all of its ranks that recorded.

    Attributes:
        ranks: Places in the list of traces, at least two.
        events: (rank, call): place of the event.
    """

    ranks: tuple[int, ...]
    events: npt.NDArray[np.int64]


def match_collectives(traces: Sequence[RankTrace]) -> list[MatchedCollective]:
    """The same calls on different ranks: the k-th of a group with equal name and size.

    Calls whose group is unknown are left out, and so are those that only some ranks recorded: a
    recording that was cut off ends earlier.
    """
    calls_by_key: dict[tuple[tuple[int, ...], str, int], dict[int, npt.NDArray[np.int64]]]
    calls_by_key = defaultdict(dict)
    for place, trace in enumerate(traces):
        events = trace.events
        calls = np.flatnonzero((events.kind == COMMUNICATION) & (events.group >= 0))
        if not len(calls):
            continue
        keys = np.stack([events.group[calls], events.name[calls], events.size_bytes[calls]])
        distinct, of_call = np.unique(keys, axis=1, return_inverse=True)
        for number, (group, name, size_bytes) in enumerate(distinct.T):
            collective = trace.names[name]
            if collective in TOGETHER:
                key = (trace.group_ranks[group], collective, int(size_bytes))
                calls_by_key[key][place] = calls[of_call.reshape(-1) == number]
    matches = []
    for calls_of in calls_by_key.values():
        count = min(map(len, calls_of.values()))
        if len(calls_of) > 1 and count:
            events_of = np.stack([calls[:count] for calls in calls_of.values()])
            matches.append(MatchedCollective(tuple(calls_of), events_of))
    return matches
