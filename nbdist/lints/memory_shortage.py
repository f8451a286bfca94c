"""A prepared model will need more memory than its device has free.

The facts come from planner/rank/shortage.
"""

from __future__ import annotations

from nbdist.core.failures import ranks_phrase
from nbdist.core.finding import RuleHit
from nbdist.core.units import size
from nbdist.lints.lint import Facts, Lint


def _shortage(subject: str, facts: Facts) -> list[RuleHit]:
    short = {rank: seen for rank, seen in facts.items() if seen["needed"] > seen["free"]}
    if not short:
        return []
    rank, worst = min(short.items(), key=lambda item: item[1]["free"] - item[1]["needed"])
    sentence = (
        f"{subject} needs {size(worst['needed'])} on each rank ({worst['counted']}), and "
        f"{ranks_phrase([rank])} has {size(worst['free'])} free for it. {worst['change']}"
    )
    return [RuleHit(sentence.removesuffix("."), tuple(short))]


_FACTS = {
    "needed": 30.7e9, "free": 23.5e9, "of": 2,
    "counted": "parameters, gradients, AdamW",
    "change": "Instead, fsdp --shard grad-op needs 17.4 GB.",
}  # fmt: skip

LINT = Lint(
    name="memory-shortage",
    when="a model is prepared, or the strategy switched, and its device has less free than it will "
    "need",
    judge=_shortage,
    why="it would run out of memory while it is prepared, or in the first steps",
    do="choose a strategy that fits (%dist_plan shows all)",
    is_early=True,
    is_of_machine=True,
    conditions="`prepare` or a switch of the strategy is about to begin, and by the formulas of "
    "[plan.md](plan.md) a rank needs more than its device has free. Activations count for a "
    "language model whose batch was seen; else the number is that of parameters, gradients, "
    "buffers and the optimizer. It is told before anything is allocated, with the smallest change "
    "that fits",
    exceptions="under deepspeed and `--offload`; with `NBDIST_TEST=1`, since it depends on the "
    "machine; models that are larger than planned by their activations alone, where no batch was "
    "seen",
    example=("model under ddp, dp 2", dict.fromkeys((0, 1), _FACTS)),
)
