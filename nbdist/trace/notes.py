"""What the numbers of a trace leave out, as sentences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

import numpy as np

from nbdist.core.failures import ranks_phrase
from nbdist.core.units import is_stored
from nbdist.trace.trace import COMMUNICATION, RankTrace, Trace

# A first step this much longer than the others is no measure of them.
FIRST_STEP = 1.5


def notes(trace: Trace, steps_ns: Sequence[Sequence[int]]) -> tuple[str, ...]:
    """What there is to say of a trace before its numbers are read.

    Args:
        trace: All of it.
        steps_ns: Of each rank that recorded something, the durations of the steps that count.
    """
    traces = [rank for rank in trace.ranks if len(rank.events)]
    parts = [
        trace.notes,
        (f"Rank {rank.rank}: {rank.problem}" for rank in trace.ranks if rank.problem),
    ]
    if traces:
        parts += [_steps(traces), _first(steps_ns), _communication(traces)]
    return tuple(chain.from_iterable(parts))


def _steps(traces: Sequence[RankTrace]) -> Iterator[str]:
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


def _first(steps_ns: Sequence[Sequence[int]]) -> Iterator[str]:
    if is_stored():
        return  # whether it is slow depends on the machine's other work
    later_ns = [ns for each in steps_ns for ns in each[1:]]
    first_ns = max((each[0] for each in steps_ns if each), default=0)
    if later_ns and first_ns > FIRST_STEP * np.median(later_ns):
        yield (
            f"The first step took {first_ns / np.median(later_ns):.1f} times as long as the "
            "others: it allocates memory and selects kernels. --steps leaves it out."
        )


def _communication(traces: Sequence[RankTrace]) -> Iterator[str]:
    names = {
        trace.names[name]
        for trace in traces
        for name in np.unique(trace.events.name[trace.events.kind == COMMUNICATION])
    }
    on_cpu = any(trace.device == "cpu" for trace in traces)
    if not names:
        yield "No collective was recorded."
    if on_cpu:
        yield "On a CPU, idle time includes Python between two operators."
    if on_cpu and "reduce-scatter" in names:
        yield "Gloo runs a reduce-scatter as an all-reduce, which sends twice the bytes shown."
