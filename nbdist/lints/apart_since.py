"""At which step parameters that ranks hold alike were apart.

The facts come from lints/rank/check_every.
"""

from __future__ import annotations

from nbdist.core.finding import RuleHit
from nbdist.lints.lint import Facts, Lint, versus


def _apart_since(subject: str, facts: Facts) -> list[RuleHit]:
    """The first looks of `--every N` at which ranks that hold the same had other parameters."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank, rank_facts in facts.items():
        groups.setdefault(tuple(rank_facts["ranks"]), []).append(rank)
    hits = []
    for ranks in groups.values():
        looks = {r: dict(zip(facts[r]["steps"], facts[r]["digests"], strict=True)) for r in ranks}
        common = sorted(set.intersection(*(set(by_step) for by_step in looks.values())))
        for step in common:
            by_digest: dict[str, list[int]] = {}
            for rank in ranks:
                by_digest.setdefault(looks[rank][step], []).append(rank)
            if len(by_digest) > 1:
                every = facts[ranks[0]]["every"]
                hits.append(
                    RuleHit(
                        f"before step {step} of its optimizer, the parameters of {subject} "
                        f"differed between {versus(by_digest)} (checked every "
                        f"{every} step{'s' * (every > 1)})",
                        tuple(ranks),
                    )
                )
                break
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
            rank: {"ranks": [0, 1], "steps": [10, 20], "digests": ["a", "bc"[rank]], "every": 10}
            for rank in (0, 1)
        },
    ),
)
