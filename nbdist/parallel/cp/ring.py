"""Ring attention: queries stay, keys and values go once around the ranks of a sequence."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from nbdist.errors import OptionError
from nbdist.parallel.cp.kernels import Attended, Problem, choose


def ring_attention(problem: Problem, group: dist.ProcessGroup) -> torch.Tensor:
    """Attention over the whole sequence, of which each rank has one piece, in rank order.

    Collective over the group, and so is its backward. A rank holds two pieces of keys and
    values at a time, never all. Pieces of causal attention that a rank does not see are passed
    on without being computed, so later ranks compute more than earlier ones.
    Source: Ring Attention (Liu, Zaharia, Abbeel; arXiv 2310.01889).

    Returns:
        (B, H, T, last dim of the values), this rank's piece.

    Raises:
        OptionError: If there is dropout, or causal queries and keys have different lengths.
    """
    query, key = problem.query, problem.key
    if problem.dropout:
        raise OptionError(
            f"ring attention has no dropout, and the model asks for {problem.dropout}. Set its "
            "attention dropout to 0 (transformers: config.attention_dropout or attn_pdrop), or "
            "use ulysses"
        )
    if problem.is_causal and query.shape[2] != key.shape[2]:
        raise OptionError(
            f"causal attention of {query.shape[2]} queries to {key.shape[2]} keys on each rank: "
            "a split sequence needs as many keys as queries. Use another strategy, such as fsdp"
        )
    circle = _Circle(group, problem.is_causal, problem.scale)
    out: torch.Tensor = _Ring.apply(query, key, problem.value, circle)  # type: ignore[no-untyped-call]
    return out


Parts = tuple[torch.Tensor, torch.Tensor]  # keys and values on their way


@dataclass(slots=True)
class _Transfer:
    """Tensors on their way to the next rank, and the previous rank's on their way here."""

    works: list[Any]
    received: list[torch.Tensor]
    sent: tuple[torch.Tensor, ...]

    def wait(self) -> list[torch.Tensor]:
        for work in self.works:
            work.wait()
        return self.received


@dataclass(frozen=True, slots=True)
class _Circle:
    """The ranks of a sequence as a ring, and what their attention is, as in a `Problem`."""

    group: dist.ProcessGroup
    is_causal: bool
    scale: float

    @property
    def size(self) -> int:
        return dist.get_world_size(self.group)

    @property
    def place(self) -> int:
        return dist.get_rank(self.group)

    def pass_on(self, *tensors: torch.Tensor) -> _Transfer:
        """Start to send tensors to the next rank, and to receive as many of the same shapes."""
        after, before = (self.place + 1) % self.size, (self.place - 1) % self.size
        sent = tuple(tensor.contiguous() for tensor in tensors)
        received = [torch.empty_like(tensor) for tensor in sent]
        ops = [
            *(dist.P2POp(dist.isend, t, group=self.group, group_peer=after) for t in sent),
            *(dist.P2POp(dist.irecv, t, group=self.group, group_peer=before) for t in received),
        ]
        return _Transfer(dist.batch_isend_irecv(ops), received, sent)

    def rounds(self, key: torch.Tensor, value: torch.Tensor) -> Iterator[tuple[int, Parts]]:
        """Each piece of keys and values and the place that it comes from.

        The own one is the first; the next comes meanwhile.
        """
        parts = (key, value)
        for step in range(self.size):
            transfer = self.pass_on(*parts) if step + 1 < self.size else None
            yield (self.place - step) % self.size, parts
            if transfer is not None:
                parts = (transfer.wait()[0], transfer.received[1])

    def problem(self, query: torch.Tensor, place: int, parts: Parts) -> Problem:
        """Combine this rank's queries with a piece of keys, which get as many heads."""
        key, value = (_expand_heads(part, query.shape[1]) for part in parts)
        return Problem(query, key, value, self.is_causal and place == self.place, self.scale)

    def sees(self, place: int) -> bool:
        """Whether this rank's queries see a piece."""
        return not self.is_causal or place <= self.place


class _Ring(torch.autograd.Function):
    """`ring_attention` for autograd. Gradients of keys go around as the keys do."""

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, circle: _Circle
    ) -> torch.Tensor:
        joined: Attended | None = None
        for place, parts in circle.rounds(key.contiguous(), value.contiguous()):
            if circle.sees(place):
                problem = circle.problem(query, place, parts)
                joined = _join(joined, choose(problem).forward(problem))
        assert joined is not None
        out = joined.out.to(query.dtype)
        # The empty one is a mark: torch.utils.checkpoint refuses a recomputation that saves
        # other tensors, and one that `recomputation` has missed would save the other five.
        ctx.save_for_backward(query.new_empty(0), query, key, value, out, joined.lse)
        ctx.circle = circle
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        _, query, key, value, out, lse = ctx.saved_tensors
        circle, joined, grad_out = ctx.circle, Attended(out, lse), grad_out.contiguous()
        grad_query = torch.zeros_like(query, dtype=torch.float32)
        # What ranks have found so far for the keys of a round follows them to the next rank.
        sums: _Transfer | None = None
        for place, parts in circle.rounds(key.contiguous(), value.contiguous()):
            shares = [torch.zeros_like(part, dtype=torch.float32) for part in parts]
            if circle.sees(place):
                problem = circle.problem(query, place, parts)
                gradients = choose(problem).backward(problem, grad_out, joined)
                grad_query += gradients[0]
                shares = [_fold_heads(gradient, key.shape[1]) for gradient in gradients[1:]]
            if sums is not None:
                shares = [
                    share + received for share, received in zip(shares, sums.wait(), strict=True)
                ]
            sums = circle.pass_on(*shares)
        assert sums is not None
        grad_key, grad_value = sums.wait()
        return grad_query.to(query.dtype), grad_key.to(key.dtype), grad_value.to(value.dtype), None


def _join(joined: Attended | None, piece: Attended) -> Attended:
    """Attention over the keys of both, from attention over each; in float32.

    Source: Online normalizer calculation for softmax (Milakov, Gimelshein; arXiv 1805.02867).
    """
    if joined is None:
        return Attended(piece.out.float(), piece.lse.float())
    lse = torch.logaddexp(joined.lse, piece.lse)
    weights = [(part.lse - lse).exp().unsqueeze(-1) for part in (joined, piece)]
    return Attended(joined.out * weights[0] + piece.out.float() * weights[1], lse)


def _expand_heads(part: torch.Tensor, n_heads: int) -> torch.Tensor:
    """(B, fewer heads, T, D) -> (B, n_heads, T, D): each head for as many queries' heads."""
    times = n_heads // part.shape[1]
    return part if times == 1 else part.repeat_interleave(times, dim=1)


def _fold_heads(grad: torch.Tensor, n_heads: int) -> torch.Tensor:
    """The gradient of what `_expand_heads` gave, in float32."""
    grad = grad.float().contiguous()
    batch, _, length, size = grad.shape
    return grad.view(batch, n_heads, -1, length, size).sum(2)
