"""Start and end of a trace's steps, by the host's clock and by the device's.

The host only launches what a GPU computes, and runs ahead of it by up to a whole loop. By the
device's clock Kineto draws each annotation of the host once more on each stream
(`gpu_user_annotation`, with the same External id): from where the first kernel, copy or memset that
was launched in it begins to where the last ends. What is launched inside an inner annotation counts
for that one alone; where nothing is launched there is nothing on the GPU
(libkineto's GenericActivityProfiler.cpp, output_json.cpp).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from nbdist.trace.chrome_trace import RawTrace
from nbdist.trace.names import DEVICE, ON_DEVICE, STEP_END, TORCH_STEP
from nbdist.trace.trace import Integers, Step

_ID = "External id"
_Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class StepCuts:
    """The steps of one rank, by two clocks; in ns since the zero that `cut` was given.

    Attributes:
        host: When the host went through them.
        device: When the GPU did, as many or fewer; empty where the file does not have it of all.
    """

    host: tuple[Step, ...]
    device: tuple[Step, ...] = ()


def is_mark(name: str) -> bool:
    """Whether an annotation of this name is there for steps alone."""
    return name == STEP_END or TORCH_STEP.match(name) is not None


def cut(raw: RawTrace, zero_ns: int, own_ends: Any) -> StepCuts:
    """Cut by nbdist's marks, each at the end of a step; by those of torch's schedule otherwise.

    Args:
        raw: The events, with the GPU's annotations.
        zero_ns: The zero of the times of steps.
        own_ends: Which of nbdist's marks count, by number; anything but a list for all.
    """
    heads = [
        number
        for number, head in enumerate(raw.heads)
        if head.category != ON_DEVICE and is_mark(head.name)
    ]
    places = np.flatnonzero(np.isin(raw.head, heads))
    marks: list[int] = places[np.argsort(raw.start_ns[places], kind="stable")].tolist()
    names = {mark: raw.heads[raw.head[mark]].name for mark in marks}
    on_device = _on_device(raw, zero_ns)
    ends = [mark for mark in marks if names[mark] == STEP_END]
    if isinstance(own_ends, list):
        ends = [mark for number, mark in enumerate(ends) if number in own_ends]
    if ends:
        return _by_ends(raw, zero_ns, ends, on_device)
    numbers = {
        mark: int(match.group(1)) for mark in marks if (match := TORCH_STEP.match(names[mark]))
    }
    return _by_schedule(raw, zero_ns, numbers, on_device)


def _on_device(raw: RawTrace, zero_ns: int) -> dict[int, _Span]:
    """Place of an annotation of the host -> from when to when the GPU did what it launched."""
    spans: dict[Any, _Span] = {}
    hosts: dict[int, Any] = {}
    for place, args in raw.args.items():
        category, number = raw.heads[raw.head[place]].category, args.get(_ID)
        if category == "user_annotation":
            hosts[place] = number
        elif category == ON_DEVICE:
            # Drawn a nanosecond longer on both sides, to lie around its kernels.
            start_ns = int(raw.start_ns[place]) - zero_ns + 1
            end_ns = start_ns + int(raw.duration_ns[place]) - 2
            begun_ns, ended_ns = spans.get(number, (start_ns, end_ns))  # of another stream
            spans[number] = min(start_ns, begun_ns), max(end_ns, ended_ns)
    return {place: spans[number] for place, number in hosts.items() if number in spans}


def _by_ends(
    raw: RawTrace, zero_ns: int, marks: Sequence[int], on_device: Mapping[int, _Span]
) -> StepCuts:
    """Each mark ends a step; on the GPU that is when the mark's own kernel ends."""
    host_ns = [int(raw.start_ns[mark] + raw.duration_ns[mark]) - zero_ns for mark in marks]
    device_ns = [on_device[mark][1] for mark in marks if mark in on_device]
    is_whole = len(device_ns) == len(marks) and device_ns == sorted(device_ns)
    return StepCuts(_between(host_ns), _between(device_ns) if is_whole else ())


def _between(ends_ns: Sequence[int]) -> tuple[Step, ...]:
    return tuple(Step(number, *span) for number, span in enumerate(pairwise([0, *ends_ns])))


def _by_schedule(
    raw: RawTrace, zero_ns: int, numbers: Mapping[int, int], on_device: Mapping[int, _Span]
) -> StepCuts:
    """`numbers`: torch's annotations around whole steps, in order, and the number of each.

    On the GPU a step begins with the first that any annotation inside it launched, and ends where
    the next begins; the last ends with the GPU's last work. What torch opens after the last
    step and closes with the recording launches nothing, and is none.
    """
    starts_ns: Integers = raw.start_ns[list(numbers)] - zero_ns
    ends_ns = starts_ns + raw.duration_ns[list(numbers)]
    host = tuple(
        Step(number, int(start_ns), int(end_ns))
        for number, start_ns, end_ns in zip(numbers.values(), starts_ns, ends_ns, strict=True)
    )
    begins_ns: dict[int, int] = {}
    for place, (begin_ns, _) in on_device.items():
        host_ns = raw.start_ns[place] - zero_ns
        step = int(np.searchsorted(starts_ns, host_ns, side="right")) - 1
        if step >= 0 and host_ns < ends_ns[step]:
            begins_ns[step] = min(begin_ns, begins_ns.get(step, begin_ns))
    edges_ns = [begins_ns[step] for step in sorted(begins_ns)]
    is_whole = sorted(begins_ns) == list(range(len(edges_ns)))
    if not edges_ns or not is_whole or edges_ns != sorted(edges_ns):
        return StepCuts(host)
    is_device = np.array([head.category in DEVICE for head in raw.heads], bool)[raw.head]
    last_ns = int((raw.start_ns + raw.duration_ns)[is_device].max()) - zero_ns
    device = tuple(
        Step(step.number, *span)
        for step, span in zip(host, pairwise([*edges_ns, last_ns]), strict=False)
    )
    return StepCuts(host, device)
