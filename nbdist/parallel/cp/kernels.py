"""Attention over one piece of keys, with what is needed to join pieces: its log-sum-exp.

Shapes: B batch, H heads, T queries or keys on this rank, D the size of a head. torch's public
scaled_dot_product_attention keeps the log-sum-exp to itself, so the operators below it are
called; `PLAIN` is the same in ordinary tensor operations.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Problem:
    """One attention of queries (B, H, T, D) to keys and values.

    Attributes:
        query, key, value: For a kernel with equal numbers of heads; elsewhere keys and values
            may have fewer, whose number divides H.
        is_causal: Query i sees keys 0 to i; else all.
        scale: What scores are multiplied with.
        dropout: Probability that a weight is set to 0. No kernel here has it.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    is_causal: bool
    scale: float
    dropout: float = 0.0

    @property
    def qkv(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values."""
        return self.query, self.key, self.value


@dataclass(frozen=True, slots=True)
class Attended:
    """Attention over some keys, in a form that can be joined with others.

    Attributes:
        out: (B, H, T, D of the values).
        lse: (B, H, T) float32: the logarithm of the sum of the exponentials of the scores.
    """

    out: torch.Tensor
    lse: torch.Tensor


# Of the queries, keys and values of a `Problem`.
AttentionGradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Kernel:
    """One way to compute attention.

    Attributes:
        device: cpu or cuda; "" for any.
        forward: Attention to these keys alone.
        backward: From the gradient of the joined output, and the joined output and
            log-sum-exp, this piece's share of the gradients.
    """

    device: str
    fits: Callable[[Problem], bool]
    forward: Callable[[Problem], Attended]
    backward: Callable[[Problem, torch.Tensor, Attended], AttentionGradients]


def choose(problem: Problem) -> Kernel:
    """The first kernel of `KERNELS` that takes the problem."""
    device = problem.query.device.type
    return next(k for k in KERNELS if k.device in ("", device) and k.fits(problem))


def _plain_forward(problem: Problem) -> Attended:
    scores = _scores(problem)
    lse = scores.logsumexp(-1)
    out = (scores - lse.unsqueeze(-1)).exp() @ problem.value.float()
    return Attended(out.to(problem.query.dtype), lse)


def _plain_backward(
    problem: Problem, grad_out: torch.Tensor, joined: Attended
) -> AttentionGradients:
    """Source: FlashAttention, algorithm 4 (arXiv 2205.14135), without the tiles."""
    query, key, value = problem.query.float(), problem.key.float(), problem.value.float()
    grad_out = grad_out.float()
    weights = (_scores(problem) - joined.lse.unsqueeze(-1)).exp()
    grad_weights = grad_out @ value.mT
    mean = (grad_out * joined.out.float()).sum(-1, keepdim=True)
    grad_scores = weights * (grad_weights - mean) * problem.scale
    return grad_scores @ key, grad_scores.mT @ query, weights.mT @ grad_out


def _scores(problem: Problem) -> torch.Tensor:
    scores = problem.query.float() @ problem.key.float().mT * problem.scale
    if problem.is_causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(hidden, -math.inf)
    return scores


def _aten(name: str) -> Any:
    """An operator below scaled_dot_product_attention; private, see the module's first lines."""
    return getattr(torch.ops.aten, f"_scaled_dot_product_{name}").default


def _flash_forward(problem: Problem, operator: str = "flash_attention") -> Attended:
    arguments = (*problem.qkv, 0.0, problem.is_causal)
    out, lse, *_ = _aten(operator)(*arguments, scale=problem.scale)
    return Attended(out, lse)


def _cpu_backward(problem: Problem, grad_out: torch.Tensor, joined: Attended) -> AttentionGradients:
    rest = (joined.out, joined.lse, 0.0, problem.is_causal)
    flash = _aten("flash_attention_for_cpu_backward")
    gradients: AttentionGradients = flash(grad_out, *problem.qkv, *rest, scale=problem.scale)
    return gradients


def _flash_backward(
    problem: Problem, grad_out: torch.Tensor, joined: Attended
) -> AttentionGradients:
    # Lengths differ within a batch only with `cum_seq`, and the seed serves dropout: both empty.
    none = torch.empty(0, dtype=torch.int64, device="cpu")
    lengths = (None, None, problem.query.shape[2], problem.key.shape[2])
    rest = (joined.out, joined.lse, *lengths, 0.0, problem.is_causal, none, none)
    flash = _aten("flash_attention_backward")
    gradients: AttentionGradients = flash(grad_out, *problem.qkv, *rest, scale=problem.scale)
    return gradients


def _efficient_forward(problem: Problem) -> Attended:
    arguments = (*problem.qkv, None, True, 0.0, problem.is_causal)
    out, lse, *_ = _aten("efficient_attention")(*arguments, scale=problem.scale)
    return Attended(out, lse[..., : problem.query.shape[2]])


def _efficient_backward(
    problem: Problem, grad_out: torch.Tensor, joined: Attended
) -> AttentionGradients:
    # It reads rows of 32 and writes infinity itself where no query is.
    lse = torch.nn.functional.pad(joined.lse, (0, -problem.query.shape[2] % 32), value=math.inf)
    # In half precision it takes the heads of a position for neighbours in memory, whatever the
    # strides say: seen on an H200 as gradients of queries and keys that were anything at all.
    out = joined.out.transpose(1, 2).contiguous().transpose(1, 2)
    none = torch.empty(0, dtype=torch.int64, device="cpu")
    rest = (None, out, lse, none, none, 0.0, [True, True, True, False], problem.is_causal)
    efficient = _aten("efficient_attention_backward")
    gradients = efficient(grad_out, *problem.qkv, *rest, scale=problem.scale)
    return gradients[0], gradients[1], gradients[2]


def _fits_cpu(problem: Problem) -> bool:
    return problem.query.shape[-1] == problem.value.shape[-1] and problem.query.shape[2] > 0


def _fits_flash(problem: Problem) -> bool:
    size = problem.query.shape[-1]
    return (
        problem.query.dtype in (torch.float16, torch.bfloat16)
        and size == problem.value.shape[-1]
        and size % 8 == 0
        and size <= 256
        and torch.cuda.get_device_capability(problem.query.device) >= (8, 0)
    )


def _fits_efficient(problem: Problem) -> bool:
    # Rows of 16 bytes; a multiple of 8 holds for each dtype.
    return problem.query.shape[-1] % 8 == 0 and problem.value.shape[-1] % 8 == 0


_cpu_forward = functools.partial(_flash_forward, operator="flash_attention_for_cpu")

PLAIN = Kernel("", lambda _problem: True, _plain_forward, _plain_backward)

# The first that fits is used. cudnn's is left out: nothing says that its backward takes a
# log-sum-exp over more keys than it is given.
KERNELS = (
    Kernel("cpu", _fits_cpu, _cpu_forward, _cpu_backward),
    Kernel("cuda", _fits_flash, _flash_forward, _flash_backward),
    Kernel("cuda", _fits_efficient, _efficient_forward, _efficient_backward),
    PLAIN,
)
