"""Models and steps of odd kinds: no false alarm, nothing lost, and refusals that say what to do."""

import collections
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from nbdist.errors import NbdistError
from nbdist.verification.verdict import StepRequest
from tests.programs.rank import n, rank, refusal, run_dir, user
from tests.programs.verifying import (
    Block,
    Net,
    check_right,
    put_back,
    reset,
    samples,
    start,
    step,
    strategy,
    unwrapped,
    verified,
)
from tests.support.torch_ranks import on_ranks


class Twice(Net):
    """One block that runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.places = nn.ModuleList([Block()]), None

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in (self.blocks[0], self.blocks[0]):
            x = block(x)
        return self.head(self.norm(x))


class InPlaceBlock(Block):
    """It changes what it is given, and what its norm gives."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.ReLU(inplace=True)

    def forward(self, x):
        x.add_(0.1)
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.act(self.norm2(x)))))


class InPlace(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(InPlaceBlock() for _ in range(2))


def check_kinds(*cases: tuple[type[Net], str]) -> None:
    for kind, name in cases:
        start(name, kind=kind)
        step()
        with put_back():
            check_right(verified())
        reset()


@on_ranks(2)
def test_shared_modules_changes_in_place_and_hooks_are_right() -> None:
    """A block that runs twice, x.add_() of a module's input, ReLU(inplace=True); hooks are kept."""
    check_kinds((Twice, "fsdp"), (InPlace, "tp"))
    check_hooks()


@pytest.mark.parity
@on_ranks(2)
def test_so_they_are_under_other_strategies() -> None:
    """Whole on each rank; split."""
    check_kinds((Twice, "ddp"), (Twice, "tp"), (InPlace, "ddp"))


def check_hooks() -> None:
    """Three runs of a right step call each of them three times, and a later step once more."""
    counts = collections.Counter()

    def count(what: str) -> Callable[..., None]:
        return lambda *_: counts.update([what])

    start("tp")
    up = unwrapped().blocks[0].up
    up.register_forward_pre_hook(count("before"))
    up.register_forward_hook(count("after"))
    up.register_full_backward_hook(count("backward"))
    check_right(verified())
    assert counts == {"before": 3, "after": 3, "backward": 3}
    step()
    assert counts == {"before": 4, "after": 4, "backward": 4}
    reset()


def check_what_is_read() -> None:
    """As other inputs where its batch comes from there, as not the same twice within a module."""

    def findings(**changes: Any) -> tuple[str, str]:
        step()
        with put_back():
            verification = verified(**changes)
        return verification.place.module, " ".join(f.found for f in verification.findings)

    path = run_dir / f"seeds.{rank}"
    path.write_text("".join(f"{i}\n" for i in range(100)))
    start("ddp")
    with path.open() as seeds:
        _, text = findings(batch=lambda: samples(int(seeds.readline()) * n + rank))
    assert "the model got another batch when the step was run again" in text
    reset()

    start("ddp")
    unwrapped().blocks[0].up.register_forward_hook(
        lambda m, a, out: out * (1 + (time.perf_counter_ns() % 1000) / 1e4)
    )
    module, text = findings()
    assert module == "blocks.0.up"
    assert "two runs of the reference differ from blocks.0.up on" in text
    reset()


def check_failures() -> None:
    """On one rank of the reference no other waits for it; the error is named on all ranks."""

    def fail(module, args):
        if strategy() == "single" and rank == 1:
            raise ValueError("only here")

    def more():
        if strategy() == "single" and rank == 1:
            step(batch=lambda: samples(3))

    def everywhere():
        raise ValueError("everywhere")

    start("ddp")
    step()
    handle = unwrapped().blocks[1].register_forward_pre_hook(fail)
    with put_back():
        text = refusal(verified, ValueError, NbdistError)
    handle.remove()
    if rank == 1:
        assert text == "only here"
    else:
        assert "failed on rank 1. rank 1: ValueError: only here" in text

    user.more = more
    request = StepRequest(code="typed(); more()")
    with put_back():
        text = refusal(lambda: verified(request, batch=lambda: samples(3)))
    assert "Rank 0 ended its step" in text
    with put_back():
        assert refusal(lambda: verified(after_backward=everywhere), ValueError) == "everywhere"
    check_right(verified())
    reset()


def check_refusals() -> None:
    """No model, several without a step, unknown inputs, other lengths, parameters, --compile."""

    def add():
        unwrapped().scale = nn.Parameter(torch.ones(()))
        user.optimizer.add_param_group({"params": [unwrapped().scale]})

    start("ddp")
    step()
    with put_back():
        text = refusal(lambda: verified(batch=lambda: samples(3, 17 - 4 * rank)))
    assert "(4, 16), (4, 12)" in text
    assert "Pad them" in text
    assert "nothing_here" in refusal(lambda: verified(StepRequest(inputs="nothing_here")))
    first = user.model, user.optimizer
    other = Net(), torch.optim.SGD(Net().parameters(), lr=0.1)
    user.model, user.optimizer = user.accelerator.prepare(*other)
    assert "There are several prepared models" in refusal(lambda: verified(StepRequest()))
    del first, other
    reset()
    assert "There is no prepared model" in refusal(lambda: verified(StepRequest(code="pass")))

    start("ddp")
    text = refusal(lambda: verified(after_step=add))
    assert text.startswith("scale of model came or went after prepare()")
    assert len(user.optimizer.param_groups) == 1
    assert refusal(verified) == text
    reset()
    start("ddp", compile=True)
    assert "Verify without it: %dist_strategy ddp" in refusal(verified)


@on_ranks(2)
def test_steps_that_are_odd_or_fail_lose_nothing_and_say_what_to_do() -> None:
    """One pair of ranks: what a step reads, where it fails, and what is no step."""
    check_what_is_read()
    check_failures()
    check_refusals()
