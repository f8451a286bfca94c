"""Plans a step of the prepared models under the chosen strategy: by the formulas of plans.

The numbers are those of `%dist_plan MODEL --engine formulas` with the same batch and device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nbdist.core import units
from nbdist.errors import OptionError
from nbdist.panel.state import PanelPlan
from nbdist.panel.strategy_form import OnRanks, Value, pick, typed
from nbdist.planner.live_model import LiveModel, by_kinds, load_of, shape_of
from nbdist.planner.memory import Memory
from nbdist.planner.plan import NO, UNKNOWN, accumulating, verdict
from nbdist.planner.workload import Workload
from nbdist.strategy.choice import Strategy, rows_of
from nbdist.strategy.table import ROWS

# Of a step: what is more than states.
_MORE = ("activations", "buffers", "overhead")
_STATES = ("parameters", "gradients", "optimizer")
# Of several models, each has its own.
_ADDED = (*_STATES, "activations", "buffers", "step", "host")


@dataclass(frozen=True, slots=True)
class Limit:
    """Limit of a rank's memory.

    Attributes:
        memory_bytes: Of its device, or its share of it where ranks share one; 0 if not known.
        has_gpu: It is a GPU: CUDA's context takes some of it.
    """

    memory_bytes: float = 0.0
    has_gpu: bool = False


def planned_memory(choice: Strategy, models: Sequence[LiveModel], limit: Limit) -> Memory:
    """The memory of the rank that needs most, as if all models were in a step at once.

    Raises:
        OptionError: It does not go with a model, or with the batch.
    """
    memories = []
    for live in models:
        load = load_of(live, Workload(has_gpu=limit.has_gpu))
        memories.append(by_kinds(live, shape_of(live), accumulating(choice, load), load))
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
    choice: Strategy, models: Sequence[LiveModel], limit: Limit, current: Strategy | None = None
) -> PanelPlan:
    """Plan each rank's memory between steps, and in one, beside its device's limit.

    `current` is the strategy that counts, to compare with.
    """
    try:
        memory = planned_memory(choice, models, limit)
    except OptionError as error:
        return PanelPlan(f"not planned: {error}", is_possible=True)
    now = ""
    if current is not None and current != choice:
        # Its batch may be one that the formulas refuse, and it runs all the same.
        with contextlib.suppress(OptionError):
            now = f", now {units.size(planned_memory(current, models, limit).states)}"
    loads = [load_of(live, Workload()) for live in models]
    optimizer = ", ".join(dict.fromkeys(load.optimizer for load in loads))
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
    batch = f"batch {loads[0].batch} x {loads[0].sequence:,} tokens"
    if any(model.inputs_shape for model in models):
        batch += ", from the data loader"
    else:
        batch = f"assumed: {batch} (no prepared data loader has yielded a batch yet)"
    return PanelPlan(f"{text}\n{step}; {batch}", True, word, share)


def fitting(
    models: Sequence[LiveModel], limit: Limit, current: Strategy, on: OnRanks
) -> tuple[str, ...]:
    """Strategies other than the current one that these ranks and models can have, as typed.

    Each computes in what the current one computes in. DeepSpeed is another package, `single` trains
    on each rank by itself, and ep needs experts: they can be chosen, and are not offered. `on`: the
    number of ranks, their device's type, their backend, and their hosts.
    """
    values: dict[str, Value] = {}
    if current.options.precision != "fp32":
        values["precision"] = current.options.precision
    others = {"single", "deepspeed", "ep", current.name}
    names = [name for name in ROWS if name not in others]
    return tuple(typed(name, values) for name in names if _fits(name, values, models, limit, on))


def _fits(
    name: str,
    values: Mapping[str, Value],
    models: Sequence[LiveModel],
    limit: Limit,
    on: OnRanks,
) -> bool:
    choice = pick(name, values, *on)
    if isinstance(choice, str):
        return False
    if not models:
        return True
    if any(row.fixed for row in rows_of(choice)):  # live models cannot be switched to it
        return False
    try:
        memory = planned_memory(choice, models, limit)
    except OptionError:
        return False
    return not limit.memory_bytes or verdict(memory.peak / limit.memory_bytes) != NO


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
