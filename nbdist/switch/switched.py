"""What all ranks tell of one switch, as one record."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from nbdist.core.ranks import rank_label
from nbdist.switch.report import RankSwitchReport


def merge(told: Sequence[RankSwitchReport]) -> RankSwitchReport:
    """The ranks' records as one, in rank order.

    What is not the same on all ranks has its ranks in front: `[0] best = model`. The time is that
    of the slowest.
    """
    return replace(
        told[0],
        models=_merged([one.models for one in told]),
        rebound=_merged([one.rebound for one in told]),
        lists=_merged([one.lists for one in told]),
        stale=_merged([one.stale for one in told]),
        notes=_merged([one.notes for one in told]),
        moved_bytes=max(one.moved_bytes for one in told),
        elapsed_s=max(one.elapsed_s for one in told),
    )


def _merged(phrases: Sequence[Sequence[str]]) -> tuple[str, ...]:
    ranks: dict[str, list[int]] = {}
    for rank, own in enumerate(phrases):
        for phrase in dict.fromkeys(own):
            ranks.setdefault(phrase, []).append(rank)
    return tuple(
        phrase if len(who) == len(phrases) else f"[{rank_label(who)}] {phrase}"
        for phrase, who in ranks.items()
    )
