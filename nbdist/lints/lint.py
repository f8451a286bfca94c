"""One lint, and what several of them judge alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nbdist.core.failures import ranks_phrase
from nbdist.core.finding import RuleHit

Facts = Mapping[int, Mapping[str, Any]]  # of the ranks that saw it


@dataclass(frozen=True, slots=True)
class Lint:
    """One thing that is looked for.

    Attributes:
        name: As it is silenced.
        when: When it is reported, for the list of lints.
        judge: What the ranks' facts about one subject come to.
        why: Why it matters, as a clause.
        do: What to do, as a clause.
        conditions: The same as `when` for docs/lints.md, with all conditions.
        example: A subject, and facts of ranks of which one hit comes.
        exceptions: Where it is silent although it may be so, for docs/lints.md.
        needs_success: Only judged where the cell ended well on every rank.
        is_of_machine: It depends on the machine, so it is left out where outputs are stored.
    """

    name: str
    when: str
    judge: Callable[[str, Facts], list[RuleHit]]
    why: str
    do: str
    conditions: str
    example: tuple[str, Facts]
    exceptions: str = ""
    needs_success: bool = False
    is_of_machine: bool = False


def each(
    sentence: Callable[[str, Mapping[str, Any]], str],
) -> Callable[[str, Facts], list[RuleHit]]:
    """A lint that each rank sees by itself; ranks with the same sentence are one hit."""

    def judge(subject: str, facts: Facts) -> list[RuleHit]:
        ranks_of: dict[str, list[int]] = {}
        for rank, rank_facts in facts.items():
            ranks_of.setdefault(sentence(subject, rank_facts), []).append(rank)
        return [RuleHit(text, tuple(ranks)) for text, ranks in ranks_of.items()]

    return judge


def apart(sentence: str) -> Callable[[str, Facts], list[RuleHit]]:
    """A lint about values that should be the same on all ranks of a group."""

    def judge(subject: str, facts: Facts) -> list[RuleHit]:
        groups: dict[tuple[int, ...], dict[str, list[int]]] = {}
        for rank, rank_facts in facts.items():
            by_digest = groups.setdefault(tuple(rank_facts["ranks"]), {})
            by_digest.setdefault(rank_facts["digest"], []).append(rank)
        return [
            RuleHit(sentence.format(subject=subject, who=versus(by_digest)), tuple(sorted(members)))
            for members, by_digest in groups.items()
            if len(by_digest) > 1
        ]

    return judge


def versus(by_digest: Mapping[str, Sequence[int]]) -> str:
    """The groups of ranks that differ: `rank 0 and ranks 1-3`."""
    return " and ".join(ranks_phrase(ranks) for ranks in by_digest.values())
