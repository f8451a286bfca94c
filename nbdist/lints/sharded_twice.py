"""The data of a prepared loader are a part on each rank already.

The facts come from lints/rank/sharded_twice.
"""

from __future__ import annotations

from nbdist.core.finding import RuleHit
from nbdist.lints.lint import Facts, Lint, group, versus

# What is read of a loader -> how its difference is told.
_SENTENCES = {
    "samples": "{subject} is prepared, and its dataset begins with different samples on {who}",
    "order": "{subject} is prepared, and its sampler begins with different indices on {who}",
}


def _differences(subject: str, facts: Facts) -> list[RuleHit]:
    hits = []
    for part, sentence in _SENTENCES.items():
        digests = {rank: seen[part].split() for rank, seen in facts.items() if seen[part]}
        count = min(map(len, digests.values()), default=0)
        ranks_of = group({rank: tuple(words[:count]) for rank, words in digests.items()})
        if len(ranks_of) > 1:
            text = sentence.format(subject=subject, who=versus(ranks_of.values()))
            hits.append(RuleHit(text, tuple(digests)))
    return hits


LINT = Lint(
    name="sharded-twice",
    when="a loop begins over a prepared loader whose data differ between ranks",
    judge=_differences,
    why="prepare shares out what all ranks read alike, so of data that each rank has cut out for "
    "itself the most is never seen",
    do="let the dataset (or sampler) give all ranks everything, or use the loader without prepare "
    "and send its batches to `device`",
    is_early=True,
    conditions="the first loop over a prepared loader begins, and the first samples of its "
    "dataset (64, or as many as can be read in 0.2 s), or the first indices of a sampler that is "
    "not one of torch's random ones, differ between ranks. A forked process reads them, so nothing "
    "is used up. It is told at once",
    exceptions="under `single`; data that differ when they are read twice, as from a generator "
    "without a seed; a dataset that gives nothing on the other ranks; one that reads files or "
    "connections which were open before; outside of Linux",
    example=(
        "loader",
        {
            0: {"samples": "a", "order": "", "of": 2},
            1: {"samples": "b", "order": "", "of": 2},
        },
    ),
)
