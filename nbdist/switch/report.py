"""Reports on a switch of the strategy, of one rank and of all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from nbdist.core.ranks import rank_label
from nbdist.strategy.choice import Strategy


@dataclass(frozen=True, slots=True)
class RankSwitchReport:
    """Report on a switch on one rank, for a person to read.

    Attributes:
        before, after: The strategies; equal where nothing was done.
        lists: Names of lists of parameters that were updated in place.
        stale: What still points to the old model or its parameters, a phrase each.
        notes: What else a person has to know, a sentence each.
        moved_bytes: Received from other ranks; of several reports, the largest.
        elapsed_s: From the call to its end.
        batch: Samples that one step sees before and after, and the learning rate; None where no
            loader that depends on it, or no optimizer, is prepared.
    """

    before: Strategy
    after: Strategy
    models: tuple[str, ...] = ()
    rebound: tuple[str, ...] = ()
    lists: tuple[str, ...] = ()
    stale: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    moved_bytes: int = 0
    elapsed_s: float = 0.0
    batch: tuple[int, int, float] | None = None


def merge_reports(reports: Sequence[RankSwitchReport]) -> RankSwitchReport:
    """The ranks' reports as one, in rank order.

    What is not the same on all ranks has its ranks in front: `[0] best = model`. The time is that
    of the slowest.
    """
    phrases: dict[str, Any] = {
        name: _merge_phrases([getattr(report, name) for report in reports])
        for name in ("models", "rebound", "lists", "stale", "notes")
    }
    return replace(
        reports[0],
        **phrases,
        moved_bytes=max(report.moved_bytes for report in reports),
        elapsed_s=max(report.elapsed_s for report in reports),
    )


def _merge_phrases(phrases: Sequence[Sequence[str]]) -> tuple[str, ...]:
    ranks: dict[str, list[int]] = {}
    for rank, rank_phrases in enumerate(phrases):
        for phrase in dict.fromkeys(rank_phrases):
            ranks.setdefault(phrase, []).append(rank)
    return tuple(
        phrase if len(holders) == len(phrases) else f"[{rank_label(holders)}] {phrase}"
        for phrase, holders in ranks.items()
    )
