"""Traces that no profiler has recorded: what a test wants to see drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from nbdist.trace.trace import (
    COMMUNICATION,
    COMPUTE,
    COPY,
    DATA,
    KINDS,
    MARK,
    WAIT,
    Events,
    Lane,
    RankTrace,
    Step,
    Trace,
)

LANES = (Lane("main thread"), Lane("autograd"), Lane("gloo 1"))
OPERATORS = ("aten::linear", "aten::addmm", "aten::relu", "aten::mul", "aten::copy_")
COLLECTIVE_BYTES = 4_194_304


def events(
    spans: Sequence[tuple[int, int]],
    *,
    lane: Sequence[int] = (),
    depth: Sequence[int] = (),
    kind: Sequence[int] = (),
    name: Sequence[int] = (),
) -> Events:
    """Events of these (start, duration) in nanoseconds; of columns not given all are 0."""
    count = len(spans)

    def column(values: Sequence[int], kind_of: type[np.integer]) -> np.ndarray:
        return np.array(values or [0] * count, kind_of)

    return Events(
        column([start for start, _ in spans], np.int64),
        column([took for _, took in spans], np.int64),
        column(lane, np.int32),
        column(depth, np.int16),
        column(kind, np.int8),
        column(name, np.int32),
        np.zeros(count, np.int64),
        np.full(count, -1, np.int32),
    )


def rank_trace(
    rank: int,
    recorded: Events,
    *,
    lanes: tuple[Lane, ...] = LANES,
    names: tuple[str, ...] = OPERATORS,
    steps: tuple[Step, ...] = (),
    problem: str = "",
) -> RankTrace:
    """What one rank has recorded."""
    return RankTrace(
        rank, "a", "cpu", lanes, names, ("world",), ((0, 1),), recorded, steps, problem
    )


def random_trace(count: int, *, ranks: int = 2, seed: int = 0, depths: int = 1) -> Trace:
    """About `count` events without a plan; nothing overlaps in a row, kinds are mixed."""
    random = np.random.default_rng(seed)
    return Trace(tuple(_random_rank(random, count // ranks, rank, depths) for rank in range(ranks)))


def _random_rank(random: np.random.Generator, count: int, rank: int, depths: int) -> RankTrace:
    lane = random.integers(0, len(LANES), count)
    depth = random.integers(0, depths, count)
    took_ns = random.lognormal(4, 2, count).astype(np.int64)  # 0 ns is among them
    gap_ns = random.exponential(40, count).astype(np.int64)
    start_ns = np.zeros(count, np.int64)
    for row in range(len(LANES) * depths):
        chosen = lane * depths + depth == row
        start_ns[chosen] = np.cumsum(took_ns[chosen] + gap_ns[chosen]) - took_ns[chosen]
    kind = np.where(lane == 2, COMMUNICATION, random.integers(0, len(KINDS), count))
    is_sent = kind == COMMUNICATION
    order = np.argsort(start_ns, kind="stable")
    names = tuple(f"operator {number}" for number in range(rank, rank + 40))
    recorded = Events(
        start_ns[order],
        took_ns[order],
        lane[order].astype(np.int32),
        depth[order].astype(np.int16),
        kind[order].astype(np.int8),
        random.integers(0, len(names), count).astype(np.int32),
        np.where(is_sent, random.integers(1, COLLECTIVE_BYTES, count), 0)[order],
        np.where(is_sent, random.integers(-1, 2, count), -1)[order].astype(np.int32),
    )
    groups = ("world", f"of rank {rank}")
    return replace(
        rank_trace(rank, recorded, names=names), groups=groups, group_ranks=((0, 1), (rank,))
    )


def training(count: int, *, ranks: int = 2, steps: int = 6, seed: int = 0) -> Trace:
    """About `count` events of DDP steps on CPUs: data, forward, backward, all-reduces, update."""
    randoms = [np.random.default_rng([seed, rank]) for rank in range(ranks)]
    each = count // ranks
    parts = (_training_rank(random, each, rank, steps) for rank, random in enumerate(randoms))
    return Trace(tuple(parts), "ddp, dp 2")


_NAMES = (
    *OPERATORS, "DataLoader.__next__", "forward", "backward", "optimizer.step", "all_reduce",
    "wait", "aten::to",
)  # fmt: skip
_DATA, _FORWARD, _BACKWARD, _UPDATE, _ALL_REDUCE, _WAIT, _TO = range(len(OPERATORS), len(_NAMES))
_MAIN, _AUTOGRAD, _GLOO = range(3)


def _training_rank(random: np.random.Generator, count: int, rank: int, steps: int) -> RankTrace:
    each = max(4, count // steps // 2 - 8)  # operators of a forward, and of a backward pass
    parts: list[np.ndarray] = []
    marks = []
    now = 0
    for number in range(steps):
        began = now
        now += 90 * each * (1 + rank)  # the last rank waits the longest for its data
        parts.append(_line(began, now - began, _MAIN, 0, DATA, _DATA))
        parts.append(_line(now, 40 * each, _MAIN, 0, COPY, _TO))
        now += 50 * each
        forward, end = _operators(random, now, each, _MAIN, 1)
        parts += [_line(now, end - now, _MAIN, 0, MARK, _FORWARD), forward]
        backward, after = _operators(random, end, each, _AUTOGRAD, 0)
        buckets = 4
        for bucket in range(buckets):
            start = end + (after - end) * (bucket + 1) // (buckets + 1)
            sent = _line(start, (after - end) // 5, _GLOO, 0, COMMUNICATION, _ALL_REDUCE)
            sent[:, 6], sent[:, 7] = COLLECTIVE_BYTES * (bucket + 1), 0
            parts.append(sent)
        done = after + (after - end) // 6
        parts += [backward, _line(end, after - end, _MAIN, 0, MARK, _BACKWARD)]
        parts.append(_line(after, done - after, _MAIN, 0, WAIT, _WAIT))
        now = done + 60 * each
        parts.append(_line(done, now - done, _MAIN, 0, COMPUTE, _UPDATE))
        marks.append(Step(number, 50 * began, 50 * now))
        now += 30 * each
    table = np.concatenate(parts)
    table = table[np.lexsort((table[:, 3], table[:, 0]))]
    table[:, :2] *= 50
    kinds = (np.int64, np.int64, np.int32, np.int16, np.int8, np.int32, np.int64, np.int32)
    columns = (column.astype(kind) for column, kind in zip(table.T, kinds, strict=True))
    return rank_trace(rank, Events(*columns), names=_NAMES, steps=tuple(marks))


def _line(start: int, took: int, lane: int, depth: int, kind: int, name: int) -> np.ndarray:
    return np.array([[start, took, lane, depth, kind, name, 0, -1]], np.int64)


def _operators(
    random: np.random.Generator, start: int, count: int, lane: int, depth: int
) -> tuple[np.ndarray, int]:
    """Operators one after the other with small gaps, every second inside the one before."""
    outer = (count + 1) // 2
    took = random.lognormal(6.0, 0.8, outer).astype(np.int64) + 30
    begins = start + np.cumsum(took * 6 // 5) - took
    table = np.zeros((count, 8), np.int64)
    table[::2, 0], table[::2, 1], table[::2, 3] = begins, took, depth
    inner = count - outer
    table[1::2, 0], table[1::2, 1] = (begins + took // 10)[:inner], (took * 3 // 4)[:inner]
    table[1::2, 3] = depth + 1
    table[:, 2], table[:, 4], table[:, 7] = lane, COMPUTE, -1
    table[:, 5] = random.integers(0, len(OPERATORS), count)
    return table, int(begins[-1] + took[-1])
