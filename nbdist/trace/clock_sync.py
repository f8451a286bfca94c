"""One time for the traces of all ranks: hosts' clocks are aligned by their collectives.

Ranks of one host share its clock. No rank is through an all-reduce before all have come, and then
all are within microseconds on one network: where two clocks differ, so do these ends. Ranks that
wait for a core note an end late by milliseconds, so an offset that the collectives do not prove is
none.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any

import numpy as np
import numpy.typing as npt

from nbdist.trace.match_collectives import match_collectives
from nbdist.trace.read import RecordedTrace
from nbdist.trace.trace import Integers, RankTrace, Step, Trace

# Offsets by single collectives lie this many median deviations about the clock's: three standard
# deviations of what is spread normally.
REACH = 3 * 1.4826
# Fewer collectives do not show how far their offsets are spread.
ENOUGH = 4
# This share of the bounds by single collectives has to hold: a match may be wrong.
HOLDING = 0.95


@dataclass(frozen=True, slots=True)
class Clock:
    """How far a host's clock is from the first rank's.

    Attributes:
        offset_ns: To be added to its times; 0 where `low_ns` to `high_ns` contain 0.
        low_ns, high_ns: The collectives allow an offset from the one to the other.
        count: Collectives that the offset comes from; 0 where there is none.
    """

    offset_ns: int
    low_ns: int = 0
    high_ns: int = 0
    count: int = 0


@dataclass(frozen=True, slots=True)
class _Differences:
    """Differences of two hosts' clocks at their collectives, to be added to the far one's times.

    Attributes:
        by_ends: The near host's end less the far host's, of each collective.
        at_least, at_most: No rank ends a collective before the last one has begun it.
    """

    by_ends: npt.NDArray[np.float64]
    at_least: npt.NDArray[np.float64]
    at_most: npt.NDArray[np.float64]

    def clock(self) -> Clock:
        """The median of the ends, between what causality and their own spread allow."""
        median = float(np.median(self.by_ends))
        spread = float(np.median(np.abs(self.by_ends - median)))
        reach = REACH * spread if len(self.by_ends) >= ENOUGH else np.inf
        # In order also where they cross, because a clock was moved while it was recorded.
        least, largest = sorted((
            float(np.quantile(self.at_least, HOLDING, method="lower")),
            float(np.quantile(self.at_most, 1 - HOLDING, method="higher")),
        ))  # fmt: skip
        offset = min(max(median, least), largest)
        low, high = max(least, offset - reach), min(largest, offset + reach)
        is_proven = not low <= 0 <= high
        return Clock(int(offset) * is_proven, int(low), int(high), len(self.by_ends))


def align(recordings: Sequence[RecordedTrace], missing: Sequence[RankTrace] = ()) -> Trace:
    """The traces of all ranks, by one clock that begins at 0.

    `missing` ranks have nothing but a reason.
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
    """The shift of each recording's times to one clock that begins at 0, and notes.

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

    Hosts are compared by common collectives; a host that has none with the first one is
    compared with one that has.
    """
    hosts = list(dict.fromkeys(recording.trace.host for recording in recordings))
    between = _differences(recordings) if len(hosts) > 1 else {}
    clocks = {host: Clock(0) for host in hosts[:1]}
    reached = hosts[:1]
    for near in reached:  # grows while it is read
        for far in hosts:
            if far in clocks or (near, far) not in between:
                continue
            near_clock, clock = clocks[near], between[near, far].clock()
            clocks[far] = Clock(
                near_clock.offset_ns + clock.offset_ns,
                near_clock.offset_ns + clock.low_ns,
                near_clock.offset_ns + clock.high_ns,
                clock.count,
            )
            reached.append(far)
    return clocks | {host: Clock(0) for host in hosts if host not in clocks}


def _differences(recordings: Sequence[RecordedTrace]) -> dict[tuple[str, str], _Differences]:
    """(near, far) -> what their common collectives say."""
    between: dict[tuple[str, str], list[tuple[Any, Any, Any]]] = defaultdict(list)
    for calls in match_collectives([recording.trace for recording in recordings]):
        starts_ns: dict[str, list[Integers]] = defaultdict(list)
        ends_ns: dict[str, list[Integers]] = defaultdict(list)
        for place, events in zip(calls.ranks, calls.events, strict=True):
            recording = recordings[place]
            # Since 1970 they have more digits than a float, which a median is.
            start_ns = recording.trace.events.start_ns[events] + (
                recording.zero_ns - recordings[0].zero_ns
            )
            starts_ns[recording.trace.host].append(start_ns)
            ends_ns[recording.trace.host].append(
                start_ns + recording.trace.events.duration_ns[events]
            )
        for near, far in permutations(ends_ns, 2):
            between[near, far].append((
                # The middle one of a host's ranks: one alone can be late to note it.
                np.median(ends_ns[near], axis=0) - np.median(ends_ns[far], axis=0),
                np.max(starts_ns[near], axis=0) - np.min(ends_ns[far], axis=0),
                np.min(ends_ns[near], axis=0) - np.max(starts_ns[far], axis=0),
            ))  # fmt: skip
    return {
        hosts: _Differences(*map(np.concatenate, zip(*parts, strict=True)))
        for hosts, parts in between.items()
    }


def _shift(trace: RankTrace, shift_ns: int) -> RankTrace:
    if not shift_ns:
        return trace
    steps = (
        Step(step.number, step.start_ns + shift_ns, step.end_ns + shift_ns) for step in trace.steps
    )
    events = replace(trace.events, start_ns=trace.events.start_ns + shift_ns)
    return replace(trace, events=events, steps=tuple(steps))


def _clock_notes(clocks: Mapping[str, Clock]) -> Iterator[str]:
    """A line for each clock that was shifted, and one for all that were left as they are."""
    others = list(clocks)[1:]
    for host in others:
        clock = clocks[host]
        if not clock.count:
            yield (
                f"The clock of {host} was not adjusted: its ranks recorded no collective in common "
                "with the others."
            )
        elif clock.offset_ns:
            yield (
                f"The clock of {host} was shifted by {_ms(clock.offset_ns)} ms to match "
                f"{clock.count} collectives, which allow {_ms(clock.low_ns)} to "
                f"{_ms(clock.high_ns)} ms."
            )
    left = [host for host in others if clocks[host].count and not clocks[host].offset_ns]
    if left:
        most_ns = max(max(-clocks[host].low_ns, clocks[host].high_ns) for host in left)
        names = left[0] if len(left) == 1 else f"{len(left)} hosts"
        yield (
            f"The clocks of {next(iter(clocks))} and of {names} agree as far as their collectives "
            f"show, within {_ms(most_ns)} ms: nothing was shifted."
        )


def _ms(ns: int) -> str:
    return f"{ns / 1e6:.3f}"
