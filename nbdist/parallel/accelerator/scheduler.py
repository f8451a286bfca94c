"""A prepared scheduler: steps once for each batch that the data-parallel ranks have used."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from accelerate.scheduler import AcceleratedScheduler
from torch.optim.lr_scheduler import ReduceLROnPlateau

from nbdist.parallel import registry
from nbdist.parallel.accelerator.optimizer import OptimizerWrapper


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
        """Whose steps it goes by: its own one, or all if that is not prepared."""
        prepared = list(self._prepared)
        optimizer = getattr(self.scheduler, "optimizer", None)
        return [
            wrapper
            for wrapper in prepared
            if wrapper is optimizer or wrapper.optimizer is optimizer
        ] or prepared

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
        for _ in range(1 if is_once else registry.current().degrees.dp):
            # OneCycleLR raises after its last step, which the last round may pass.
            total = getattr(self.scheduler, "total_steps", None)
            if is_once or total is None or self.scheduler.last_epoch < total:
                self.scheduler.step(*args, **kwargs)
