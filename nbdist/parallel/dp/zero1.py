"""ZeRO stage 1 on the user's own optimizer: each parameter's state lives on one rank.

The optimizer, its groups and its lists stay as they are. During a step it finds gradients of
this rank's share alone; afterwards every rank gets the others' parameters. What looks at
gradients outside of the step (clipping, the scaler) sees all of them.

Source of the idea: ZeRO, stage 1, https://arxiv.org/abs/1910.02054. torch's
ZeroRedundancyOptimizer makes another optimizer, so schedulers and closures would hold the old one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from nbdist.parallel.base.transform import Transform

# Parameters travel in pieces of about this size.
_BUCKET_BYTES = 64 << 20


@dataclass(slots=True)
class _Share:
    """The memory of one optimizer's hooks: each parameter's owner (by id), and hidden gradients."""

    rank: int
    owner_of: Mapping[int, int]
    group: dist.ProcessGroup | None
    hidden: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Hide gradients of foreign parameters; also those that a closure is about to make."""
        self.hidden.clear()  # of a step that has failed
        self._hide(optimizer)
        positional = list(args)
        # The optimizer itself comes first.
        if len(positional) > 1 and positional[1] is not None:
            positional[1] = self._around(optimizer, positional[1])
        elif kwargs.get("closure") is not None:
            kwargs = {**kwargs, "closure": self._around(optimizer, kwargs["closure"])}
        return tuple(positional), kwargs

    def after(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        """Put gradients back, and bring every rank the others' parameters. Collective."""
        self._show()
        send(_parameters(optimizer), self.owner_of, self.rank, self.group)

    def _around(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        def whole() -> Any:
            self._show()
            result = closure()
            self._hide(optimizer)
            return result

        return whole

    def _hide(self, optimizer: Optimizer) -> None:
        for parameter in _parameters(optimizer):
            is_foreign = self.owner_of.get(id(parameter), self.rank) != self.rank
            if is_foreign and parameter.grad is not None:
                self.hidden.append((parameter, parameter.grad))
                parameter.grad = None

    def _show(self) -> None:
        for parameter, gradient in self.hidden:
            parameter.grad = gradient
        self.hidden.clear()


def attach(
    optimizer: Optimizer,
    owner_of: Mapping[int, int],
    group: dist.ProcessGroup | None,
) -> Callable[[], None]:
    """Let an optimizer step this rank's share only; what is returned ends that.

    From then on `optimizer.step()` is collective: every rank. Parameters without an owner, by id,
    are stepped on all. The group is that of all ranks; None for the default group.
    """
    share = _Share(dist.get_rank(), owner_of, group)
    handles = (
        optimizer.register_step_pre_hook(share.before),
        optimizer.register_step_post_hook(share.after),
    )

    def detach() -> None:
        for handle in handles:
            handle.remove()

    return detach


def send(
    parameters: Iterable[torch.Tensor],
    owner_of: Mapping[int, int],
    rank: int,
    group: dist.ProcessGroup | None,
) -> None:
    """Give every rank the owners' values of what is trained.

    Collective: every rank, with parameters in one order.
    """
    on_way = []
    with torch.no_grad():
        for owner, together in _buckets(parameters, owner_of):
            flat = torch.cat([parameter.detach().reshape(-1) for parameter in together])
            on_way.append(
                (dist.broadcast(flat, owner, group, async_op=True), owner, flat, together)
            )
        for work, owner, flat, together in on_way:
            assert work is not None
            work.wait()
            if owner != rank:
                pieces = torch.split(flat, [parameter.numel() for parameter in together])
                for parameter, piece in zip(together, pieces, strict=True):
                    parameter.copy_(piece.view_as(parameter))


def _buckets(
    parameters: Iterable[torch.Tensor], owner_of: Mapping[int, int]
) -> list[tuple[int, list[torch.Tensor]]]:
    """Parameters that travel together: of one owner, dtype and device, and not too many."""
    buckets: list[tuple[int, list[torch.Tensor]]] = []
    filling: dict[tuple[int, torch.dtype, torch.device], tuple[list[torch.Tensor], int]] = {}
    for parameter in parameters:
        owner = owner_of.get(id(parameter))
        if owner is None or not parameter.numel() or not parameter.requires_grad:
            continue
        key = owner, parameter.dtype, parameter.device
        together, size = filling.get(key, ([], _BUCKET_BYTES))
        if size >= _BUCKET_BYTES:
            together, size = [], 0
            buckets.append((owner, together))
        together.append(parameter)
        filling[key] = together, size + parameter.numel() * parameter.element_size()
    return buckets


def _parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


# All is done to the optimizer; the model is under ddp.
STEP = Transform()
