"""Every lint as a row of a table: what it judges, its sentence, why it matters and what to do.

What a rank observes for them stands in `lints.rank`; each row says in which file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nbdist.core.failures import ranks_phrase
from nbdist.core.finding import RuleHit

Facts = Mapping[int, Mapping[str, Any]]  # of the ranks that saw it

# Fewer batches say nothing: two of a small dataset can be equal by chance.
LEAST_BATCHES = 2
# More names of unused parameters than these are counted.
SHOWN_NAMES = 4


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


def _each(sentence: Callable[..., str]) -> Callable[[str, Facts], list[RuleHit]]:
    """A lint that each rank sees by itself; ranks with the same sentence are one hit."""

    def judge(subject: str, facts: Facts) -> list[RuleHit]:
        sentences = {rank: sentence(subject=subject, **seen) for rank, seen in facts.items()}
        return [RuleHit(text, tuple(ranks)) for text, ranks in _group(sentences).items()]

    return judge


def _apart(sentence: str) -> Callable[[str, Facts], list[RuleHit]]:
    """A lint about values that should be the same on all ranks of a group."""

    def judge(subject: str, facts: Facts) -> list[RuleHit]:
        hits = []
        for members, ranks in _group({r: tuple(facts[r]["ranks"]) for r in facts}).items():
            by_digest = _group({rank: facts[rank]["digest"] for rank in ranks})
            if len(by_digest) > 1:
                text = sentence.format(subject=subject, who=_versus(by_digest.values()))
                hits.append(RuleHit(text, tuple(sorted(members))))
        return hits

    return judge


def _group(values: Mapping[int, Any]) -> dict[Any, list[int]]:
    """Value -> the ranks that have it."""
    ranks_of: dict[Any, list[int]] = {}
    for rank, value in values.items():
        ranks_of.setdefault(value, []).append(rank)
    return ranks_of


def _versus(groups: Iterable[Sequence[int]]) -> str:
    """The groups of ranks that differ: `rank 0 and ranks 1-3`."""
    return " and ".join(map(ranks_phrase, groups))


def _same_batches(subject: str, facts: Facts) -> list[RuleHit]:
    """Ranks whose data should differ, and whose first batches do not."""
    groups: list[list[int]] = []
    for rank in facts:
        mates = next((group for group in groups if _has_same(facts, group[0], rank)), None)
        if mates is None:
            groups.append([rank])
        else:
            mates.append(rank)
    hits = []
    for ranks in groups:
        if len(ranks) > 1:
            compared = min(len(facts[rank]["digests"]) for rank in ranks)
            found = (
                f"{subject} gave {ranks_phrase(ranks)} the same batches (the first {compared} were "
                "compared)"
            )
            hits.append(RuleHit(found, tuple(ranks)))
    return hits


def _has_same(facts: Facts, rank: int, other: int) -> bool:
    if other not in facts[rank]["peers"]:
        return False
    mine, theirs = facts[rank]["digests"], facts[other]["digests"]
    n_batches = min(len(mine), len(theirs))
    # Batches that are all alike are a constant dataset, of which every part is the same.
    return (
        n_batches >= LEAST_BATCHES
        and mine[:n_batches] == theirs[:n_batches]
        and len(set(mine[:n_batches])) == n_batches
    )


def _batch_sentence(*, before: int, after: int, lr: float, **_subject: str) -> str:
    factor = after / before
    return (
        f"the effective batch was {before} samples and is now {after}, but the learning rate stays "
        f"{lr:g} (linear scaling: {lr * factor:g}, square-root scaling: {lr * factor**0.5:.3g})"
    )


def _unused_sentence(*, subject: str, names: Sequence[str], count: int, total: int) -> str:
    more = f" and {count - SHOWN_NAMES} more" if count > SHOWN_NAMES else ""
    return (
        f"{', '.join(names[:SHOWN_NAMES])}{more} of {subject} got no gradient in the first step "
        f"({count} of {total} parameters)"
    )


def _apart_since(subject: str, facts: Facts) -> list[RuleHit]:
    """The first looks of `--every N` at which ranks that hold the same had other parameters."""
    hits = []
    for ranks in _group({rank: tuple(facts[rank]["ranks"]) for rank in facts}).values():
        looks = {r: dict(zip(facts[r]["steps"], facts[r]["digests"], strict=True)) for r in ranks}
        common = sorted(set.intersection(*(set(by_step) for by_step in looks.values())))
        by_digest = ((step, _group({r: looks[r][step] for r in ranks})) for step in common)
        first = next(((step, groups) for step, groups in by_digest if len(groups) > 1), None)
        if first is not None:
            step, groups = first
            every = facts[ranks[0]]["every"]
            found = (
                f"before step {step} of its optimizer, the parameters of {subject} differed "
                f"between {_versus(groups.values())} (checked every {every} "
                f"step{'s' * (every > 1)})"
            )
            hits.append(RuleHit(found, tuple(ranks)))
    return hits


def _workers(_subject: str, facts: Facts) -> list[RuleHit]:
    hits = []
    for ranks in _group({rank: facts[rank]["host"] for rank in facts}).values():
        total = sum(facts[rank]["workers"] for rank in ranks)
        cores = max(facts[rank]["cores"] for rank in ranks)
        if total > cores:
            # A host's name is no news on one host, and differs from machine to machine.
            found = (
                f"{len(ranks)} rank{'s' * (len(ranks) > 1)} of one host started {total} DataLoader "
                f"workers on {cores} core{'s' * (cores > 1)}"
            )
            hits.append(RuleHit(found, tuple(ranks)))
    return hits


_TWO_VALUES = {0: {"ranks": [0, 1], "digest": "a"}, 1: {"ranks": [0, 1], "digest": "b"}}

_LINTS = (
    Lint(  # seen by lints/rank/data
        name="same-data",
        when="a loop that trains takes the same first batches from a DataLoader on ranks whose "
        "data should differ",
        judge=_same_batches,
        why="each gradient is computed twice, and the ranks together learn no more than one",
        do="pass the loader to accelerator.prepare, or give it a DistributedSampler",
        conditions="a loop that trains (an optimizer steps between its batches) takes the same "
        "first batches from a `DataLoader`, prepared or not, on ranks whose data should differ: "
        "those of one DDP model, or along the data-parallel axes of a prepared one",
        exceptions="other sources of data than a `DataLoader`; loops that end before the second "
        "batch; datasets whose batches are all alike; an FSDP2 model that nbdist has not prepared",
        example=(
            "loader",
            {rank: {"digests": ["a", "b", "c", "d"], "peers": [0, 1]} for rank in (0, 1)},
        ),
    ),
    Lint(  # seen by lints/rank/data
        name="set-epoch",
        when="a cell trains twice over a DistributedSampler that shuffles, at the same epoch",
        judge=_each(
            "{subject} was iterated again with its DistributedSampler still at epoch {epoch}".format
        ),
        why="every epoch has the same order, and each rank always sees the same samples",
        do="call sampler.set_epoch(epoch) before each loop, or pass the loader to "
        "accelerator.prepare",
        conditions="in one cell two loops that train go over a `DistributedSampler` that shuffles, "
        "at the same epoch",
        exceptions="loops in two cells: running a cell again is no mistake",
        example=("loader", {0: {"epoch": 0}, 1: {"epoch": 0}}),
    ),
    Lint(  # seen by lints/rank/optimizer_steps
        name="loss-not-divided",
        when="in two steps in a row one line calls backward several times, its loss is a mean, "
        "and neither it nor an Accelerator divides it",
        judge=_each(
            "{place} called backward {count} times per step on a mean loss that was not divided, "
            "and the gradients were added up".format
        ),
        why="if these are parts of one batch, its gradient is that many times too large",
        do="divide the loss by the number of parts, or use accelerator.accumulate with "
        "gradient_accumulation_steps",
        conditions="in two steps in a row one line calls `backward` the same number of times, "
        "twice or more, the gradients are added up, and the loss is a mean that nothing divides: "
        "neither `/` behind it nor the Accelerator's `gradient_accumulation_steps`",
        exceptions="losses that are sums, weighted or divided anywhere; a model that was compiled; "
        "two lines, as of a GAN. Whether the parts are of one batch cannot be known, so it says "
        '"if"',
        example=("line 7 of cell [12]", {0: {"place": "line 7 of cell [12]", "count": 4}}),
    ),
    Lint(  # seen by lints/kernel/lints
        name="effective-batch",
        when="a switch of the strategy changes how many samples one step of the optimizer sees",
        judge=_each(_batch_sentence),
        why="a learning rate belongs to a batch size",
        do="set the learning rate, the loader's batch_size, or --accumulate",
        conditions="a switch of the strategy changes dp x accumulate, and a loader is prepared "
        "whose batches each rank gets whole, and an optimizer",
        exceptions="with `split_batches`, where a step sees the same; without a prepared loader",
        example=("32 64", {0: {"before": 32, "after": 64, "lr": 0.01}}),
    ),
    Lint(  # seen by lints/rank/ddp
        name="unused-parameters",
        when="after the first step of a DDP model without --find-unused, trained parameters have "
        "no gradient",
        judge=_each(_unused_sentence),
        why="DDP waits for the gradient of each of them, leaves gradients of the same bucket "
        "unreduced, and fails in the next forward",
        do="use them in the loss, freeze them with requires_grad_(False) before the model is "
        "wrapped, or %dist_strategy ddp --find-unused",
        conditions="after the first step of a DDP model without `find_unused_parameters` and "
        "`static_graph`, some parameters have no gradient; it names them, also above the error "
        "that torch raises in the next forward",
        exceptions="parameters that are left out only later",
        example=("model", {0: {"names": ["head.bias"], "count": 1, "total": 12}}),
    ),
    Lint(  # seen by lints/rank/ddp
        name="beside-wrapper",
        when="an optimizer steps with gradients of a backward while its DDP model was not called",
        judge=_each(
            "the optimizer of {subject} stepped with gradients that did not come through "
            "{subject}".format
        ),
        why="DDP reduces gradients of its own forward only, so the ranks have diverged",
        do="call the wrapped model, not its .module or the model from before prepare; "
        "%dist_sync_model makes the ranks equal again",
        conditions="an optimizer steps after a backward, and its DDP model was not called since "
        "its last step: the gradients came through `model.module`, or through the model from "
        "before `prepare`",
        exceptions="where the wrapper was called in the same step as well",
        example=("model", {0: {}, 1: {}}),
    ),
    Lint(  # seen by lints/rank/initial_values
        name="initial-values",
        when="prepare gets a model whose values differ between ranks",
        judge=_apart(
            "the initial values of {subject} differed between {who}; prepare replaced them with "
            "rank 0's"
        ),
        why="the values that the other ranks had drawn or loaded are gone",
        do="seed all ranks alike until the model is built (%dist_init --seed 0)",
        conditions="`prepare` gets a model whose values differ between ranks. It takes rank 0's, "
        "under every strategy",
        exceptions="only the first 16 elements of each tensor are compared",
        example=("model", _TWO_VALUES),
    ),
    Lint(  # seen by lints/rank/initial_values
        name="shard-seeds",
        when="fully_shard gets a model whose values differ between its ranks",
        judge=_apart("fully_shard got different values of {subject} on {who}"),
        why="it sends no values: unless a state is loaded later, the model consists of pieces of "
        "different models",
        do="seed all ranks alike before the model is built (%dist_init --seed 0), or use "
        "accelerator.prepare, which sends rank 0's values",
        conditions="torch's own `fully_shard` gets values that differ in its mesh: it sends none",
        exceptions="`fully_shard` that was imported before FSDP was loaded for a second",
        example=("model", _TWO_VALUES),
    ),
    Lint(  # seen by lints/rank/initial_values
        name="parameters-apart",
        when="after a cell with steps the parameters of a DDP model differ between its ranks (the "
        "first elements of each are compared)",
        judge=_apart("the parameters of {subject} differ between {who} after this cell"),
        why="DDP sends gradients, not parameters: ranks that differ go on differing",
        do="%dist_check shows where; %dist_sync_model makes them equal",
        needs_success=True,
        conditions="after a cell that ended well on all its ranks, parameters of a DDP model that "
        "was called or stepped in it differ (the first 16 elements of each)",
        exceptions="differences in other elements: `%dist_check` compares all. After a cell that "
        "failed, the notebook compares all anyway",
        example=("model", _TWO_VALUES),
    ),
    Lint(  # seen by lints/rank/check_every
        name="apart-since",
        when="with %dist_check --every N: at which step parameters that ranks hold alike were "
        "apart",
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
    ),
    Lint(  # seen by lints/rank/optimizer_steps
        name="bf16-scaler",
        when="a GradScaler scales a loss that was computed under bf16 autocast",
        judge=_each("a GradScaler scaled a loss computed under bf16 autocast".format),
        why="bf16 has the range of fp32: scaling only adds a check for inf to every step",
        do="remove the scaler, or use fp16",
        conditions="a `GradScaler` that is switched on scales a loss, and the last autocast of "
        "this step was bf16",
        example=("GradScaler", {0: {}, 1: {}}),
    ),
    Lint(  # seen by lints/rank/data
        name="workers",
        when="the ranks of a host start more DataLoader workers than it has cores",
        judge=_workers,
        why="they compete with each other and with the ranks for the cores",
        do="use fewer (num_workers <= cores / ranks), unless they mostly wait for a disk",
        is_of_machine=True,
        conditions="the ranks of a host together start more DataLoader workers than it has cores",
        exceptions="with `NBDIST_TEST=1`, since it depends on the machine",
        example=("", {rank: {"workers": 8, "cores": 8, "host": "h"} for rank in (0, 1)}),
    ),
)
LINTS = {lint.name: lint for lint in _LINTS}
