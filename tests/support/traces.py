"""Traces made by hand, of few events with round times."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from nbdist.trace.read import RecordedTrace
from nbdist.trace.trace import Events, Lane, RankTrace, Step, Trace

MS = 1_000_000
ALL = "all ranks"


@dataclass(frozen=True, slots=True)
class Did:
    """One event, in milliseconds.

    Attributes:
        kind: Place in KINDS.
        start: Since the beginning.
        end: Likewise.
        name: Of the operation.
        lane: 0 for the main thread, 1 for a thread or stream beside it.
        size_bytes: Of a collective.
    """

    kind: int
    start: float
    end: float
    name: str = "op"
    lane: int = 0
    size_bytes: int = 0


def rank_trace(
    rank: int,
    did: Iterable[Did],
    steps: Sequence[float] = (),
    *,
    world_size: int = 2,
    host: str = "one",
    device: str = "cpu",
) -> RankTrace:
    """What a rank did. Collectives are of the group of all ranks.

    Args:
        rank: Whose.
        did: In any order.
        steps: Where steps begin and end, in milliseconds: one number more than there are steps.
        world_size: Ranks of the group.
        host: Where it ran.
        device: "cpu", or "cuda": then lane 1 is a stream.
    """
    events = sorted(did, key=lambda one: (one.start, -one.end))
    names = tuple(dict.fromkeys(one.name for one in events))
    lanes = (Lane("main thread"), Lane("stream 7", is_device=device == "cuda"))
    return RankTrace(
        rank=rank,
        host=host,
        device=device,
        lanes=lanes,
        names=names,
        groups=(ALL,),
        group_ranks=(tuple(range(world_size)),),
        events=Events(
            start_ns=np.array([round(one.start * MS) for one in events], np.int64),
            duration_ns=np.array([round((one.end - one.start) * MS) for one in events], np.int64),
            lane=np.array([one.lane for one in events], np.int32),
            depth=np.array([_depth(one, events) for one in events], np.int16),
            kind=np.array([one.kind for one in events], np.int8),
            name=np.array([names.index(one.name) for one in events], np.int32),
            size_bytes=np.array([one.size_bytes for one in events], np.int64),
            group=np.array([0 if one.kind == 1 else -1 for one in events], np.int32),
        ),
        steps=tuple(
            Step(number, round(start * MS), round(end * MS))
            for number, (start, end) in enumerate(pairwise(steps))
        ),
    )


def trace(*ranks: RankTrace, strategy: str = "") -> Trace:
    """The traces of these ranks, by one clock."""
    return Trace(ranks, strategy)


def recorded(one: RankTrace, zero_ns: int) -> RecordedTrace:
    """A rank's trace by the clock of its host, which was so far when the recording began."""
    return RecordedTrace(one, zero_ns)


def _depth(one: Did, events: Sequence[Did]) -> int:
    return sum(
        other is not one
        and other.lane == one.lane
        and other.start <= one.start < other.end
        and other.end >= one.end
        for other in events
    )
