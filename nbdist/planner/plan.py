"""Will it fit: memory and time of a model under each strategy, a verdict, and what to choose.

The records do not say how memory was found: `Memory.engine` does, and another engine than the
closed formulas can fill the same ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from nbdist.bandwidth.results import LinkModel
from nbdist.core.topology import HostRanks
from nbdist.errors import OptionError
from nbdist.planner.devices import SAFE_SHARE, Device
from nbdist.planner.memory import Memory, memory_of
from nbdist.planner.models import ModelShape
from nbdist.planner.step_time import Time, flows, samples, time_of
from nbdist.planner.workload import Workload, check_load, recipe_for
from nbdist.strategy import options
from nbdist.strategy.choice import Degrees, Strategy, label, mesh_phrase
from nbdist.strategy.choose import choose
from nbdist.strategy.footprint import Recipe
from nbdist.strategy.options import listed
from nbdist.strategy.table import HELD

# UNKNOWN: what is counted fits, and something is not counted.
SAFE, RISKY, NO, UNKNOWN = "safe", "risky", "no", "?"

Engine = Callable[[ModelShape, Strategy, Workload], Memory]
# A strategy's name and what is typed with it.
Case = tuple[str, Mapping[str, object]]


@dataclass(frozen=True, slots=True)
class SearchSpace:
    """The subject of a plan: a model, devices and a batch, and the given parts of a strategy.

    Attributes:
        load: In a search its `samples` are the effective batch, and `batch` counts for nothing.
        strategy: Only this one; a search takes all that have it, with fsdp also fsdp x tp.
        given: Degrees and options as strategy.choose.choose takes them: these are kept.
        measured: A model of these ranks' collectives; it applies to their number of ranks alone.
        engine: Counts memory.
        ranks_on: The hosts, as strategy.choose.choose takes them.
        copies: dp beside tp or pp keeps whole copies of what these leave, as Megatron does; nbdist
            itself shards there.
        precisions: The precisions of a search, where none was typed.
        each: Samples for each rank, where only these were asked for: more ranks train more.
        assumed: A phrase for each assumption about values that were not typed.
        live: Lines of further facts on a live model.
        price: The price of an hour of one device, in any currency; 0 where none was named.
        tokens: That are to be trained on; 0 likewise.
    """

    model: ModelShape
    device: Device
    world_size: int
    load: Workload
    strategy: str | None = None
    given: Mapping[str, object] = field(default_factory=dict, hash=False)
    measured: LinkModel | None = None
    engine: Engine = memory_of
    ranks_on: Sequence[HostRanks] = ()
    copies: bool = False
    precisions: tuple[str, ...] = ("bf16", "fp32")
    each: int = 0
    assumed: tuple[str, ...] = ()
    live: tuple[str, ...] = ()
    price: float = 0.0
    tokens: float = 0.0

    def typed(self) -> tuple[dict[str, int], dict[str, object]]:
        """Degrees and options that were typed, by name."""
        return options.read(self.given)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A configuration whose memory is counted; shares and verdict are those of PlanRow."""

    choice: Strategy
    load: Workload
    memory: Memory
    share: float
    host_share: float
    verdict: str

    @property
    def mesh(self) -> tuple[str, object]:
        """The common part of candidates that differ in options and batch alone."""
        return self.choice.name, self.choice.degrees


@dataclass(frozen=True, slots=True)
class PlanRow:
    """A model under one strategy.

    Attributes:
        typed: The text to type after --strategy.
        choice: The strategy with its degrees; None where it does not go with the model or ranks.
        problem: Why it does not; a sentence.
        memory: The memory of the rank that needs most.
        share: The share of the device's memory.
        host_share: Of a rank's share of its host's memory, where that is known: what is offloaded.
        sent_bytes: That a rank sends in a step of the optimizer.
        samples: That all ranks train on in it.
        time: Estimated; None where the device's speed is not known.
        batch: Samples that a data-parallel rank computes at once.
        verdict: SAFE, RISKY, NO or UNKNOWN; empty where it was not counted.
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
    batch: int = 0
    verdict: str = ""

    @property
    def mesh(self) -> str:
        """`dp 4 x tp 2`; empty of one rank."""
        return mesh_phrase(self.choice) if self.choice else ""


@dataclass(frozen=True, slots=True)
class Plan(SearchSpace):
    """A model on so many devices, a row for each strategy in the order of their table."""

    rows: tuple[PlanRow, ...] = ()

    def counts_sent(self, row: PlanRow) -> bool:
        """Whether sent_bytes are all: not where activations of an unknown shape are split."""
        degrees = row.choice.degrees if row.choice else Degrees()
        return self.model.has_shape or (degrees.dp == degrees.product and degrees.ep == 1)


def verdict(share: float, safe_share: float = SAFE_SHARE) -> str:
    """SAFE below a share of the device's memory, 80 % mostly; RISKY up to 100 %, NO above."""
    if share < safe_share:
        return SAFE
    return RISKY if share <= 1 else NO


# What is planned without --strategy: what is typed, and what that stands for.
_CASES: tuple[Case, ...] = (
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


def _cases(space: SearchSpace) -> tuple[Case, ...]:
    """Cases that are planned; on more than one host also layers within hosts, the rest between.

    The experts of a layer lie on as many ranks as can be, of one host where there are several.
    """
    world_size, per_host, experts = space.world_size, space.device.per_host, space.model.experts
    if world_size == 1:
        return _CASES[:1]
    within = math.gcd(world_size, per_host) if world_size > per_host > 1 else world_size
    shares = math.gcd(experts, within) if experts else 1
    shared: tuple[Case, ...] = (("ep", {"ep": shares}), ("fsdp", {"ep": shares}))
    cases = (*_CASES, *shared) if shares > 1 else _CASES
    if world_size <= per_host or per_host == 1:
        return cases
    layers: tuple[Case, ...] = (("fsdp", {"tp": per_host}), ("pp", {"tp": per_host, "pp": 2}))
    return (*cases, *(case for case in layers if case not in _CASES))


def plan(
    space: SearchSpace,
    progress: Callable[[str, float, float, str], object] = lambda *_args: None,
) -> Plan:
    """A row for each strategy, or one for a strategy or degrees that were typed.

    `progress` is called with the work being counted: words, done, total, unit.

    Raises:
        OptionError: If a word does not exist, or the one strategy that was typed does not fit.
    """
    # What is wrong in any row is refused once.
    check_load(space.load)
    degrees, fixed = space.typed()
    if not space.device.has_bf16 and fixed.get("precision") == "bf16":
        raise OptionError(f"{space.device.title} cannot compute in bf16. Use --fp16.")
    if space.strategy is not None or degrees.keys() - {"replicas"}:
        choice = _chosen(space, space.strategy, {})
        if space.copies:
            _check_copies(choice)
        typed = label(as_copies(choice) if space.copies else choice)
        progress(f"counting {typed}", 0, 0, "")
        return Plan(**asked(space), rows=(_row(space, choice, typed),))
    _check_words(space)
    cases = _cases(space)
    rows = []
    for number, (name, case_options) in enumerate(cases):
        typed = typed_as(name, case_options)
        progress(f"counting {typed}", number, len(cases), "strategies")
        try:
            rows.append(_row(space, _chosen(space, name, case_options), typed))
        except OptionError as error:
            rows.append(PlanRow(typed, problem=str(error)))
    return Plan(**asked(space), rows=tuple(rows))


def asked(space: SearchSpace) -> dict[str, Any]:
    """The fields of what is planned, for a plan of it."""
    return {row.name: getattr(space, row.name) for row in fields(SearchSpace)}


def _chosen(space: SearchSpace, name: str | None, more: Mapping[str, object]) -> Strategy:
    settings = {**space.given, **more}
    return choose(name, settings, space.world_size, ranks_on=space.ranks_on)


def _row(space: SearchSpace, choice: Strategy, typed: str) -> PlanRow:
    choice = accumulating(as_copies(choice) if space.copies else choice, space.load)
    return row_of(space, count(space, choice, space.load), typed)


def count(space: SearchSpace, choice: Strategy, load: Workload) -> Candidate:
    """A choice with its memory, and what that is of the device's and of its host's.

    Raises:
        OptionError: It does not go with the model or the load.
    """
    device, memory = space.device, space.engine(space.model, choice, load)
    share = memory.peak / device.memory_bytes
    host_share = memory.host / (device.host_memory_bytes or math.inf)
    verdict_of = verdict(max(share, host_share), device.safe_share)
    return Candidate(choice, load, memory, share, host_share, verdict_of)


def row_of(space: SearchSpace, candidate: Candidate, typed: str) -> PlanRow:
    """The row of a candidate, with what it sends and its time."""
    model, choice, load = space.model, candidate.choice, candidate.load
    measured = space.measured
    if measured is not None and measured.world_size != space.world_size:
        measured = None
    is_open = candidate.memory.is_partial and candidate.verdict != NO
    return PlanRow(
        typed=typed,
        choice=choice,
        recipe=recipe_for(choice, load),
        memory=candidate.memory,
        share=candidate.share,
        host_share=candidate.host_share,
        sent_bytes=sum(
            flow.wire_bytes
            for flow in flows(model, choice, load)
            if model.has_shape or flow.sent.what in HELD
        ),
        samples=samples(choice, load),
        time=time_of(model, choice, load, space.device, measured) if model.has_shape else None,
        batch=load.batch,
        verdict=UNKNOWN if is_open else candidate.verdict,
    )


def as_copies(choice: Strategy) -> Strategy:
    """The choice with dp as copies where it stands beside tp or pp; any other as it is."""
    if choice.name not in {"tp", "pp"}:
        return choice
    degrees = choice.degrees
    copied = replace(degrees, dp_replicate=degrees.dp, dp_shard=1)
    return replace(choice, degrees=copied)


def _check_copies(choice: Strategy) -> None:
    if choice.name not in {"tp", "pp"} or choice.degrees.dp == 1:
        raise OptionError(
            f"--copies says how dp stands beside tp or pp, and {label(choice)} has no such dp. "
            "Leave it out, or type --dp with --tp or --pp."
        )


def typed_as(name: str, settings: Mapping[str, object]) -> str:
    """A strategy with options as it is typed: `fsdp --tp 2`."""
    return " ".join([name, *(f"--{word} {value}" for word, value in settings.items())])


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


def _check_words(space: SearchSpace) -> None:
    """Refuse options that no strategy could take as they are typed."""
    problems = []
    for name, case_options in _CASES:
        try:
            choose(name, {**space.given, **case_options}, space.world_size)
        except OptionError as error:
            problems.append(error)
        else:
            return
    raise problems[0]
