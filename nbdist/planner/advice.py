"""What to choose by a plan's numbers, what would make it fit, and what common rules say instead."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from nbdist.bandwidth.results import LinkModel
from nbdist.core.units import exact_size
from nbdist.errors import OptionError
from nbdist.planner.plan import NO, RISKY, SAFE, UNKNOWN, Plan, PlanRow, plan
from nbdist.strategy.choice import Strategy
from nbdist.strategy.degrees import ranks
from nbdist.strategy.options import DEGREES, read

_MOST_RANKS = 4096


@dataclass(frozen=True, slots=True)
class Advice:
    """What a plan comes to.

    Attributes:
        row: What to choose; None where nothing fits.
        sentences: Why, and what would help.
        rules: Common rules that say something else, a sentence each.
    """

    row: PlanRow | None
    sentences: tuple[str, ...]
    rules: tuple[str, ...] = ()


def advise(
    planned: Plan, given: Mapping[str, object] | None = None, measured: LinkModel | None = None
) -> Advice:
    """The safe strategy that costs least in communication; else what would make one safe.

    The plan has a row for each strategy, or one; `given` and `measured` are what it was made with.
    """
    given = dict(given or {})
    # Of a model whose shape no formula knows: by bytes alone, and no other plan is made.
    has_shape = planned.model.has_shape
    useful = _useful(planned)
    for wanted in (SAFE, RISKY) if has_shape else (SAFE,):
        fitting = [row for row in useful if row.verdict == wanted]
        fitting, notes = _comparable(planned, fitting)
        if fitting:
            best = min(fitting, key=_cost)
            sentences = [_recommended(planned, best, len(fitting)), *notes]
            if not has_shape:
                return Advice(best, tuple(sentences))
            if wanted == RISKY:
                sentences.append(_would_help(planned, given, measured))
            fits_one = any(row.typed == "single" and row.verdict == SAFE for row in planned.rows)
            if fits_one and planned.world_size > 1:
                sentences.append("It fits on one device: more ranks only add speed.")
            return Advice(best, tuple(sentences), _disagreeing(planned, best))
    if not has_shape and any(row.verdict == UNKNOWN for row in useful):
        sentence = "No strategy is recommended: the activations could not be counted."
        return Advice(None, (sentence,))
    nothing = "No strategy accepts these degrees and options."
    if useful:
        least = min(useful, key=lambda row: row.share)
        needs = f"needs {percent(least)} of the device."
        nothing = f"Nothing fits: the smallest, {least.typed}, {needs}"
    helps = (_would_help(planned, given, measured),) if has_shape else ()
    return Advice(None, (nothing, *helps))


def _comparable(planned: Plan, rows: list[PlanRow]) -> tuple[list[PlanRow], list[str]]:
    """The rows of which it is known what they send, or all; a sentence on those left out."""
    counted = [row for row in rows if planned.counts_sent(row)]
    if len(counted) in {0, len(rows)}:
        return rows, []
    return counted, ["tp, pp and cp are not compared: what they send is not known."]


def _useful(planned: Plan) -> list[PlanRow]:
    """The rows that were counted; each rank of `single` does the same, so more train no faster."""
    counted = [row for row in planned.rows if row.memory is not None]
    return [row for row in counted if planned.world_size == 1 or row.typed != "single"]


def _cost(row: PlanRow) -> tuple[float, ...]:
    """What is no computation, for each sample; where no speed is known, bytes and no pipelines.

    Where that is equal: what needs no other package, then what stands first in the table.
    """
    assert row.choice is not None
    per_sample = row.sent_bytes / row.samples
    first = float(row.choice.degrees.pp > 1) if row.time is None else row.time.cost_s
    needs_package = row.choice.name == "deepspeed"
    return float(f"{first:.3g}"), float(f"{per_sample:.3g}"), needs_package


def _recommended(planned: Plan, row: PlanRow, others: int) -> str:
    among = (
        f"the only {row.verdict} strategy" if others == 1 else f"least communication of {others}"
    )
    verdict = f"{row.verdict} ({percent(row)} of the device)"
    if planned.world_size == 1:
        return f"{row.typed}: {verdict}."
    if len(planned.rows) == 1:
        return f"{row.typed}: {verdict}; communication: {cost(planned, row)}."
    return f"Recommended: {row.typed}: {verdict}; {among}: {cost(planned, row)}."


def percent(row: PlanRow) -> str:
    """The share of the device's memory as text."""
    return f"{100 * row.share:.1f} %"


def cost(planned: Plan, row: PlanRow) -> str:
    """What a strategy costs beside computation, for each sample, as text."""
    if not planned.counts_sent(row):
        return "what it sends is not known"
    sent = f"{exact_size(row.sent_bytes / row.samples)} sent per sample"
    if row.time is None:
        return sent
    idle = " and idle time" if row.time.idle_s else ""
    return f"{sent}, about {row.time.cost_s:.2g} s of communication{idle} per sample"


def _would_help(planned: Plan, given: Mapping[str, object], measured: LinkModel | None) -> str:
    """The first of these that makes a strategy safe, each with those before it; else more ranks."""
    load, options = planned.load, dict(given)
    added: list[str] = []
    half = "bf16" if planned.device.has_bf16 else "fp16"
    is_single = read(options)[1].get("precision", "fp32") == "fp32"
    steps: tuple[tuple[str, bool, dict[str, object], int | None], ...] = (
        (f"--{half}", is_single, {"precision": half}, None),
        ("--checkpoint full", options.get("checkpoint") is None, {"checkpoint": "full"}, None),
        ("--batch 1", load.batch > 1, {}, 1),
        (
            "--offload cpu",
            options.get("offload") is None and load.has_gpu,
            {"offload": "cpu"},
            None,
        ),
    )
    ladder: list[tuple[str, Plan, dict[str, object]]] = []
    for word, is_new, more, batch in steps:
        if is_new:
            added.append(word)
            options.update(more)
            load = load if batch is None else replace(load, batch=batch)
            ladder.append((" ".join(added), replace(planned, load=load), dict(options)))
    # The strategy that was typed, then all.
    for strategy in [None] if len(planned.rows) > 1 else [planned.rows[0].choice, None]:
        for words, changed, with_options in ladder:
            row = _safe(changed, with_options, measured, strategy)
            if row is not None:
                return f"With {words}, {row.typed} is safe ({percent(row)})."
    options.pop("offload", None)
    words = " ".join(word for word in added if "offload" not in word)
    and_words = f" and {words}" if words else ""
    count = planned.world_size * 2
    while count <= _MOST_RANKS:
        row = _safe(replace(planned, load=load, world_size=count), options)
        if row is not None:
            return f"With {ranks(count)}{and_words}, {row.typed} is safe ({percent(row)})."
        count *= 2
    return f"Not even {_MOST_RANKS} ranks{and_words} make it safe: one block is too large."


def _safe(
    planned: Plan,
    options: Mapping[str, object],
    measured: LinkModel | None = None,
    like: Strategy | None = None,
) -> PlanRow | None:
    """The cheapest safe row of another plan, or the one like a choice; None without one."""
    given = dict(options)
    if like is None:
        given = {word: value for word, value in given.items() if word not in DEGREES}
    try:
        again = plan(
            planned.model, planned.device, planned.world_size, planned.load,
            strategy=like.name if like else None, given=given, measured=measured,
        )  # fmt: skip
    except OptionError:  # it does not take one of the options
        return None
    return min((row for row in _useful(again) if row.verdict == SAFE), key=_cost, default=None)


def rows_by_rules(planned: Plan, rows: Mapping[str, PlanRow]) -> Mapping[str, str]:
    """Common rules, and the row that each names; "" where it names none."""

    def fits(typed: str) -> bool:
        return typed in rows and rows[typed].verdict != NO

    single = rows["single"].memory if "single" in rows else None
    by_size = ""
    if single is not None:
        is_small = single.parameters <= planned.device.memory_bytes
        by_size = "fsdp --shard grad-op" if is_small else "fsdp"
        by_size = "ddp" if single.parameters < 2e9 else by_size
    is_large = planned.model.parameters >= 70e9 and planned.world_size > 8
    second, third = "deepspeed --stage 2", "deepspeed --stage 3"
    return {
        "fits on one device: ddp, else fsdp": "ddp" if fits("single") else "fsdp",
        "ZeRO stage 2 first, stage 3 where that does not fit": second if fits(second) else third,
        "parameters under 2 GB: ddp, tight: grad-op, larger than the device: full": by_size,
        "from 70 billion: tp 8 in a host, pp between hosts, dp for the rest": (
            "pp --tp 8 --pp 2" if is_large else ""
        ),
    }


def _disagreeing(planned: Plan, best: PlanRow) -> tuple[str, ...]:
    """Rules that name another row, with what its numbers are."""
    if len(planned.rows) < 2 or planned.world_size == 1:
        return ()
    rows = {row.typed: row for row in planned.rows if row.memory is not None}
    sentences = []
    for rule, typed in rows_by_rules(planned, rows).items():
        row = rows.get(typed)
        if row is not None and row.typed != best.typed:
            verdict = f"{row.verdict} ({percent(row)})"
            sentences.append(
                f'The rule "{rule}" says {row.typed}: {verdict}, {cost(planned, row)}.'
            )
    return tuple(sentences)
