"""A choice by a plan's numbers, remedies that would make it fit, and rules of thumb."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nbdist.core.units import exact_size, gigabytes
from nbdist.errors import OptionError
from nbdist.planner.collective_time import ring_of
from nbdist.planner.lora import quantized
from nbdist.planner.plan import RISKY, SAFE, UNKNOWN, Plan, PlanRow, SearchSpace, plan
from nbdist.planner.rules_of_thumb import RuleAnswer, answers
from nbdist.strategy.degrees import ranks
from nbdist.strategy.options import DEGREES, OPTIONS

MOST_RANKS = 4096
# A strategy that is less faster than this is no reason to leave a simpler one: estimates that are
# each 10 to 15 % off (docs/accuracy.md) cannot tell the two apart.
MARGIN = 0.25
# And this for copies: what sharding saves is of a step (the optimizer, messages), not of a sample,
# and where copies fit a larger batch makes it small.
COPIES_MARGIN = 0.5
# Estimates that are as close are the same: of measured pairs 5 % apart the order is mostly right.
SAME = 0.05
# Steps whose options most strategies take.
_COMMON = {"precision", "options"}
# Axes whose messages are waited for in every block, forward and backward.
_IN_BLOCKS = ("cp", "tp", "ep")


@dataclass(frozen=True, slots=True)
class Advice:
    """The conclusions of a plan.

    Attributes:
        row: The row to choose; None where none fits.
        sentences: Why, and what would help.
        rules: The choice of rules of thumb; none for a plan of one strategy or one rank.
    """

    row: PlanRow | None
    sentences: tuple[str, ...]
    rules: tuple[RuleAnswer, ...] = ()


def advise(planned: Plan) -> Advice:
    """The strategy to choose of those that are safe; else what would make one safe.

    The fastest for a sample, unless a simpler one is nearly as fast; docs/plan.md has the rules.
    The plan has a row for each strategy, or one.
    """
    rules: tuple[RuleAnswer, ...] = ()
    if len(planned.rows) > 1 and planned.world_size > 1:

        def find(name: str, options: Mapping[str, object]) -> PlanRow | None:
            given = {**planned.given, **options}
            again = _plan_again(replace(planned, strategy=name, given=given))
            return again.rows[0] if again is not None else None

        rules = answers(planned, find)
    row, sentences = choose_row(planned, lambda: _would_help(planned))
    return Advice(row, tuple(sentences), rules)


def _plan_again(space: SearchSpace) -> Plan | None:
    """A plan of what was changed; None where the options do not go with the strategy."""
    with contextlib.suppress(OptionError):
        return plan(replace(space, ranks_on=(), copies=False))
    return None


def choose_row(planned: Plan, would_help: Callable[[], str]) -> tuple[PlanRow | None, list[str]]:
    """The row to choose, and why; None and `would_help` where nothing fits."""
    # No other plan is made for a model whose shape no formula knows.
    has_shape = planned.model.has_shape
    useful = _useful(planned)
    for wanted in (SAFE, RISKY) if has_shape else (SAFE,):
        fitting = [row for row in useful if row.verdict == wanted]
        if not fitting:
            continue
        best, sentences = _recommended(planned, fitting)
        if best is not None and wanted == RISKY:
            sentences.append(would_help())
        if any(row.typed == "single" and row.verdict == SAFE for row in planned.rows) and (
            has_shape and planned.world_size > 1
        ):
            sentences.append("It fits on one device: more ranks only add speed.")
        return best, sentences
    if not has_shape and any(row.verdict == UNKNOWN for row in useful):
        return None, ["No strategy is recommended: the activations could not be counted."]
    nothing = "No strategy accepts these degrees and options."
    if useful:
        least = min(useful, key=lambda row: max(row.share, row.host_share))
        nothing = f"Nothing fits: the smallest, {least.typed}, needs {percent(least)} of the device"
        nothing += f"{_on_host(planned, least)}."
    return None, [nothing, *([would_help()] if has_shape else [])]


def _useful(planned: Plan) -> list[PlanRow]:
    """The rows that were counted; each rank of `single` does the same, so more train no faster."""
    counted = [row for row in planned.rows if row.memory is not None]
    return [row for row in counted if planned.world_size == 1 or row.typed != "single"]


def _recommended(planned: Plan, fitting: Sequence[PlanRow]) -> tuple[PlanRow | None, list[str]]:
    """The row to choose of those that fit, and the sentences that say it."""
    if len(planned.rows) == 1:
        [row] = fitting
        verdict = f"{row.typed}: {row.verdict} ({percent(row)} of the device)"
        costs = "" if planned.world_size == 1 else f"; {cost(planned, row)}"
        slow = slow_link(planned, row)
        notes = [f"The {_sums(row)} go over {slow} in every block, and nothing hides them."]
        return row, [f"{verdict}{costs}{_on_host(planned, row)}.", *(notes if slow else [])]
    counted = [row for row in fitting if planned.counts_sent(row)]
    unknown = "tp, pp and cp are not compared: what they send is not known."
    if not counted:
        names = ", ".join(row.typed for row in fitting)
        verdict = f"No strategy is recommended: {fitting[0].verdict} are {names}, and what they"
        return None, [f"{verdict} send is not known. %dist_compare measures them."]
    best = best_of(planned, counted)
    fastest = min(counted, key=_per_sample)
    first = (
        f"Recommended: {best.typed}: {best.verdict} ({percent(best)} of the device)"
        f"{_among(counted, best, fastest)}; "
        f"{cost(planned, best)}{_on_host(planned, best)}."
    )
    notes = _why_not(planned, counted, best, fastest)
    return best, [first, *notes, *([unknown] if len(counted) < len(fitting) else [])]


def _among(counted: Sequence[PlanRow], best: PlanRow, fastest: PlanRow) -> str:
    """How a choice stands among those that fit."""
    others = len(counted) - 1
    if not others:
        return f", the only {best.verdict} strategy"
    if best is fastest and not _host_bytes(best):
        return f", the {'fastest' if best.time else 'least sent'} of {others + 1}"
    return f", as {'is one other' if others == 1 else f'are {others} others'}"


def best_of(planned: Plan, fitting: Sequence[PlanRow]) -> PlanRow:
    """The row to choose of some that fit and whose cost is known.

    Without those that only look fast; of the rest the simplest that is nearly as fast as the
    fastest, and of equally simple and fast ones that which needs least memory.
    """
    widest = widest_gradients(fitting)
    usable = [row for row in fitting if not objection(planned, widest, row)] or fitting
    # Bytes alone are no time: what hides behind backward costs none. And what is offloaded is in
    # none: its transfers take longest, as much as lies on the host.
    is_time = all(row.time is not None and not _host_bytes(row) for row in usable)
    near = _within(usable, _per_sample, MARGIN if is_time else math.inf)
    # Copies, the simplest, have a wider margin.
    wide = _within(usable, _per_sample, COPIES_MARGIN)
    near = [row for row in wide if _tier(row) == 0] or near
    tier = min(map(_tier, near))
    simplest = _within([row for row in near if _tier(row) == tier], _host_bytes, 0.0)
    return min(_within(simplest, _per_sample, SAME), key=lambda row: row.share)


def _within(
    rows: Sequence[PlanRow], value: Callable[[PlanRow], float], margin: float
) -> Sequence[PlanRow]:
    """The rows whose value is the least, or more by a share of it."""
    least = min(map(value, rows))
    return [row for row in rows if value(row) <= least or value(row) <= (1 + margin) * least]


def _per_sample(row: PlanRow) -> float:
    """The cost of a sample: seconds, or bytes where the device's speed is not known."""
    return row.sent_bytes / row.samples if row.time is None else row.time.cost_s


def _host_bytes(row: PlanRow) -> float:
    return 0.0 if row.memory is None else row.memory.host


def _tier(row: PlanRow) -> int:
    """How much a strategy asks of model and machine.

    0: copies. 1: torch shards what they repeat. 2: another package does. 3: the model is split.
    """
    assert row.choice is not None
    degrees = row.choice.degrees
    if degrees.product > degrees.dp:
        return 3
    if row.choice.name == "deepspeed":
        return 2
    return int(row.choice.name not in {"single", "ddp"})


def widest_gradients(fitting: Iterable[PlanRow]) -> int:
    """Bytes in which gradients are summed, the most of all rows."""
    return max(row.recipe.gradients for row in fitting if row.recipe is not None)


def objection(planned: Plan, widest: int, row: PlanRow) -> str:
    """Why a row's cost is not to be compared with that of the others; "" mostly.

    `widest` are the bytes in which others sum gradients.
    """
    assert row.choice is not None
    width = widest if row.recipe is None else row.recipe.gradients
    if width < widest:
        return f"it sums gradients in {width} bytes, the others in {widest}"
    if slow := slow_link(planned, row):
        return f"the {_sums(row)} go over {slow} in every block, and nothing hides them"
    if row.time is None and row.choice.degrees.pp > 1:
        return "its stages wait for each other, which is not counted"
    return ""


def slow_link(planned: Plan, row: PlanRow) -> str:
    """Name the slow link that messages inside of blocks cross; "" where it was measured.

    All-reduces of tp wait in the middle of forward and backward. PCIe's and a network's data sheet
    says little of them: GPUs without peer-to-peer go through the host's memory.
    """
    assert row.choice is not None
    if row.time is not None and row.time.source == "measurement":
        return ""
    if not any(getattr(row.choice.degrees, axis) > 1 for axis in _IN_BLOCKS):
        return ""
    link = planned.device.network if crossing(planned, row) else planned.device.link
    if not link:
        return "a link that is not known"
    return "" if link.startswith("NVLink") else link


def crossing(planned: Plan, row: PlanRow) -> list[str]:
    """The axes of _IN_BLOCKS whose messages go from host to host inside of each block."""
    choice, per_host = row.choice, planned.device.per_host
    assert choice is not None
    return [axis for axis in _IN_BLOCKS if ring_of(choice, (axis,), per_host).hosts > 1]


def _sums(row: PlanRow) -> str:
    assert row.choice is not None
    degrees = row.choice.degrees
    return "sums of tp" if degrees.tp > 1 else f"messages of {'ep' if degrees.ep > 1 else 'cp'}"


def _why_not(
    planned: Plan, counted: Sequence[PlanRow], best: PlanRow, fastest: PlanRow
) -> list[str]:
    """Why the fastest, or what sends least, is not the choice; nothing where they are equal."""
    less = 100 * (1 - _per_sample(fastest) / _per_sample(best))
    if round(less) < 1:
        return []
    what = "sends" if fastest.time is None else "takes, by estimate,"
    more = f"{fastest.typed} {what} {less:.0f} % less"
    if reason := objection(planned, widest_gradients(counted), fastest):
        return [f"{more}, but {reason}."]
    if _host_bytes(best):
        return [f"{more}, without the transfers of what is offloaded."]
    if _tier(best) == _tier(fastest):
        return [f"{more}: too little to tell, and {best.typed} needs less memory."]
    margin = MARGIN if _tier(best) else COPIES_MARGIN
    enough = f"less than {100 * margin / (1 + margin):.0f} %" if fastest.time else "without a speed"
    return [f"{more}; {enough} is no reason for more than {best.typed}."]


def percent(row: PlanRow) -> str:
    """The share of the device's memory as text."""
    return f"{100 * row.share:.1f} %"


def cost(planned: Plan, row: PlanRow) -> str:
    """The cost of a sample under a strategy, as text."""
    seconds = "" if row.time is None else f"about {row.time.cost_s:.2g} s per sample; "
    if not planned.counts_sent(row):
        return f"{seconds}what it sends is not known"
    return f"{seconds}{exact_size(row.sent_bytes / row.samples)} sent per sample"


def _on_host(planned: Plan, row: PlanRow) -> str:
    """Word the bytes that all ranks of a host offload to it; "" where nothing is."""
    memory = row.memory
    if memory is None or not (memory.host or memory.disk):
        return ""
    sharing = min(planned.world_size, planned.device.per_host)
    each, where = (memory.host, "memory") if memory.host else (memory.disk, "NVMe")
    has = planned.device.host_memory_bytes * sharing if memory.host else 0.0
    of = f", which has {gigabytes(has)}" if has else ""
    return (
        f". Needs {gigabytes(each * sharing)} of each host's {where} ({ranks(sharing)} x "
        f"{gigabytes(each)}){of}"
    )


@dataclass(frozen=True, slots=True)
class Change:
    """A change that makes a plan safe.

    Attributes:
        words: The text: "With --checkpoint full".
        row: The row of the plan with the change.
    """

    words: str
    row: PlanRow

    @property
    def sentence(self) -> str:
        """The change with what is safe then, without a full stop."""
        return f"{self.words}, {self.row.typed} is safe ({percent(self.row)})"


def first_safe(
    changes: Iterable[tuple[str, SearchSpace]], best: Callable[[SearchSpace], PlanRow | None]
) -> Change | None:
    """The first change with which `best` has a safe row to choose; None where none has."""
    rows = ((words, best(space)) for words, space in changes)
    return next((Change(words, row) for words, row in rows if row is not None), None)


def more_ranks(space: SearchSpace) -> Iterator[SearchSpace]:
    """The same on twice as many ranks, and again, up to MOST_RANKS."""
    count = space.world_size * 2
    while count <= MOST_RANKS:
        yield replace(space, world_size=count)
        count *= 2


def _would_help(planned: Plan) -> str:
    """The smallest change that makes a strategy safe, or that none does, as a sentence."""
    change = smallest_change(planned)
    if change is None:
        added = _ladder(planned)[-1][0]
        and_words = f" and {added}" if added else ""
        return f"Not even {MOST_RANKS} ranks{and_words} make it safe: one block is too large."
    return f"{change.sentence}{_on_host(planned, change.row)}."


def smallest_change(planned: Plan) -> Change | None:
    """Options, another strategy or more ranks that make a plan for one strategy or all safe.

    Each with what comes before it; docs/plan.md has the order. None where nothing does.
    """
    return first_safe(_changes(planned), _safe_row)


def _changes(planned: Plan) -> Iterator[tuple[str, SearchSpace]]:
    """Changes to try, the smallest first: another strategy counts as one."""
    ladder = _ladder(planned)
    added, most = ladder[-1]
    if planned.load.has_gpu and planned.given.get("offload") is None and planned.model.has_shape:
        offloaded = replace(most, given={**most.given, "offload": "cpu"})
        ladder.append((f"{added} --offload cpu".strip(), offloaded))
    typed = planned.rows[0].choice if len(planned.rows) == 1 else None
    for (fewer, before), (words, space) in itertools.pairwise(ladder):
        if typed is None:
            yield f"With {words}", _of_all(space)
        else:
            yield f"With {words}", replace(space, strategy=typed.name)
            yield f"With {fewer}" if fewer else "Instead", _of_all(before)
    if typed is not None:
        words, space = ladder[-1]
        yield f"With {words}" if words else "Instead", _of_all(space)
    on_device = {word: value for word, value in most.given.items() if word != "offload"}
    for space in more_ranks(replace(most, given=on_device)):
        and_words = f" and {added}" if added else ""
        yield f"With {ranks(space.world_size)}{and_words}", _of_all(space)


def _ladder(planned: Plan) -> list[tuple[str, SearchSpace]]:
    """List savings of memory, each on top of those before it: words and plan; first none.

    Offloading is not in it: it moves what it saves to the host.
    """
    space: SearchSpace = planned
    ladder = [("", space)]
    if not planned.model.has_shape:  # its activations are not counted: nothing saves any
        return ladder
    half = "bf16" if planned.device.has_bf16 else "fp16"
    given, packed = planned.given, quantized(planned.model)
    is_single = planned.typed()[1].get("precision", "fp32") == "fp32"
    steps: list[tuple[str, dict[str, Any]]] = []
    if is_single:
        given = {**given, "precision": half}
        steps.append((f"--{half}", {"given": given}))
    if given.get("checkpoint") is None:
        given = {**given, "checkpoint": "full"}
        steps.append(("--checkpoint full", {"given": given}))
    if planned.load.batch > 1:
        steps.append(("--batch 1", {"load": replace(planned.load, batch=1)}))
    if packed is not None:
        steps.append(("--quant 4bit", {"model": packed}))
    for word, change in steps:
        space = replace(space, **change)
        ladder.append((f"{ladder[-1][0]} {word}".strip(), space))
    return ladder


def _of_all(space: SearchSpace) -> SearchSpace:
    """The same for all strategies, without what only some of them take."""
    given = {word: value for word, value in space.given.items() if not _is_of_one(word)}
    return replace(space, strategy=None, given=given)


def _safe_row(space: SearchSpace) -> PlanRow | None:
    """The row to choose of a plan; None where none is safe."""
    again = _plan_again(space)
    safe = [row for row in _useful(again) if row.verdict == SAFE] if again is not None else []
    return best_of(again, safe) if again is not None and safe else None


def _is_of_one(word: str) -> bool:
    """Whether it is a degree, or an option that most strategies do not take, but offloading."""
    rows = [row for row in OPTIONS.values() if word in (row.name, row.word) and word != "offload"]
    return word in DEGREES or any(row.steps and not {*row.steps} & _COMMON for row in rows)
