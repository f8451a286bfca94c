"""What usually goes wrong in training without an error: a table, and what ranks saw of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nbdist.core.failures import ranks_phrase
from nbdist.core.ranks import rank_label
from nbdist.errors import OptionError

# Names that are silenced from the start, with commas between them; `all` for all.
VARIABLE = "NBDIST_SILENCE"
# More names than these are counted.
SHOWN_NAMES = 4
# Fewer batches say nothing: two of a small dataset can be equal by chance.
LEAST_BATCHES = 2


@dataclass(frozen=True, slots=True)
class Observation:
    """What one rank saw in one cell.

    Attributes:
        lint: Name in LINTS.
        subject: Of what: a variable's name, or a class.
        facts: Numbers and texts, as JSON can carry them.
    """

    lint: str
    subject: str
    facts: Mapping[str, Any] = field(default_factory=dict)


Facts = Mapping[int, Mapping[str, Any]]  # of the ranks that saw it


@dataclass(frozen=True, slots=True)
class RuleHit:
    """What a lint has found: a clause with its numbers, and the ranks that it is about."""

    found: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Lint:
    """One thing that is looked for.

    Attributes:
        name: As it is silenced.
        when: When it is told, for the list of lints.
        judge: What the ranks' facts about one subject come to.
        why: Why it matters, as a clause.
        do: What to do, as a clause.
        needs_success: Only judged where the cell ended well on every rank.
        is_of_machine: Whether it is told depends on the machine: not where outputs are stored.
    """

    name: str
    when: str
    judge: Callable[[str, Facts], list[RuleHit]]
    why: str
    do: str
    needs_success: bool = False
    is_of_machine: bool = False


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """A lint that was found in a cell.

    Attributes:
        lint: Name in LINTS.
        subject: Of what; with the lint's name the cause, which is told once.
        hit: What was found.
    """

    lint: str
    subject: str
    hit: RuleHit

    @property
    def lines(self) -> tuple[str, str]:
        """What and where; then why, what to do, and how to hear no more of it."""
        row = LINTS[self.lint]
        return (
            f"lint {row.name} [{rank_label(self.hit.ranks)}]: {self.hit.found}",
            f"  {row.why}; {row.do} (%dist_check --silence {row.name}: no more of this)",
        )


def evaluate(seen: Mapping[int, Sequence[Observation]], *, is_ok: bool) -> list[Diagnostic]:
    """What is to be told of a cell, in the table's order.

    Args:
        seen: Rank -> what it saw.
        is_ok: The cell ended well on every rank that ran it.
    """
    grouped: dict[tuple[str, str], dict[int, Mapping[str, Any]]] = {}
    for rank, own in sorted(seen.items()):
        for one in own:
            if one.lint in LINTS:
                grouped.setdefault((one.lint, one.subject), {})[rank] = one.facts
    told = []
    for row in LINTS.values():
        for (name, subject), facts in grouped.items():
            if name == row.name and (is_ok or not row.needs_success):
                told += [Diagnostic(name, subject, hit) for hit in row.judge(subject, facts)]
    known = {one.subject for one in told if one.lint == "apart-since"}  # which says more
    return [one for one in told if one.lint != "parameters-apart" or one.subject not in known]


def checked(names: Iterable[str]) -> tuple[str, ...]:
    """Names of lints, each of which exists; `all` is all.

    Raises:
        OptionError: One does not exist; lists those that do.
    """
    found: list[str] = []
    for name in names:
        if name != "all" and name not in LINTS:
            raise OptionError(f"There is no lint {name!r}. Choose of {', '.join(LINTS)}, or all.")
        found += list(LINTS) if name == "all" else [name]
    return tuple(dict.fromkeys(found))


def silenced_by(text: str) -> tuple[frozenset[str], tuple[str, ...]]:
    """(the lints that a value of NBDIST_SILENCE names, its words that name none)."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    known = [word for word in words if word == "all" or word in LINTS]
    return frozenset(checked(known)), tuple(word for word in words if word not in known)


def _each(
    sentence: Callable[[str, Mapping[str, Any]], str],
) -> Callable[[str, Facts], list[RuleHit]]:
    """A lint that each rank sees by itself; ranks with the same sentence are one hit."""

    def judge(subject: str, facts: Facts) -> list[RuleHit]:
        ranks_of: dict[str, list[int]] = {}
        for rank, own in facts.items():
            ranks_of.setdefault(sentence(subject, own), []).append(rank)
        return [RuleHit(text, tuple(ranks)) for text, ranks in ranks_of.items()]

    return judge


def _alike(subject: str, facts: Facts) -> list[RuleHit]:
    """Ranks whose data should differ, and whose first batches do not."""
    found: list[list[int]] = []
    for rank in facts:
        mates = next((group for group in found if _has_same(facts, group[0], rank)), None)
        if mates is None:
            found.append([rank])
        else:
            mates.append(rank)
    return [
        RuleHit(
            f"{subject} gave {ranks_phrase(ranks)} the same batches ({_compared(facts, ranks)})",
            tuple(ranks),
        )
        for ranks in found
        if len(ranks) > 1
    ]


def _has_same(facts: Facts, one: int, other: int) -> bool:
    if other not in facts[one]["peers"]:
        return False
    mine, theirs = facts[one]["digests"], facts[other]["digests"]
    n = min(len(mine), len(theirs))
    # Batches that are all alike are a constant dataset, of which every part is the same.
    return n >= LEAST_BATCHES and mine[:n] == theirs[:n] and len(set(mine[:n])) == n


def _compared(facts: Facts, ranks: Sequence[int]) -> str:
    return f"the first {min(len(facts[rank]['digests']) for rank in ranks)} were compared"


def _apart(sentence: str) -> Callable[[str, Facts], list[RuleHit]]:
    """A lint about values that should be the same on all ranks of a group."""

    def judge(subject: str, facts: Facts) -> list[RuleHit]:
        groups: dict[tuple[int, ...], dict[str, list[int]]] = {}
        for rank, own in facts.items():
            by_digest = groups.setdefault(tuple(own["ranks"]), {})
            by_digest.setdefault(own["digest"], []).append(rank)
        return [
            RuleHit(
                sentence.format(subject=subject, who=_versus(by_digest)), tuple(sorted(members))
            )
            for members, by_digest in groups.items()
            if len(by_digest) > 1
        ]

    return judge


def _versus(by_digest: Mapping[str, Sequence[int]]) -> str:
    return " and ".join(ranks_phrase(ranks) for ranks in by_digest.values())


def _apart_since(subject: str, facts: Facts) -> list[RuleHit]:
    """The first looks of `--every N` at which ranks that hold the same had other parameters."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank, own in facts.items():
        groups.setdefault(tuple(own["ranks"]), []).append(rank)
    hits = []
    for ranks in groups.values():
        looks = {r: dict(zip(facts[r]["steps"], facts[r]["digests"], strict=True)) for r in ranks}
        common = sorted(set.intersection(*(set(one) for one in looks.values())))
        for step in common:
            by_digest: dict[str, list[int]] = {}
            for rank in ranks:
                by_digest.setdefault(looks[rank][step], []).append(rank)
            if len(by_digest) > 1:
                hits.append(
                    RuleHit(
                        f"before step {step} of its optimizer the parameters of {subject} differed "
                        f"between {_versus(by_digest)} (looked at every "
                        f"{facts[ranks[0]]['every']})",
                        tuple(ranks),
                    )
                )
                break
    return hits


def _workers(_subject: str, facts: Facts) -> list[RuleHit]:
    hosts: dict[str, list[int]] = {}
    for rank, own in facts.items():
        hosts.setdefault(own["host"], []).append(rank)
    hits = []
    for ranks in hosts.values():
        total = sum(facts[rank]["workers"] for rank in ranks)
        cores = max(facts[rank]["cores"] for rank in ranks)
        if total > cores:
            # A host's name is no news on one host, and differs from machine to machine.
            hits.append(
                RuleHit(
                    f"{len(ranks)} rank{'s' * (len(ranks) > 1)} of one host started {total} "
                    f"DataLoader workers on {cores} core{'s' * (cores > 1)}",
                    tuple(ranks),
                )
            )
    return hits


def _unused(subject: str, facts: Mapping[str, Any]) -> str:
    names, count = facts["names"], facts["count"]
    more = f" and {count - SHOWN_NAMES} more" if count > SHOWN_NAMES else ""
    return (
        f"{', '.join(names[:SHOWN_NAMES])}{more} of {subject} got no gradient in the first step "
        f"({count} of {facts['total']} parameters)"
    )


def _batch(_subject: str, facts: Mapping[str, Any]) -> str:
    before, after, lr = facts["before"], facts["after"], facts["lr"]
    factor = after / before
    return (
        f"the effective batch was {before} samples and is {after}, and the learning rate stays "
        f"{lr:g} (scaled linearly it would be {lr * factor:g}, with the square root "
        f"{lr * factor**0.5:.3g})"
    )


_ROWS = (
    Lint(
        "same-data",
        "a loop that trains takes the same first batches from a DataLoader on ranks whose data "
        "should differ",
        _alike,
        "each gradient is computed twice, and the ranks together learn no more than one",
        "pass the loader to accelerator.prepare, or give it a DistributedSampler",
    ),
    Lint(
        "set-epoch",
        "a cell trains twice over a DistributedSampler that shuffles, at the same epoch",
        _each(
            lambda subject, facts: (
                f"{subject} was gone through again with its DistributedSampler at epoch "
                f"{facts['epoch']} as before"
            )
        ),
        "every epoch has the same order, and each rank sees the same samples for ever",
        "call sampler.set_epoch(epoch) before each loop, or let accelerator.prepare share out",
    ),
    Lint(
        "loss-not-divided",
        "in two steps in a row one line calls backward several times, its loss is a mean, and "
        "neither it nor an Accelerator divides it",
        _each(
            lambda _subject, facts: (
                f"{facts['place']} called backward {facts['count']} times in each step, with a "
                "mean that was not divided, and the gradients were added up"
            )
        ),
        "if these are parts of one batch, its gradient comes out that many times too large",
        "divide the loss by their number, or use accelerator.accumulate with "
        "gradient_accumulation_steps",
    ),
    Lint(
        "effective-batch",
        "a switch of the strategy changes how many samples one step of the optimizer sees",
        _each(_batch),
        "a learning rate belongs to a batch size",
        "set the learning rate, the loader's batch_size, or --accumulate",
    ),
    Lint(
        "unused-parameters",
        "after the first step of a DDP model without --find-unused, trained parameters have no "
        "gradient",
        _each(_unused),
        "DDP waits for the gradient of each of them, leaves gradients of the same bucket "
        "unreduced, and fails in the next forward",
        "use them in the loss, freeze them with requires_grad_(False) before the model is wrapped, "
        "or %dist_strategy ddp --find-unused",
    ),
    Lint(
        "beside-wrapper",
        "an optimizer steps with gradients of a backward while its DDP model was not called",
        _each(
            lambda subject, _facts: (
                f"the optimizer of {subject} stepped with gradients that did not come through "
                f"{subject}"
            )
        ),
        "DDP reduces gradients of its own forward alone, so each rank went its own way",
        "call the wrapped model, not its .module or the model from before prepare; "
        "%dist_sync_model makes the ranks equal again",
    ),
    Lint(
        "initial-values",
        "prepare gets a model whose values differ between ranks",
        _apart(
            "the initial values of {subject} differed between {who}, and prepare gave all of them "
            "rank 0's"
        ),
        "nothing is lost but what the other ranks had drawn or loaded",
        "seed ranks alike before the model is built (%dist_init --seed 0), and apart after that",
    ),
    Lint(
        "shard-seeds",
        "fully_shard gets a model whose values differ between its ranks",
        _apart("fully_shard was given other values of {subject} on {who}"),
        "it sends no values: unless a state is loaded later, the model is made of pieces of "
        "different models",
        "seed ranks alike before the model is built (%dist_init --seed 0), or use "
        "accelerator.prepare, which sends rank 0's",
    ),
    Lint(
        "parameters-apart",
        "after a cell with steps the parameters of a DDP model differ between its ranks (the "
        "first elements of each are compared)",
        _apart("the parameters of {subject} differ between {who} after this cell"),
        "DDP sends gradients, not parameters: ranks that are apart stay apart",
        "%dist_check says where; %dist_sync_model makes them equal",
        needs_success=True,
    ),
    Lint(
        "apart-since",
        "with %dist_check --every N: at which step parameters that ranks hold alike were apart",
        _apart_since,
        "something on these ranks is not the same since the look before",
        "%dist_check says where; %dist_sync_model makes DDP models equal",
    ),
    Lint(
        "bf16-scaler",
        "a GradScaler scales a loss that was computed under bf16 autocast",
        _each(lambda _subject, _facts: "a GradScaler scaled a loss of bf16 autocast"),
        "bf16 has the range of fp32, so scaling does nothing but look for inf in every step",
        "leave the scaler out, or use fp16",
    ),
    Lint(
        "workers",
        "the ranks of a host start more DataLoader workers than it has cores",
        _workers,
        "they take turns with each other and with the ranks",
        "use fewer, num_workers <= cores / ranks, unless they mostly wait for a disk",
        is_of_machine=True,
    ),
)  # fmt: skip

LINTS: dict[str, Lint] = {row.name: row for row in _ROWS}
