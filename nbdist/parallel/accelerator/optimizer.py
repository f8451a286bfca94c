"""A prepared optimizer: steps when gradients are complete, and leaves out steps that overflow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer

from nbdist.errors import OptionError
from nbdist.parallel import prepare
from nbdist.parallel.accelerator import save_state
from nbdist.parallel.accelerator.grad_scaler import Scaler


class OptimizerWrapper(AcceleratedOptimizer):  # type: ignore[misc]  # untyped
    """Accelerate's wrapper around the user's optimizer. That one stays the same object.

    Its groups are not made anew either, as Accelerate does to move state to the device: whoever
    holds one of them, a scheduler or a cell, would hold an old one.
    """

    scaler: Scaler | None

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        """Wrap an optimizer that `prepare.bind` knows. This rank alone."""
        super().__init__(optimizer, device_placement=False)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step, if this backward is the last one of an accumulation.

        Collective where the user's optimizer is (zero1), and with fp16.

        Returns:
            What the closure returned, if there is one.

        Raises:
            OptionError: A closure with fp16: its losses could overflow unseen.
        """
        if not self.gradient_state.sync_gradients:
            return None
        if self.scaler is None:
            self._is_overflow = False
            return self.optimizer.step(closure)
        if closure is not None:
            raise OptionError(
                f"{type(self.optimizer).__name__}.step(closure) does not work with fp16: its "
                "scaler has to see every gradient first. Use bf16, or step without a closure."
            )
        self.scaler.step(self.optimizer)
        self._is_overflow = self.scaler.has_overflowed(self.optimizer)
        return None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; parameters of a model from before it was prepared are found."""
        super().add_param_group(param_group)
        prepare.bind(self.optimizer)

    def state_dict(self) -> dict[str, Any]:
        """This rank's part, as torch's. While `save_state` runs, the whole: collective then."""
        if save_state.is_saving():
            return save_state.whole_optimizer(self.optimizer)
        state: dict[str, Any] = self.optimizer.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state: this rank's part, or the whole as `save_state` writes it."""
        save_state.load_optimizer(self.optimizer, state_dict)
