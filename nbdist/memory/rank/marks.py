"""Moments of a recording, and whose memory it was at each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from nbdist.memory.categories import Claim
from nbdist.memory.rank.owners import StorageOwner
from nbdist.memory.snapshot import BACKWARD, STEPPING, Phase


@dataclass(slots=True)
class Marks:
    """The notes of a recording, each under the number of its mark.

    Attributes:
        first: The mark at which the recording began.
        before: Whose memory it was then.
        owners: Whose it was at later ones.
        steppings: First and last mark of each optimizer's step.
        ends: Marks that end a step of training.
    """

    first: int = 0
    before: tuple[StorageOwner, ...] = ()
    owners: list[tuple[int, tuple[StorageOwner, ...]]] = field(default_factory=list)
    steppings: list[tuple[int, int]] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)

    def claims(self, times_ns: Mapping[int, int], device: str) -> Iterator[Claim]:
        """The claims of the owners of a device's memory."""
        for number, owners in [(self.first, self.before), *self.owners]:
            time_ns = times_ns.get(number)
            if time_ns is None:
                continue
            for owner in owners:
                if owner.device == device:
                    yield Claim(
                        time_ns, owner.address, owner.size_bytes, owner.category, owner.name
                    )

    def stepping(self, times_ns: Mapping[int, int]) -> Iterator[Phase]:
        """The steps of optimizers that both marks were seen of."""
        for first, last in self.steppings:
            if first in times_ns and last in times_ns:
                yield Phase(STEPPING, times_ns[first], times_ns[last])

    def step_ends(self, times_ns: Mapping[int, int]) -> tuple[int, ...]:
        """When steps of training ended."""
        return tuple(times_ns[number] for number in self.ends if number in times_ns)


def merge_phases(phases: Iterable[Phase]) -> tuple[Phase, ...]:
    """In order, none over another: a backward within an optimizer's step (a closure's) stays one.

    A step of an optimizer within another's, or in a backward (hooks that step), is part of it.
    """
    ordered: list[Phase] = []
    for phase in sorted(phases, key=lambda phase: (phase.start_ns, -phase.end_ns)):
        if not ordered or phase.start_ns >= ordered[-1].end_ns:
            ordered.append(phase)
            continue
        last = ordered[-1]
        if phase.kind == BACKWARD and last.kind == STEPPING and phase.end_ns <= last.end_ns:
            parts = (
                Phase(last.kind, last.start_ns, phase.start_ns),
                phase,
                Phase(last.kind, phase.end_ns, last.end_ns),
            )
            ordered[-1:] = [part for part in parts if part.end_ns > part.start_ns]
        elif phase.end_ns > last.end_ns:
            ordered[-1] = Phase(last.kind, last.start_ns, phase.end_ns)
    return tuple(ordered)
