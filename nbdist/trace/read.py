"""Interprets a rank's trace: kinds of events, lanes, steps, collectives with their sizes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nbdist.trace import chrome_trace, collectives
from nbdist.trace import names as trace_names
from nbdist.trace import steps as step_cuts
from nbdist.trace.chrome_trace import Head, RawTrace
from nbdist.trace.collectives import CollectiveCall, Meaning, TraceGroup
from nbdist.trace.trace import (
    COMMUNICATION,
    COMPUTE,
    DATA,
    HOST,
    Events,
    Integers,
    Lane,
    RankTrace,
    Step,
)

# The key that nbdist adds to the header of a rank's file.
OURS = "nbdist"
_RANK_IN_NAME = re.compile(r"rank[-_]?(\d+)")

# In the order in which lanes are drawn.
_MAIN, _PYTHON, _AUTOGRAD, _THREAD, _GLOO, _STREAM = range(6)
_LANE_NAMES = {
    _MAIN: "main thread",
    _PYTHON: "Python",
    _AUTOGRAD: "autograd",
    _THREAD: "thread",
    _GLOO: "gloo",
}

# (process, thread, which lane of that thread)
_Key = tuple[str, str, str]


@dataclass(frozen=True, slots=True)
class RecordedTrace:
    """A rank's trace by the clock of its host.

    Attributes:
        trace: The trace; times are since `zero_ns`.
        zero_ns: Since 1970; 0 where the file does not say.
        ours: nbdist's part of the file: the strategy, and the bytes that it sends.
    """

    trace: RankTrace
    zero_ns: int
    ours: Mapping[str, Any] = field(default_factory=dict)


def read(path: Path, rank: int = 0) -> RecordedTrace:
    """Read the trace of one rank.

    Args:
        path: As torch.profiler's export_chrome_trace writes it, compressed or not.
        rank: Whose it is, where neither the file nor its name says it.

    Raises:
        TraceError: If it is not a trace. One without events, or that is cut off, is read as far as
            it goes, and `problem` says so.
    """
    named = _RANK_IN_NAME.search(path.name)
    return recording(chrome_trace.read(path), int(named.group(1)) if named else rank)


def recording(raw: RawTrace, rank: int) -> RecordedTrace:
    """Give the columns of a file their meaning; see `read`."""
    with_annotations, ours = raw, _record(raw.header, OURS)
    raw = _keep(raw, lambda head: head.category not in trace_names.LEFT_OUT)
    zero_ns = int(raw.start_ns.min()) if len(raw) else 0
    cuts = step_cuts.cut(with_annotations, zero_ns, ours.get("ends"))
    steps, skipped = cuts.device or cuts.host, int(ours.get("skipped", 0))
    if skipped and len(steps) > skipped:
        begin_ns = cuts.host[skipped].start_ns
        raw = _after_skipped(raw, zero_ns + begin_ns, zero_ns + steps[skipped].start_ns)
        zero_ns += begin_ns
        steps = tuple(
            Step(number, step.start_ns - begin_ns, step.end_ns - begin_ns)
            for number, step in enumerate(steps[skipped:])
        )
    raw = _keep(raw, lambda head: not step_cuts.is_mark(head.name))
    raw = _reorder(raw, np.lexsort((-raw.duration_ns, raw.start_ns)))
    info = _record(raw.header, collectives.INFO)
    is_device = any(head.category in trace_names.DEVICE for head in raw.heads)
    lanes, lane_of_head = _lanes_of(
        raw.heads, np.bincount(raw.head, minlength=len(raw.heads)).tolist()
    )
    groups = collectives.groups_of(raw.header, ours)
    events, names = _events(raw, lane_of_head, groups, zero_ns, is_device=is_device)
    torn = f"{raw.problem}: the rest is missing." if raw.problem else ""
    empty = "" if len(raw) else "Nothing was recorded: the trace holds no events."
    trace = RankTrace(
        rank=int(info.get("rank", ours.get("rank", rank))),
        host=str(ours.get("host") or raw.header.get("host_name") or ""),
        device="cuda" if is_device else "cpu",
        lanes=lanes,
        names=names,
        groups=tuple(group.name for group in groups),
        group_ranks=tuple(group.ranks for group in groups),
        events=events,
        steps=steps,
        has_device_steps=bool(cuts.device),
        problem=" ".join(filter(None, (torn, empty))),
        cpus=tuple(map(int, ours.get("cpus") or ())),
    )
    return RecordedTrace(trace, raw.base_ns + zero_ns if raw.base_ns else 0, ours)


def _record(header: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    record = header.get(name)
    return record if isinstance(record, dict) else {}


def _after_skipped(raw: RawTrace, host_ns: int, device_ns: int) -> RawTrace:
    """From where the host came to the first step that counts, and later the GPU to its part."""
    on_device = _of_heads(raw, lambda head: head.category in trace_names.DEVICE)
    begin_ns = np.where(on_device, device_ns, host_ns)
    return _reorder(raw, np.flatnonzero(raw.start_ns >= begin_ns))


def _of_heads(raw: RawTrace, is_so: Callable[[Head], bool]) -> npt.NDArray[np.bool_]:
    """Which events have such a head."""
    heads = np.array(list(map(is_so, raw.heads)), bool)
    chosen: npt.NDArray[np.bool_] = heads[raw.head]
    return chosen


def _keep(raw: RawTrace, is_kept: Callable[[Head], bool]) -> RawTrace:
    return _reorder(raw, np.flatnonzero(_of_heads(raw, is_kept)))


def _reorder(raw: RawTrace, order: Integers) -> RawTrace:
    place = np.full(len(raw), -1, np.int64)
    place[order] = np.arange(len(order))
    return replace(
        raw,
        start_ns=raw.start_ns[order],
        duration_ns=raw.duration_ns[order],
        head=raw.head[order],
        args={int(place[old]): args for old, args in raw.args.items() if place[old] >= 0},
    )


def _events(
    raw: RawTrace,
    lane_of_head: npt.NDArray[np.int32],
    groups: Sequence[TraceGroup],
    zero_ns: int,
    *,
    is_device: bool,
) -> tuple[Events, tuple[str, ...]]:
    """The columns, and the names that they refer to."""
    kinds = [trace_names.kind(head.category, head.name, is_device=is_device) for head in raw.heads]
    kind = np.array(kinds, np.int8)[raw.head]
    lane = lane_of_head[raw.head]
    names: dict[str, int] = {}
    of_head = np.array([names.setdefault(head.name, len(names)) for head in raw.heads], np.int32)
    name = of_head[raw.head]
    start_ns = raw.start_ns - zero_ns
    end_ns = start_ns + raw.duration_ns
    depth = np.zeros(len(raw), np.int16)
    size_bytes = np.zeros(len(raw), np.int64)
    group = np.full(len(raw), -1, np.int32)
    is_issued = _of_heads(raw, lambda head: trace_names.ISSUED.match(head.name) is not None)
    for number in np.unique(lane):
        on = np.flatnonzero(lane == number)
        # Events that began before it (the longer first) and have not ended enclose it.
        ended = np.searchsorted(
            np.sort(np.maximum(end_ns[on], start_ns[on] + 1)), start_ns[on], side="right"
        )
        depth[on] = np.maximum(np.arange(len(on)) - ended, 0)
        kind[on] = _inherit_kinds(start_ns[on], end_ns[on], kind[on], is_issued[on])
    for place, meaning in _meanings(raw, kind, lane, groups).items():
        name[place] = names.setdefault(meaning.name, len(names))
        size_bytes[place], group[place] = meaning.size_bytes, meaning.group
    events = Events(start_ns, raw.duration_ns, lane, depth, kind, name, size_bytes, group)
    return events, tuple(names)


def _inherit_kinds(
    start_ns: Integers,
    end_ns: Integers,
    kind: npt.NDArray[np.int8],
    is_issued: npt.NDArray[np.bool_],
) -> Any:
    """Operators inside a DataLoader's iteration fetch data; inside Gloo's calls they are Gloo's.

    One in which a collective is issued, as of an autograd.Function, waits for it: what computes
    are the operators inside.
    """
    changed = kind.copy()
    issued = np.searchsorted(start_ns[is_issued], [start_ns, end_ns])
    changed[(issued[1] > issued[0]) & (kind == COMPUTE)] = HOST
    for outer, becomes in ((DATA, DATA), (COMMUNICATION, HOST)):
        around = np.flatnonzero(kind == outer)
        if not len(around):
            continue
        last = np.searchsorted(start_ns[around], start_ns, side="right") - 1
        inside = (last >= 0) & (start_ns < end_ns[around[np.maximum(last, 0)]])
        changed[inside & (kind == COMPUTE)] = becomes
    return changed


def _meanings(
    raw: RawTrace,
    kind: npt.NDArray[np.int8],
    lane: npt.NDArray[np.int32],
    groups: Sequence[TraceGroup],
) -> dict[int, Meaning]:
    """Event -> what collective it is."""
    nccl: dict[int, Meaning] = {}
    gloo: dict[int, CollectiveCall] = {}

    def call(place: int) -> CollectiveCall:
        name = trace_names.collective(raw.heads[raw.head[place]].name)
        args = raw.args.get(place, {})
        return CollectiveCall(name, int(raw.start_ns[place]), args, int(lane[place]))

    for place in map(int, np.flatnonzero(kind == COMMUNICATION)):
        if raw.heads[raw.head[place]].category == "kernel":
            nccl[place] = collectives.of_nccl(call(place), groups)
        else:
            gloo[place] = call(place)
    is_issued = [trace_names.ISSUED.match(head.name) is not None for head in raw.heads]
    issued = [call(place) for place in sorted(raw.args) if is_issued[raw.head[place]]]
    meanings = collectives.of_gloo(list(gloo.values()), issued, _flight_record(raw), groups)
    return nccl | dict(zip(gloo, meanings, strict=True))


def _flight_record(raw: RawTrace) -> list[CollectiveCall]:
    """The entries of torch's flight recorder, where nbdist wrote them into the header."""
    calls = _record(raw.header, OURS).get("calls")
    return [
        CollectiveCall(
            trace_names.collective(str(name)),
            int(created_ns) - raw.base_ns,
            {"Input Dims": sizes},
            torch_group=str(group),
        )
        for name, created_ns, group, sizes in (calls if isinstance(calls, list) else [])
    ]


def _lanes_of(
    heads: Sequence[Head], counts: Sequence[int]
) -> tuple[tuple[Lane, ...], npt.NDArray[np.int32]]:
    """The lanes on which these heads are, as they are drawn, and the place of each head's lane.

    A thread has another lane for Python's own functions (`--stacks`), which would bury its
    operators forty deep, and for sends and receives that go on beside them.
    A head without any events makes no lane.
    """
    on: dict[_Key, list[Head]] = {}
    events: dict[_Key, int] = {}
    for head, count in zip(heads, counts, strict=True):
        if not count:
            continue
        key = _lane_key(head)
        on.setdefault(key, []).append(head)
        events[key] = events.get(key, 0) + count
    main = _main_key(events, on)
    kinds = {key: _MAIN if key == main else _lane_kind(key, on[key]) for key in on}
    keys = sorted(on, key=lambda key: (kinds[key], _as_number(key[0]), _as_number(key[1])))
    devices = {key[0] for key in keys if kinds[key] == _STREAM}
    lanes = [_lane(key, keys, kinds, has_several=len(devices) > 1) for key in keys]
    place = {key: number for number, key in enumerate(keys)}
    of_head = np.array([place.get(_lane_key(head), -1) for head in heads], np.int32)
    return tuple(lanes), of_head


def _lane_key(head: Head) -> _Key:
    if head.category == trace_names.PYTHON:
        return head.process, head.thread, "python"
    # The main thread issues sends and receives, and goes on while they are under way.
    is_beside = head.process == head.thread and trace_names.GLOO.match(head.name) is not None
    return head.process, head.thread, "gloo" if is_beside else ""


def _as_number(text: str) -> tuple[int, str]:
    return (int(text), "") if text.lstrip("-").isdigit() else (0, text)


def _main_key(events: Mapping[_Key, int], on: Mapping[_Key, Sequence[Head]]) -> _Key | None:
    """On Linux a process's main thread has its number; elsewhere take the busiest of the host."""
    host = [key for key in events if not key[2] and _lane_kind(key, on[key]) != _STREAM]
    for key in host:
        if key[0] == key[1]:
            return key
    threads = [key for key in host if _lane_kind(key, on[key]) == _THREAD]
    return max(threads, key=lambda key: events[key], default=None)


def _lane_kind(key: _Key, heads: Sequence[Head]) -> int:
    if key[2] == "python":
        return _PYTHON
    if any(head.category in trace_names.DEVICE for head in heads):
        return _STREAM
    if any(trace_names.GLOO.match(head.name) for head in heads):
        return _GLOO
    if any(head.name.startswith(trace_names.AUTOGRAD) for head in heads):
        return _AUTOGRAD
    return _THREAD


def _lane(key: _Key, keys: Sequence[_Key], kinds: Mapping[_Key, int], *, has_several: bool) -> Lane:
    kind = kinds[key]
    if kind == _STREAM:
        device = f"GPU {key[0]} " if has_several else ""
        return Lane(f"{device}stream {key[1]}", is_device=True)
    alike = [other for other in keys if kinds[other] == kind]
    if kind == _MAIN or (len(alike) == 1 and kind != _GLOO):
        return Lane(_LANE_NAMES[kind])
    return Lane(f"{_LANE_NAMES[kind]} {alike.index(key) + 1}")
