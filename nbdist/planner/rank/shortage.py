"""Whether a model that is about to be built will find room on its device: by formulas, unasked."""

from __future__ import annotations

import resource
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import psutil
import torch
from torch.optim import Optimizer

from nbdist.core import procfs
from nbdist.core.rank import this_rank
from nbdist.core.units import size
from nbdist.errors import OptionError
from nbdist.lints.rank import watch
from nbdist.parallel.accelerator.loader_state import last_batch
from nbdist.parallel.base import precision
from nbdist.parallel.live.live_models import names
from nbdist.parallel.live.prepared import Prepared
from nbdist.parallel.live.registry import prepared
from nbdist.parallel.live.training_step import optimizer_of
from nbdist.planner.advice import smallest_change
from nbdist.planner.devices import Device
from nbdist.planner.live_model import LiveModel, by_kinds, load_of, shape_of
from nbdist.planner.memory import Memory, has_buckets
from nbdist.planner.models import ModelShape
from nbdist.planner.plan import Engine, SearchSpace, plan
from nbdist.planner.rank import describe_model, describe_prepared
from nbdist.planner.workload import Workload
from nbdist.strategy.choice import Strategy, described
from nbdist.strategy.choose import settings_of

LINT = "memory-shortage"


@watch.guarded(LINT)
def look(model: torch.nn.Module, choice: Strategy) -> None:
    """Tell the notebook at once what a model that is about to be built needs. Meets no rank."""
    [name] = names([model]).values()
    live = describe_model.describe(name, model, None, {}, wants_source=False)
    if facts := _facts(live, choice, _held(model.parameters(), None)):
        watch.note_now(LINT, facts["subject"], facts)


def of_prepared(choice: Strategy) -> tuple[dict[str, Any], ...]:
    """The same of each prepared model, for a switch to another strategy. Meets no rank."""
    return _of_prepared(precision.with_accelerator_precision(choice)) or ()


@watch.guarded(LINT)
def _of_prepared(choice: Strategy) -> tuple[dict[str, Any], ...]:
    pairs = zip(describe_prepared.sketches(), prepared(), strict=True)
    facts_of_models = [_facts_of(model, live, choice) for live, model in pairs]
    return tuple(facts for facts in facts_of_models if facts)


@watch.guarded(LINT)
def _facts_of(model: Prepared, live: LiveModel, choice: Strategy) -> dict[str, Any] | None:
    parameters = list(model.parameters.values())
    held = _held(parameters, optimizer_of(model.base, model))
    if has_buckets(model.built.job.choice):
        held += [parameter for parameter in parameters if parameter.requires_grad]
    return _facts(live, choice, held)


def _facts(
    live: LiveModel, choice: Strategy, held: Sequence[torch.Tensor]
) -> dict[str, Any] | None:
    """Compare needed and free memory; None under strategies that keep states elsewhere.

    `held` is what it has on the device already: it counts as needed, so as free too.
    """
    if choice.options.offload or choice.name == "deepspeed" or not live.parameters:
        return None
    shape, _ = last_batch()
    live = live if live.inputs_shape or not shape else replace(live, inputs_shape=shape)
    load = load_of(live, Workload(optimizer="sgd", has_gpu=_device() != "cpu"))
    model = shape_of(live)
    if not (live.is_language_model and live.inputs_shape):  # nobody has seen its batch
        model = replace(model, has_shape=False)

    def count(model: ModelShape, choice: Strategy, load: Workload) -> Memory:
        memory = by_kinds(live, model, choice, load)
        return replace(memory, overhead=0.0, is_partial=False)  # CUDA's context is there already

    try:
        needed, free = count(model, choice, load).peak, _free_bytes(held)
        change = "" if needed <= free else _change(choice, model, load, free, count)
    except OptionError:  # degrees that do not go with the model: it is refused anyway
        return None
    parts = ["parameters", "gradients", live.optimizer or "no optimizer was found"]
    if model.has_shape:
        parts.append(f"activations of batch {load.batch} x {load.sequence} tokens")
    return {
        "subject": f"{live.name} under {described(choice)}",
        "needed": needed,
        "free": free,
        "counted": ", ".join(parts),
        "change": change,
        "of": this_rank().topology.world_size,
    }


def _change(choice: Strategy, model: ModelShape, load: Workload, free: float, count: Engine) -> str:
    """The smallest change with which it fits, as a sentence."""
    space = SearchSpace(
        model, Device("", "its device", free), choice.world_size, load, choice.name,
        settings_of(choice), engine=count,
    )  # fmt: skip
    change = smallest_change(plan(space))
    if change is None or change.row.memory is None:
        return "No strategy makes it fit."
    return f"{change.words}, {change.row.typed} needs {size(change.row.memory.peak)}."


def _device() -> str:
    return this_rank().place.device


def _held(
    parameters: Iterable[torch.nn.Parameter], optimizer: Optimizer | None
) -> list[torch.Tensor]:
    """Count a model's bytes on this rank: parameters, gradients, the optimizer's state."""
    tensors = [t for p in parameters for t in (p, p.grad) if t is not None]
    states = optimizer.state.values() if optimizer is not None else ()
    return tensors + [t for s in states for t in s.values() if isinstance(t, torch.Tensor)]


def _free_bytes(held: Sequence[torch.Tensor]) -> float:
    """Count the bytes that this rank may still take of its device, with those held already.

    Ranks that share a device share what is free.
    """
    place, places = this_rank().place, this_rank().topology.ranks
    local = [watch.local(tensor) for tensor in held]
    kind = place.device.partition(":")[0]
    held_bytes: float = sum(t.numel() * t.element_size() for t in local if t.device.type == kind)
    if kind == "cpu":
        return _host_free_bytes() / place.local_world_size + held_bytes
    sharing = sum(other.device_uuid == place.device_uuid for other in places)
    free, _ = torch.cuda.mem_get_info(place.device)
    cached = torch.cuda.memory_reserved(place.device) - torch.cuda.memory_allocated(place.device)
    return free / sharing + cached + held_bytes


def _host_free_bytes() -> float:
    """Free bytes of the machine, its control groups, or this process's limit: the least."""
    free: float = min([psutil.virtual_memory().available, *procfs.below_limits("self")])
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        # Of this process alone: its ranks do not share it.
        left = max(0, soft - psutil.Process().memory_info().vms)
        free = min(free, left * this_rank().place.local_world_size)
    return free
