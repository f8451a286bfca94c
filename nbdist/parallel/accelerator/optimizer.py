"""Prepared optimizers and schedulers: they step when gradients are complete and finite."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from torch.optim.lr_scheduler import ReduceLROnPlateau

from nbdist.errors import OptionError
from nbdist.parallel.accelerator import gather, prepare, save_state
from nbdist.parallel.accelerator.grad_scaler import Scaler
from nbdist.parallel.live import registry


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
            return self.optimizer.step(_of_all_data(closure, self.optimizer))
        if closure is not None:
            raise OptionError(
                f"{type(self.optimizer).__name__}.step(closure) does not work with fp16: its "
                "scaler has to see every gradient first. Use bf16, or step without a closure."
            )
        self.scaler.step(self.optimizer)
        self._is_overflow = self.scaler.has_overflowed(self.optimizer)
        return None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as torch does; parameters from before a model was prepared are found."""
        super().add_param_group(param_group)
        prepare.bind(self.optimizer)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's part of the state; while `save_state` runs the whole, collectively."""
        if save_state.is_saving():
            return save_state.whole_optimizer(self.optimizer)
        state: dict[str, Any] = self.optimizer.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state: this rank's part, or the whole as `save_state` writes it."""
        save_state.load_optimizer(self.optimizer, state_dict)


def _of_all_data(
    closure: Callable[[], Any] | None, optimizer: torch.optim.Optimizer
) -> Callable[[], Any] | None:
    """A closure whose loss is the mean over all data, for LBFGS: it chooses its steps by that."""
    if closure is None or not isinstance(optimizer, torch.optim.LBFGS):
        return closure
    device = registry.device()
    return lambda: gather.reduce(torch.as_tensor(closure(), device=device), "mean")


class Scheduler(AcceleratedScheduler):  # type: ignore[misc]  # untyped
    """Accelerate's wrapper, by the data-parallel degree in place of the number of ranks.

    The degree is that of the current strategy, so after a switch it goes on with the new one.
    """

    def __init__(
        self,
        scheduler: Any,
        optimizers: Iterable[OptimizerWrapper],
        *,
        is_linked: bool,
        is_split: bool,
    ) -> None:
        """Wrap the user's scheduler. This rank alone.

        Args:
            scheduler: The user's.
            optimizers: All prepared ones; looked at with each step.
            is_linked: It steps with its optimizer: not while gradients accumulate, nor after a
                step that was left out (Accelerate's step_scheduler_with_optimizer).
            is_split: A batch is split between ranks, so a step has used one.
        """
        self._prepared = optimizers
        super().__init__(scheduler, [], step_with_optimizer=is_linked, split_batches=is_split)

    @property
    def optimizers(self) -> list[OptimizerWrapper]:
        """List optimizers whose steps a scheduler counts: its own, or all if not prepared."""
        prepared = list(self._prepared)
        optimizer = getattr(self.scheduler, "optimizer", None)
        return [w for w in prepared if optimizer in (w, w.optimizer)] or prepared

    @optimizers.setter
    def optimizers(self, _: Sequence[OptimizerWrapper]) -> None:
        """Accelerate sets them; they may be prepared later than the scheduler."""

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step as often as the ranks that see different data have used a batch.

        Once with split_batches, and once for ReduceLROnPlateau: its steps count evaluations, of
        which all ranks make one together. Accelerate lets its patience run out faster the more
        ranks there are.
        """
        if not self.step_with_optimizer:
            self.scheduler.step(*args, **kwargs)
            return
        if not self.gradient_state.sync_gradients:
            if self.gradient_state.adjust_scheduler:
                self.scheduler._step_count += 1  # noqa: SLF001  # as Accelerate does
            return
        if any(optimizer.step_was_skipped for optimizer in self.optimizers):
            return
        is_once = self.split_batches or isinstance(self.scheduler, ReduceLROnPlateau)
        for _ in range(1 if is_once else registry.data_choice().degrees.dp):
            # OneCycleLR raises after its last step, which the last round may pass.
            total = getattr(self.scheduler, "total_steps", None)
            if is_once or total is None or self.scheduler.last_epoch < total:
                self.scheduler.step(*args, **kwargs)
