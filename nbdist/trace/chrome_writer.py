"""One file of all ranks in Chrome's trace format, which Perfetto opens."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

import numpy as np

from nbdist.trace.trace import KINDS, RankTrace, Trace

# Such files are read once; level 1 is six times as fast as 9, for a third more bytes.
LEVEL = 1


def write_merged(trace: Trace, path: Path) -> None:
    """Write a trace into one compressed file.

    Each rank is a process, its lanes are threads, steps a thread of their own, all by one clock.
    It holds what nbdist draws: names, times, kinds, sizes and groups, not the profiler's notes.

    Raises:
        OSError: If it cannot be written.
    """
    with gzip.open(path, "wt", LEVEL, encoding="utf-8") as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        lines = chain.from_iterable(map(_lines, trace.ranks))
        file.write(next(lines, ""))
        file.writelines(f",\n{line}" for line in lines)
        file.write("\n]}\n")


def _lines(trace: RankTrace) -> Iterator[str]:
    names = [*(lane.name for lane in trace.lanes), "steps"]
    yield _metadata(trace.rank, 0, "process_name", "name", f"rank {trace.rank}, {trace.host}")
    yield _metadata(trace.rank, 0, "process_sort_index", "sort_index", trace.rank)
    for thread, name in enumerate(names):
        yield _metadata(trace.rank, thread, "thread_name", "name", name)
        yield _metadata(trace.rank, thread, "thread_sort_index", "sort_index", thread)
    for step in trace.steps:
        where = f'"name": "step {step.number}", "cat": "step", "tid": {len(trace.lanes)}'
        yield _event(trace.rank, where, step.start_ns, step.end_ns - step.start_ns, "")
    yield from _events(trace)


def _metadata(process: int, thread: int, name: str, key: str, value: object) -> str:
    return json.dumps(
        {"ph": "M", "name": name, "pid": process, "tid": thread, "args": {key: value}}
    )


def _event(process: int, where: str, start_ns: int, duration_ns: int, args: str) -> str:
    return (
        f'{{"ph": "X", {where}, "pid": {process}, "ts": {_us(start_ns)}, '
        f'"dur": {_us(duration_ns)}{args}}}'
    )


def _us(time_ns: int) -> str:
    """A time in microseconds, as exact decimal text."""
    sign = "-" if time_ns < 0 else ""
    return f"{sign}{abs(time_ns) // 1000}.{abs(time_ns) % 1000:03d}"


def _events(trace: RankTrace) -> Iterator[str]:
    events = trace.events
    keys = np.stack([events.name, events.kind.astype(np.int32), events.lane])
    distinct, of_event = np.unique(keys, axis=1, return_inverse=True)
    where = [
        f'"name": {json.dumps(trace.names[name])}, "cat": "{KINDS[kind]}", "tid": {lane}'
        for name, kind, lane in distinct.T
    ]
    columns: Iterable[tuple[int, ...]] = zip(
        of_event.reshape(-1).tolist(),
        events.start_ns.tolist(),
        events.duration_ns.tolist(),
        events.size_bytes.tolist(),
        events.group.tolist(),
        strict=True,
    )
    for key, start_ns, duration_ns, size_bytes, group in columns:
        notes: dict[str, object] = {"bytes": size_bytes} if size_bytes or group >= 0 else {}
        if group >= 0:
            notes["group"] = trace.groups[group]
        args = f', "args": {json.dumps(notes)}' if notes else ""
        yield _event(trace.rank, where[key], start_ns, duration_ns, args)
