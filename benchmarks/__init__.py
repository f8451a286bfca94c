"""Benchmarks: each compares nbdist with the same thing done without it.

A benchmark is a module of this folder with `def rows() -> list[Row]` and a first docstring line
that names what is compared. It takes its samples here, interleaved (`compare`: ours, other, ours,
other, ...), and hands over their medians: on a machine with other work, values that were taken
one after the other say nothing about each other. It runs in seconds, asserts that both sides
computed the same where they compute anything, and leaves nothing behind. Engines and processes
that it needs it starts itself. Add its name to MODULES in benchmarks/run.py; `make bench` runs
all and writes docs/benchmarks.md.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table.

    Attributes:
        name: What was done: "all_reduce of 4 bytes, 2 ranks".
        ours: Median with nbdist, in `unit`.
        other: Median of the same without it, in `unit`.
        unit: "us", "ms", "s" or "MB".
        how: How it was measured: samples, what "other" is. One line.
        most_ratio: The largest ours / other that is promised; None if nothing is.
        most_more: The largest ours - other that is promised, in `unit`; None if nothing is.
    """

    name: str
    ours: float
    other: float
    unit: str
    how: str
    most_ratio: float | None = None
    most_more: float | None = None

    @property
    def ratio(self) -> float:
        """Ours over other; infinite where other is 0."""
        return self.ours / self.other if self.other else float("inf")

    @property
    def is_kept(self) -> bool:
        """Whether every promise of this row is kept."""
        within_ratio = self.most_ratio is None or self.ratio <= self.most_ratio
        within_more = self.most_more is None or self.ours - self.other <= self.most_more
        return within_ratio and within_more


def compare(
    ours: Callable[[], float], other: Callable[[], float], rounds: int, *, warm_up: int = 1
) -> tuple[float, float]:
    """Medians of two measurements that take turns.

    Args:
        ours: Measures once with nbdist and returns the value.
        other: The same without it.
        rounds: How often each is measured.
        warm_up: Rounds before these, not counted.
    """
    pairs = [(ours(), other()) for _ in range(warm_up + rounds)][warm_up:]
    return statistics.median(a for a, _ in pairs), statistics.median(b for _, b in pairs)
