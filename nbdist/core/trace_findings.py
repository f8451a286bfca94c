"""What slows a recorded cell down, by rules: what was found, why it matters, what to do."""

from __future__ import annotations

from dataclasses import dataclass

from nbdist.core.trace import Trace
from nbdist.core.trace_shares import Shares


@dataclass(frozen=True, slots=True)
class Spot:
    """A place in the trace that shows a finding.

    Attributes:
        rank: Whose lanes.
        start_ns: Since the beginning of the recording.
        end_ns: Likewise.
    """

    rank: int
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class TraceFinding:
    """Something that slows the cell down.

    Attributes:
        rule: Name in RULES, as people read it: "device-to-host copies".
        found: What is there, with its numbers, as a clause.
        why: Why that costs time, as a clause.
        what: What to do, as a clause.
        ranks: Where it was found.
        share: Of a step's time (of the recording's, without steps), the worst rank's; the largest
            finding comes first.
        spots: A few places to look at, the longest first.
    """

    rule: str
    found: str
    why: str
    what: str
    ranks: tuple[int, ...]
    share: float
    spots: tuple[Spot, ...] = ()


def findings(trace: Trace, shares: Shares) -> tuple[TraceFinding, ...]:
    """What slows the cell down, the largest first."""
    del trace, shares
    return ()
