"""Mixtures of experts: a rank with too many tokens, and a router that learns nothing.

The facts come from lints/rank/experts.
"""

from __future__ import annotations

from nbdist.core.failures import ranks_phrase
from nbdist.core.finding import RuleHit
from nbdist.lints.lint import Facts, Lint
from nbdist.strategy.expert_tokens import ExpertTokens

# Of fewer tokens (each counts once for each of its experts) nothing is said.
_FEWEST = 512
# How many times the mean a rank has to compute, and an expert to get; and of all tokens at least.
_RANK, _EXPERT, _SHARE = 1.5, 4.0, 0.25


def _uneven(subject: str, facts: Facts) -> list[RuleHit]:
    tokens = ExpertTokens.of(facts)
    if tokens.total < _FEWEST or len(facts) == 1:
        return []
    hits = []
    rank, times = tokens.busiest_rank
    if times >= _RANK:
        sentence = (
            f"{ranks_phrase([rank])} computed {times:.1f} times as many tokens in the experts "
            f"of {subject} as a rank does on average ({tokens.ranks[rank]:,} of {tokens.total:,})"
        )
        hits.append(RuleHit(sentence, tuple(facts)))
    layer, expert, share = tokens.busiest_expert
    even = tokens.even(layer)
    if share >= max(_SHARE, _EXPERT * even):
        sentence = (
            f"expert {expert} of {layer} in {subject} got {share:.0%} of its layer's "
            f"tokens; evenly it would be {even:.0%}"
        )
        hits.append(RuleHit(sentence, tuple(facts)))
    return hits


LINT = Lint(
    name="uneven-experts",
    when="a rank, or one expert, gets much more than its share of the tokens under ep",
    judge=_uneven,
    why="the other ranks wait for it in each layer, and other experts learn little",
    do="train the router with its auxiliary loss (transformers: output_router_logits=True), or "
    "share the experts over fewer ranks (--ep)",
    conditions="in the training forwards of a cell under ep, with 512 tokens of experts or more (a "
    "token counts once for each of its experts), a rank computes 1.5 times the mean, or an expert "
    "gets 4 times its even share and a quarter of its layer's tokens",
    exceptions="where experts are not shared between ranks (`--ep`)",
    example=(
        "model",
        {
            0: {"share": 0, "layers": {"layers.0.experts": [900, 40]}},
            1: {"share": 1, "layers": {"layers.0.experts": [30, 30]}},
        },
    ),
)


def _untrained(subject: str, facts: Facts) -> list[RuleHit]:
    """Report routers without a gradient on any rank whose experts have one on some rank."""
    trained: dict[str, bool] = {}
    for rank_facts in facts.values():
        for router, (has_gradient, experts_have) in rank_facts["routers"].items():
            # True as soon as one rank has a gradient, absent while the experts have none either.
            if has_gradient or experts_have:
                trained[router] = trained.get(router, False) or has_gradient
    names = [router for router, is_trained in trained.items() if not is_trained]
    if not names:
        return []
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    sentence = (
        f"{names[0]}{more} of {subject} got no gradient in a step in which the experts got one"
    )
    return [RuleHit(sentence, tuple(facts))]


UNTRAINED_ROUTER = Lint(
    name="untrained-router",
    when="the router of a mixture of experts gets no gradient, and its experts get one",
    judge=_untrained,
    why="it stays as it was initialized, so which expert gets a token is never learnt",
    do="multiply what each expert returns by the router's weight for it, and compute that weight "
    "with gradients: without torch.no_grad() and detach(), not by argmax alone, and for one "
    "expert per token by a softmax over all experts (over one it is always 1)",
    conditions="in an optimizer's first step the router of a mixture in a prepared model has no "
    "gradient, or in its third one zeros on all ranks, while experts have gradients (the first "
    "steps of a warmup change nothing, and experts that begin at zero give no gradient). A router "
    "is a trained matrix beside the experts with their number as one of its dims",
    exceptions="routers and experts in different optimizers, and under fsdp1 and deepspeed, which "
    "keep gradients elsewhere",
    example=("model", {0: {"routers": {"layers.0.router.weight": [False, True]}}}),
)
