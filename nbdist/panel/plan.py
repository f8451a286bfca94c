"""What the chosen strategy comes to in a step of the prepared models: by the formulas of plans.

The numbers are those of `%dist_plan MODEL --engine formulas` with the same batch and device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from nbdist.core import units
from nbdist.errors import OptionError
from nbdist.panel.state import PanelPlan
from nbdist.planner.live_model import LiveModel, by_kinds, load_of, shape_of
from nbdist.planner.memory import Memory
from nbdist.planner.plan import NO, UNKNOWN, accumulating, verdict
from nbdist.planner.workload import Workload
from nbdist.strategy.choice import Strategy

# Of a step: what is more than states.
_MORE = ("activations", "buffers", "overhead")
_STATES = ("parameters", "gradients", "optimizer")
# Of several models, each has its own.
_ADDED = (*_STATES, "activations", "buffers", "step", "host")


@dataclass(frozen=True, slots=True)
class Limit:
    """What a rank's memory may come to.

    Attributes:
        memory_bytes: Of its device, or its share of it where ranks share one; 0 if not known.
        has_gpu: It is a GPU: CUDA's context takes some of it.
    """

    memory_bytes: float = 0.0
    has_gpu: bool = False


@dataclass(frozen=True, slots=True)
class PlannedMemory:
    """One strategy's memory, of all prepared models together.

    Attributes:
        memory: Overhead counts once.
        loads: What each model was planned with.
    """

    memory: Memory
    loads: tuple[Workload, ...]


def planned_memory(choice: Strategy, models: Sequence[LiveModel], limit: Limit) -> PlannedMemory:
    """The memory of the rank that needs most, as if all models were in a step at once.

    Args:
        choice: The strategy.
        models: One or more, as ranks describe them.
        limit: Of their device.

    Raises:
        OptionError: It does not go with a model, or with the batch.
    """
    loads, memories = [], []
    for live in models:
        load = replace(load_of(live, Workload()), has_gpu=limit.has_gpu)
        loads.append(load)
        memories.append(by_kinds(live, shape_of(live), accumulating(choice, load), load))
    return PlannedMemory(_combined(memories), tuple(loads))


def _combined(memories: Sequence[Memory]) -> Memory:
    if len(memories) == 1:
        return memories[0]
    return Memory(
        **{name: sum(getattr(memory, name) for memory in memories) for name in _ADDED},
        overhead=memories[0].overhead,
        # The largest of all, as each has its most at another moment at the latest.
        most=sum(memory.peak - memory.overhead - memory.optimizer for memory in memories),
        is_partial=any(memory.is_partial for memory in memories),
    )


def plan_of_models(
    choice: Strategy,
    models: Sequence[LiveModel],
    limit: Limit,
    current: Strategy | None = None,
) -> PanelPlan:
    """What each rank would hold between steps, and in one, beside its device's limit.

    Args:
        choice: The strategy.
        models: One or more.
        limit: Of their device.
        current: The strategy that counts, to compare with.
    """
    try:
        planned = planned_memory(choice, models, limit)
    except OptionError as error:
        return PanelPlan(f"not planned: {error}", is_possible=True)
    memory = planned.memory
    now = ""
    if current is not None and current != choice:
        now = _now(current, models, limit)
    optimizer = ", ".join(dict.fromkeys(load.optimizer for load in planned.loads))
    states = f"{_sum(memory, _STATES)} ({optimizer})"
    text = f"each rank holds {units.size(memory.states)} between steps{now}: {states}"
    share = memory.peak / limit.memory_bytes if limit.memory_bytes else None
    word = "" if share is None else verdict(share)
    of = f" of {units.size(limit.memory_bytes)}: {share:.0%}, {word}" if share is not None else ""
    if memory.is_partial:
        word = word if word in {NO, ""} else UNKNOWN
        least = f"more than {units.size(memory.peak)}{of} in a step; " if word == NO else ""
        return PanelPlan(f"{text}\n{least}{_why_partial(choice, models)}", True, word, share)
    step = f"in a step up to {units.size(memory.peak)}{of} (+ {_sum(memory, _MORE)})"
    return PanelPlan(
        f"{text}\n{step}; {_batch_phrase(models, planned.loads[0])}", True, word, share
    )


def _now(current: Strategy, models: Sequence[LiveModel], limit: Limit) -> str:
    try:
        return f", now {units.size(planned_memory(current, models, limit).memory.states)}"
    except OptionError:  # it has a batch that the formulas refuse, and runs all the same
        return ""


def _sum(memory: Memory, names: Sequence[str]) -> str:
    sizes = {name: getattr(memory, name) for name in names}
    return " + ".join(f"{name} {units.size(size)}" for name, size in sizes.items() if size)


def _why_partial(choice: Strategy, models: Sequence[LiveModel]) -> str:
    if choice.options.offload:
        return "states only: the formulas do not cover activations under --offload"
    unknown = [model for model in models if not shape_of(model).has_shape]
    names = ", ".join(f"{model.name} ({model.title})" for model in unknown)
    typed = f"%dist_plan {unknown[0].name} --inputs NAME" if unknown else "%dist_plan"
    return (
        f"states only: activations depend on the batch and on what {names} keeps for backward, "
        f"and there is no transformer config to compute them from; {typed} measures them in a run"
    )


def _batch_phrase(models: Sequence[LiveModel], load: Workload) -> str:
    """Which batch was counted with, and who says so."""
    text = f"batch {load.batch} x {load.sequence:,} tokens"
    if any(model.inputs_shape for model in models):
        return f"{text}, from the data loader"
    return f"assumed: {text} (no prepared data loader has yielded a batch yet)"
