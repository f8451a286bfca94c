"""Loss scaling for fp16: an overflow on one rank is one on all."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.amp.grad_scaler import OptState

from nbdist.parallel.base.tensors import local_parts
from nbdist.parallel.live import registry


class Scaler(torch.amp.GradScaler):
    """torch's scaler for gradients of which each rank has its own, and for several optimizers.

    The scale is adjusted at the next backward, not with a step: optimizers that step for the same
    loss divide by the scale that it was multiplied with. torch has nothing public for either.
    """

    _is_due = False

    def scale(self, outputs: Any) -> Any:
        """Multiply a loss by the scale."""
        self._settle()
        return super().scale(outputs)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Step unless a gradient has overflowed on any rank. Collective, except under single."""
        if self._stage(optimizer) is OptState.STEPPED:
            self._settle()
        returned = super().step(optimizer, *args, **kwargs)
        self._is_due = True
        return returned

    def get_scale(self) -> float:
        """The factor of the next loss."""
        if not any(s["stage"] is OptState.UNSCALED for s in self._per_optimizer_states.values()):
            self._settle()
        return super().get_scale()

    def state_dict(self) -> dict[str, Any]:
        """Return torch's state dict, with what the last step has shown taken into account."""
        self._settle()
        return super().state_dict()

    def has_unscaled(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether an optimizer's gradients are divided by the scale already, and not used yet."""
        return self._stage(optimizer) is OptState.UNSCALED

    def has_overflowed(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the last step of an optimizer was left out."""
        flags = self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        return any(flag.item() for flag in flags.values())

    def _settle(self) -> None:
        if self._is_due:
            self._is_due = False
            self.update()

    def _stage(self, optimizer: torch.optim.Optimizer) -> OptState:
        stage: OptState = self._per_optimizer_states[id(optimizer)]["stage"]
        return stage

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, torch.Tensor]:
        """The one place where torch divides gradients and looks for overflows."""
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        local_optimizer: Any = SimpleNamespace(param_groups=[{"params": local_parts(parameters)}])
        flags = super()._unscale_grads_(local_optimizer, inv_scale, found_inf, allow_fp16)
        for flag in flags.values():  # offloaded gradients have a flag of their own
            found_inf.copy_(torch.maximum(found_inf, flag.to(found_inf.device)))
        if registry.current().name != "single":
            dist.all_reduce(found_inf, dist.ReduceOp.MAX)
        return {found_inf.device: found_inf}
