"""A pipeline's schedule, event by event: when each stage runs which micro-batch, and waits."""

from __future__ import annotations

import functools
from collections.abc import Sequence

# An operation of a stage: kind (FORWARD, BACKWARD, WEIGHTS), chunk, micro-batch.
FORWARD, BACKWARD, WEIGHTS = "F", "B", "W"
Operation = tuple[str, int, int]


def order_of(
    schedule: str, stages: int, stage: int, pieces: int, chunks: int = 1
) -> list[Operation]:
    """What a stage does, in order.

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

    Of many micro-batches the schedule repeats itself: what one more adds is then taken from a
    shorter run, and no longer simulated.
    """
    stages = len(forwards_s)
    some = 3 * stages
    if schedule == "gpipe" or pieces <= some + stages:
        return _simulated_s(schedule, forwards_s, backwards_s, send_s, pieces, chunks)
    rest = (pieces - some) % stages
    short = _simulated_s(schedule, forwards_s, backwards_s, send_s, some + rest, chunks)
    longer = _simulated_s(schedule, forwards_s, backwards_s, send_s, some + rest + stages, chunks)
    return short + (longer - short) * ((pieces - some - rest) // stages)


def _simulated_s(
    schedule: str,
    forwards_s: tuple[float, ...],
    backwards_s: tuple[float, ...],
    send_s: float,
    pieces: int,
    chunks: int,
) -> float:
    stages = len(forwards_s)
    orders = [order_of(schedule, stages, stage, pieces, chunks) for stage in range(stages)]
    halves = schedule == "zb"
    lasts = stages * chunks - 1
    ended: dict[tuple[str, int, int], float] = {}
    at, free = [0] * stages, [0.0] * stages
    left = sum(map(len, orders))
    while left:
        before = left
        for stage, order in enumerate(orders):
            while at[stage] < len(order):
                kind, chunk, piece = order[at[stage]]
                place = chunk * stages + stage
                ready = _ready_s(ended, kind, place, piece, lasts, send_s)
                if ready is None:
                    break
                cost = forwards_s[stage] if kind == FORWARD else backwards_s[stage]
                cost = cost / chunks / (2 if halves and kind != FORWARD else 1)
                free[stage] = ended[kind, place, piece] = max(free[stage], ready) + cost
                at[stage] += 1
                left -= 1
        if left == before:
            raise ValueError(f"{schedule}: no stage of {stages} can go on with {pieces} pieces")
    return max(free)


def _ready_s(
    ended: dict[tuple[str, int, int], float],
    kind: str,
    place: int,
    piece: int,
    last: int,
    send_s: float,
) -> float | None:
    """When what an operation needs is there; None while that is not known."""
    if kind == FORWARD:
        if place == 0:
            return 0.0
        needed = ended.get((FORWARD, place - 1, piece))
        return None if needed is None else needed + send_s
    if kind == WEIGHTS or place == last:
        return ended.get((BACKWARD if kind == WEIGHTS else FORWARD, place, piece))
    needed = ended.get((BACKWARD, place + 1, piece))
    return None if needed is None else needed + send_s
