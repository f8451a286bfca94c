"""Calls of a model's forward, caught where a sequence is split: attention, and mean losses."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any, Self

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from nbdist.errors import OptionError
from nbdist.parallel.cp.kernels import Problem
from nbdist.parallel.cp.ring import ring_attention
from nbdist.parallel.cp.ulysses import ulysses_attention

# Attention of this rank's piece to the whole sequence.
Attend = Callable[[Problem], torch.Tensor]

# The option `context` -> what it computes attention with.
CONTEXTS: dict[str, Callable[[Problem, dist.ProcessGroup], torch.Tensor]] = {
    "ring": ring_attention,
    "ulysses": ulysses_attention,
}

_HALVES = (torch.bfloat16, torch.float16)

# Means over positions whose weights differ: those of ranks must be combined by their weights.
_WEIGHTED = (F.cross_entropy, F.nll_loss)
_OTHERS = (
    F.binary_cross_entropy,
    F.binary_cross_entropy_with_logits,
    F.huber_loss,
    F.kl_div,
    F.l1_loss,
    F.mse_loss,
    F.smooth_l1_loss,
)


class _Active(threading.local):
    mode: SplitSequence | None = None


_active = _Active()


class SplitSequence(TorchFunctionMode):
    """While it is entered, this thread's attention spans the sequence of a group.

    Losses of torch.nn.functional come out such that their mean over the group is the loss of
    the whole sequence: weighted by the targets that count, a sum times the number of ranks.
    """

    def __init__(
        self, attend: Attend | None = None, group: dist.ProcessGroup | None = None
    ) -> None:
        """Without arguments nothing is split, and `attention_inputs` is all that it does."""
        super().__init__()
        self._attend = attend
        self._group = group
        # Tensors of each call of attention, where somebody compares them.
        self.attention_inputs: list[torch.Tensor] | None = None
        self.is_half = False  # whether such a call has computed in bf16 or fp16
        self._outer: list[SplitSequence | None] = []

    def __enter__(self) -> Self:
        self._outer.append(_active.mode)
        _active.mode = self
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        _active.mode = self._outer.pop()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            with self._instead():
                return func(*args, **kwargs)
        if func in _WEIGHTED or func in _OTHERS:
            return self._loss(func, args, kwargs)
        return func(*args, **kwargs)

    @contextlib.contextmanager
    def _instead(self) -> Iterator[None]:
        """The functional module's attention is this one, on this thread.

        torch calls multi_head_attention_forward with the mode off, so what that calls by the
        module's name would not come here.
        """
        here = threading.get_ident()

        def dispatch(*args: Any, **kwargs: Any) -> Any:
            is_here = threading.get_ident() == here
            return (self._attention if is_here else scaled_dot_product_attention)(*args, **kwargs)

        before = F.scaled_dot_product_attention
        setattr(F, "scaled_dot_product_attention", dispatch)  # noqa: B010 - a name of torch's
        try:
            yield
        finally:
            setattr(F, "scaled_dot_product_attention", before)  # noqa: B010

    def _attention(  # noqa: PLR0913 - torch's own signature
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        if self.attention_inputs is not None:
            self.attention_inputs += [query, key, value]
            # Under autocast it may be given float32 alone.
            self.is_half |= _prepare_input(value, has_heads=True).dtype in _HALVES
        if self._attend is None:
            return scaled_dot_product_attention(
                query, key, value, attn_mask, dropout_p, is_causal,
                scale=scale, enable_gqa=enable_gqa,
            )  # fmt: skip
        if attn_mask is not None:
            raise OptionError(
                f"attention with a mask of shape {tuple(attn_mask.shape)} cannot be split along "
                "the sequence. Leave the mask out: is_causal=True is the causal one, and padding "
                "at the end needs no mask where its labels are ignored. Or use fsdp"
            )
        has_heads = query.ndim > 3
        query, key, value = (_prepare_input(t, has_heads=has_heads) for t in (query, key, value))
        factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
        problem = Problem(query, key, value, is_causal, factor, dropout_p)
        # Here tensors have their dtype, and float32 inside is meant.
        with torch.autocast(query.device.type, enabled=False):
            out = self._attend(problem)
        return out if has_heads else out.squeeze(1)

    def _loss(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        loss = func(*args, **kwargs)
        if self._group is None:
            return loss
        call = inspect.signature(func).bind(*args, **kwargs)
        call.apply_defaults()
        reduction, size = call.arguments["reduction"], dist.get_world_size(self._group)
        if reduction in ("sum", "batchmean"):
            return loss * size
        if reduction != "mean" or func not in _WEIGHTED:
            return loss
        own_weight = _weight(call.arguments)
        total = own_weight.clone()
        dist.all_reduce(total, group=self._group)
        # A rank all of whose targets are ignored has nan.
        return torch.where(own_weight > 0, loss, 0) * (own_weight * size / total).to(loss.dtype)


def as_now(run: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, and whenever it runs, attention is what it is now on this thread."""
    mode = _active.mode
    if mode is None:
        return run

    @functools.wraps(run)
    def run_in_mode(*args: Any, **kwargs: Any) -> Any:
        with contextlib.nullcontext() if _active.mode is mode else mode:
            return run(*args, **kwargs)

    return run_in_mode


def _prepare_input(tensor: torch.Tensor, *, has_heads: bool) -> torch.Tensor:
    """Give an input four dims, and the dtype that attention has under autocast."""
    device = tensor.device.type
    if torch.is_autocast_enabled(device) and tensor.dtype != torch.float64:
        tensor = tensor.to(torch.get_autocast_dtype(device))
    return tensor if has_heads else tensor.unsqueeze(1)


def _weight(arguments: dict[str, Any]) -> torch.Tensor:
    """Compute the divisor of a mean cross_entropy or nll_loss, for these arguments."""
    scores, target, weight = arguments["input"], arguments["target"], arguments["weight"]
    if target.is_floating_point():  # probabilities: torch divides by the number of positions
        n_positions = scores.numel() // scores.shape[min(1, scores.ndim - 1)]
        return torch.tensor(float(n_positions), dtype=torch.float64, device=scores.device)
    counts: torch.Tensor = target != arguments["ignore_index"]
    of_each: torch.Tensor = counts if weight is None else weight[target[counts]]
    return of_each.sum(dtype=torch.float64)
