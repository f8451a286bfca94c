"""Progress bars as text: how far each is, and those of several ranks as one."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping

from nbdist.core.failures import ranks_phrase
from nbdist.core.ranks import rank_label

_PERCENT = re.compile(r"(\d{1,3})(?:\.\d+)?\s*%")
# Percent that make a rank the last one: bars are redrawn at different moments.
_BEHIND = 5
_ranks_phrase = functools.lru_cache(maxsize=64)(ranks_phrase)


@functools.lru_cache(maxsize=1024)  # of many ranks one bar has changed, and all are read
def percent(bar: str) -> int | None:
    """How far a bar is, 0 to 100, by the percentage that stands in it; None without one."""
    match = _PERCENT.search(bar)
    return None if match is None else min(100, int(match[1]))


def together(bars: Mapping[int, str]) -> str:
    """The bar of the lowest rank, with its label, and where the other ranks' bars are.

    `[0]  50%|#####     | 2/4 (ranks 1-3: 40-62%, rank 2 is last)`. Equal bars are one, of all
    their ranks. They are given in rank order, without empty ones.
    """
    if not bars:
        return ""
    first = next(iter(bars.values()))
    alike = [rank for rank, bar in bars.items() if bar == first]
    others = {rank: bar for rank, bar in bars.items() if rank not in alike}
    text = f"[{rank_label(alike)}] {first}"
    return f"{text} ({_others(others, percent(first))})" if others else text


def _others(bars: Mapping[int, str], first: int | None) -> str:
    named = _ranks_phrase(tuple(bars))
    percents = {rank: far for rank, bar in bars.items() if (far := percent(bar)) is not None}
    if len(percents) < len(bars):  # each counts in its own way
        count = len(bars)
        return f"and {count} bar{'s' if count > 1 else ''} of {named}"
    least, most = min(percents.values()), max(percents.values())
    span = f"{least}%" if least == most else f"{least}-{most}%"
    if least == most or least >= max(most, first or 0) - _BEHIND:
        return f"{named}: {span}"
    last = [rank for rank, far in percents.items() if far == least]
    return f"{named}: {span}, rank {rank_label(last)} last"
