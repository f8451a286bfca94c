"""Ulysses attention: heads are split instead of the sequence while attention is computed."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention

from nbdist.errors import OptionError
from nbdist.parallel.cp.kernels import Problem


def ulysses_attention(problem: Problem, group: dist.ProcessGroup) -> torch.Tensor:
    """Attention over the whole sequence, of which each rank has one piece, in rank order.

    Collective over the group, and so is its backward. Each rank computes some heads for the
    whole sequence, with torch's own attention, and draws its own dropout. Where the ranks are
    more than the heads of keys and values allow, these are repeated first.
    Source: DeepSpeed Ulysses (arXiv 2309.14509).

    Returns:
        (B, H, T, last dim of the values), this rank's piece.

    Raises:
        OptionError: If the heads cannot be split evenly; lists the degrees that work.
    """
    query, key, value = problem.query, problem.key, problem.value
    size, n_heads = dist.get_world_size(group), query.shape[1]
    check_heads(n_heads, size)
    if key.shape[1] % size:
        key, value = (t.repeat_interleave(n_heads // t.shape[1], dim=1) for t in (key, value))
    query, key, value = (_all_to_all(t, 1, 2, group) for t in (query, key, value))
    out = scaled_dot_product_attention(
        query,
        key,
        value,
        dropout_p=problem.dropout,
        is_causal=problem.is_causal,
        scale=problem.scale,
        enable_gqa=key.shape[1] != query.shape[1],
    )
    return _all_to_all(out, 2, 1, group)


def check_heads(n_heads: int, degree: int) -> None:
    """Raises an OptionError if a degree does not divide the heads; it lists those that do."""
    if n_heads % degree:
        fitting = [str(d) for d in range(1, n_heads + 1) if n_heads % d == 0]
        choices = f"{', '.join(fitting[:-1])} or {fitting[-1]}" if n_heads > 1 else "1"
        heads = f"{n_heads} heads are" if n_heads > 1 else "1 head is"
        raise OptionError(
            f"ulysses splits the heads of attention over cp={degree} ranks, and {heads} not "
            f"divisible by {degree} ({n_heads} % {degree} = {n_heads % degree}). Use "
            f"cp={choices}, or the strategy cp (ring attention), which splits no heads"
        )


class _Swap(torch.autograd.Function):
    """All-to-all: one dim is split over the ranks, another one, split before, becomes whole."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, split: int, joined: int, group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.split, ctx.joined, ctx.group = split, joined, group
        pieces = torch.stack(tensor.chunk(dist.get_world_size(group), split))
        received = torch.empty_like(pieces)
        dist.all_to_all_single(received, pieces, group=group)
        return torch.cat(received.unbind(0), joined)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _all_to_all(grad, ctx.joined, ctx.split, ctx.group), None, None, None


def _all_to_all(
    tensor: torch.Tensor, split: int, joined: int, group: dist.ProcessGroup
) -> torch.Tensor:
    out: torch.Tensor = _Swap.apply(tensor, split, joined, group)  # type: ignore[no-untyped-call]
    return out
