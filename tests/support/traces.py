"""Traces made by hand, of few events with round times."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

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
    events = sorted(did, key=lambda event: (event.start, -event.end))
    names = tuple(dict.fromkeys(event.name for event in events))
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
            start_ns=np.array([round(event.start * MS) for event in events], np.int64),
            duration_ns=np.array(
                [round((event.end - event.start) * MS) for event in events], np.int64
            ),
            lane=np.array([event.lane for event in events], np.int32),
            depth=np.array([_depth(event, events) for event in events], np.int16),
            kind=np.array([event.kind for event in events], np.int8),
            name=np.array([names.index(event.name) for event in events], np.int32),
            size_bytes=np.array([event.size_bytes for event in events], np.int64),
            group=np.array([0 if event.kind == 1 else -1 for event in events], np.int32),
        ),
        steps=tuple(
            Step(number, round(start * MS), round(end * MS))
            for number, (start, end) in enumerate(pairwise(steps))
        ),
    )


def trace(*ranks: RankTrace, strategy: str = "") -> Trace:
    """The traces of these ranks, by one clock."""
    return Trace(ranks, strategy)


def _depth(event: Did, events: Sequence[Did]) -> int:
    return sum(
        other is not event
        and other.lane == event.lane
        and other.start <= event.start < other.end
        and other.end >= event.end
        for other in events
    )
