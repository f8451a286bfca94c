"""The predicted memory of a step beside the measured memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nbdist.planner.live_model import LiveModel
from nbdist.planner.memory import Memory
from nbdist.planner.workload import Workload
from nbdist.strategy.choice import Strategy


@dataclass(frozen=True, slots=True)
class MeasuredMemory:
    """One rank's memory in a step, in bytes.

    Attributes:
        parameters, gradients, optimizer: Held; gradients after backward, the state after a step.
        activations: Made in forward and there at its end, with what FSDP has gathered by then.
        buffers: The model's own, DDP's buckets, and what it was called with.
        peak: The most at one time, over forward, backward and the optimizer's step.
        has_optimizer: An optimizer has stepped.
        is_device: Of a GPU, by its allocator; else of the CPU, by torch's profiler.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    buffers: int
    peak: int
    has_optimizer: bool = True
    is_device: bool = False


@dataclass(frozen=True, slots=True)
class Check:
    """One quantity of a step, predicted and measured.

    Attributes:
        predicted, measured: Bytes.
        is_exact: Whether the two ought to be equal.
    """

    what: str
    predicted: float
    measured: float
    is_exact: bool = False

    @property
    def error(self) -> float | None:
        """Error of the prediction as a share of the measurement; None without one."""
        return (self.predicted - self.measured) / self.measured if self.measured else None


@dataclass(frozen=True, slots=True)
class StepCheck:
    """A step of a model on the ranks, predicted and measured.

    Attributes:
        choice: The strategy of the step.
        load: The batch that it trained with.
        memory: Predicted, without what the allocator does not count.
        measured: On the rank that needed most.
    """

    live: LiveModel
    choice: Strategy
    load: Workload
    memory: Memory
    measured: MeasuredMemory

    @property
    def checks(self) -> tuple[Check, ...]:
        """Line by line; a pipeline's call runs backward too, so its activations are not there."""
        return checks(self.memory, self.measured, has_forward=self.choice.degrees.pp == 1)


def largest(measured: Sequence[MeasuredMemory]) -> MeasuredMemory:
    """Return the measurement of the rank that needed most."""
    return max(measured, key=lambda rank_memory: rank_memory.peak)


def checks(
    memory: Memory, measured: MeasuredMemory, *, has_forward: bool = True
) -> tuple[Check, ...]:
    """Line by line; without what nobody predicted or measured on the rank that needed most.

    `has_forward` is False of a pipeline, whose call runs backward as well.
    """
    rows = [
        Check("parameters", memory.parameters, measured.parameters, is_exact=True),
        Check("gradients", memory.gradients, measured.gradients, is_exact=True),
    ]
    if measured.has_optimizer:
        rows.append(Check("optimizer", memory.optimizer, measured.optimizer, is_exact=True))
    if memory.is_partial:
        return tuple(rows)
    if has_forward:
        rows.append(Check("activations", memory.activations, measured.activations))
    # Without a step of the optimizer the peak is that of forward and backward.
    unstepped = 0.0 if measured.has_optimizer else memory.optimizer + memory.step
    return (*rows, Check("peak", memory.peak - unstepped, measured.peak))
