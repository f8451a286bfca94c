"""A request made into a plan or a check: what was not typed is taken from the ranks that run."""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nbdist.bandwidth.kernel import Bandwidth
from nbdist.bandwidth.results import LinkModel
from nbdist.cells.kernel import progress
from nbdist.cluster.kernel.ranks import Ranks
from nbdist.core.topology import HostRanks
from nbdist.errors import OptionError, no_such
from nbdist.monitor.kernel.monitor import FIRST_S, Monitor
from nbdist.planner import devices
from nbdist.planner.advice import Advice, advise
from nbdist.planner.check import StepCheck
from nbdist.planner.devices import ASSUMED, DEVICES, Device, device_of_ranks
from nbdist.planner.fake_protocol import Source
from nbdist.planner.kernel.describe_model import checked_step, live_model
from nbdist.planner.kernel.fake_process import FakeEngine
from nbdist.planner.live_model import LiveModel, by_kinds, described, load_of, shape_of
from nbdist.planner.memory import memory_of
from nbdist.planner.models import CONFIGS
from nbdist.planner.plan import Engine, Plan, SearchSpace, accumulating, plan
from nbdist.planner.request import (
    AMOUNTS,
    ENGINES,
    PlanRequest,
    shape_asked_for,
    with_precision,
    with_samples,
)
from nbdist.planner.search import advised, search
from nbdist.strategy import options
from nbdist.strategy.choice import Strategy
from nbdist.strategy.choose import choose
from nbdist.strategy.hosts import ranks_of_host

_RANKS = 8


@dataclass(frozen=True, slots=True)
class Running:
    """The ranks that run, and what was measured of them."""

    ranks: Ranks
    monitor: Monitor
    bandwidth: Bandwidth


def make_plan(
    model: Any, request: PlanRequest, given: Mapping[str, object], running: Running | None
) -> tuple[Plan, Advice]:
    """A plan or a search for a model, and what to choose.

    Args:
        model: A number of parameters, a name, the path of a config.json, a config (a mapping, or
            anything with `to_dict`, as transformers' configs), or a model that has such a config.
            Where ranks run, also the name of a variable there that is a model.
        request: The options of the plan: devices, batch, search.
        given: Degrees and options.
        running: None where no ranks run.

    Raises:
        OptionError: If a word does not exist, or degrees do not fit.
        NbdistError: A model on the ranks is not the same on all.
    """
    if request.engine is not None and request.engine not in ENGINES:
        raise no_such("--engine", request.engine, ENGINES)
    live = _live(model, request, running)
    space = _space(model, live, request, given, running)
    with progress.during("plan") as tell:
        if request.is_search:
            tell("counting all configurations")
            outcome = search(space)
            return outcome, advised(outcome)
        with _engine(space, live, request) as engine:
            result = plan(replace(space, engine=engine), tell)
    result = replace(result, engine=space.engine)
    return result, advise(result)


def _space(
    model: Any,
    live: LiveModel | None,
    request: PlanRequest,
    given: Mapping[str, object],
    running: Running | None,
) -> SearchSpace:
    """Build the search space, with defaults; in a search the precision stays open."""
    if live is None and request.inputs:
        raise OptionError(
            "--inputs names the inputs of a model on the ranks, and the model typed here is not on "
            "the ranks. Leave --inputs out."
        )
    shape = shape_asked_for(model) if live is None else shape_of(live)
    load = request.load if live is None else load_of(live, request.load, request.optimizer)
    network, price, tokens = map(request.amount, AMOUNTS)
    device, measured, assumed = _device(request, running)
    typed = request.options(given)
    settings, assumed_precision = with_precision(typed, load, device)
    world_size, assumed_ranks = _ranks(request, settings, running)
    ranks_on = _hosts(request, world_size, running)
    device = replace(device, safe_share=request.safe_share, host_bytes_per_s=network * 1e9)
    if ranks_on:
        device = replace(device, per_host=len(ranks_on[0].ranks))
    if device.is_cpu and running is not None:  # all of them share it
        shares = running.ranks.topology.world_size / world_size
        device = replace(device, memory_bytes=device.memory_bytes * shares)
    space = SearchSpace(
        request.adapted(shape, is_live=live is not None), device, world_size,
        replace(load, has_gpu=not device.is_cpu), request.strategy, settings, measured,
        engine=memory_of if live is None else functools.partial(by_kinds, live),
        ranks_on=ranks_on, copies=request.copies, price=price, tokens=tokens,
        live=() if live is None else described(live),
        assumed=(*assumed, *assumed_ranks, *assumed_precision),
    )  # fmt: skip
    if not request.is_search:
        return space
    request.check_search()
    precisions = tuple(dict.fromkeys([str(settings.get("precision", "bf16")), "fp32"]))
    assumed = (*assumed, *assumed_ranks)
    return with_samples(replace(space, given=typed, precisions=precisions, assumed=assumed))


def _live(model: Any, request: PlanRequest, running: Running | None) -> LiveModel | None:
    """The model of that name on the ranks; None for what is no name of a variable there."""
    if not isinstance(model, str) or running is None:
        return None
    is_name = all(part.isidentifier() for part in model.split("."))
    if not is_name or model in CONFIGS or Path(model).exists():
        return None
    try:
        return live_model(running.ranks, model, request.inputs or "")
    except OptionError as error:
        if not str(error).startswith("There is no variable"):
            raise
        raise OptionError(
            f"{error} Or plan for a number of parameters (7e9), the path of a config.json, or one "
            f"of {', '.join(CONFIGS)}."
        ) from error


def _engine(
    space: SearchSpace, live: LiveModel | None, request: PlanRequest
) -> AbstractContextManager[Engine]:
    """Yield the counter of memory, until the plan is made."""
    if (request.engine or ("formulas" if live is None else "fake")) == "formulas":
        return contextlib.nullcontext(space.engine)
    if live is None:
        return FakeEngine(Source(config=space.model.config), otherwise=space.engine)
    source = replace(live.source, has_optimizer=request.optimizer is None)
    return FakeEngine(source, otherwise=space.engine, problem=live.problem)


def _device(
    request: PlanRequest, running: Running | None
) -> tuple[Device, LinkModel | None, tuple[str, ...]]:
    """The device, what was measured between the ranks if it is theirs, and what is assumed."""
    if request.gpu is not None and request.memory is not None:
        raise OptionError("Type --gpu or --memory, not both.")
    if request.gpu is not None:
        return devices.device_of(request.gpu), None, ()
    if request.memory is not None:
        return devices.with_memory(request.memory), None, ()
    default = DEVICES[ASSUMED]
    if running is None:
        return default, None, (f"--gpu {ASSUMED}",)
    last, samples = running.bandwidth.last, running.monitor.latest()
    end_s = time.monotonic() + FIRST_S
    # Ranks of other hosts are asked for their first sample, and have answered at the next.
    while not any(sample.usage for sample in samples) and (left_s := end_s - time.monotonic()) > 0:
        samples = running.monitor.wait(samples[0].time_s if samples else 0.0, left_s)
    device, note = device_of_ranks(running.ranks.topology, samples)
    model = last.model if device is not None and last is not None and not last.caveat else None
    return device or default, model, note


def _ranks(
    request: PlanRequest, given: Mapping[str, object], running: Running | None
) -> tuple[int, tuple[str, ...]]:
    """Number of ranks: as typed, as the degrees make it, or as many as run."""
    if request.ranks is not None:
        return request.ranks, ()
    degrees = {**options.read(given)[0], "replicas": 1}
    product = math.prod(degrees.values())
    if product > 1:
        return product, (f"--ranks {product}, as the degrees make them",)
    if running is not None:
        count = running.ranks.topology.world_size
        return count, (f"--ranks {count}, as run here",)
    return _RANKS, (f"--ranks {_RANKS}",)


def _hosts(request: PlanRequest, world_size: int, running: Running | None) -> tuple[HostRanks, ...]:
    """The hosts that were typed, or those of as many ranks that run; none where nobody knows them.

    Raises:
        OptionError: If the ranks do not fill them; with the numbers of hosts that they do.
    """
    if request.nodes is not None:
        each = ranks_of_host(world_size, request.nodes)
        return tuple(
            HostRanks(f"host {n}", tuple(range(n * each, (n + 1) * each)))
            for n in range(request.nodes)
        )
    if request.gpu is None and running is not None:
        topology = running.ranks.topology
        sizes = {len(host.ranks) for host in topology.hosts}
        if topology.world_size == world_size and len(topology.hosts) > 1 and len(sizes) == 1:
            return tuple(topology.hosts)
    return ()


def check_step(
    name: str,
    request: PlanRequest,
    ranks: Ranks,
    choice: Strategy,
    tell: Callable[[str], None] = lambda _text: None,
) -> StepCheck:
    """Predict a step's memory under the strategy that counts, and measure it on the ranks.

    Four steps are run with the user's model and optimizer, and all is put back bit by bit.

    Args:
        name: A variable on the ranks that is a model.
        request: The variable that it is called with, else batch and sequence of random tokens.
        ranks: All of them run the steps.
        choice: The strategy that counts.
        tell: Told what is done now.

    Raises:
        OptionError: There is no such model, or nobody knows what it is called with.
        NotRunning, RankBusy, RankGone, Interrupted, NbdistError: As for a cell.
    """
    if not all(part.isidentifier() for part in name.split(".")):
        raise OptionError(
            f"--check measures a model on the ranks, and {name} is not a variable name."
        )
    inputs = request.inputs or ""
    live = live_model(ranks, name, inputs)
    # One backward for each step, as it is measured.
    choice = replace(choice, options=replace(choice.options, accumulate=1))
    if not live.is_prepared:  # every rank has it by itself
        choice = choose("single", {}, ranks.topology.world_size)
    has_gpu = ranks.topology.ranks[0].device != "cpu"
    # Without an optimizer of its own no step of one is measured: SGD keeps nothing.
    load = load_of(live, request.load, None if live.optimizer else "sgd")
    load = replace(load, has_gpu=has_gpu)
    tell("a step on the ranks")
    measured = checked_step(ranks, name, inputs, load.batch, load.sequence)
    otherwise = functools.partial(by_kinds, live)
    fake = FakeEngine(live.source, otherwise=otherwise, problem=live.problem, progress=tell)
    with fake as engine:
        memory = engine(shape_of(live), accumulating(choice, load), load)
    # The allocator's count lacks the memory of CUDA's context and libraries.
    return StepCheck(live, choice, load, replace(memory, overhead=0.0), measured)
