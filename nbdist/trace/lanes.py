"""Which lanes a trace has: threads of the host, then streams of its GPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from nbdist.trace import names
from nbdist.trace.chrome_trace import Head
from nbdist.trace.trace import Lane

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


def lanes_of(
    heads: Sequence[Head], counts: Sequence[int]
) -> tuple[tuple[Lane, ...], npt.NDArray[np.int32]]:
    """The lanes on which these heads are, as they are drawn, and the place of each head's lane.

    A thread has another lane for Python's own functions (`--stacks`), which would bury its
    operators forty deep, and for sends and receives that go on beside them.

    Args:
        heads: Of a trace.
        counts: Events of each; a head without any makes no lane.
    """
    on: dict[_Key, list[Head]] = {}
    events: dict[_Key, int] = {}
    for head, count in zip(heads, counts, strict=True):
        if not count:
            continue
        key = _key(head)
        on.setdefault(key, []).append(head)
        events[key] = events.get(key, 0) + count
    main = _main_key(events, on)
    kinds = {key: _MAIN if key == main else _kind(key, on[key]) for key in on}
    keys = sorted(on, key=lambda key: (kinds[key], _number(key[0]), _number(key[1])))
    devices = {key[0] for key in keys if kinds[key] == _STREAM}
    lanes = [_lane(key, keys, kinds, has_several=len(devices) > 1) for key in keys]
    place = {key: number for number, key in enumerate(keys)}
    of_head = np.array([place.get(_key(head), -1) for head in heads], np.int32)
    return tuple(lanes), of_head


def _key(head: Head) -> _Key:
    if head.category == names.PYTHON:
        return head.process, head.thread, "python"
    # The main thread issues sends and receives, and goes on while they are under way.
    is_beside = head.process == head.thread and names.GLOO.match(head.name) is not None
    return head.process, head.thread, "gloo" if is_beside else ""


def _number(text: str) -> tuple[int, str]:
    return (int(text), "") if text.lstrip("-").isdigit() else (0, text)


def _main_key(events: Mapping[_Key, int], on: Mapping[_Key, Sequence[Head]]) -> _Key | None:
    """On Linux a process's main thread has its number; elsewhere take the busiest of the host."""
    host = [key for key in events if not key[2] and _kind(key, on[key]) != _STREAM]
    for key in host:
        if key[0] == key[1]:
            return key
    threads = [key for key in host if _kind(key, on[key]) == _THREAD]
    return max(threads, key=lambda key: events[key], default=None)


def _kind(key: _Key, heads: Sequence[Head]) -> int:
    if key[2] == "python":
        return _PYTHON
    if any(head.category in names.DEVICE for head in heads):
        return _STREAM
    if any(names.GLOO.match(head.name) for head in heads):
        return _GLOO
    if any(head.name.startswith(names.AUTOGRAD) for head in heads):
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
