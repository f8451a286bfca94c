"""Verdict of a verification: right, or where a difference begins and what it looks like."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from nbdist.core.finding import BAD, WARN, Finding
from nbdist.core.option import option, whole_number
from nbdist.core.ranks import rank_label
from nbdist.hang.records import SourceLine
from nbdist.strategy.choice import Degrees
from nbdist.verification.differences import (
    FORWARD,
    GRADIENT,
    GRADIENTS,
    OUTPUT,
    PARAMETERS,
    Row,
)
from nbdist.verification.draws import DrawProblem
from nbdist.verification.optimizers import (
    Settings,
    StateApart,
    optimizer_findings,
    optimizer_text,
)

SINGLE, FSDP = "single", "fsdp"
# What a step can be compared with.
REFERENCES = (SINGLE, FSDP)
_count = whole_number("a whole number from 1 to 10^6", most=10**6)
# A ratio so near to a whole number, or to one over it, is taken for it.
_NEAR = 0.02
# A difference is explained where what is left of it is so small a part.
_LEFT = 0.05
_STEPS = "number of accumulated steps"
# Power of a degree by which a tensor is off -> what that looks like.
_POWERS = {
    1: "a reduction too many, or a mean that was not taken",
    -1: "divided once too often, or a sum that was not taken",
    2: "two reductions too many",
    -2: "divided twice too often",
}
_ACCUMULATED = {
    True: "the gradients of a step are added up and not averaged",
    False: "the gradients of a step are divided twice",
}


@dataclass(frozen=True, slots=True)
class StepRequest:
    """The step that is verified: Python with the user's names, or, without, a step of our own."""

    code: str = ""
    n_steps: int = option(
        "how often the step is made; modules are compared in the first (default: 1)", "N", _count,
        1, flags=("--steps",),
    )  # fmt: skip
    against: str = option(
        "what the step is compared with: single (one process), or fsdp, of which one block at a "
        "time is whole (default: single, and fsdp where that has no room)",
        "NAME",
        default="",
        choices=REFERENCES,
    )
    inputs: str = option(
        "without a step: a variable on the ranks that the model is called with: a tensor, a tuple, "
        "or a dict of keyword arguments",
        "NAME",
        default="",
    )
    batch: int = option(
        "without a step and inputs: samples per rank of random tokens, for a language model "
        "(default: 4)",
        "N",
        _count,
        4,
    )
    sequence: int = option("their length (default: 32)", "N", _count, 32, flags=("--seq",))


@dataclass(frozen=True, slots=True)
class AxisEvidence:
    """Evidence of ranks along an axis on one tensor, put together.

    Attributes:
        axis: dp, cp or tp.
        degree: How many ranks it has.
        sum_error, mean_error: Of their sum and of their mean, from the reference.
        are_equal: They all have the same.
    """

    axis: str
    degree: int
    sum_error: float
    mean_error: float
    are_equal: bool


@dataclass(frozen=True, slots=True)
class StepFacts:
    """Facts that decide the kind of a difference, beside the difference itself.

    Attributes:
        evidence: Rank by rank, of the tensor where it begins.
        varying: The first module that differs between two runs of the reference; None for none.
        apart: Rank by rank, parameters that it had other values of than rank 0, before the step.
        draws: Dropouts whose masks are wrong between ranks.
        is_same_batch: All data-parallel ranks had the same batch.
        are_other_inputs: The step gave the model other inputs when it was run again.
        outer: What is wrong in the code around the model (losses).
        settings: Rank by rank, of the optimizer of the first step.
        states: What optimizers remember, where ranks had other values before the step.
    """

    evidence: tuple[tuple[AxisEvidence, ...], ...] = ()
    varying: str | None = None
    apart: tuple[tuple[str, ...], ...] = ()
    draws: tuple[DrawProblem, ...] = ()
    is_same_batch: bool = False
    are_other_inputs: bool = False
    outer: tuple[Finding, ...] = ()
    settings: tuple[Settings, ...] = ()
    states: tuple[StateApart, ...] = ()


@dataclass(frozen=True, slots=True)
class ModuleLine:
    """Start of a difference: a module (empty for the model itself), and the user's line."""

    module: str = ""
    line: SourceLine | None = None


@dataclass(frozen=True, slots=True)
class Verification:
    """A step under a strategy beside the same step of one process.

    Attributes:
        rows: Every tensor that was compared, in execution order.
        not_compared: Module or parameter -> why nothing of it was.
        first: Where it leaves the tolerance first; None where nothing does.
        kind: What the difference looks like, as a clause.
        eps: Of the dtype that is computed in.
        n_steps: Of the optimizer.
        n_calls: Of the user's code until the optimizer stepped; several for micro-batches.
        step_s, reference_s: How long the step took with hooks, and the reference's.
        host_bytes: Of the copies of all runs on the rank that has most of them.
        note: Why another reference was taken than one process; empty where none was.
        findings: What else is wrong, or uncertain.
    """

    strategy: str
    reference: str
    rows: tuple[Row, ...]
    first: Row | None
    eps: float
    degrees: Degrees
    not_compared: Mapping[str, str] = field(default_factory=dict)
    place: ModuleLine = ModuleLine()
    kind: str = ""
    accumulate: int = 1
    n_steps: int = 0
    n_calls: int = 1
    step_s: float = 0.0
    reference_s: float = 0.0
    host_bytes: int = 0
    note: str = ""
    findings: tuple[Finding, ...] = ()

    @property
    def is_right(self) -> bool:
        """Nothing is outside of its tolerance, and no finding says that something is wrong."""
        return self.first is None and all(f.verdict != BAD for f in self.findings)


def conclude(verification: Verification, facts: StepFacts) -> Verification:
    """The same with the kind of its first difference, and with what else was found."""
    first, findings = verification.first, tuple(_findings(facts, verification))
    if first is None:
        return replace(verification, findings=findings)
    kind, place = kind_of(verification, first, facts), verification.place
    if first.key.what == GRADIENT and _are_all_outside(verification):
        n_gradients = len(_sure_gradients(verification))
        kind += f"; all {n_gradients} gradients are outside, so it is no single module that does it"
        place = ModuleLine()
    return replace(verification, kind=kind, place=place, findings=findings)


def _sure_gradients(verification: Verification) -> list[Row]:
    """Without those that are zero but for rounding, as that of a key's bias: they say nothing."""
    rows = (row for row in verification.rows if row.key.what == GRADIENT)
    return [row for row in rows if row.allowed < _LEFT]


def _are_all_outside(verification: Verification) -> bool:
    gradients = _sure_gradients(verification)
    return len(gradients) > 1 and all(row.outside for row in gradients)


def kind_of(verification: Verification, first: Row, facts: StepFacts) -> str:
    """Kind of a difference, by its numbers alone."""
    for look in _LOOKS:
        if text := look(verification, first, facts):
            return text
    return "none of the kinds that verify can tell by numbers"


def _varying(_v: Verification, _first: Row, facts: StepFacts) -> str:
    if facts.varying is None:
        return ""
    return (
        "not the same twice: a second run of the reference differs from the first too, from "
        f"{facts.varying or 'the model itself'} on"
    )


def _other_inputs(_v: Verification, _first: Row, facts: StepFacts) -> str:
    if not facts.are_other_inputs:
        return ""
    return (
        "other inputs: the step gave the model another batch when it was run again. It reads "
        "something that is not put back, such as an iterator, a file or a clock"
    )


def _apart(_v: Verification, first: Row, facts: StepFacts) -> str:
    names = {name for rank_names in facts.apart for name in rank_names}
    owned = sorted(n for n in names if first.key.name in (n, n.rpartition(".")[0]))
    if not names:
        return ""
    ranks = [rank for rank, rank_names in enumerate(facts.apart) if rank_names]
    shown = ", ".join((owned or sorted(names))[:3])
    return (
        f"trained apart: before the step, {shown} had other values on rank {rank_label(ranks)} "
        "than on the ranks that hold the same part. It was changed on some ranks alone, or "
        "its gradient was never reduced"
    )


def _of_sums(verification: Verification, first: Row, facts: StepFacts) -> str:
    shared = [e for e in facts.evidence if e]
    axes = {e.axis for rank_evidence in shared for e in rank_evidence}
    for axis in ("tp", "cp", "dp"):
        of_axis = [e for rank_evidence in shared for e in rank_evidence if e.axis == axis]
        if axis not in axes or not of_axis or all(e.are_equal for e in of_axis):
            continue
        degree = of_axis[0].degree
        limit = max(degree * first.tolerance, _LEFT * first.worst.error)
        if all(e.sum_error <= limit for e in of_axis):
            return (
                f"a missing reduction: the sum over the {degree} ranks of {axis} is right, and "
                "each rank has only its own part of it"
            )
        is_late = first.key.phase in (GRADIENTS, PARAMETERS)
        if is_late and all(e.mean_error <= limit for e in of_axis):
            return (
                f"not averaged: each rank has its own, and the mean over the {degree} ranks of "
                f"{axis} is right"
            )
    return ""


def _is_scaled(row: Row) -> bool:
    """Whether a factor, alike in all elements, explains the largest difference."""
    worst = row.worst
    left_is_small = worst.left <= max(row.tolerance, _LEFT * worst.error)
    return abs(worst.factor - 1) >= _NEAR and left_is_small


def _factor(verification: Verification, first: Row, _facts: StepFacts) -> str:
    worst = first.worst
    if not _is_scaled(first):
        return ""
    for what, number in _numbers(verification):
        for power, often in _POWERS.items():
            if abs(worst.factor / number**power - 1) < _NEAR:
                times = f"{worst.factor:.4g} times what it should be, and the {what} is {number}"
                return f"scaled: {times}: {_ACCUMULATED[power > 0] if what == _STEPS else often}"
    return (
        f"scaled: {worst.factor:.4g} times what it should be, alike in all elements: a wrong "
        "weight of the loss, or a clipping by another norm"
    )


def _numbers(verification: Verification) -> Iterator[tuple[str, int]]:
    degrees = verification.degrees
    if verification.accumulate > 1:
        yield _STEPS, verification.accumulate
    for axis in ("dp", "tp", "cp", "pp"):
        if getattr(degrees, axis) > 1:
            yield f"degree of {axis}", getattr(degrees, axis)


def _optimizer(_v: Verification, first: Row, facts: StepFacts) -> str:
    text = optimizer_text(facts.settings, facts.states)
    if first.key.phase != PARAMETERS or not text:
        return ""
    return f"other numbers of the optimizer: gradients are right, and {text}"


def _added(verification: Verification, first: Row, _facts: StepFacts) -> str:
    if first.key.phase != GRADIENTS or _is_scaled(first):
        return ""
    addition = first.worst.addition
    if addition is not None and addition.left <= max(first.tolerance, _LEFT * first.worst.error):
        return f"something added: {addition.amount:.4g} {addition.what}, after the backward"
    if not _are_all_outside(verification):
        return ""
    return (
        "something added: forward and backward are right in every module, and all gradients are "
        "changed afterwards, by no factor: noise, a penalty, or another gradient"
    )


def _some_ranks(_v: Verification, first: Row, _facts: StepFacts) -> str:
    right = [rank for rank in first.errors if rank not in first.outside]
    if not right:
        return ""
    times = f"; elsewhere it is {first.worst.factor:.4g} times that" if _is_scaled(first) else ""
    return (
        f"on some ranks only: rank {rank_label(right)} is right{times}. Something depends on the "
        "rank: a mask, positions, a seed, a condition on the rank"
    )


def _shares(verification: Verification, first: Row, _facts: StepFacts) -> str:
    if first.key.what != OUTPUT or first.key.name or verification.degrees.dp == 1:
        return ""
    return (
        "wrong batch shares: the modules are right, and the mean of the ranks' losses is not the "
        "loss of the whole batch. Ranks count different numbers of samples or labels, and "
        "each weighs the same"
    )


def _batch_statistics(verification: Verification, first: Row, _facts: StepFacts) -> str:
    degrees = verification.degrees
    if first.key.phase != FORWARD or degrees.dp == 1 or degrees.dp != degrees.product:
        return ""
    kind = "statistics of a share"
    if degrees.ep > 1:
        kind = f"tokens of experts went astray between the ranks, or {kind}"
    return (
        f"{kind}: what goes in and the weights are right, and what comes out is "
        "not that of the whole batch. It looks at other samples of its batch, and has those of "
        "one rank (torch.nn.SyncBatchNorm, a layer norm or a group norm)"
    )


_LOOKS: tuple[Callable[[Verification, Row, StepFacts], str], ...] = (
    _other_inputs, _varying, _apart, _shares, _of_sums, _optimizer, _added, _some_ranks, _factor,
    _batch_statistics,
)  # fmt: skip


def _findings(facts: StepFacts, verification: Verification) -> Iterator[Finding]:
    for problem in facts.draws:
        yield _draw_finding(problem)
    if facts.is_same_batch:
        yield Finding(
            "same batch", "all data-parallel ranks computed with one batch", WARN,
            "the step learns from one rank's data and costs that of all",
            "share the data out: a prepared DataLoader, or a seed per data-parallel rank",
        )  # fmt: skip
    if facts.varying is not None:
        yield Finding(
            "not the same twice",
            f"two runs of the reference differ from {facts.varying or 'the model itself'} on", BAD,
            "what differs from run to run cannot be compared with anything",
            "draw random numbers from torch's generators, read no file or clock in a step, and "
            "see torch.use_deterministic_algorithms",
        )  # fmt: skip
    if facts.are_other_inputs:
        yield Finding(
            "other inputs", "the model got another batch when the step was run again", BAD,
            "the runs of the step were compared with different data",
            "let the step take its batch from a prepared DataLoader or a variable, not from an "
            "iterator, a file or a clock",
        )  # fmt: skip
    yield from facts.outer
    yield from optimizer_findings(facts.settings, facts.states)


def _draw_finding(problem: DrawProblem) -> Finding:
    axis = {"dp_replicate": "dp", "dp_shard": "dp"}.get(problem.axis, problem.axis)
    if problem.is_equal:
        return Finding(
            "random numbers", f"dropout in {problem.module or 'the model'} drew the same mask", BAD,
            f"ranks along {axis} see different data, and drop out alike",
            "seed data-parallel ranks differently", problem.ranks,
        )  # fmt: skip
    return Finding(
        "random numbers", f"dropout in {problem.module or 'the model'} drew different masks", BAD,
        f"ranks along {axis} hold the same activations, and go on with different ones",
        "let these ranks draw from one seed", problem.ranks,
    )  # fmt: skip
