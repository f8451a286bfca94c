"""Silent bugs, each a small change to a model or a loop, and what is to be said of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Bug:
    """One bug, planted.

    Attributes:
        code: Python behind `texts.SETUP` that ends in `return verified()`.
        module: Of the model, where it is to be found; empty for the model itself.
        kind: What the text of its kind contains; of a finding, where nothing differs.
        n: Ranks that it needs.
        in_test: One of its kind in `make test`; the others are in `make parity`.
    """

    code: str
    module: str
    kind: str
    n: int = 2
    in_test: bool = False


BUGS = {
    # A reduction that is missing, or made twice
    "tp_without_reduction": Bug(
        """
        start("tp")
        down = unwrapped().blocks[1].down
        for key in list(down._forward_hooks):  # the sum of rowwise parts
            del down._forward_hooks[key]
        down.register_forward_hook(
            lambda m, a, out: out.to_local() if hasattr(out, "to_local") else out)
        return verified()
        """,
        "blocks.1.down",
        "missing reduction",
        in_test=True,
    ),
    "reduced_twice_in_forward": Bug(
        """
        start("tp")
        def twice(module, args, output):
            if registry.current().name == "tp":
                output = output.clone()
                dist.all_reduce(output.detach())
            return output
        unwrapped().blocks[0].attention.o_proj.register_forward_hook(twice)
        return verified()
        """,
        "blocks.0.attention.o_proj",
        "the degree of tp is 2",
    ),
    "no_reduction_in_backward": Bug(
        """
        start("tp")
        class Half(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x): return x.clone()
            @staticmethod
            def backward(ctx, g): return g / n if registry.current().name == "tp" else g
        unwrapped().blocks[1].norm2.register_forward_hook(lambda m, a, out: Half.apply(out))
        return verified()
        """,
        "blocks.1.norm2",
        "the degree of tp is 2",
    ),
    "gradient_reduced_twice": Bug(
        """
        start("ddp")
        def twice(p):
            if registry.current().name == "ddp":
                dist.all_reduce(p.grad)
        unwrapped().head.weight.register_post_accumulate_grad_hook(twice)
        return verified(clip=False)
        """,
        "head",
        "the degree of dp is 2",
    ),
    "averaged_twice": Bug(
        """
        start("ddp")
        def twice():
            if registry.current().name == "ddp":
                for p in unwrapped().parameters():
                    p.grad /= accelerator.num_processes
        return verified(clip=False, after_backward=twice)
        """,
        "",
        "the degree of dp is 2",
    ),
    # Gradients that belong to one rank
    "around_ddp": Bug(
        """
        start("ddp")
        return verified(call=lambda x: unwrapped()(x), clip=False)
        """,
        "",
        "not averaged",
        in_test=True,
    ),
    "no_sync_at_the_end": Bug(
        """
        start("ddp")
        return verified(in_no_sync=True, clip=False)
        """,
        "",
        "not averaged",
    ),
    "norm_not_reduced_under_sequence_parallel": Bug(
        """
        start("tp", sequence_parallel=True)
        weight = unwrapped().blocks[0].norm1.weight
        weight._backward_hooks.clear()
        from nbdist.parallel.tensors import local_of, like
        def own(p):
            g = p.grad
            p.grad = like(p, local_of(g) if not any(x.is_partial() for x in g.placements)
                          else g.to_local())
        weight.register_post_accumulate_grad_hook(own)
        return verified(clip=False)
        """,
        "blocks.0.norm1",
        "missing reduction",
    ),
    "trained_apart": Bug(
        """
        start("ddp")
        with torch.no_grad():
            unwrapped().blocks[1].up.bias.add_(0.01 * rank)
        return verified()
        """,
        "blocks.1.up",
        "trained apart",
    ),
    # What depends on the rank
    "mask_by_rank": Bug(
        """
        start("tp")
        def mask(module, args, output):
            if rank == 1 and registry.current().name == "tp":
                output = output.clone()
                output[:, 0] = 0
            return output
        unwrapped().blocks[0].norm2.register_forward_hook(mask)
        return verified()
        """,
        "blocks.0.norm2",
        "on some ranks only",
        in_test=True,
    ),
    "positions_by_rank": Bug(
        """
        start("ddp")
        class Shifted(torch.nn.Module):
            def __init__(self, inner):
                super().__init__()
                self.inner = inner
            def forward(self, x):
                return self.inner(x + (rank if registry.current().name == "ddp" else 0))
        base = unwrapped()
        base.places.register_forward_pre_hook(
            lambda m, a: (a[0] + (rank if registry.current().name == "ddp" else 0),))
        return verified()
        """,
        "places",
        "on some ranks only",
    ),
    # Weights of the loss
    "accumulated_and_not_divided": Bug(
        """
        start("ddp", kind=WithLoss, accumulate=2)
        return verified(backward=lambda loss: loss.backward(), clip=False)
        """,
        "",
        "weigh 2 together",
    ),
    "divided_twice": Bug(
        """
        start("ddp", kind=WithLoss, accumulate=2)
        return verified(backward=lambda loss: accelerator.backward(loss / 2), clip=False)
        """,
        "",
        "weigh 0.5 together",
    ),
    "unequal_shares": Bug(
        """
        start("ddp", kind=WithLoss)
        return verified(ignore=12 * rank)
        """,
        "",
        "wrong batch shares",
    ),
    # Losses outside of the model
    "divided_twice_outside": Bug(
        """
        start("ddp", accumulate=2)
        return verified(backward=lambda loss: accelerator.backward(loss / 2), clip=False)
        """,
        "",
        "weigh 0.5 together",
    ),
    "unequal_shares_outside": Bug(
        """
        start("fsdp")
        return verified(ignore=12 * rank)
        """,
        "",
        "weighs 0.0156 on rank 0, 0.0625 on rank 1",
        in_test=True,
    ),
    "mean_over_a_mask_of_the_rank": Bug(
        """
        start("ddp")
        def masked(logits, tokens):
            mask = torch.arange(tokens.numel()) % (2 + rank) == 0
            losses = F.cross_entropy(logits.reshape(-1, 24), tokens.reshape(-1), reduction="none")
            return (losses * mask).sum() / mask.sum()
        return verified(loss=masked)
        """,
        "",
        "an element of the loss weighs 0.0312 on rank 0, 0.0455 on rank 1",
    ),
    "loss_weighed_by_rank": Bug(
        """
        start("zero1")
        return verified(loss=lambda logits, tokens: (1 + rank) * loss_of(logits, tokens))
        """,
        "",
        "an element of the loss weighs 0.0156 on rank 0, 0.0312 on rank 1",
    ),
    "labels_by_rank": Bug(
        """
        start("ddp")
        return verified(loss=lambda logits, tokens: loss_of(
            logits, tokens.roll(1) if rank == 1 else tokens))
        """,
        "",
        "rank 1 alone calls roll, on what goes into the model or the loss",
        in_test=True,
    ),
    "labels_moved_by_the_rank": Bug(
        """
        start("ddp")
        return verified(loss=lambda logits, tokens: loss_of(logits, (tokens + rank) % 24))
        """,
        "",
        "add is called with 0 on rank 0, 1 on rank 1",
    ),
    "other_loss_on_one_rank": Bug(
        """
        start("ddp")
        return verified(loss=lambda logits, tokens: (
            logits.square().mean() if rank else loss_of(logits, tokens)))
        """,
        "",
        "alone calls",
    ),
    "other_input_on_one_rank": Bug(
        """
        start("ddp")
        return verified(call=lambda x: model(x.flip(0) if rank else x))
        """,
        "",
        "rank 1 alone calls flip",
    ),
    # Random numbers
    "equal_seeds": Bug(
        """
        start("ddp", drop=0.2)
        torch.manual_seed(5)
        return verified()
        """,
        "",
        "drew the same mask",
        in_test=True,
    ),
    "unequal_seeds": Bug(
        """
        start("tp", drop=0.2)
        from nbdist.parallel.tp import rng
        torch.manual_seed(rank)
        base = unwrapped()
        base.forward = type(base).forward.__get__(base)  # without the streams of tp
        return verified()
        """,
        "",
        "drew different masks",
    ),
    "numpy_noise": Bug(
        """
        start("ddp")
        import numpy as np
        noise = np.random.default_rng()
        unwrapped().blocks[1].norm1.register_forward_hook(
            lambda m, a, out: out * (1 + 0.1 * noise.random()))
        return verified()
        """,
        "blocks.1.norm1",
        "two runs of the reference differ",
    ),
    # Data
    "same_batch": Bug(
        """
        start("ddp")
        data = torch.randint(24, (4, 17), generator=torch.Generator().manual_seed(3))
        return verified(batch=lambda: data)
        """,
        "",
        "computed with one batch",
        in_test=True,
    ),
    "reads_an_iterator": Bug(
        """
        start("ddp")
        numbers = iter(range(100))
        def batch():
            seed = next(numbers) * n + rank
            return torch.randint(24, (4, 17), generator=torch.Generator().manual_seed(seed))
        return verified(batch=batch)
        """,
        "embed",
        "got another batch",
    ),
    # What happens to gradients
    "clipped_by_local_norm": Bug(
        """
        start("fsdp")
        def clip():
            from nbdist.parallel.tensors import local_of
            grads = [local_of(p.grad) for p in unwrapped().parameters() if p.grad is not None]
            norm = torch.stack([g.norm() for g in grads]).norm()
            for g in grads:
                g.mul_(min(1.0, 0.1 / float(norm)))
        return verified(clip=False, after_backward=clip)
        """,
        "",
        "clipping by another norm",
    ),
    "scheduler_by_rank": Bug(
        """
        start("ddp")
        optimizer.optimizer.param_groups[0]["lr"] = 1e-2 / (1 + rank)
        return verified()
        """,
        "embed",
        "lr is 0.01 on rank 0, 0.005 on rank 1",
    ),
    "batch_norm": Bug(
        """
        start("ddp", kind=WithBatchNorm)
        return verified()
        """,
        "norm.0",
        "statistics of a share",
        in_test=True,
    ),
    # Code that asks for its rank, under every strategy alike
    "mask_by_rank_everywhere": Bug(
        """
        start("tp")
        def mask(module, args, output):
            return output * (0.5 if rank == 1 else 1)
        unwrapped().blocks[1].norm1.register_forward_hook(mask)
        return verified()
        """,
        "blocks.1.norm1",
        "on some ranks only",
    ),
    "ema_of_rank_0_alone": Bug(
        """
        start("fsdp", kind=WithAverage)
        def average():
            if rank == 0:
                from nbdist.parallel.tensors import local_of
                for mean, weight in unwrapped().pairs():
                    local_of(mean.detach()).lerp_(local_of(weight.detach()), 0.1)
        return verified(after_step=average)
        """,
        "average",
        "on some ranks only",
    ),
    "tied_weights_split": Bug(
        """
        start("ddp", kind=Tied)
        def untie():
            if registry.current().name == "ddp":
                head = unwrapped().head.weight
                head.grad = head.grad - 0.5 * head.grad
        return verified(after_backward=untie, clip=False)
        """,
        "embed",
        "scaled: 0.5 times",
    ),
    "momentum_by_rank": Bug(
        """
        start("ddp")
        step()
        for state in optimizer.optimizer.state.values():
            state["exp_avg"].mul_(1 + rank)
        return verified()
        """,
        "embed",
        "exp_avg of embed.weight, places.weight, blocks.0.norm1.weight and 34 more had other",
        in_test=True,
    ),
    "betas_by_rank": Bug(
        """
        start("ddp")
        step()
        optimizer.optimizer.param_groups[0]["betas"] = (0.8 + 0.1 * rank, 0.99)
        return verified()
        """,
        "embed",
        "betas is (0.8, 0.99) on rank 0, (0.9, 0.99) on rank 1",
    ),
    # Something added to gradients
    "number_added": Bug(
        """
        start("ddp")
        def add():
            if registry.current().name == "ddp":
                for p in unwrapped().parameters():
                    p.grad += 0.01
        return verified(after_backward=add, clip=False)
        """,
        "",
        "something added: 0.01 for each element",
    ),
    "weights_decayed_by_hand": Bug(
        """
        start("fsdp")
        def add():
            if registry.current().name == "fsdp":
                for p in unwrapped().parameters():
                    p.grad += 0.05 * p.detach()
        return verified(after_backward=add, clip=False)
        """,
        "embed",
        "something added: 0.05 times the parameter",
        in_test=True,
    ),
    "noise_added": Bug(
        """
        start("ddp")
        def add():
            for p in unwrapped().parameters():
                p.grad += 0.01 * torch.randn_like(p.grad)
        return verified(after_backward=add, clip=False)
        """,
        "",
        "something added: forward and backward are right in every module",
    ),
    "centered_between_modules": Bug(
        """
        start("ddp")
        unwrapped().embed.register_forward_hook(lambda m, a, out: out - out.mean(0))
        return verified()
        """,
        "embed",
        "statistics of a share",
    ),
    "detached_on_one_rank": Bug(
        """
        start("ddp")
        def detach(module, args, output):
            return output * 0 + output.detach() if rank == 1 else output
        unwrapped().blocks[0].up.register_forward_hook(detach)
        return verified(clip=False)
        """,
        "blocks.0.up",
        "on some ranks only",
    ),
    # Experts that ranks share
    "experts_summed_over_ranks": Bug(
        """
        class Summed(torch.autograd.Function):
            @staticmethod
            def forward(ctx, *parameters): return tuple(p.view_as(p) for p in parameters)
            @staticmethod
            def backward(ctx, *gradients): return gradients
        def summed(right):
            return lambda group, *parameters: Summed.apply(*parameters)
        return verified_with("_average", summed)
        """,
        "blocks.0.down.experts",
        "scaled: 2 times what it should be, and the degree of dp is 2",
        in_test=True,
    ),
    "copies_of_experts_not_reduced": Bug(
        """
        import dataclasses
        def alone(right):
            return lambda group, *p: right(dataclasses.replace(group, copies=None), *p)
        return verified_with("_average", alone, ep=2)
        """,
        "blocks.0.down.experts",
        "none of the kinds",
        n=4,
    ),
    "router_noise_by_rank": Bug(
        """
        start("ep", kind=MixedNet)
        def jitter(module, args):
            return (args[0] * (1 + 0.01 * rank * shares_experts()),)
        unwrapped().blocks[1].down.router.register_forward_pre_hook(jitter)
        return verified()
        """,
        "blocks.1.down.router",
        "on some ranks only",
    ),
    "tokens_dropped_on_a_rank": Bug(
        """
        def dropping(right):
            def compute(module, forward, group, rows, index, weights):
                kept = torch.arange(len(weights)) < (20 if rank == 1 else len(weights))
                return right(module, forward, group, rows, index, weights * kept)
            return compute
        return verified_with("_compute", dropping)
        """,
        "blocks.0.down.experts",
        "tokens of experts went astray",
        in_test=True,
    ),
    "tokens_of_another_expert": Bug(
        """
        def swapping(right):
            return lambda module, forward, group, rows, index, weights: right(
                module, forward, group, rows, index.flip(0), weights)
        return verified_with("_compute", swapping)
        """,
        "blocks.0.down.experts",
        "tokens of experts went astray",
    ),
    "permutation_not_undone": Bug(
        """
        calls = []
        def shuffling(right):
            def exchange(rows, *args):
                calls.append(0)
                rows = right(rows, *args)
                return rows if len(calls) % 4 else rows.flip(0)  # the fourth brings results back
            return exchange
        return verified_with("_exchange", shuffling)
        """,
        "blocks.0.down.experts",
        "tokens of experts went astray",
    ),
    "weights_not_normalised_on_a_rank": Bug(
        """
        start("ep", kind=MixedNet)
        def smaller(module, args):
            return (args[0], args[1], args[2] * (0.9 if rank and shares_experts() else 1))
        unwrapped().blocks[0].down.experts.register_forward_pre_hook(smaller)
        return verified()
        """,
        "blocks.0.down.experts",
        "rank 0 is right; elsewhere it is 0.9 times that",
    ),
    "auxiliary_loss_for_each_rank": Bug(
        """
        start("ep", kind=MixedNet)
        def loss(logits, tokens):
            router = unwrapped().blocks[0].down.router
            auxiliary = router.weight.square().sum() * (n if shares_experts() else 1)
            return loss_of(logits, tokens) + 0.1 * auxiliary
        return verified(clip=False, loss=loss)
        """,
        "blocks.0.down.router",
        "scaled: 2 times what it should be, and the degree of dp is 2",
    ),
}
