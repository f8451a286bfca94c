"""Silent bugs, each a small change to a model or a loop, and what is to be said of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812

from nbdist.parallel.base.tensors import like, local_of
from nbdist.parallel.ep import dispatch
from nbdist.parallel.live import registry
from nbdist.verification.verdict import Verification
from tests.programs.rank import n, rank, user
from tests.programs.verifying import (
    MixedNet,
    Net,
    Tied,
    WithAverage,
    WithBatchNorm,
    WithLoss,
    loss_of,
    samples,
    start,
    step,
    strategy,
    unwrapped,
    verified,
)


@dataclasses.dataclass(frozen=True, slots=True)
class Bug:
    """One bug, planted.

    Attributes:
        program: It runs on ranks, and verifies a step.
        module: Of the model, where it is to be found; empty for the model itself.
        kind: What the text of its kind contains; of a finding, where nothing differs.
        n: Ranks that it needs.
        in_test: One of its kind in `make test`; the others are in `make parity`.
    """

    program: Callable[[], Verification]
    module: str
    kind: str
    n: int = 2
    in_test: bool = False


BUGS: dict[str, Bug] = {}
_Program = Callable[[], Verification]


def planted(
    module: str, kind: str, n: int = 2, *, in_test: bool = False
) -> Callable[[_Program], _Program]:
    """Put a program into BUGS, under its name."""

    def add(program: _Program) -> _Program:
        BUGS[program.__name__] = Bug(program, module, kind, n, in_test)
        return program

    return add


# A reduction that is missing, or made twice


@planted("blocks.1.down", "missing reduction", in_test=True)
def tp_without_reduction():
    start("tp")
    down = unwrapped().blocks[1].down
    for key in list(down._forward_hooks):  # the sum of rowwise parts
        del down._forward_hooks[key]
    down.register_forward_hook(
        lambda m, a, out: out.to_local() if hasattr(out, "to_local") else out
    )
    return verified()


@planted("blocks.0.attention.o_proj", "the degree of tp is 2")
def reduced_twice_in_forward():
    def twice(module, args, output):
        if strategy() == "tp":
            output = output.clone()
            dist.all_reduce(output.detach())
        return output

    start("tp")
    unwrapped().blocks[0].attention.o_proj.register_forward_hook(twice)
    return verified()


@planted("blocks.1.norm2", "the degree of tp is 2")
def no_reduction_in_backward():
    class Half(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            return g / n if strategy() == "tp" else g

    start("tp")
    unwrapped().blocks[1].norm2.register_forward_hook(lambda m, a, out: Half.apply(out))
    return verified()


@planted("head", "the degree of dp is 2")
def gradient_reduced_twice():
    def twice(p):
        if strategy() == "ddp":
            dist.all_reduce(p.grad)

    start("ddp")
    unwrapped().head.weight.register_post_accumulate_grad_hook(twice)
    return verified(clip=False)


def changed(name: str, change: Callable[[torch.Tensor], Any]) -> Verification:
    """With a change of each parameter under the strategy, after each backward."""

    def after_backward():
        if strategy() == name:
            for p in unwrapped().parameters():
                change(p)

    start(name)
    return verified(after_backward=after_backward, clip=False)


@planted("", "the degree of dp is 2")
def averaged_twice():
    return changed("ddp", lambda p: p.grad.div_(user.accelerator.num_processes))


# Gradients that belong to one rank


@planted("", "not averaged", in_test=True)
def around_ddp():
    def call(x):
        return unwrapped()(x)

    start("ddp")
    return verified(call=call, clip=False)


@planted("", "not averaged")
def no_sync_at_the_end():
    start("ddp")
    return verified(in_no_sync=True, clip=False)


@planted("blocks.0.norm1", "missing reduction")
def norm_not_reduced_under_sequence_parallel():
    def local(p):
        g = p.grad
        is_partial = any(x.is_partial() for x in g.placements)
        p.grad = like(p, g.to_local() if is_partial else local_of(g))

    start("tp", sequence_parallel=True)
    weight = unwrapped().blocks[0].norm1.weight
    weight._backward_hooks.clear()
    weight.register_post_accumulate_grad_hook(local)
    return verified(clip=False)


@planted("blocks.1.up", "trained apart")
def trained_apart():
    start("ddp")
    with torch.no_grad():
        unwrapped().blocks[1].up.bias.add_(0.01 * rank)
    return verified()


# What depends on the rank


@planted("blocks.0.norm2", "on some ranks only", in_test=True)
def mask_by_rank():
    def mask(module, args, output):
        if rank == 1 and strategy() == "tp":
            output = output.clone()
            output[:, 0] = 0
        return output

    start("tp")
    unwrapped().blocks[0].norm2.register_forward_hook(mask)
    return verified()


@planted("places", "on some ranks only")
def positions_by_rank():
    start("ddp")
    unwrapped().places.register_forward_pre_hook(
        lambda m, a: (a[0] + (rank if strategy() == "ddp" else 0),)
    )
    return verified()


# Weights of the loss


@planted("", "weigh 2 together")
def accumulated_and_not_divided():
    start("ddp", kind=WithLoss, accumulate=2)
    return verified(backward=lambda loss: loss.backward(), clip=False)


def divided_twice_with(kind: type[Net]) -> Verification:
    start("ddp", kind=kind, accumulate=2)
    return verified(backward=lambda loss: user.accelerator.backward(loss / 2), clip=False)


@planted("", "weigh 0.5 together")
def divided_twice():
    return divided_twice_with(WithLoss)


@planted("", "wrong batch shares")
def unequal_shares():
    start("ddp", kind=WithLoss)
    return verified(ignore=12 * rank)


# Losses outside of the model


@planted("", "weigh 0.5 together")
def divided_twice_outside():
    return divided_twice_with(Net)


@planted("", "weighs 0.0156 on rank 0, 0.0625 on rank 1", in_test=True)
def unequal_shares_outside():
    start("fsdp")
    return verified(ignore=12 * rank)


@planted("", "an element of the loss weighs 0.0312 on rank 0, 0.0455 on rank 1")
def mean_over_a_mask_of_the_rank():
    def masked(logits, tokens):
        mask = torch.arange(tokens.numel()) % (2 + rank) == 0
        losses = F.cross_entropy(logits.reshape(-1, 24), tokens.reshape(-1), reduction="none")
        return (losses * mask).sum() / mask.sum()

    start("ddp")
    return verified(loss=masked)


@planted("", "an element of the loss weighs 0.0156 on rank 0, 0.0312 on rank 1")
def loss_weighed_by_rank():
    start("zero1")
    return verified(loss=lambda logits, tokens: (1 + rank) * loss_of(logits, tokens))


@planted("", "rank 1 alone calls roll, on what goes into the model or the loss", in_test=True)
def labels_by_rank():
    start("ddp")
    return verified(
        loss=lambda logits, tokens: loss_of(logits, tokens.roll(1) if rank == 1 else tokens)
    )


@planted("", "add is called with 0 on rank 0, 1 on rank 1")
def labels_moved_by_the_rank():
    start("ddp")
    return verified(loss=lambda logits, tokens: loss_of(logits, (tokens + rank) % 24))


@planted("", "alone calls")
def other_loss_on_one_rank():
    start("ddp")
    return verified(
        loss=lambda logits, tokens: logits.square().mean() if rank else loss_of(logits, tokens)
    )


@planted("", "rank 1 alone calls flip")
def other_input_on_one_rank():
    start("ddp")
    return verified(call=lambda x: user.model(x.flip(0) if rank else x))


# Random numbers


@planted("", "drew the same mask", in_test=True)
def equal_seeds():
    start("ddp", kind=lambda: Net(drop=0.2))
    torch.manual_seed(5)
    return verified()


@planted("", "drew different masks")
def unequal_seeds():
    start("tp", kind=lambda: Net(drop=0.2))
    base = unwrapped()
    base.forward = type(base).forward.__get__(base)  # without the streams of tp
    return verified()


@planted("blocks.1.norm1", "two runs of the reference differ")
def numpy_noise():
    noise = np.random.default_rng()
    start("ddp")
    unwrapped().blocks[1].norm1.register_forward_hook(
        lambda m, a, out: out * (1 + 0.1 * noise.random())
    )
    return verified()


# Data


@planted("", "computed with one batch", in_test=True)
def same_batch():
    start("ddp")
    return verified(batch=lambda: samples(3))


@planted("embed", "got another batch")
def reads_an_iterator():
    numbers = iter(range(100))
    start("ddp")
    return verified(batch=lambda: samples(next(numbers) * n + rank))


# What happens to gradients


@planted("", "clipping by another norm")
def clipped_by_local_norm():
    def clip():
        grads = [local_of(p.grad) for p in unwrapped().parameters() if p.grad is not None]
        norm = torch.stack([g.norm() for g in grads]).norm()
        for g in grads:
            g.mul_(min(1.0, 0.1 / float(norm)))

    start("fsdp")
    return verified(clip=False, after_backward=clip)


@planted("embed", "lr is 0.01 on rank 0, 0.005 on rank 1")
def scheduler_by_rank():
    start("ddp")
    user.optimizer.optimizer.param_groups[0]["lr"] = 1e-2 / (1 + rank)
    return verified()


@planted("norm.0", "statistics of a share", in_test=True)
def batch_norm():
    start("ddp", kind=WithBatchNorm)
    return verified()


# Code that asks for its rank, under every strategy alike


@planted("blocks.1.norm1", "on some ranks only")
def mask_by_rank_everywhere():
    start("tp")
    unwrapped().blocks[1].norm1.register_forward_hook(
        lambda m, a, out: out * (0.5 if rank == 1 else 1)
    )
    return verified()


@planted("average", "on some ranks only")
def ema_of_rank_0_alone():
    def average():
        if rank == 0:
            mean, weight = unwrapped().average.weight, unwrapped().head.weight
            local_of(mean.detach()).lerp_(local_of(weight.detach()), 0.1)

    start("fsdp", kind=WithAverage)
    return verified(after_step=average)


@planted("embed", "scaled: 0.5 times")
def tied_weights_split():
    def untie():
        if strategy() == "ddp":
            head = unwrapped().head.weight
            head.grad = head.grad - 0.5 * head.grad

    start("ddp", kind=Tied)
    return verified(after_backward=untie, clip=False)


@planted(
    "embed",
    "exp_avg of embed.weight, places.weight, blocks.0.norm1.weight and 34 more had other",
    in_test=True,
)
def momentum_by_rank():
    start("ddp")
    step()
    for state in user.optimizer.optimizer.state.values():
        state["exp_avg"].mul_(1 + rank)
    return verified()


@planted("embed", "betas is (0.8, 0.99) on rank 0, (0.9, 0.99) on rank 1")
def betas_by_rank():
    start("ddp")
    step()
    user.optimizer.optimizer.param_groups[0]["betas"] = (0.8 + 0.1 * rank, 0.99)
    return verified()


# Something added to gradients


@planted("", "something added: 0.01 for each element")
def number_added():
    return changed("ddp", lambda p: p.grad.add_(0.01))


@planted("embed", "something added: 0.05 times the parameter", in_test=True)
def weights_decayed_by_hand():
    return changed("fsdp", lambda p: p.grad.add_(0.05 * p.detach()))


@planted("", "something added: forward and backward are right in every module")
def noise_added():
    def add():
        for p in unwrapped().parameters():
            p.grad += 0.01 * torch.randn_like(p.grad)

    start("ddp")
    return verified(after_backward=add, clip=False)


@planted("embed", "statistics of a share")
def centered_between_modules():
    start("ddp")
    unwrapped().embed.register_forward_hook(lambda m, a, out: out - out.mean(0))
    return verified()


@planted("blocks.0.up", "on some ranks only")
def detached_on_one_rank():
    start("ddp")
    unwrapped().blocks[0].up.register_forward_hook(
        lambda m, a, out: out * 0 + out.detach() if rank == 1 else out
    )
    return verified(clip=False)


# Experts that ranks share


def shares_experts() -> bool:
    return registry.current().degrees.ep > 1


def verified_with(name: str, change: Callable[[Any], Any], **options: Any) -> Verification:
    """With another function of the experts' exchange in the place of one."""
    start("ep", kind=MixedNet, **options)
    with mock.patch.object(dispatch, name, change(getattr(dispatch, name))):
        return verified()


@planted(
    "blocks.0.down.experts", "scaled: 2 times what it should be, and the degree of dp is 2",
    in_test=True,
)  # fmt: skip
def experts_summed_over_ranks():
    class Summed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *parameters):
            return tuple(p.view_as(p) for p in parameters)

        @staticmethod
        def backward(ctx, *gradients):
            return gradients

    return verified_with("_average", lambda right: lambda group, *p: Summed.apply(*p))


@planted("blocks.0.down.experts", "none of the kinds", n=4)
def copies_of_experts_not_reduced():
    def alone(right):
        return lambda group, *p: right(dataclasses.replace(group, copies=None), *p)

    return verified_with("_average", alone, ep=2)


@planted("blocks.1.down.router", "on some ranks only")
def router_noise_by_rank():
    start("ep", kind=MixedNet)
    unwrapped().blocks[1].down.router.register_forward_pre_hook(
        lambda m, a: (a[0] * (1 + 0.01 * rank * shares_experts()),)
    )
    return verified()


def computed_with(change: Callable[..., Any]) -> Verification:
    """With a change of the rows' experts and weights, under the strategy."""

    def changing(right):
        return lambda *a: right(*a[:-2], *change(*a[-2:]))

    return verified_with("_compute", changing)


@planted("blocks.0.down.experts", "tokens of experts went astray", in_test=True)
def tokens_dropped_on_a_rank():
    def dropped(index, weights):
        kept = torch.arange(len(weights)) < (20 if rank == 1 else len(weights))
        return index, weights * kept

    return computed_with(dropped)


@planted("blocks.0.down.experts", "tokens of experts went astray")
def tokens_of_another_expert():
    return computed_with(lambda index, weights: (index.flip(0), weights))


@planted("blocks.0.down.experts", "tokens of experts went astray")
def permutation_not_undone():
    calls = []

    def shuffling(right):
        def exchange(rows, *args):
            calls.append(0)
            rows = right(rows, *args)
            return rows if len(calls) % 4 else rows.flip(0)  # the fourth brings results back

        return exchange

    return verified_with("_exchange", shuffling)


@planted("blocks.0.down.experts", "rank 0 is right; elsewhere it is 0.9 times that")
def weights_not_normalised_on_a_rank():
    start("ep", kind=MixedNet)
    unwrapped().blocks[0].down.experts.register_forward_pre_hook(
        lambda m, a: (a[0], a[1], a[2] * (0.9 if rank and shares_experts() else 1))
    )
    return verified()


@planted("blocks.0.down.router", "scaled: 2 times what it should be, and the degree of dp is 2")
def auxiliary_loss_for_each_rank():
    def loss(logits, tokens):
        router = unwrapped().blocks[0].down.router
        auxiliary = router.weight.square().sum() * (n if shares_experts() else 1)
        return loss_of(logits, tokens) + auxiliary

    start("ep", kind=MixedNet)
    return verified(clip=False, loss=loss)
