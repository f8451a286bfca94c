"""What `make gpu` has found: a JSON line for each case, of which the last one counts.

Without anything but the standard library: a machine may have nothing else yet.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

FILE = "results.jsonl"
LOG = "NBDIST_GPU_RESULTS"
"""Names the file that every case is added to."""
PART = "NBDIST_GPU_PART"
"""The part of `make gpu` that runs."""
DATA = "NBDIST_GPU_DATA"
"""The folder that traces and snapshots are captured into."""
ON_CPU = "NBDIST_GPU_TESTS_ON_CPU"
"""Set: the tests of this folder run on CPU ranks, where they can."""

PASSED, FAILED, RUNNING, TIMED_OUT, NOT_RUN = "passed", "failed", "running", "timed out", "not run"


@dataclass(frozen=True, slots=True)
class Case:
    """One thing that was looked at.

    Attributes:
        part: The part of `make gpu` that it belongs to.
        on: The ranks that it ran on: a key of places.PLACES; empty where there are none.
        outcome: PASSED, FAILED, TIMED_OUT or NOT_RUN; RUNNING until it has one of them.
        seconds: How long it took.
        measured: Numbers and words by name, for the page.
        why: What failed, or why it was not run.
    """

    part: str
    name: str
    outcome: str
    on: str = ""
    seconds: float = 0.0
    measured: Mapping[str, Any] = field(default_factory=dict)
    why: str = ""


def add(path: Path, case: Case) -> None:
    """Add a line to a file of results."""
    with path.open("a") as file:
        file.write(json.dumps(asdict(case), default=str) + "\n")


def read(paths: Iterable[Path]) -> list[Case]:
    """Every case of these files once, in the order of its first line; the last file counts.

    But what a later file says was not run does not take back what ran before.
    """
    cases: dict[tuple[str, str, str], Case] = {}
    for path in paths:
        for key, case in _read(path).items():
            if case.outcome != NOT_RUN or cases.get(key, case).outcome == NOT_RUN:
                cases[key] = case
    return list(cases.values())


def _read(path: Path) -> dict[tuple[str, str, str], Case]:
    """By part, name and place; of each its last line. What still ran then has run out of time."""
    cases: dict[tuple[str, str, str], Case] = {}
    for line in path.read_text().splitlines():
        case = Case(**json.loads(line))
        if case.outcome == RUNNING:
            case = replace(case, outcome=TIMED_OUT, why="it had not ended when its part had to")
        cases[case.part, case.name, case.on] = case
    return cases
