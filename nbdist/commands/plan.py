"""The verb that says whether a model will fit; it needs no ranks."""

from __future__ import annotations

import contextlib
import functools
import math
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from IPython import get_ipython

from nbdist.bandwidth.results import LinkModel
from nbdist.cells.kernel import progress
from nbdist.config.emit import Setting, run_line
from nbdist.config.launch import configured, ranks_of_host
from nbdist.core.topology import HostRanks
from nbdist.core.view import View
from nbdist.errors import OptionError, no_such
from nbdist.monitor.kernel.monitor import FIRST_S
from nbdist.notebook.notebook import NOTEBOOK
from nbdist.notebook.verb import (
    ANYWHERE,
    Option,
    Verb,
    positive_number,
    rank_count,
    strategy_given,
    strategy_options,
    whole_number,
)
from nbdist.planner import devices
from nbdist.planner.advice import advise
from nbdist.planner.check import checks
from nbdist.planner.devices import (
    ASSUMED,
    DEVICES,
    PER_HOST,
    Device,
    device_of_ranks,
)
from nbdist.planner.fake_protocol import Source
from nbdist.planner.kernel.describe_model import checked_step, live_model
from nbdist.planner.kernel.fake_process import FakeEngine
from nbdist.planner.live_model import LiveModel, by_kinds, described, load_of, shape_of
from nbdist.planner.lora import QUANTS, TARGETS
from nbdist.planner.memory import memory_of
from nbdist.planner.models import CONFIGS, ModelShape
from nbdist.planner.plan import Engine, PlanRow, accumulating, plan
from nbdist.planner.request import (
    AMOUNTS,
    PlanRequest,
    shape_asked_for,
    with_precision,
    with_samples,
)
from nbdist.planner.search import SearchSpace, advised, search
from nbdist.planner.view.check_view import shown_check
from nbdist.planner.view.plan_view import PlanView, shown_plan
from nbdist.planner.view.search_view import shown_search
from nbdist.planner.workload import OPTIMIZERS, Workload
from nbdist.strategy import choice as strategies
from nbdist.strategy import options
from nbdist.strategy.choose import choose
from nbdist.strategy.footprint import RECIPES
from nbdist.strategy.table import ROWS

# What memory is counted by: closed formulas, or a step with fake tensors in a process of its own.
ENGINES = ("formulas", "fake")
_RANKS = 8
OPTIMIZER = "adamw"


def make_plan(
    model: Any,
    request: PlanRequest,
    load: Workload,
    strategy: str | None = None,
    given: Mapping[str, object] | None = None,
) -> PlanView:
    """Plan for a model.

    Args:
        model: A number of parameters, a name, the path of a config.json, a config (a mapping, or
            anything with `to_dict`, as transformers' configs), or a model that has such a config.
            Where ranks run, also the name of a variable there that is a model.
        request: On how many ranks, on which device, counted by what.
        load: What is trained with.
        strategy: A name; None for all.
        given: Its degrees and options.

    Raises:
        OptionError: If a word does not exist, or degrees do not fit.
        NbdistError: A model on the ranks is not the same on all.
    """
    if request.engine is not None and request.engine not in ENGINES:
        raise no_such("--engine", request.engine, ENGINES)
    live = _live(model, request)
    if live is None and request.inputs:
        raise OptionError(
            "--inputs names the inputs of a model on the ranks, and the model typed here is not on "
            "the ranks. Leave --inputs out."
        )
    shape = shape_asked_for(model) if live is None else shape_of(live)
    shape = request.adapted(shape, is_live=live is not None)
    load = load if live is None else load_of(live, load, request.optimizer)
    amounts = {word: request.amount(word) for word in AMOUNTS}
    device, measured, assumed = _device(request)
    given, assumed_precision = with_precision(dict(typed := given or {}), load, device)
    load = replace(load, has_gpu=not device.is_cpu)
    world_size, assumed_ranks = _ranks(request, given)
    ranks_on = _hosts(request, world_size)
    device = _with_limits(device, request, world_size, ranks_on)
    device = replace(device, host_bytes_per_s=amounts["network"] * 1e9)
    if measured is not None and measured.world_size != world_size:
        measured = None
    formulas: Engine = memory_of if live is None else functools.partial(by_kinds, live)
    if request.is_search:
        typed = {word: value for word, value in typed.items() if value not in (None, False)}
        precisions = tuple(dict.fromkeys([str(given.get("precision", "bf16")), "fp32"]))
        space = SearchSpace(
            shape, device, world_size, load, strategy or "", typed, precisions, measured, formulas
        )
        return _searched(space, request, len(ranks_on), (*assumed, *assumed_ranks), amounts)
    with progress.during("plan") as tell, _engine(shape, live, request, formulas) as engine:
        result = plan(
            shape, device, world_size, load, strategy=strategy, given=given, measured=measured,
            engine=engine, assumed=(*assumed, *assumed_ranks, *assumed_precision), progress=tell,
            copies=request.copies, ranks_on=ranks_on,
        )  # fmt: skip
    result = replace(result, price=amounts["price"], tokens=amounts["tokens"])
    if live is not None:
        result = replace(result, live=described(live))
    return shown_plan(result, advise(result, given, measured, formulas))


def _with_limits(
    device: Device, request: PlanRequest, world_size: int, ranks_on: Sequence[HostRanks]
) -> Device:
    """The device with what is to stay free of it, as one of a host with so many ranks."""
    device = replace(device, safe_share=request.safe_share)
    if ranks_on:
        device = replace(device, per_host=len(ranks_on[0].ranks))
    if device.is_cpu:  # all of them share it
        here = NOTEBOOK.session.topology.world_size
        device = replace(device, memory_bytes=device.memory_bytes * here / world_size)
    return device


def _searched(
    space: SearchSpace, request: PlanRequest, hosts: int, assumed: tuple[str, ...],
    amounts: Mapping[str, float],
) -> PlanView:  # fmt: skip
    """All configurations of a space, and the lines that take the chosen one."""
    request.check_search()
    load, assumed_samples = with_samples(space.load, space.world_size)
    each = load.batch if assumed_samples else 0
    space, assumed = replace(space, load=load, each=each), (*assumed, *assumed_samples)
    with progress.during("plan") as tell:
        tell("counting all configurations")
        outcome = search(space)
        advice = advised(outcome)
    planned = replace(
        outcome.planned, assumed=assumed, price=amounts["price"], tokens=amounts["tokens"]
    )
    lines = () if advice.row is None else _lines(advice.row, space.world_size, hosts)
    return shown_search(replace(outcome, planned=planned), advice, lines)


def _lines(row: PlanRow, world_size: int, hosts: int) -> tuple[str, ...]:
    """What takes a row: for these ranks in a notebook, and for a script.

    That is a configuration where Accelerate or DeepSpeed has the strategy, else nbdist's launcher.
    """
    assert row.choice is not None
    texts = configured(Setting(row.choice)).texts
    file = next((name for form, name in _FILES.items() if form in texts), "")
    nodes = f" --nodes {hosts}" if hosts > 1 else ""
    verb = "nbdist config" if get_ipython() is None else "%dist_config"
    config = f"{verb} --strategy {row.typed} --ranks {world_size}{nodes} --write {file}"
    return (f"%dist_strategy {row.typed}", config if file else run_line(row.choice))


# Form of a configuration -> a name for its file; the first that a strategy has is offered.
_FILES = {"accelerate": "accelerate.yaml", "deepspeed": "ds_config.json"}


def _hosts(request: PlanRequest, world_size: int) -> tuple[HostRanks, ...]:
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
    if request.gpu is None and NOTEBOOK.is_running:
        topology = NOTEBOOK.session.topology
        sizes = {len(host.ranks) for host in topology.hosts}
        if topology.world_size == world_size and len(topology.hosts) > 1 and len(sizes) == 1:
            return tuple(topology.hosts)
    return ()


def _live(model: Any, request: PlanRequest) -> LiveModel | None:
    """The model of that name on the ranks; None for what is no name of a variable there."""
    if not isinstance(model, str) or not NOTEBOOK.is_running:
        return None
    is_name = all(part.isidentifier() for part in model.split("."))
    if not is_name or model in CONFIGS or Path(model).exists():
        return None
    try:
        return live_model(NOTEBOOK.session, model, request.inputs or "")
    except OptionError as error:
        if not str(error).startswith("There is no variable"):
            raise
        raise OptionError(
            f"{error} Or plan for a number of parameters (7e9), the path of a config.json, or one "
            f"of {', '.join(CONFIGS)}."
        ) from error


def _engine(
    shape: ModelShape, live: LiveModel | None, request: PlanRequest, formulas: Engine
) -> AbstractContextManager[Engine]:
    """What counts memory, until the plan is made."""
    name = request.engine or ("formulas" if live is None else "fake")
    if name == "formulas":
        return contextlib.nullcontext(formulas)
    source = Source(config=shape.config)
    if live is not None:
        source = replace(live.source, has_optimizer=request.optimizer is None)
    problem = "" if live is None else live.problem
    return FakeEngine(source, otherwise=formulas, problem=problem)


def _device(request: PlanRequest) -> tuple[Device, LinkModel | None, tuple[str, ...]]:
    """The device, what was measured between the ranks if it is theirs, and what is assumed."""
    if request.gpu is not None and request.memory is not None:
        raise OptionError("Type --gpu or --memory, not both.")
    if request.gpu is not None:
        return devices.device_of(request.gpu), None, ()
    if request.memory is not None:
        return devices.with_memory(request.memory), None, ()
    default = DEVICES[ASSUMED]
    if not NOTEBOOK.is_running:
        return default, None, (f"--gpu {ASSUMED}",)
    session = NOTEBOOK.session
    last, samples = session.bandwidth.last, session.monitor.latest()
    end_s = time.monotonic() + FIRST_S
    # Ranks of other hosts are asked for their first sample, and have answered at the next.
    while not any(sample.usage for sample in samples) and (left_s := end_s - time.monotonic()) > 0:
        samples = session.monitor.wait(samples[0].time_s if samples else 0.0, left_s)
    device, note = device_of_ranks(session.topology, samples)
    model = last.model if device is not None and last is not None and not last.caveat else None
    return device or default, model, note


def _ranks(request: PlanRequest, given: Mapping[str, object]) -> tuple[int, tuple[str, ...]]:
    """As typed, or as the degrees make it, or as many as run."""
    if request.ranks is not None:
        return request.ranks, ()
    degrees = {**options.read(given)[0], "replicas": 1}
    product = math.prod(degrees.values())
    if product > 1:
        return product, (f"--ranks {product}, as the degrees make them",)
    if NOTEBOOK.is_running:
        count = NOTEBOOK.session.topology.world_size
        return count, (f"--ranks {count}, as run here",)
    return _RANKS, (f"--ranks {_RANKS}",)


def dist_plan(values: Namespace) -> View:
    """Plan for what was typed."""
    if len(values.model) != 1:
        raise OptionError(
            "%dist_plan: name one model: its number of parameters (7e9), the path of a "
            f"config.json, a model on the ranks, or one of {', '.join(CONFIGS)}."
        )
    given = strategy_given(values)
    others = [word for word in ("bf16", "fp16") if given[word]]
    if values.is_fp32:
        if others:
            raise OptionError(f"%dist_plan: --fp32 and --{others[0]} contradict each other.")
        given["precision"] = "fp32"
    if values.checkpoints_all:
        given["checkpoint"] = given["checkpoint"] or "full"
    load = Workload(
        values.batch, values.sequence, values.optimizer or OPTIMIZER, values.recipe or "",
        values.samples or 0, imbalance=values.imbalance,
    )  # fmt: skip
    request = PlanRequest(**{row.name: getattr(values, row.name) for row in fields(PlanRequest)})
    if not values.is_check:
        return make_plan(_named(values.model[0]), request, load, values.strategy, given)
    _check_alone(values)
    with progress.during("plan") as tell:
        return check_step(values.model[0], values.inputs or "", load, tell)


def check_step(
    name: str, inputs: str, load: Workload, tell: Callable[[str], None] = lambda _text: None
) -> View:
    """Predict a step's memory under the strategy that counts, and measure it on the ranks.

    Four steps are run with the user's model and optimizer, and all is put back bit by bit.

    Args:
        name: A variable on the ranks that is a model.
        inputs: A variable that it is called with; empty for random tokens of a language model.
        load: Batch and sequence of these tokens.
        tell: Told what is done now.

    Raises:
        OptionError: There is no such model, or nobody knows what it is called with.
        NotRunning, RankBusy, RankGone, Interrupted, NbdistError: As for a cell.
    """
    session = NOTEBOOK.session
    if not all(part.isidentifier() for part in name.split(".")):
        raise OptionError(
            f"--check measures a model on the ranks, and {name} is not a variable name."
        )
    live = live_model(session, name, inputs)
    choice = session.strategy.current()
    # One backward for each step, as it is measured.
    choice = replace(choice, options=replace(choice.options, accumulate=1))
    if not live.is_prepared:  # every rank has it by itself
        choice = choose("single", {}, session.topology.world_size)
    has_gpu = session.topology.ranks[0].device != "cpu"
    # Without an optimizer of its own no step of one is measured: SGD keeps nothing.
    load = replace(load_of(live, load, None if live.optimizer else "sgd"), has_gpu=has_gpu)
    tell("a step on the ranks")
    measured = checked_step(session, name, inputs, load.batch, load.sequence)
    otherwise = functools.partial(by_kinds, live)
    shape = shape_of(live)
    fake = FakeEngine(live.source, otherwise=otherwise, problem=live.problem, progress=tell)
    with fake as engine:
        memory = engine(shape, accumulating(choice, load), load)
    # What CUDA's context and libraries take is not in the allocator's count.
    memory = replace(memory, overhead=0.0)
    results = checks(memory, measured, has_forward=choice.degrees.pp == 1)
    return shown_check(live, strategies.described(choice), load, memory, results, measured)


def _check_alone(values: Namespace) -> None:
    """Refuse what says under which strategy, on what, or counted by what: it runs as it is."""
    typed = [word for word, value in strategy_given(values).items() if value not in (None, False)]
    words = ["strategy", "recipe", "samples", *(row.name for row in fields(PlanRequest))]
    words.remove("inputs")
    typed += [word for word in words if getattr(values, word) not in (None, False)]
    if typed:
        flag = typed[0].removeprefix("is_").replace("_", "-")
        raise OptionError(
            f"--check measures the model under the current strategy: leave --{flag} out. "
            "%dist_strategy changes the strategy."
        )


def _named(text: str) -> Any:
    """The notebook's variable of that name, if it is a config or has one; else the text."""
    shell = get_ipython()
    value = None if shell is None else shell.user_ns.get(text)
    has_config = isinstance(value, Mapping) or hasattr(getattr(value, "config", value), "to_dict")
    return value if has_config else text


_count = whole_number("a whole number from 1 to 10^9", most=10**9)


VERBS = (
    Verb(
        "dist_plan",
        "Say whether a model will fit, under which strategy, and what to choose.",
        "%dist_plan llama-3-8b --ranks 8 --gpu h100 --seq 4096",
        dist_plan,
        (
            Option(
                ("model",),
                "number of parameters (7e9, 7B), a name such as llama-3-8b, the path of a "
                "config.json, or a model's variable on the ranks",
                metavar="MODEL",
                choices=tuple(CONFIGS),
            ),
            Option(
                ("--strategy",), "one strategy (default: a row for each)", metavar="NAME",
                choices=tuple(ROWS),
            ),
            Option(
                ("--ranks", "-n"), "number of ranks (default: those running, or 8)", rank_count,
                metavar="N",
            ),
            Option(
                ("--gpu",), f"one of {', '.join(DEVICES)} (default: what the ranks have, or h100)",
                metavar="NAME", choices=tuple(DEVICES),
            ),
            Option(("--memory",), "memory of a GPU that is not listed: 24GB", metavar="SIZE"),
            Option(
                ("--network",),
                "GB/s that a host sends to others, all ports together (default: as hosts with that "
                "GPU commonly have)",
                metavar="GB/S",
            ),
            Option(("--batch",), "samples per data-parallel rank (default: 1)", _count, 1, "B"),
            Option(
                ("--seq",), "tokens per sample (default: 2048)", _count, 2048, "S", name="sequence"
            ),
            Option(
                ("--samples",),
                "samples of all ranks per step, the effective batch; sets --accumulate",
                _count,
                metavar="N",
            ),
            Option(
                ("--imbalance",),
                "rows of the rank that gets most of those that share experts, by their mean "
                "(default: 1, equally many)",
                positive_number,
                1.0,
                "X",
            ),
            Option(("--price",), "of one GPU for an hour, such as 2.50: adds costs", metavar="P"),
            Option(
                ("--tokens",), "tokens to train on, such as 500e6: adds GPU-hours", metavar="N"
            ),
            Option(
                ("--copies",),
                "dp beside tp or pp keeps whole copies, as Megatron does (default: as nbdist, "
                "which shards there)",
                None,
            ),
            Option(
                ("--search",),
                "all configurations that fit (degrees, sharding, micro-batches, recomputation, "
                "precision), the fastest first, with the same samples in a step",
                None,
                name="is_search",
            ),
            Option(
                ("--nodes",),
                f"hosts of the ranks (default: {PER_HOST} ranks on each, or those running)",
                rank_count,
                metavar="N",
            ),
            Option(
                ("--keep-free",),
                "the part of each device's memory that has to stay free, such as 10%% (default: "
                "20%%)",
                metavar="PERCENT",
            ),
            Option(
                ("--optimizer",), f"one of {', '.join(OPTIMIZERS)} (default: adamw)",
                metavar="NAME", choices=tuple(OPTIMIZERS),
            ),
            Option(
                ("--lora",),
                "rank r of LoRA's adapters, beside which all is frozen",
                whole_number("a rank of adapters (1 or more)"),
                metavar="R",
            ),
            Option(
                ("--targets",),
                "layers with adapters, with commas (default: q_proj,v_proj, or c_attn, as PEFT)",
                metavar="NAMES",
                choices=TARGETS,
            ),
            Option(
                ("--quant",),
                f"with --lora: frozen linear layers in 4 bits, one of {', '.join(QUANTS)}",
                metavar="NAME",
                choices=tuple(QUANTS),
            ),
            Option(
                ("--recipe",),
                f"what is stored, one of {', '.join(RECIPES)} (default: as nbdist stores it)",
                metavar="NAME",
                choices=tuple(RECIPES),
            ),
            Option(
                ("--engine",),
                "how memory is counted: formulas, or fake, a step with fake tensors (default: "
                "formulas; fake for a model on the ranks)",
                metavar="NAME",
                choices=ENGINES,
            ),
            Option(
                ("--inputs",),
                "a variable on the ranks with a live model's inputs: a tensor, tuple or dict",
                metavar="NAME",
            ),
            Option(
                ("--check",),
                "run a real step of a model on the ranks; compare measured with predicted",
                None,
                name="is_check",
            ),
            Option(
                ("--fp32",),
                "compute in fp32 (default: bf16; fp16 on a GPU without it, fp32 on the CPU)",
                None,
                name="is_fp32",
            ),
            Option(("--ac",), "same as --checkpoint full", None, name="checkpoints_all"),
            *strategy_options(),
        ),
        place=ANYWHERE,
    ),
)  # fmt: skip
