"""One time for the traces of all ranks: hosts' clocks are aligned at the ends of collectives.

Ranks of one host share its clock. No rank is through an all-reduce before all have come, and then
all are within microseconds on one network: where two clocks differ, so do these ends.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from nbdist.trace.match_collectives import match_collectives
from nbdist.trace.read import RecordedTrace
from nbdist.trace.trace import RankTrace, Step, Trace


@dataclass(frozen=True, slots=True)
class Clock:
    """How far a host's clock is from the first rank's.

    Attributes:
        offset_ns: To be added to its times.
        spread_ns: Half of the collectives say an offset that is closer to it than this.
        count: Collectives by which it is known; 0 where it was not adjusted.
    """

    offset_ns: int
    spread_ns: int = 0
    count: int = 0


def align(recordings: Sequence[RecordedTrace], missing: Sequence[RankTrace] = ()) -> Trace:
    """The traces of all ranks, by one clock that begins at 0.

    Of the `missing` ranks there is nothing but a reason.
    """
    shifts_ns, notes = shifts(recordings)
    moved = [
        _shift(recording.trace, shift_ns)
        for recording, shift_ns in zip(recordings, shifts_ns, strict=True)
    ]
    ours = next((recording.ours for recording in recordings if recording.ours.get("strategy")), {})
    return Trace(
        ranks=tuple(sorted([*moved, *missing], key=lambda trace: trace.rank)),
        strategy=str(ours.get("strategy", "")),
        formula=tuple(map(str, ours.get("formula") or ())),
        formula_bytes=ours.get("formula_bytes"),
        notes=tuple(notes),
    )


def shifts(recordings: Sequence[RecordedTrace]) -> tuple[list[int], list[str]]:
    """What is to be added to each recording's times for one clock that begins at 0, and notes.

    Never below 0: the recording that began first stays as it is.
    """
    has_zeros = all(recording.zero_ns for recording in recordings)
    clocks = offsets(recordings)
    zeros_ns = [
        (recording.zero_ns if has_zeros else 0) + clocks[recording.trace.host].offset_ns
        for recording in recordings
    ]
    first_ns = min(zeros_ns, default=0)
    notes = [] if has_zeros else ["The files have no start time: each rank begins at 0."]
    return [zero_ns - first_ns for zero_ns in zeros_ns], [*notes, *_clock_notes(clocks)]


def offsets(recordings: Sequence[RecordedTrace]) -> Mapping[str, Clock]:
    """Host -> its clock, against that of the first recording's host.

    The median over the collectives that two hosts have in common; a host that has none with the
    first one is compared with one that has.
    """
    hosts = list(dict.fromkeys(recording.trace.host for recording in recordings))
    between = _differences(recordings) if len(hosts) > 1 else {}
    clocks = {host: Clock(0) for host in hosts[:1]}
    reached = hosts[:1]
    for near in reached:  # grows while it is read
        for far in hosts:
            differences_ns = between.get((near, far))
            if far not in clocks and differences_ns:
                offset = np.median(differences_ns)
                spread = int(np.median(np.abs(np.array(differences_ns) - offset)))
                clocks[far] = Clock(
                    clocks[near].offset_ns + int(offset), spread, len(differences_ns)
                )
                reached.append(far)
    return clocks | {host: Clock(0) for host in hosts if host not in clocks}


def _differences(recordings: Sequence[RecordedTrace]) -> dict[tuple[str, str], list[int]]:
    """(near, far) -> for each common collective, how much later it ended by near's clock."""
    between: dict[tuple[str, str], list[int]] = defaultdict(list)
    for calls in match_collectives([recording.trace for recording in recordings]):
        ends_ns: dict[str, list[np.ndarray]] = defaultdict(list)
        for place, events in zip(calls.ranks, calls.events, strict=True):
            recording = recordings[place]
            end_ns = (
                recording.trace.events.start_ns[events] + recording.trace.events.duration_ns[events]
            )
            # Since 1970 they have more digits than a float, which a median is.
            ends_ns[recording.trace.host].append(
                end_ns + (recording.zero_ns - recordings[0].zero_ns)
            )
        # The middle one of a host's ranks: one alone can be late to note it.
        middle = {host: np.median(np.stack(ends), axis=0) for host, ends in ends_ns.items()}
        for near, near_ns in middle.items():
            for far, far_ns in middle.items():
                if near != far:
                    between[near, far].extend((near_ns - far_ns).astype(np.int64).tolist())
    return between


def _shift(trace: RankTrace, shift_ns: int) -> RankTrace:
    if not shift_ns:
        return trace
    steps = (
        Step(step.number, step.start_ns + shift_ns, step.end_ns + shift_ns) for step in trace.steps
    )
    events = replace(trace.events, start_ns=trace.events.start_ns + shift_ns)
    return replace(trace, events=events, steps=tuple(steps))


def _clock_notes(clocks: Mapping[str, Clock]) -> list[str]:
    notes = []
    for host, clock in list(clocks.items())[1:]:
        if clock.count:
            notes.append(
                f"The clock of {host} was shifted by {clock.offset_ns / 1e6:.3f} ms to match the "
                f"ends of {clock.count} collectives; half of them agree within "
                f"{clock.spread_ns / 1e3:.0f} us."
            )
        else:
            notes.append(
                f"The clock of {host} was not adjusted: its ranks recorded no collective in common "
                "with the others."
            )
    return notes
