"""At which step parameters that ranks hold alike were apart.

The facts come from lints/rank/check_every.
"""

from __future__ import annotations

from nbdist.core.finding import RuleHit
from nbdist.lints.lint import Facts, Lint, group, versus


def _apart_since(subject: str, facts: Facts) -> list[RuleHit]:
    """The first looks of `--every N` at which ranks that hold the same had other parameters."""
    hits = []
    for ranks in group({rank: tuple(facts[rank]["ranks"]) for rank in facts}).values():
        looks = {r: dict(zip(facts[r]["steps"], facts[r]["digests"], strict=True)) for r in ranks}
        common = sorted(set.intersection(*(set(by_step) for by_step in looks.values())))
        by_digest = ((step, group({r: looks[r][step] for r in ranks})) for step in common)
        first = next(((step, groups) for step, groups in by_digest if len(groups) > 1), None)
        if first is not None:
            step, groups = first
            every = facts[ranks[0]]["every"]
            sentence = (
                f"before step {step} of its optimizer, the parameters of {subject} differed "
                f"between {versus(groups.values())} (checked every {every} "
                f"step{'s' * (every > 1)})"
            )
            hits.append(RuleHit(sentence, tuple(ranks)))
    return hits


LINT = Lint(
    name="apart-since",
    when="with %dist_check --every N: at which step parameters that ranks hold alike were apart",
    judge=_apart_since,
    why="something on these ranks has differed since the check before that",
    do="%dist_check shows where; %dist_sync_model makes DDP models equal",
    conditions="with `--every N`, parameters that ranks hold alike differ: the first such step",
    example=(
        "model",
        {
            rank: {"ranks": [0, 1], "steps": [10, 20], "digests": ["a", digest], "every": 10}
            for rank, digest in enumerate("bc")
        },
    ),
)
