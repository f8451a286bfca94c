"""Auxiliary losses beside what forward returns: as one process's, or refused by name."""

import functools
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from tests.parallel.test_ep import mixtral, steady
from tests.programs import parity
from tests.programs.experts import Experts
from tests.programs.parity import FP32, WIDTH, batch, close, compare, make, put, train
from tests.programs.rank import everyone, n, rank, refusal
from tests.support.torch_ranks import on_ranks

EXPERTS = 8
# What hooks fill, and a loop empties before each step.
caught: list[torch.Tensor] = []


class Block(nn.Module):
    """A mixture of experts that keeps a loss of its router, a mean of what each token has."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = parity.Block()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = Experts(WIDTH, 20, EXPERTS)
        self.aux: Any = 0.0

    def forward(self, h):
        h = self.inner(h)
        scores = self.router(h)
        self.aux = side_of(scores)
        weights, which = scores.flatten(0, 1).softmax(-1).topk(2)
        return h + self.experts(h.flatten(0, 1), which, weights).view_as(h)


def side_of(scores: torch.Tensor) -> torch.Tensor:
    return scores.logsumexp(-1).square().mean()


def balance(scores: torch.Tensor) -> torch.Tensor:
    """That of a whole is not the mean of its parts'."""
    return EXPERTS * scores.softmax(-1).mean((0, 1)).square().sum()


class LM(parity.LM):
    """Returns its loss; `where` it adds up the side losses: outside, or behind the blocks."""

    def __init__(self, where: str = "outside", side: Any = side_of) -> None:
        super().__init__(is_tied=False)
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.ep_plan = {"layers.*.experts": "experts"}
        self.where, self.losses = where, []
        for layer in self.layers:
            if where == "list":
                layer.router.register_forward_hook(lambda *a: self.losses.append(side(a[-1])))
            if where == "hooks":
                layer.router.register_forward_hook(lambda *a: caught.append(side(a[-1])))

    def forward(self, tokens, targets):
        self.losses.clear()
        loss = F.cross_entropy(self.head(self.hidden(tokens)).flatten(0, 1), targets.flatten())
        if self.where == "attributes":
            loss = loss + 0.1 * sum(layer.aux for layer in self.layers)
        return loss + 0.1 * sum(self.losses)


def with_side(model: Any, step: int, cut: parity.Cut) -> torch.Tensor:
    """The loss of a loop that adds up what layers or hooks have kept."""
    tokens = cut(batch(step))
    caught.clear()
    loss = model(tokens, tokens.roll(1, 1))
    base = next(module for module in model.modules() if isinstance(module, LM))
    kept = caught if base.where == "hooks" else [layer.aux for layer in base.layers]
    return loss + 0.1 * sum(kept)


@on_ranks(2)
def test_means_train_as_one_process() -> None:
    """An attribute, and a list that hooks fill: of each rank's tokens, in several backwards."""
    shared = {"dp_replicate": n, "ep": n}
    rows: list[tuple[str, tuple[Any, ...], str, dict[str, Any]]] = [
        ("ddp", (), "outside", {"accumulate": 2}),
        ("fsdp", (), "outside", {"checkpoint": "full"}),
        ("ep", (shared,), "outside", {"accumulate": 2}),
        ("ep", (shared,), "hooks", {}),
        ("cp", (), "hooks", {}),
        ("ulysses", (), "outside", {}),
    ]
    for name, degrees, where, options in rows:
        build = functools.partial(make, LM, where=where)
        settings = {"loss_of": with_side, "optimizer": steady, "steps": 2, **options}
        close({f"{name} {where}": compare(name, *degrees, build=build, **settings)})


def balanced() -> nn.Module:
    """transformers' loss for balance, with a weight that nobody can overlook."""
    torch.manual_seed(0)
    model: Any = mixtral()
    model.router_aux_loss_coef = 0.5
    return model


def of_shares(model: Any, step: int, cut: parity.Cut) -> torch.Tensor:
    """The mean of the losses of two samples each, one backward's share."""
    shares = cut(batch(step)).split(2)
    losses = [model(input_ids=x, labels=x, output_router_logits=True).loss for x in shares]
    return torch.stack(losses).mean()


@on_ranks(2)
def test_a_loss_for_balance_is_the_mean_of_those_of_shares() -> None:
    """Of each rank and backward, as the page says; not that of the whole batch."""
    shared = {"dp_replicate": n, "ep": n}
    settings: dict[str, Any] = {"loss_of": of_shares, "optimizer": steady, "accumulate": 2}
    close({"ep": compare("ep", shared, build=balanced, steps=1, **settings)})
    settings["accumulate"] = 1
    close({"tp": compare("tp", build=balanced, steps=1, **settings)})
    model, tokens = balanced(), batch(0)
    whole = model(input_ids=tokens, labels=tokens, output_router_logits=True).loss.item()
    assert of_shares(model, 0, lambda tokens: tokens).item() > whole + 1e-3


@on_ranks(2)
def test_what_is_no_mean_is_refused_where_the_sequence_is_split() -> None:
    """Also in a list that hooks fill; the trial leaves nothing in it."""
    for name in ("cp", "ulysses"):
        outer = put(make(LM, where="hooks", side=balance), name).outer
        loss = with_side(outer, 0, lambda tokens: tokens)
        assert len(caught) == 4
        sentence = refusal(loss.backward)
        assert "the loss uses caught (in a hook on layers.0.router), which each rank" in sentence


@on_ranks(2)
def test_what_other_stages_keep_is_refused_by_name() -> None:
    """Read behind the blocks, with a value from before or without one; what is logged is not."""
    tokens = batch(0)
    for where, name in (("attributes", "layers.0.aux, layers.1.aux"), ("list", "losses")):
        outer = put(make(LM, where=where), "pp").outer
        assert f"forward uses {name}, which blocks keep on the rank of their own stage" in refusal(
            lambda: outer(tokens, tokens)  # noqa: B023
        )
    model = make(LM, where="attributes")
    for layer in model.layers:
        del layer.aux
    outer = put(model, "pp").outer
    first, last = everyone(refusal(lambda: outer(tokens, tokens)))
    assert "stage 1, on rank 1, failed" in first
    assert "forward uses layers.0.aux, layers.1.aux, which blocks keep" in last
    plain = lambda model, step, cut: model(cut(batch(step)), cut(batch(step)).roll(1, 1))  # noqa: E731
    for schedule in ("1f1b", "interleaved"):
        built = put(make(LM), "pp", schedule=schedule)
        assert max(train(built, make(LM), plain, steady)[:3]) < FP32
        assert isinstance(built.job.base.layers[3 * rank].aux, torch.Tensor)


@on_ranks(2)
def test_router_logits_are_refused_where_a_rank_has_some() -> None:
    """transformers' auxiliary loss: asked for in the call, or by the config."""
    tokens = batch(0)
    for name, sentence in (("pp", "router logits of its own layers"), ("cp", "of its piece of")):
        base = make(mixtral)
        outer = put(base, name).outer
        called = functools.partial(outer, input_ids=tokens, labels=tokens)
        assert sentence in refusal(lambda: called(output_router_logits=True))  # noqa: B023
        base.config.output_router_logits = True
        assert sentence in refusal(called)
