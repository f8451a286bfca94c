"""Tokens travel to the ranks that have their experts, and what these have made of them comes back.

    hidden, index, weights of this rank's tokens
      -> a row for each (token, expert), sorted by expert     all_to_all: counts, rows, weights
      -> the experts' own forward, with the experts that are here
      -> the rows come back                                   all_to_all
      -> added up for each token

Forward and backward are the same on all ranks of a group: each takes part in every call, also one
whose experts got no token. The experts' code is the user's; it sees a stack that is shorter.
"""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from nbdist.errors import NbdistError
from nbdist.parallel.ep import tokens


@dataclass(frozen=True, slots=True)
class ExpertGroup:
    """The ranks that share the experts of a layer.

    Attributes:
        ranks: They, for the exchange of tokens.
        copies: The ranks that have the same experts and average their gradients here; None where
            there are none, or FSDP does it.
        count: Experts of a layer, on all ranks together.
        name: Of them, in the model.
    """

    ranks: dist.ProcessGroup
    copies: dist.ProcessGroup | None
    count: int
    name: str

    def __deepcopy__(self, _memo: object) -> Self:
        """Itself: it holds no values."""
        return self


@torch.compiler.disable  # type: ignore[untyped-decorator]  # sizes come from the data
def dispatch(
    module: torch.nn.Module,
    forward: Callable[..., torch.Tensor],
    group: ExpertGroup,
    hidden: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """Send this rank's tokens through a layer's experts. Collective over `group.ranks`.

    Args:
        module: The experts that are here.
        forward: Their own.
        group: Who has the others.
        hidden: (tokens, width).
        index: (tokens, k), of all experts; a number outside of them stands for none.
        weights: (tokens, k).

    Returns:
        As hidden: for each token the sum over its experts.
    """
    _refuse_wrong_shapes(hidden, index, weights)
    k, width = index.shape[-1], hidden.shape[-1]
    n_ranks = group.ranks.size()
    here = group.count // n_ranks
    experts = index.reshape(-1)
    is_routed = (experts >= 0) & (experts < group.count)
    order = torch.where(is_routed, experts, group.count).argsort(stable=True)
    # One wait for the device.
    n_routed, n_nan = torch.stack([is_routed.sum(), weights.isnan().sum()]).tolist()
    if n_nan:
        _warn_of_nan(group.name)
    order = order[:n_routed]
    experts = experts[order]
    sent, received, loads = _counts(torch.bincount(experts, minlength=group.count), group.ranks)
    if torch.is_grad_enabled():
        tokens.count(module, loads, len(experts))

    rows = hidden.reshape(-1, width)[order // k]
    rows = _exchange(rows, group.ranks, sent, received)
    row_weights = _exchange(weights.reshape(-1)[order], group.ranks, sent, received)
    local_index = _exchange(experts % here, group.ranks, sent, received)
    rows = _compute(module, forward, group, rows, local_index, row_weights)
    rows = _exchange(rows, group.ranks, received, sent)

    # A place for each, then a sum: adding up by index comes in any order on GPUs.
    places = rows.new_zeros(index.numel(), width).index_copy(0, order, rows)
    return places.view(-1, k, width).sum(1).to(hidden.dtype).view(hidden.shape)


def _refuse_wrong_shapes(hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> None:
    n_tokens = hidden.numel() // max(1, hidden.shape[-1])
    is_one_each = index.shape == weights.shape and index.numel() == n_tokens * index.shape[-1]
    if not is_one_each:
        raise NbdistError(
            f"Experts got hidden states {tuple(hidden.shape)}, experts of tokens "
            f"{tuple(index.shape)} and weights {tuple(weights.shape)}. ep needs (tokens, width), "
            "(tokens, k) and (tokens, k)."
        )


def _warn_of_nan(name: str) -> None:
    warnings.warn(  # one text for all steps, so that it is shown once
        f"The router gives NaN as weights of {name}, on rank {dist.get_rank()}, so the loss is NaN "
        "too. %dist_check --trace-nan tells which module of the next cell gives NaN first.",
        stacklevel=2,
    )


def _counts(counts: torch.Tensor, group: dist.ProcessGroup) -> Iterator[list[int]]:
    """Rows that this rank sends to each rank of the group and gets from each; for each expert here.

    `counts` are this rank's rows for each expert. Collective over the group.
    """
    arriving = torch.empty_like(counts)
    dist.all_to_all_single(arriving, counts, group=group)
    outgoing, incoming = counts.view(group.size(), -1), arriving.view(group.size(), -1)
    # One wait for the device.
    sums = torch.cat([outgoing.sum(1), incoming.sum(1), incoming.sum(0)]).tolist()
    ends = 0, group.size(), 2 * group.size(), len(sums)
    return (sums[start:end] for start, end in itertools.pairwise(ends))


def _compute(
    module: torch.nn.Module,
    forward: Callable[..., torch.Tensor],
    group: ExpertGroup,
    rows: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """The experts' own forward over rows that have one expert each, with this rank's parameters."""
    local = {
        name: parameter.to_local() if isinstance(parameter, DTensor) else parameter
        for name, parameter in module.named_parameters(recurse=False)
    }
    trained = [name for name, value in local.items() if value.requires_grad]
    if trained and torch.is_grad_enabled():
        values = _average(group, *(local[name] for name in trained))
        local.update(zip(trained, values, strict=True))
    # FSDP2 gathers in what is computed in, but for experts that no other rank has.
    local = {
        name: value.to(rows.dtype) if value.is_floating_point() else value
        for name, value in local.items()
    }
    if not len(rows):
        return _no_rows(rows, weights, *local.values())
    with _parameters_of(module, local):
        return forward(rows, index[:, None], weights[:, None])


@contextlib.contextmanager
def _parameters_of(module: torch.nn.Module, values: dict[str, torch.Tensor]) -> Iterator[None]:
    """Other tensors in the places of a module's parameters, in here."""
    table: Any = module._parameters  # noqa: SLF001  # as torch's functional_call
    before = dict(table)
    table.update(values)
    try:
        yield
    finally:
        table.update(before)


class _AllToAll(torch.autograd.Function):
    """Rows to the ranks of a group; their gradients go the same way back."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        group: dist.ProcessGroup,
        sent: Sequence[int],
        received: Sequence[int],
    ) -> torch.Tensor:
        ctx.back = (group, received, sent)
        return _all_to_all(rows, group, sent, received)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _all_to_all(gradient, *ctx.back), None, None, None


def _all_to_all(
    rows: torch.Tensor, group: dist.ProcessGroup, sent: Sequence[int], received: Sequence[int]
) -> torch.Tensor:
    arrived = rows.new_empty((sum(received), *rows.shape[1:]))
    dist.all_to_all_single(arrived, rows.contiguous(), list(received), list(sent), group=group)
    return arrived


class _MeanGradient(torch.autograd.Function):
    """Parameters of experts, whose gradients are averaged as all others are: over all data.

    Each has the sum over the tokens of the ranks that share the experts; losses are means over
    each rank's. In one node for all, so that ranks reduce in one order. It comes after the rows'
    exchange, so its backward goes before that one's.
    """

    @staticmethod
    def forward(ctx: Any, group: ExpertGroup, *parameters: torch.Tensor) -> Any:
        ctx.group = group
        return tuple(parameter.view_as(parameter) for parameter in parameters)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        group: ExpertGroup = ctx.group
        copies = 1 if group.copies is None else group.copies.size()
        means = [gradient / (group.ranks.size() * copies) for gradient in gradients]
        for mean in means if group.copies is not None else ():
            dist.all_reduce(mean, group=group.copies)
        return None, *means


class _NoRows(torch.autograd.Function):
    """No rows of experts that got no token: their gradients are zeros, as on one process."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, _weights: torch.Tensor, *values: Any) -> Any:
        ctx.count = 2 + len(values)
        return rows.clone()

    @staticmethod
    def backward(ctx: Any, _gradient: torch.Tensor) -> Any:
        return (None,) * ctx.count  # the functions before it take none for zeros


# torch leaves it untyped.
_exchange: Callable[..., torch.Tensor] = _AllToAll.apply
_average: Callable[..., tuple[torch.Tensor, ...]] = _MeanGradient.apply
_no_rows: Callable[..., torch.Tensor] = _NoRows.apply
