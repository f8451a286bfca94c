"""What common rules of thumb choose, asked with a plan's own numbers.

Each is a published text's rule for when to take DDP, FSDP, which stage of ZeRO, or to split the
model. They know neither the batch nor the links; docs/plan.md has them beside what a plan does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from nbdist.planner.plan import NO, UNKNOWN, Plan, PlanRow, typed_as

# A name, and options.
Case = tuple[str, Mapping[str, object]]

_DDP: Case = ("ddp", {})
_FULL: Case = ("fsdp", {})
_GRAD_OP: Case = ("fsdp", {"shard": "grad-op"})
_STAGES: tuple[Case, ...] = (("deepspeed", {"stage": 2}), ("deepspeed", {"stage": 3}))
_OFFLOADED: Case = ("deepspeed", {"stage": 3, "offload": "cpu"})
# What the texts call small and very large: bytes, and parameters.
SMALL_BYTES = 2e9
LARGE, LARGEST = 70e9, 175e9
_STAGES_OF_3D = 4


@dataclass(frozen=True, slots=True)
class RuleOfThumb:
    """A text's rule.

    Attributes:
        name: As it is shown.
        source: The text that has it, for docs/plan.md.
        choose: The case, and why, by what the model takes.
    """

    name: str
    source: str
    choose: Callable[[RuleQuestion], tuple[Case, str]]


@dataclass(frozen=True, slots=True)
class RuleAnswer:
    """What a rule chooses for a plan.

    Attributes:
        because: Its own reason, a clause.
        row: With its numbers; None where it does not go with the model, ranks or options.
    """

    rule: str
    typed: str
    because: str
    row: PlanRow | None


@dataclass(frozen=True, slots=True)
class RuleQuestion:
    """What rules ask of a plan.

    Attributes:
        planned: With a row for each strategy.
        single: The model on one device.
        find: The row of a case, also of one that the plan does not have; None where it is refused.
    """

    planned: Plan
    single: PlanRow
    find: Callable[[Case], PlanRow | None]

    @property
    def parameter_bytes(self) -> float:
        """Of the parameters alone, as they are stored."""
        assert self.single.memory is not None
        return self.single.memory.parameters

    @property
    def fits_one(self) -> bool:
        """Whether a step of it fits into one device."""
        return self.single.verdict != NO

    @property
    def fits_all(self) -> bool:
        """Whether parameters, gradients and optimizer fit into all devices together."""
        assert self.single.memory is not None
        all_bytes = self.planned.world_size * self.planned.device.memory_bytes
        return self.single.memory.states <= all_bytes

    def fits(self, case: Case) -> bool:
        """Whether a step of it fits under this strategy."""
        row = self.find(case)
        return row is not None and row.verdict != NO


def _by_fit(question: RuleQuestion) -> tuple[Case, str]:
    if question.fits_one:
        return _DDP, "it fits on one device"
    if question.fits_all:
        return _FULL, "it fits on all devices together, not on one"
    return _OFFLOADED, "it does not fit on all devices together"


def _by_size(question: RuleQuestion) -> tuple[Case, str]:
    size, limit = question.parameter_bytes, question.planned.device.memory_bytes
    parameters = f"its parameters take {size / 1e9:,.1f} GB"
    per_host = question.planned.device.per_host
    hosts = question.planned.world_size // per_host
    if question.planned.model.parameters >= LARGEST and hosts > 1:
        stages = min(_STAGES_OF_3D, hosts)
        return ("pp", {"tp": per_host, "pp": stages}), "175 billion or more: 3D, tp within a host"
    if size < SMALL_BYTES:
        return _DDP, f"{parameters}, less than 2 GB"
    if size <= limit:
        return _GRAD_OP, f"{parameters}: they fit on one device"
    return _FULL, f"{parameters}: more than one device has"


def _by_stages(question: RuleQuestion) -> tuple[Case, str]:
    planned = question.planned
    if question.fits_one:
        return _DDP, "it fits on one device"
    if planned.model.parameters > LARGE and planned.device.link.startswith("NVLink"):
        inside: Case = ("tp", {})
        per_host = planned.device.per_host
        if planned.world_size <= per_host and question.fits(inside):
            return inside, "more than 70 billion, and NVLink"
        across: Case = ("pp", {"tp": per_host, "pp": 2})
        if planned.world_size > per_host and question.fits(across):
            return across, "more than 70 billion, and tp within a host is not enough"
    for case in _STAGES:
        if question.fits(case):
            return case, "the first stage of ZeRO that fits, from 2 on"
    return _OFFLOADED, "no stage of ZeRO fits"


# Titles as their authors have them.
RULES = (
    RuleOfThumb(
        "one device, else all", "Complete Guide to Multi-GPU Distributed Training, section 11",
        _by_fit,
    ),
    RuleOfThumb("size of the parameters", "Chapter 15: Distributed Training Strategies", _by_size),
    RuleOfThumb("ddp, then ZeRO from stage 2", "Snippet: Distributed Training", _by_stages),
)  # fmt: skip


def answers(
    planned: Plan, find: Callable[[str, Mapping[str, object]], PlanRow | None]
) -> tuple[RuleAnswer, ...]:
    """What each rule chooses; none where the model on one device was not counted.

    `find` plans a case that is not among the rows.
    """
    rows = {row.typed: row for row in planned.rows if row.memory is not None}
    single = rows.get("single")
    if single is None or single.verdict == UNKNOWN:
        return ()
    made: dict[str, PlanRow | None] = dict(rows)

    def lookup(case: Case) -> PlanRow | None:
        typed = typed_as(*case)
        if typed not in made:
            made[typed] = find(*case)
        return made[typed]

    question = RuleQuestion(planned, single, lookup)
    result = []
    for rule in RULES:
        case, because = rule.choose(question)
        result.append(RuleAnswer(rule.name, typed_as(*case), because, lookup(case)))
    return tuple(result)
