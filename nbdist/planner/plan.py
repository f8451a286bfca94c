"""Will it fit: memory and time of a model under each strategy, a verdict, and what to choose.

The records do not say how memory was found: `Memory.engine` does, and another engine than the
closed formulas can fill the same ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from nbdist.bandwidth.results import LinkModel
from nbdist.errors import OptionError
from nbdist.planner.devices import Device
from nbdist.planner.memory import Memory, memory_of
from nbdist.planner.models import ModelShape
from nbdist.planner.step_time import Time, flows, samples, time_of
from nbdist.planner.workload import Workload, check_load, recipe_for
from nbdist.strategy.choice import Degrees, Strategy, label, mesh_phrase
from nbdist.strategy.choose import choose
from nbdist.strategy.footprint import Recipe
from nbdist.strategy.options import listed
from nbdist.strategy.table import HELD

# UNKNOWN: what is counted fits, and something is not counted.
SAFE, RISKY, NO, UNKNOWN = "safe", "risky", "no", "?"
# Of 454 runs none that was estimated below 80 % of the device's memory ran out of it: Fujii et
# al. 2024, https://arxiv.org/abs/2411.06465.
SAFE_SHARE = 0.8

Engine = Callable[[ModelShape, Strategy, Workload], Memory]


@dataclass(frozen=True, slots=True)
class PlanRow:
    """A model under one strategy.

    Attributes:
        typed: As it is typed after --strategy.
        choice: The strategy with its degrees; None where it does not go with the model or ranks.
        problem: Why it does not; a sentence.
        memory: Of the rank that needs most.
        share: Of the device's memory.
        host_share: Of a rank's share of its host's memory, where that is known: what is offloaded.
        sent_bytes: That a rank sends in a step of the optimizer.
        samples: That all ranks train on in it.
        time: Estimated; None where the device's speed is not known.
    """

    typed: str
    choice: Strategy | None = None
    problem: str = ""
    recipe: Recipe | None = None
    memory: Memory | None = None
    share: float = 0.0
    host_share: float = 0.0
    sent_bytes: float = 0.0
    samples: int = 0
    time: Time | None = None

    @property
    def verdict(self) -> str:
        """SAFE, RISKY, NO or UNKNOWN; empty where it was not counted."""
        if self.memory is None:
            return ""
        by_share = verdict(max(self.share, self.host_share))
        return UNKNOWN if self.memory.is_partial and by_share != NO else by_share

    @property
    def mesh(self) -> str:
        """`dp 4 x tp 2`; empty of one rank."""
        return mesh_phrase(self.choice) if self.choice else ""


@dataclass(frozen=True, slots=True)
class Plan:
    """A model on so many devices, a row for each strategy.

    Attributes:
        rows: In order of the table of strategies.
        assumed: What was not typed, a phrase each.
        live: What more is known of a live model, a line each.
    """

    model: ModelShape
    device: Device
    world_size: int
    load: Workload
    rows: tuple[PlanRow, ...]
    assumed: tuple[str, ...] = ()
    live: tuple[str, ...] = ()

    def counts_sent(self, row: PlanRow) -> bool:
        """Whether sent_bytes are all: not where activations of an unknown shape are split."""
        degrees = row.choice.degrees if row.choice else Degrees()
        return self.model.has_shape or degrees.dp == degrees.product


def verdict(share: float) -> str:
    """SAFE below 80 % of the device's memory, RISKY up to 100 %, NO above."""
    if share < SAFE_SHARE:
        return SAFE
    return RISKY if share <= 1 else NO


# What is planned without --strategy: what is typed, and what that stands for.
_CASES: tuple[tuple[str, Mapping[str, object]], ...] = (
    ("single", {}),
    ("ddp", {}),
    ("zero1", {}),
    ("deepspeed", {"stage": 1}),
    ("deepspeed", {"stage": 2}),
    ("deepspeed", {"stage": 3}),
    ("fsdp", {"shard": "grad-op"}),
    ("fsdp", {}),
    ("fsdp", {"shard": "hybrid"}),
    ("fsdp1", {}),
    ("fsdp", {"tp": 2}),
    ("tp", {}),
    ("pp", {}),
    ("cp", {}),
    ("ulysses", {}),
)
# On more than one host: layers within hosts, the rest between.
_ON_HOSTS: tuple[tuple[str, Mapping[str, object]], ...] = (
    ("fsdp", {"tp": 8}),
    ("pp", {"tp": 8, "pp": 2}),
)


def plan(  # noqa: PLR0913  # what a plan is about
    model: ModelShape,
    device: Device,
    world_size: int,
    load: Workload,
    *,
    strategy: str | None = None,
    given: Mapping[str, object] | None = None,
    measured: LinkModel | None = None,
    engine: Engine = memory_of,
    assumed: tuple[str, ...] = (),
    progress: Callable[[str, float, float, str], object] = lambda *_args: None,
) -> Plan:
    """A row for each strategy, or one for a strategy or degrees that were typed.

    `given` has degrees and options, as strategy.choose.choose takes them. `measured` says how fast
    these ranks' collectives are, the engine how much memory a choice takes; `progress` is told what
    is counted now: words, done, total, unit.

    Raises:
        OptionError: If a word does not exist, or the one strategy that was typed does not fit.
    """
    given = {word: value for word, value in (given or {}).items() if value not in (None, False)}
    # What is wrong in any row is refused once.
    check_load(load)
    if not device.has_bf16 and ("bf16" in given or given.get("precision") == "bf16"):
        raise OptionError(f"{device.title} cannot compute in bf16. Use --fp16.")

    def row(typed: str, choice: Strategy) -> PlanRow:
        choice = accumulating(choice, load)
        memory = engine(model, choice, load)
        return PlanRow(
            typed=typed,
            choice=choice,
            recipe=recipe_for(choice, load),
            memory=memory,
            share=memory.peak / device.memory_bytes,
            host_share=memory.host / (device.host_memory_bytes or math.inf),
            sent_bytes=sum(
                flow.wire_bytes
                for flow in flows(model, choice, load)
                if model.has_shape or flow.sent.what in HELD
            ),
            samples=samples(choice, load),
            time=time_of(model, choice, load, device, measured) if model.has_shape else None,
        )

    if strategy is not None or any(word in given for word in ("dp", "tp", "pp", "cp")):
        choice = choose(strategy, given, world_size)
        progress(f"counting {label(choice)}", 0, 0, "")
        return Plan(model, device, world_size, load, (row(label(choice), choice),), assumed)
    _check_words(given, world_size)
    cases = (*_CASES, *(_ON_HOSTS if world_size > 8 else ())) if world_size > 1 else _CASES[:1]
    rows = []
    for number, (name, case_options) in enumerate(cases):
        typed = typed_as(name, case_options)
        progress(f"counting {typed}", number, len(cases), "strategies")
        try:
            rows.append(row(typed, choose(name, {**given, **case_options}, world_size)))
        except OptionError as error:
            rows.append(PlanRow(typed, problem=str(error)))
    return Plan(model, device, world_size, load, tuple(rows), assumed)


def typed_as(name: str, options: Mapping[str, object]) -> str:
    """A strategy with options as it is typed: `fsdp --tp 2`."""
    return " ".join([name, *(f"--{word} {value}" for word, value in options.items())])


def accumulating(choice: Strategy, load: Workload) -> Strategy:
    """The choice with as many backwards per step as an effective batch needs.

    Raises:
        OptionError: If the batches of all data-parallel ranks do not divide it, or it is another
            than --accumulate makes.
    """
    if not load.samples:
        return choice
    together = samples(choice, load) // choice.options.accumulate
    times, rest = divmod(load.samples, together)
    dp = together // load.batch
    if rest:
        raise OptionError(
            f"--samples {load.samples} is {load.samples / together:.2f} x {together} (--batch "
            f"{load.batch} on {dp} data-parallel ranks), not a whole number of batches. Use "
            f"{listed([count * together for count in (times, times + 1) if count], 'or')}."
        )
    if choice.options.accumulate not in (1, times):
        raise OptionError(
            f"--samples {load.samples} is {times} x {together}, so it needs --accumulate {times}, "
            f"not {choice.options.accumulate}. Type one of them."
        )
    return replace(choice, options=replace(choice.options, accumulate=times))


def _check_words(given: Mapping[str, object], world_size: int) -> None:
    """Refuse options that no strategy could take as they are typed."""
    problems = []
    for name, case_options in _CASES:
        try:
            choose(name, {**given, **case_options}, world_size)
        except OptionError as error:
            problems.append(error)
        else:
            return
    raise problems[0]
