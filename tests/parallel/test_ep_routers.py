"""Routers that are difficult under ep: noisy, recomputed, compiled, with a capacity, with NaN."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointError, checkpoint

from tests.parallel import test_ep
from tests.parallel.test_ep import CHOSEN, EXPERTS, over, steady
from tests.programs.parity import Cut, batch, close, compare, own_part, put, train
from tests.programs.rank import everyone, n, rank, refusal
from tests.support.torch_ranks import on_ranks


class Block(test_ep.Block):
    """Its router draws noise; `how` torch computes it again, "" where nobody does."""

    def __init__(self, skew: float, how: str, capacity: int = 0) -> None:
        super().__init__(skew)
        self.how, self.capacity = how, capacity

    def forward(self, h):
        if not self.how:
            return self.run(h)
        given = {"use_reentrant": self.how == "reentrant"}
        return checkpoint(self.run, h, preserve_rng_state=self.how != "forgetful", **given)

    def run(self, h):
        x = h.flatten(0, 1)
        scores = self.router(x)
        scores = scores + torch.randn_like(scores)
        weights, which = scores.softmax(-1).topk(CHOSEN)
        if self.capacity:  # the first tokens of each expert, and none of the others
            chosen = nn.functional.one_hot(which.flatten(), EXPERTS)
            place = (chosen.cumsum(0) * chosen).sum(-1).view_as(which)
            which = which.masked_fill(place > self.capacity, -1)
        return h + self.shared(h) + self.experts(x, which, weights).view_as(h)


def make(how: str = "", skew: float = 0.0, capacity: int = 0) -> Any:
    torch.manual_seed(0)
    model = test_ep.LM()
    model.blocks = nn.ModuleList(Block(skew, how, capacity) for _ in range(2))
    return model


def of_shares(model: Any, step: int, cut: Cut) -> torch.Tensor:
    """The mean of the losses of ranks' shares, each with its own noise; on a rank its own."""
    tokens = cut(batch(step))
    is_alone = len(tokens) == len(batch(step))
    losses = []
    for share in range(n) if is_alone else [rank]:
        torch.manual_seed(100 * step + share)
        losses.append(model(tokens.chunk(n)[share] if is_alone else tokens))
    return torch.stack(losses).mean()


def near(kind: str, build: Callable[[], Any], **options: Any) -> None:
    settings: dict[str, Any] = {"loss_of": of_shares, "optimizer": steady, "steps": 2, **options}
    off = compare(*over(kind, n), build=build, **settings)
    close({f"{kind} {options}": off})


@on_ranks(2)
def test_a_noisy_router_that_is_computed_again_routes_alike() -> None:
    """By the option and by torch's own checkpoint; where some ranks get no token at all, too."""
    near("ep", lambda: make(skew=100.0), checkpoint="full")
    near("fsdp", make, checkpoint="selective")
    near("ep", lambda: make("plain", skew=100.0))
    near("fsdp", lambda: make("reentrant"))
    outer = put(make("forgetful"), *over("ep", n)).outer
    loss = outer(own_part(batch(0)))
    assert "have different metadata" in refusal(loss.backward, CheckpointError)


@on_ranks(2)
def test_a_capacity_is_that_of_each_ranks_tokens() -> None:
    """Tokens that a router drops by -1 are those of one process with each share by itself."""
    near("ep", lambda: make(capacity=3))
    near("fsdp", lambda: make("plain", capacity=3))


def wrap_experts(model: Any) -> Any:
    for block in model.blocks:
        block.experts = torch.compile(block.experts, backend="aot_eager")
    return model


def wrap_blocks(model: Any) -> Any:
    for number, block in enumerate(model.blocks):
        model.blocks[number] = torch.compile(block, backend="aot_eager")
    return model


def in_place(model: Any) -> Any:
    for block in model.blocks:
        block.compile(backend="aot_eager")
    return model


@on_ranks(2)
def test_what_is_compiled_trains_as_one_process() -> None:
    """The model, its blocks or the experts; in place or in a wrapper, which a plan ignores."""
    from torch._dynamo.utils import counters

    cases: list[tuple[str, Callable[[Any], Any]]] = [
        ("ep", lambda model: torch.compile(model, backend="aot_eager")),
        ("fsdp", wrap_experts),
        ("ep", wrap_blocks),
        ("fsdp", in_place),
    ]
    for number, (kind, wrap) in enumerate(cases):
        off = train(put(wrap(test_ep.make()), *over(kind, n)), wrap(test_ep.make()), steps=2)
        close({f"{number} {kind}": off})
    assert counters["frames"]["ok"] > 0


@on_ranks(2)
def test_a_router_that_gives_nan_is_named() -> None:
    """On its rank, once; nobody waits, and other ranks' losses are what they are."""
    base = test_ep.make()
    outer = put(base, *over("ep", n)).outer
    if rank == 1:
        base.blocks[1].router.weight.data[0, 0] = torch.nan
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        with torch.no_grad():
            losses = everyone([outer(own_part(batch(0))).item() for _ in range(2)])
    alone = test_ep.make()
    assert losses[0] == pytest.approx([alone(batch(0).chunk(n)[0]).item()] * 2, abs=1e-6)
    assert losses[1] == pytest.approx([torch.nan] * 2, nan_ok=True)
    names = [str(warning.message) for warning in caught]
    assert len(names) == rank
    assert all("NaN as weights of blocks.1.experts, on rank 1" in name for name in names)
