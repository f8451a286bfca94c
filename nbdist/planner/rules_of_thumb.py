"""Choices of common rules of thumb, asked with a plan's own numbers.

Each is a published text's rule for when to take DDP, FSDP, which stage of ZeRO, or to split the
model. They know neither the batch nor the links; docs/plan.md has them beside what a plan does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from nbdist.core.units import gigabytes
from nbdist.planner.memory import Memory
from nbdist.planner.plan import NO, UNKNOWN, Case, Plan, PlanRow, typed_as

_SINGLE: Case = ("single", {})
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
    """Choice of a rule for a plan.

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
    """The question to the rules about a plan.

    Attributes:
        planned: With a row for each strategy.
        memory: Of the model on one device.
        find: The row of a case, also of one that the plan does not have; None where it is refused.
    """

    planned: Plan
    memory: Memory
    find: Callable[[Case], PlanRow | None]

    def fits(self, case: Case) -> bool:
        """Whether a step of it fits under this strategy."""
        row = self.find(case)
        return row is not None and row.verdict != NO


def _by_fit(question: RuleQuestion) -> tuple[Case, str]:
    planned = question.planned
    if question.fits(_SINGLE):
        return _DDP, "it fits on one device"
    if question.memory.states <= planned.world_size * planned.device.memory_bytes:
        return _FULL, "it fits on all devices together, not on one"
    return _OFFLOADED, "it does not fit on all devices together"


def _by_size(question: RuleQuestion) -> tuple[Case, str]:
    size_bytes, device = question.memory.parameters, question.planned.device
    parameters = f"its parameters take {gigabytes(size_bytes)}"
    hosts = question.planned.world_size // device.per_host
    if question.planned.model.parameters >= LARGEST and hosts > 1:
        sizes = {"tp": device.per_host, "pp": min(_STAGES_OF_3D, hosts)}
        return ("pp", sizes), "175 billion or more: 3D, tp within a host"
    if size_bytes < SMALL_BYTES:
        return _DDP, f"{parameters}, less than 2 GB"
    if size_bytes <= device.memory_bytes:
        return _GRAD_OP, f"{parameters}: they fit on one device"
    return _FULL, f"{parameters}: more than one device has"


def _by_stages(question: RuleQuestion) -> tuple[Case, str]:
    planned = question.planned
    if question.fits(_SINGLE):
        return _DDP, "it fits on one device"
    if planned.model.parameters > LARGE and planned.device.link.startswith("NVLink"):
        per_host = planned.device.per_host
        case: Case = ("tp", {})
        because = "more than 70 billion, and NVLink"
        if planned.world_size > per_host:
            case = ("pp", {"tp": per_host, "pp": 2})
            because = "more than 70 billion, and tp within a host is not enough"
        if question.fits(case):
            return case, because
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
    """List each rule's choice; none where the model on one device was not counted.

    `find` plans a case that is not among the rows.
    """
    rows: dict[str, PlanRow | None] = {row.typed: row for row in planned.rows if row.memory}
    single = rows.get("single")
    if single is None or single.memory is None or single.verdict == UNKNOWN:
        return ()

    def lookup(case: Case) -> PlanRow | None:
        typed = typed_as(*case)
        if typed not in rows:
            rows[typed] = find(*case)
        return rows[typed]

    question = RuleQuestion(planned, single.memory, lookup)
    chosen = [(rule.name, *rule.choose(question)) for rule in RULES]
    return tuple(RuleAnswer(name, typed_as(*case), why, lookup(case)) for name, case, why in chosen)
