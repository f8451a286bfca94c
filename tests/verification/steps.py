"""Right steps that are easily taken for wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from nbdist.verification.verdict import StepRequest, Verification
from tests.programs.rank import rank, user
from tests.programs.verifying import Sorted, WithExperts, loss_of, samples, start, step, verified

Program = Callable[[], Verification]
STEPS: dict[str, Program] = {}
IN_TEST = ("one_micro_batch", "no_sync_of_ddp")
"""One of its kind in `make test`; the others are in `make parity`."""


def right(program: Program) -> Program:
    """Put a program into STEPS, under its name."""
    return STEPS.setdefault(program.__name__, program)


# Losses outside of the model


@right
def flipped_at_random():
    start("ddp")
    return verified(call=lambda x: user.model(x.flip(-1) if torch.rand(()) < 0.5 else x))


@right
def one_rank_prints():
    def backward(loss):
        if rank == 0:
            print(loss.exp())  # noqa: T201
        user.accelerator.backward(loss)

    start("ddp")
    return verified(backward=backward)


@right
def labels_of_all_ranks():
    def loss(logits, tokens):
        return F.cross_entropy(logits.reshape(-1, 24), tokens.reshape(-1), reduction="sum") / 40

    start("ddp")
    return verified(ignore=12 * rank, loss=loss)


@right
def half_of_a_loss():
    start("ddp")
    return verified(loss=lambda logits, tokens: 0.5 * loss_of(logits, tokens))


@right
def penalty():
    def loss(logits, tokens):
        squares = sum(p.square().sum() for p in user.model.parameters())
        return loss_of(logits, tokens) + 0.01 * squares

    start("ddp")
    return verified(loss=loss)


# Accumulated steps


@right
def one_micro_batch():
    start("ddp", accumulate=2)
    step(n_steps=1)  # in the middle of a step
    return verified(n_steps=1)


@right
def one_micro_batch_twice():
    start("zero1", accumulate=2)
    return verified(StepRequest(code="typed(); typed()"), n_steps=1)


@right
def one_micro_batch_in_two_steps():
    start("ddp", accumulate=2)
    return verified(StepRequest(code="typed()", n_steps=2), n_steps=1)


@right
def without_an_optimizers_step():
    start("fsdp", accumulate=2)
    verification = verified(n_steps=1)
    assert verification.n_calls == 2, verification.n_calls
    return verification


# Methods of the strategy's wrapper


def half(backward: Callable[[Any], None]) -> Callable[[Any], None]:
    """Half of a loss before what `backward` adds, and half of that of another batch behind it."""
    other = samples(3)

    def both(loss):
        backward(loss / 2)
        loss_of(user.model(other[:, :-1]), other[:, 1:]).div(2).backward()

    return both


@right
def no_sync_of_ddp():
    def call(x):
        return user.model.module(x)

    def backward(loss):
        with user.model.no_sync():
            loss.backward()

    start("ddp")
    return verified(call=call, backward=half(backward))


@right
def sync_of_fsdp():
    def backward(loss):
        user.model.set_requires_gradient_sync(False)
        loss.backward()
        user.model.set_requires_gradient_sync(True)

    start("fsdp")
    return verified(backward=half(backward))


# Other models, and rows that are sorted over the batch


@right
def another_model_is_alive():
    start("zero1")
    kept = user.model, user.optimizer
    start("zero1")
    verification = verified()
    del kept
    return verification


@right
def experts():
    start("ddp", kind=WithExperts)
    return verified()


@right
def sorted_samples():
    start("ddp", kind=Sorted)
    return verified()
