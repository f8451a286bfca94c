"""A pipeline's schedule, event by event: when each stage runs which micro-batch, and waits."""

from __future__ import annotations

import functools
from collections.abc import Sequence

# An operation of a stage: kind (FORWARD, BACKWARD, WEIGHTS), chunk, micro-batch.
FORWARD, BACKWARD, WEIGHTS = "F", "B", "W"
Operation = tuple[str, int, int]
MOST_EVENTS = 2_000


def order_of(
    schedule: str, stages: int, stage: int, pieces: int, chunks: int = 1
) -> list[Operation]:
    """The operations of a stage, in order.

    gpipe runs all forwards, then all backwards; 1f1b warms up with a forward for each stage after
    it and then alternates (https://arxiv.org/abs/2104.04473, section 2.2); interleaved deals
    micro-batches out in rounds of `stages` over its chunks; zb splits the backward and fills the
    end with gradients of weights (https://arxiv.org/abs/2401.10241).
    """
    if schedule == "gpipe":
        forwards = [(FORWARD, 0, piece) for piece in range(pieces)]
        return [*forwards, *((BACKWARD, 0, piece) for piece in range(pieces))]
    count = pieces * chunks
    warm = stages - 1 - stage if chunks == 1 else 2 * (stages - 1 - stage) + (chunks - 1) * stages
    warm = min(count, warm)
    forwards = [(FORWARD, *_dealt(i, stages, pieces, chunks)) for i in range(count)]
    backwards = []
    for i in range(count):
        chunk, piece = _dealt(i, stages, pieces, chunks)
        backwards.append((BACKWARD, chunks - 1 - chunk, piece))
    order: list[Operation] = forwards[:warm]
    for i in range(count - warm):
        order += [forwards[warm + i], backwards[i]]
    order += backwards[count - warm :]
    return _with_weights(order, stage) if schedule == "zb" else order


def _dealt(index: int, stages: int, pieces: int, chunks: int) -> tuple[int, int]:
    """Chunk and micro-batch of the index-th forward: rounds of as many as there are stages."""
    if chunks == 1:
        return 0, index
    size = stages * chunks
    begin = index // size * stages
    wide = min(stages, pieces - begin)
    within = index - begin * chunks
    return within // wide, begin + within % wide


def _with_weights(order: Sequence[Operation], late: int) -> list[Operation]:
    """Gradients of weights, each `late` backwards after that of its inputs or at the end."""
    result: list[Operation] = []
    waiting: list[Operation] = []
    for operation in order:
        result.append(operation)
        if operation[0] == BACKWARD:
            waiting.append((WEIGHTS, *operation[1:]))
            if len(waiting) > late:
                result.append(waiting.pop(0))
    return [*result, *waiting]


@functools.lru_cache(maxsize=4096)
def makespan_s(
    schedule: str,
    forwards_s: tuple[float, ...],
    backwards_s: tuple[float, ...],
    send_s: float,
    pieces: int,
    chunks: int = 1,
) -> float:
    """Seconds from the first forward to the last backward.

    Args:
        schedule: gpipe, 1f1b, interleaved or zb.
        forwards_s: Of one micro-batch, of each stage with all its chunks.
        backwards_s: Likewise.
        send_s: Of one message to a neighbouring stage; the receiver waits, the sender does not.
        pieces: Micro-batches.
        chunks: Of each stage: interleaved's.

    Of more than MOST_EVENTS the rest is no longer simulated: the schedule repeats itself by then,
    and a round over the stages adds what the last one added.
    """
    stages = len(forwards_s)
    some = max(2, MOST_EVENTS // (2 * chunks * stages**2)) * stages

    def run(count: int) -> float:
        return simulated_s(schedule, forwards_s, backwards_s, send_s, count, chunks)

    if pieces <= some + stages:
        return run(pieces)
    rest = (pieces - some) % stages
    short, longer = run(some + rest), run(some + rest + stages)
    return short + (longer - short) * ((pieces - some - rest) // stages)


def simulated_s(
    schedule: str,
    forwards_s: Sequence[float],
    backwards_s: Sequence[float],
    send_s: float,
    pieces: int,
    chunks: int = 1,
) -> float:
    """The same, of every event."""
    stages = len(forwards_s)
    ahead = [seconds / chunks for seconds in forwards_s]
    # zb does gradients of inputs and of weights apart, each half of the backward.
    parts = 2 * chunks if schedule == "zb" else chunks
    back = [seconds / parts for seconds in backwards_s]
    free = [0.0] * stages
    ended: list[float] = []
    for stage, is_forward, needed, is_sent in events_of(schedule, stages, pieces, chunks):
        begin = free[stage]
        if needed >= 0:
            ready = ended[needed] + send_s if is_sent else ended[needed]
            begin = max(begin, ready)
        end = begin + (ahead[stage] if is_forward else back[stage])
        free[stage] = end
        ended.append(end)
    return max(free)


@functools.lru_cache(maxsize=32)
def events_of(
    schedule: str, stages: int, pieces: int, chunks: int
) -> tuple[tuple[int, bool, int, bool], ...]:
    """All operations, each after what it needs: stage, is a forward, number of that, is sent.

    A forward needs that of the stage before, a backward that of the stage after, the last one's
    its own forward, and gradients of weights those of inputs; -1 for nothing. These do not depend
    on times, and so are kept.

    Raises:
        ValueError: The orders of the stages wait for each other.
    """
    orders = [order_of(schedule, stages, stage, pieces, chunks) for stage in range(stages)]
    numbers: dict[Operation, int] = {}
    events: list[tuple[int, bool, int, bool]] = []
    at = [0] * stages
    total = sum(map(len, orders))
    while len(events) < total:
        before = len(events)
        for stage, order in enumerate(orders):
            while at[stage] < len(order):
                kind, chunk, piece = order[at[stage]]
                place = chunk * stages + stage
                needed, is_sent = _needed(kind, place, piece, stages * chunks - 1)
                if needed is not None and needed not in numbers:
                    break
                number = -1 if needed is None else numbers[needed]
                numbers[kind, place, piece] = len(events)
                events.append((stage, kind == FORWARD, number, is_sent))
                at[stage] += 1
        if len(events) == before:
            raise ValueError(f"{schedule}: no stage of {stages} can go on with {pieces} pieces")
    return tuple(events)


def _needed(kind: str, place: int, piece: int, last: int) -> tuple[Operation | None, bool]:
    """Find the operation that another one needs, and whether its result is sent from a stage."""
    if kind == FORWARD:
        return (None, False) if place == 0 else ((FORWARD, place - 1, piece), True)
    if kind == WEIGHTS:
        return (BACKWARD, place, piece), False
    if place == last:
        return (FORWARD, place, piece), False
    return (BACKWARD, place + 1, piece), True
