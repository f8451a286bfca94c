"""Gradients of parameters that several stages of a pipeline hold: each has its own share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from nbdist.parallel.base.tensors import like, local_of


@dataclass(slots=True)
class GradientShare:
    """One parameter's gradient on this rank.

    Attributes:
        parameter: It, or this rank's part of it.
        holders: Coordinates along pp that hold the same; None for all.
        gradient: None where no stage of this rank has used it; then the sum.
    """

    parameter: torch.Tensor
    holders: frozenset[int] | None
    gradient: torch.Tensor | None


def all_reduce_tied(shares: Sequence[GradientShare], group: dist.ProcessGroup) -> None:
    """Sum each gradient over its holders. Collective: every rank of the pipeline.

    A gradient that is None everywhere stays None, as in one process: optimizers leave such a
    parameter alone. The sum is the same, to the last bit, on all holders. The shares are of
    every parameter that is trained and held here, in the model's order.
    """
    everyone = frozenset(range(dist.get_world_size(group)))
    together: dict[tuple[tuple[int, ...], str], list[GradientShare]] = {}
    for share in shares:
        holders = everyone if share.holders is None else share.holders
        if len(holders) > 1:
            key = tuple(sorted(holders)), str(share.parameter.dtype)
            together.setdefault(key, []).append(share)
    # In one order on all ranks, so that no two wait for each other.
    for (places, _), same_holders in sorted(together.items(), key=lambda pair: pair[0]):
        _add_up(same_holders, places, group)


def _add_up(
    shares: Sequence[GradientShare], holders: tuple[int, ...], group: dist.ProcessGroup
) -> None:
    parts = [local_of(share.parameter) for share in shares]
    gradients = [
        torch.zeros_like(part) if share.gradient is None else local_of(share.gradient)
        for part, share in zip(parts, shares, strict=True)
    ]
    is_there = torch.tensor(
        [share.gradient is not None for share in shares],
        dtype=gradients[0].dtype,
        device=gradients[0].device,
    )
    flat = torch.cat([*(gradient.flatten() for gradient in gradients), is_there])
    if len(holders) == dist.get_world_size(group):
        dist.all_reduce(flat, group=group)
    else:
        flat = _sum_of_holders(flat, holders, group)
    *sums, counts = torch.split(flat, [*(part.numel() for part in parts), len(shares)])
    for share, part, total, count in zip(shares, parts, sums, counts.tolist(), strict=True):
        # By itself: it becomes a parameter's .grad, and must not keep the others alive.
        summed = total.view_as(part).clone() if count else None
        share.gradient = None if summed is None else like(share.parameter, summed)


def _sum_of_holders(
    flat: torch.Tensor, holders: tuple[int, ...], group: dist.ProcessGroup
) -> torch.Tensor:
    """The sum over a few ranks of the group, in the order of their coordinates."""
    here = dist.get_rank(group)
    received = {holder: torch.empty_like(flat) for holder in holders if holder != here}
    calls = [
        dist.P2POp(function, tensor, group=group, group_peer=holder)
        for holder, buffer in received.items()
        for function, tensor in ((dist.isend, flat), (dist.irecv, buffer))
    ]
    for work in dist.batch_isend_irecv(calls):
        work.wait()
    everyone = {**received, here: flat}
    return torch.stack([everyone[holder] for holder in holders]).sum(0)
