"""An optimizer stepped with gradients that DDP had not reduced.

The facts come from lints/rank/reduction.
"""

from __future__ import annotations

from nbdist.core.finding import RuleHit
from nbdist.lints.lint import Facts, Lint, group, versus

TWO_FORWARDS, SECOND_BACKWARD, STEP_IN_HOOK, NO_SYNC, BY_HAND = (
    "two forwards", "second backward", "step in hook", "no_sync", "by hand",
)  # fmt: skip
# Idiom -> (what the program did, what to write in its place).
_IDIOMS = {
    TWO_FORWARDS: (
        "two forwards or more ran before their backwards",
        "add the losses and call backward once, or run each backward before the next forward",
    ),
    SECOND_BACKWARD: (
        "a second backward ran through one forward (retain_graph)",
        "add the losses and call backward once, without retain_graph",
    ),
    STEP_IN_HOOK: (
        "the step ran in a hook of the backward",
        "step after the backward, or use fsdp, whose gradients are reduced when such hooks run",
    ),
    NO_SYNC: (
        "the last backward before the step ran under no_sync",
        "leave no_sync for the last backward before each step",
    ),
    BY_HAND: (
        "torch.autograd.grad or torch.func has computed them, and DDP reduces those of a backward",
        "average each: accelerator.reduce(gradient, 'mean')",
    ),
}


def sentence(subject: str, who: str, idiom: str, place: str) -> str:
    """Word the finding and its remedy, for the lint and `%dist_check`."""
    what, write = _IDIOMS[idiom]
    where = f" at {place}" if place else ""
    return (
        f"the optimizer of {subject} stepped{where} with gradients that DDP had not reduced, and "
        f"that differed between {who}: {what}. Instead, {write}"
    )


def _unreduced(subject: str, facts: Facts) -> list[RuleHit]:
    hits = []
    for members, ranks in group({rank: tuple(facts[rank]["ranks"]) for rank in facts}).items():
        by_digest = group({rank: facts[rank]["digest"] for rank in ranks})
        if len(by_digest) > 1:
            first = facts[ranks[0]]
            text = sentence(subject, versus(by_digest.values()), first["idiom"], first["place"])
            hits.append(RuleHit(text, members))
    return hits


LINT = Lint(
    name="gradients-apart",
    when="an optimizer of a DDP model steps with gradients that DDP has not reduced: two forwards "
    "and then two backwards, a second backward of one forward, autograd.grad, a step in a hook",
    judge=_unreduced,
    why="DDP reduces the first backward after a forward and no other, so each rank stepped with "
    "gradients of its own data",
    do="%dist_check names the model until a cell trains it without this",
    is_early=True,
    conditions="under ddp, zero1 and cp, an optimizer of a DDP model steps after a backward that "
    "DDP does not reduce (several forwards and then their backwards, a second backward of one "
    "forward, under zero1 also one under no_sync), after torch.autograd.grad alone, or in a hook "
    "of the backward, and the gradients of that step differ between the ranks. It is told at once, "
    "for each model",
    exceptions="under ddp and cp steps after a backward under no_sync, which can be meant (local "
    "SGD); a second backward on some ranks alone; models that are compiled whole; only the first "
    "such step of a cell is looked at",
    example=(
        "model",
        {
            rank: {
                "ranks": [0, 1], "digest": digest, "idiom": TWO_FORWARDS, "of": 2,
                "place": "line 7 of cell [12]",
            }
            for rank, digest in enumerate("ab")
        },
    ),
)  # fmt: skip
