"""What a check has found: what, how wise that is, why, and what to do."""

from __future__ import annotations

from dataclasses import dataclass

OK = "ok"
WARN = "warn"
BAD = "bad"


@dataclass(frozen=True, slots=True)
class Finding:
    """One row of `%dist_doctor`.

    Attributes:
        name: What was looked at.
        found: What is there.
        verdict: OK, WARN (works, but see why) or BAD (ranks will not start, or not work).
        why: A clause; may be empty where all is well.
        what: What to do, as a clause; empty where there is nothing.
    """

    name: str
    found: str
    verdict: str = OK
    why: str = ""
    what: str = ""
