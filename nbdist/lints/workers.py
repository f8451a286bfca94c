"""More DataLoader workers than cores.

The facts come from lints/rank/data.
"""

from __future__ import annotations

from nbdist.core.finding import RuleHit
from nbdist.lints.lint import Facts, Lint, group


def _workers(_subject: str, facts: Facts) -> list[RuleHit]:
    hits = []
    for ranks in group({rank: facts[rank]["host"] for rank in facts}).values():
        total = sum(facts[rank]["workers"] for rank in ranks)
        cores = max(facts[rank]["cores"] for rank in ranks)
        if total > cores:
            # A host's name is no news on one host, and differs from machine to machine.
            sentence = (
                f"{len(ranks)} rank{'s' * (len(ranks) > 1)} of one host started {total} DataLoader "
                f"workers on {cores} core{'s' * (cores > 1)}"
            )
            hits.append(RuleHit(sentence, tuple(ranks)))
    return hits


LINT = Lint(
    name="workers",
    when="the ranks of a host start more DataLoader workers than it has cores",
    judge=_workers,
    why="they compete with each other and with the ranks for the cores",
    do="use fewer (num_workers <= cores / ranks), unless they mostly wait for a disk",
    is_of_machine=True,
    conditions="the ranks of a host together start more DataLoader workers than it has cores",
    exceptions="with `NBDIST_TEST=1`, since it depends on the machine",
    example=("", {rank: {"workers": 8, "cores": 8, "host": "h"} for rank in (0, 1)}),
)
