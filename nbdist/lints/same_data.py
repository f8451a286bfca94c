"""Ranks whose data should differ get the same batches; every epoch has the order of the last one.

The facts come from lints/rank/data.
"""

from __future__ import annotations

from nbdist.core.failures import ranks_phrase
from nbdist.core.finding import RuleHit
from nbdist.lints.lint import Facts, Lint, each

# Fewer batches say nothing: two of a small dataset can be equal by chance.
LEAST_BATCHES = 2


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
            sentence = (
                f"{subject} gave {ranks_phrase(ranks)} the same batches (the first {compared} were "
                "compared)"
            )
            hits.append(RuleHit(sentence, tuple(ranks)))
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


LINT = Lint(
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
)

SET_EPOCH = Lint(
    name="set-epoch",
    when="a cell trains twice over a DistributedSampler that shuffles, at the same epoch",
    judge=each(
        "{subject} was iterated again with its DistributedSampler still at epoch {epoch}".format
    ),
    why="every epoch has the same order, and each rank always sees the same samples",
    do="call sampler.set_epoch(epoch) before each loop, or pass the loader to accelerator.prepare",
    conditions="in one cell two loops that train go over a `DistributedSampler` that shuffles, "
    "at the same epoch",
    exceptions="loops in two cells: running a cell again is no mistake",
    example=("loader", {0: {"epoch": 0}, 1: {"epoch": 0}}),
)
