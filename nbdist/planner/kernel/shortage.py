"""Whether the ranks' models will find room on their devices under another strategy."""

from __future__ import annotations

import sys
from typing import Any

from nbdist.cluster.kernel.ranks import Ranks
from nbdist.lints.kernel.lints import Lints
from nbdist.lints.rules import Observation
from nbdist.rpc.kernel.functions import RankFunction
from nbdist.strategy.choice import Strategy

SHORTAGE_S = 30.0
LINT = "memory-shortage"

of_prepared: RankFunction[[Strategy], tuple[dict[str, Any], ...]] = RankFunction(
    "nbdist.planner.rank.shortage:of_prepared"
)


def warn(ranks: Ranks, lints: Lints, choice: Strategy) -> None:
    """Say that a switch's models will not fit, before it begins; by formulas.

    Raises:
        RankGone, RankBusy, NotRunning: As for a cell.
    """
    facts_of_rank = ranks.call_all(of_prepared, choice, deadline_s=SHORTAGE_S)
    observations = {
        rank: [Observation(LINT, facts["subject"], facts) for facts in models]
        for rank, models in enumerate(facts_of_rank)
    }
    for line in lints.of_ranks(observations):
        sys.stderr.write(f"{line}\n")
