"""A lint as a record, and the judgement of the facts of several ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
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
        is_early: It is told while the cell runs, once all ranks have noted it.
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
    is_early: bool = False
    is_of_machine: bool = False


def each(sentence: Callable[..., str]) -> Callable[[str, Facts], list[RuleHit]]:
    """A lint that each rank sees by itself; ranks with the same sentence are one hit."""

    def judge(subject: str, facts: Facts) -> list[RuleHit]:
        sentences = {rank: sentence(subject=subject, **values) for rank, values in facts.items()}
        return [RuleHit(text, tuple(ranks)) for text, ranks in group(sentences).items()]

    return judge


def apart(sentence: str) -> Callable[[str, Facts], list[RuleHit]]:
    """A lint about values that should be the same on all ranks of a group."""

    def judge(subject: str, facts: Facts) -> list[RuleHit]:
        hits = []
        for members, ranks in group({r: tuple(facts[r]["ranks"]) for r in facts}).items():
            by_digest = group({rank: facts[rank]["digest"] for rank in ranks})
            if len(by_digest) > 1:
                text = sentence.format(subject=subject, who=versus(by_digest.values()))
                hits.append(RuleHit(text, tuple(sorted(members))))
        return hits

    return judge


def group(values: Mapping[int, Any]) -> dict[Any, list[int]]:
    """Value -> the ranks that have it."""
    ranks_of: dict[Any, list[int]] = {}
    for rank, value in values.items():
        ranks_of.setdefault(value, []).append(rank)
    return ranks_of


def versus(groups: Iterable[Sequence[int]]) -> str:
    """The groups of ranks that differ: `rank 0 and ranks 1-3`."""
    return " and ".join(map(ranks_phrase, groups))


# Facts of two ranks that differ, for examples.
TWO_VALUES = {0: {"ranks": [0, 1], "digest": "a"}, 1: {"ranks": [0, 1], "digest": "b"}}
