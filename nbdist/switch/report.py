"""What a switch of the strategy did on one rank."""

from __future__ import annotations

from dataclasses import dataclass

from nbdist.strategy.choice import Strategy


@dataclass(frozen=True, slots=True)
class RankSwitchReport:
    """What a switch did on one rank, for a person to read.

    Attributes:
        before, after: The strategies; equal where nothing was done.
        models: Names of the models that were moved.
        rebound: Names that stand for another object now.
        lists: Names of lists of parameters that were updated in place.
        stale: What still points to the old model or its parameters, a phrase each.
        notes: What else a person has to know, a sentence each.
        moved_bytes: Sent between all ranks; the same number on each.
        elapsed_s: From the call to its end.
        batch: Samples that one step sees before and after, and the learning rate; None where no
            loader that depends on it, or no optimizer, is prepared.
    """

    before: Strategy
    after: Strategy
    models: tuple[str, ...]
    rebound: tuple[str, ...]
    lists: tuple[str, ...]
    stale: tuple[str, ...]
    notes: tuple[str, ...]
    moved_bytes: int
    elapsed_s: float
    batch: tuple[int, int, float] | None = None
