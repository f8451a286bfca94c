"""A plan as tables of memory, time and rules of thumb, and as bars beside the device's limit."""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nbdist.core.units import exact_size, gigabytes
from nbdist.core.view import View, folded, lines_html, table
from nbdist.planner.advice import Advice, percent
from nbdist.planner.lora import described
from nbdist.planner.memory import FORMULAS, Memory
from nbdist.planner.models import ModelShape
from nbdist.planner.plan import NO, Plan, PlanRow
from nbdist.planner.rules_of_thumb import RuleAnswer
from nbdist.planner.step_time import Time
from nbdist.planner.workload import widths_for
from nbdist.strategy.degrees import ranks
from nbdist.strategy.footprint import RECIPES

# In {} stands the unit of all columns of memory.
_HEAD = (
    "strategy", "mesh", "parameters", "gradients", "optimizer", "activations", "buffers", "step",
    "overhead", "peak ({})", "% of device", "fits", "samples", "sent ({})", "s per step",
)  # fmt: skip
_RULES_HEAD = ("rule of thumb", "chooses", "because", "fits", "a sample", "memory")
# Axes whose messages may be waited for, in the order of the columns.
AXES = ("dp", "tp", "cp", "ep", "pp")
_UNITS = {"GB": 1e9, "MB": 1e6}
_SMALL = 50_000_000  # parameters: 0.8 GB with gradients and Adam
# What a bar is made of, in the order in which it is stacked: letter, word, colour.
_PARTS = (
    ("p", "parameters", "#4477aa"),
    ("g", "gradients", "#66ccee"),
    ("o", "optimizer", "#228833"),
    ("a", "activations, where larger than gradients", "#ccbb44"),
    ("b", "buffers", "#ee6677"),
    ("c", "overhead", "#bbbbbb"),
)
_LIMIT_AT = 40  # characters of a bar that are the device's memory
_LONGEST = 64
_VERDICTS = {"safe": "#228833", "risky": "#aa7700", "no": "#bb3344", "?": "#777777"}


@dataclass(frozen=True, slots=True)
class PlanView(View):
    """View of a plan, with its numbers."""

    plan: Plan | None = None
    advice: Advice | None = None


def shown_plan(plan: Plan, advice: Advice) -> PlanView:
    """The advice first, then table and bars; in the HTML what does not fit is folded."""
    counted = [row for row in plan.rows if row.memory is not None]
    refused = [f"{row.typed}: {row.problem}" for row in plan.rows if row.problem]
    before, after = heading(plan), footing(plan)
    rules = shown_rules(plan, advice)
    bars, times = _text_bars(plan, counted), shown_time(plan, counted)
    text = "\n".join(
        [*advice.sentences, "", *before, "", _table(plan, counted).text, "", *bars, "",
         *([times.text, ""] if times.text else []), *([rules.text, ""] if rules.text else []),
         *refused, *after]
    )  # fmt: skip
    fitting = [row for row in counted if row.verdict != NO] or counted
    rest = [row for row in counted if row not in fitting]
    page = (
        f'<div><div style="font-weight:600">{lines_html(advice.sentences)}</div>'
        f"{lines_html(before)}{_rows_html(plan, fitting)}"
        f"{_folded('does not fit', [row.typed for row in rest], _rows_html(plan, rest))}"
        f"{_folded('not possible', [r.typed for r in plan.rows if r.problem], lines_html(refused))}"
        f"{rules.html}"
        f'<div style="font-size:smaller">{lines_html(after)}</div></div>'
    )
    return PlanView(text, page, plan=plan, advice=advice)


def _table(plan: Plan, rows: Sequence[PlanRow]) -> View:
    unit = "MB" if plan.model.parameters < _SMALL else "GB"
    return table(
        [word.format(unit) for word in _HEAD], [_cells(plan, row, _UNITS[unit]) for row in rows]
    )


def _rows_html(plan: Plan, rows: Sequence[PlanRow]) -> str:
    return _table(plan, rows).html + _svg(plan, rows) + shown_time(plan, rows).html


def _folded(what: str, names: Sequence[str], body: str) -> str:
    """Fold the details that not every reader needs; "" of no strategies."""
    return folded(f"{what}: {', '.join(names)}", body) if names else ""


def heading(plan: Plan) -> list[str]:
    """Describe the subject of the plan: model, devices, batch, numbers stored, assumptions."""
    model, load, device = plan.model, plan.load, plan.device
    form = ""
    if model.has_shape:
        assumed = "assumed: " if model.is_assumed else ""
        heads = f", {model.shape.heads} heads" if not model.is_assumed else ""
        form = f" ({assumed}{model.shape.layers} blocks of width {model.shape.hidden}{heads})"
    first = (
        f"{model.name}: {model.parameters:,} parameters{form}, on {ranks(plan.world_size)} "
        f"with {device.title}, {gigabytes(device.memory_bytes)} each"
    )
    tokens = f" x {load.sequence} tokens" if model.has_shape else ""
    is_search = len({row.batch for row in plan.rows if row.batch}) > 1
    batch = f"batch {load.batch}{tokens} on each data-parallel rank"
    if is_search:
        batch = f"{load.samples} samples{tokens} in each step, of all ranks"
    lines = [
        first,
        *plan.live,
        f"{batch}, {load.optimizer}",
        *_experts(plan),
        *(_frozen(plan) if model.lora else [_counts(model)] if model.parameters >= _SMALL else []),
    ]
    recipes: dict[str, list[str]] = {}
    for row in plan.rows:
        if row.recipe is not None:
            trained = "trained " if model.lora else ""
            name = f"{row.recipe.total} B per {trained}parameter: {row.recipe.name}"
            recipes.setdefault(name, []).append(row.typed)
    for name, names in recipes.items():
        some = names if len(names) <= 3 else names[:2]
        more = f" and {len(names) - 2} more" if len(names) > 3 else ""
        whose = f" ({', '.join(some)}{more})" if len(recipes) > 1 and not is_search else ""
        lines.append(f"recipe {name}{whose}")
    return lines + [f"Assumed: {', '.join(plan.assumed)}"] * bool(plan.assumed)


def _experts(plan: Plan) -> list[str]:
    """How many experts there are, what a token passes, and how evenly they are taken to be used."""
    shape = plan.model.shape
    if shape.experts is None or not plan.model.has_shape:
        return []
    experts, blocks = shape.experts, f"{shape.routed_blocks} of {shape.layers} blocks"
    even = f"up to {plan.load.imbalance:g} x as many rows as the mean"
    if plan.load.imbalance == 1:
        even = "equally many rows"
    passes = f"{experts.chosen} for each token, which passes {shape.active_parameters:,} parameters"
    return [
        f"experts: {experts.count} in {blocks}, {passes}; under ep ranks get {even} (--imbalance)"
    ]


def _frozen(plan: Plan) -> list[str]:
    """Word the frozen base of adapters, as the rows store it."""
    choices = [row.choice for row in plan.rows if row.choice]
    stored = {widths_for(plan.model, choice, plan.load).frozen for choice in choices}
    return described(plan.model, max(stored, default=2))


def _counts(model: ModelShape) -> str:
    """Spell out a count that would mislead alone: each recipe beside its sum."""
    short, full = RECIPES["bf16"].total, RECIPES["mixed"].total
    single, half, more, less = (gigabytes(n * model.parameters) for n in (4, 2, full, short))
    return (
        f"unsharded: parameters {single} in fp32, {half} in bf16; with gradients and Adam {more} "
        f"({full} B: fp32, autocast, or bf16 with a copy in fp32) or {less} ({short} B: all in "
        "bf16, no copy)"
    )


def _cells(plan: Plan, row: PlanRow, unit_bytes: float) -> list[str]:
    memory, time = row.memory, row.time
    assert memory is not None

    def size_cell(size_bytes: float) -> str:
        return f"{size_bytes / unit_bytes:,.1f}"

    activations = "?" if memory.is_partial else size_cell(memory.activations)
    more = "> " if memory.is_partial else ""
    return [
        row.typed, row.mesh.partition(" (")[0] or "-",
        *map(size_cell, (memory.parameters, memory.gradients, memory.optimizer)), activations,
        *map(size_cell, (memory.buffers, memory.step, memory.overhead)),
        f"{more}{size_cell(memory.peak)}", f"{100 * row.share:.1f}", row.verdict,
        str(row.samples), size_cell(row.sent_bytes) if plan.counts_sent(row) else "?",
        seconds(time.step_s) if time else "-",
    ]  # fmt: skip


def footing(plan: Plan) -> list[str]:
    """Explain the numbers, and name the sources of speeds."""
    lines = _notes(plan)
    device = plan.device
    lines.append(
        "GB = 10^9 bytes, on the rank that needs most. Peak: the sum with activations, or with "
        "gradients and the optimizer's step, whichever is larger. Fits: safe below "
        f"{100 * device.safe_share:g} % of the device, risky up to 100 %."
    )
    hosts = [row for row in plan.rows if row.memory is not None and row.memory.host]
    if hosts:
        most = max(row.memory.host for row in hosts if row.memory is not None)
        sharing = min(plan.world_size, plan.device.per_host)
        lines.append(
            f"Offloaded: up to {gigabytes(most)} in each rank's CPU memory, "
            f"{gigabytes(most * sharing)} in that of a host with {ranks(sharing)}; the time does "
            "not include the transfers."
        )
    if not plan.model.has_shape:
        lines.append(
            "Time, and the activations that tp, pp and cp send, are not estimated: the model's "
            "shape is not known."
        )
    elif device.bandwidth:
        half, single = device.half_flops / 1e12, device.single_flops / 1e12
        measured = any(row.time and row.time.source == "measurement" for row in plan.rows)
        between = f"{device.ports} x {device.network}"
        if device.host_bytes_per_s:
            between = f"{device.host_bytes_per_s / 1e9:g} GB/s"
        links = "as measured here"
        if not measured:
            links = f"over {device.link} in a host, {between} of a host between hosts"
        lines.append(
            "s per step: estimated for a step of all samples; large products at "
            f"{100 * device.sustained:.0f} % of {half:.0f} TFLOPS ({single:.0f} in fp32), "
            f"messages {links}. {device.source}"
        )
    else:
        lines.append(
            "Time: not estimated, since the device's speed is not known; --gpu takes one whose "
            "speed is."
        )
    lines.append("Formulas, sources and what is assumed: docs/plan.md.")
    return lines


def _notes(plan: Plan) -> list[str]:
    """Note the rows that a run has counted, and those it could not, by reason."""
    counted = [(row.typed, row.memory) for row in plan.rows if row.memory is not None]
    lines = []
    if any(memory.engine != FORMULAS for _, memory in counted):
        lines.append(
            "Memory: counted by a step with fake tensors under each strategy, as nbdist prepares "
            "it; includes the peak of backward."
        )
    reasons: dict[str, list[str]] = {}
    for typed, memory in counted:
        if memory.note:
            what = "activations not counted" if memory.is_partial else "by formulas"
            reasons.setdefault(f"{what}: {memory.note}", []).append(typed)
    return lines + [f"{', '.join(names)}: {reason}." for reason, names in reasons.items()]


def _stacked(memory: Memory) -> list[float]:
    """Parts of the peak. Of a run gradients and activations are never all there together."""
    resident = memory.states + memory.buffers + memory.overhead
    rest = max(0.0, memory.peak - resident)
    short = max(0.0, resident - memory.peak)
    buffers = max(0.0, memory.buffers - short)
    gradients = max(0.0, memory.gradients - (short - (memory.buffers - buffers)))
    return [memory.parameters, gradients, memory.optimizer, rest, buffers, memory.overhead]


def _text_bars(plan: Plan, rows: Sequence[PlanRow]) -> list[str]:
    """A line for each row; the device's limit is a bar across all."""
    limit = plan.device.memory_bytes
    width = max(len(row.typed) for row in rows) if rows else 0
    lines = []
    for row in rows:
        assert row.memory is not None
        # Edges are rounded, not parts: the bar's length is the sum's.
        edge, bar = 0.0, ""
        for (letter, _, _), size in zip(_PARTS, _stacked(row.memory), strict=True):
            edge += size / limit * _LIMIT_AT
            bar += letter * (min(round(edge), _LONGEST) - len(bar))
        bar = f"{bar[:_LIMIT_AT]:{_LIMIT_AT}}|{bar[_LIMIT_AT:]}"
        more = ">" if edge > _LONGEST else ""
        lines.append(f"{row.typed:{width}}  {bar}{more}".rstrip())
    letters = ", ".join(f"{letter} {word}" for letter, word, _ in _PARTS)
    return [f"| {gigabytes(limit)}; {letters}", *lines]


def _svg(plan: Plan, rows: Sequence[PlanRow]) -> str:
    """The same as a picture: a bar for each row, a line at the limit, one where safe ends."""
    if not rows:
        return ""
    margin, width, height = 170, 640, 20
    limit = plan.device.memory_bytes
    most = max(row.memory.peak for row in rows if row.memory is not None)
    full = min(max(1.15 * limit, most), 2.5 * limit)  # what is cut is far from fitting

    def at(size: float) -> float:
        return margin + (width - margin - 60) * min(size / full, 1)

    shapes = [_bar(row, index * height + 20, at) for index, row in enumerate(rows)]
    bottom = len(rows) * height + 24
    safe = plan.device.safe_share
    marks = ((safe, "3,3", f"{100 * safe:g} %", "end"), (1.0, "", gigabytes(limit), "start"))
    for share, dash, label, side in marks:
        x = at(share * limit)
        shapes.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="16" y2="{bottom}" stroke="currentColor" '
            f'stroke-dasharray="{dash}"></line><text x="{x:.1f}" y="12" font-size="10" '
            f'fill="currentColor" text-anchor="{side}">{label}</text>'
        )
    for index, (_, title, colour) in enumerate(_PARTS):
        word = title.partition(",")[0]
        x, y = margin + 150 * (index % 3), bottom + 8 + 14 * (index // 3)
        shapes.append(
            f'<rect x="{x}" y="{y}" width="9" height="9" fill="{colour}"></rect>'
            f'<text x="{x + 13}" y="{y + 9}" font-size="10" fill="currentColor">{word}</text>'
        )
    name = html.escape(f"Memory of {plan.model.name} by strategy beside the device's limit")
    return (
        f'<svg role="img" aria-label="{name}; the table has the numbers." width="{width}" '
        f'height="{bottom + 40}" viewBox="0 0 {width} {bottom + 40}" '
        f'font-family="sans-serif">{"".join(shapes)}</svg>'
    )


def _bar(row: PlanRow, y: int, at: Callable[[float], float]) -> str:
    assert row.memory is not None
    name = html.escape(row.typed)
    shapes = [_svg_text(at(0) - 6, y, name, 'fill="currentColor" text-anchor="end"')]
    edge = 0.0
    for (_, word, colour), size in zip(_PARTS, _stacked(row.memory), strict=True):
        begin, edge = edge, edge + size
        wide = at(edge) - at(begin)
        if wide > 0:
            shapes.append(
                f'<rect x="{at(begin):.1f}" y="{y}" width="{wide:.1f}" height="14" '
                f'fill="{colour}"><title>{word}: {gigabytes(size)}</title></rect>'
            )
    colour = _VERDICTS[row.verdict]
    shapes.append(_svg_text(at(edge) + 4, y, percent(row), f'fill="{colour}"'))
    return "".join(shapes)


def _svg_text(x: float, y: int, text: str, look: str) -> str:
    return f'<text x="{x:.1f}" y="{y + 11}" font-size="11" {look}>{text}</text>'


def shown_time(plan: Plan, rows: Sequence[PlanRow]) -> View:
    """A line for each row whose time is estimated; an empty view where there is none."""
    timed = [(row, row.time) for row in rows if row.time is not None]
    if not timed:
        return View("")
    axes = [axis for axis in AXES if any(time.exposed_s.get(axis) for _, time in timed)]
    is_idle = any(time.idle_s for _, time in timed)
    head = [
        "strategy", "s per step", "all overlapped - none", "compute",
        *(f"waits for {axis}" for axis in axes), *["idle stages"] * is_idle,
        "% of peak (MFU)", "tokens/s", *(cost_head(plan)),
    ]  # fmt: skip
    lines = [
        [
            row.typed, seconds(time.step_s), f"{seconds(time.least_s)} - {seconds(time.most_s)}",
            seconds(time.compute_s), *(seconds(time.exposed_s.get(axis, 0.0)) for axis in axes),
            *[seconds(time.idle_s)] * is_idle, f"{100 * time.mfu:.1f}", f"{time.tokens_per_s:,.0f}",
            *cost_cells(plan, time),
        ]
        for row, time in timed
    ]  # fmt: skip
    return table(head, lines)


def seconds(value_s: float) -> str:
    """Two digits that count: `0.012`, `2.4`, `161`."""
    return f"{value_s:.0f}" if value_s >= 10 else f"{value_s:.2g}"


def gpu_hours(plan: Plan, time: Time, tokens: float) -> float:
    """Hours of all devices together to train on so many tokens."""
    return tokens / time.tokens_per_s * plan.world_size / 3600


def cost_head(plan: Plan) -> list[str]:
    """Title of the cost of the given tokens, or of a billion where only a price was given."""
    if not plan.tokens and not plan.price:
        return []
    tokens = f"{plan.tokens:.3g}".replace("e+0", "e").replace("e+", "e") if plan.tokens else "1e9"
    return [f"GPU-hours for {tokens} tokens", *["cost"] * bool(plan.price)]


def cost_cells(plan: Plan, time: Time) -> list[str]:
    """GPU-hours and cost of a row, under `cost_head`."""
    if not plan.tokens and not plan.price:
        return []
    hours = gpu_hours(plan, time, plan.tokens or 1e9)
    return [f"{hours:,.1f}", *[f"{hours * plan.price:,.2f}"] * bool(plan.price)]


def shown_rules(plan: Plan, advice: Advice) -> View:
    """A row for each rule; nothing where there are none."""
    if not advice.rules:
        return View("")
    best = advice.row
    choice = f" beside {best.typed}: time of a sample, peak memory" if best else ""
    rows = [_rule_cells(plan, answer, best) for answer in advice.rules]
    return table(_RULES_HEAD, rows, before=[f"Rules of thumb{choice} (sources: docs/plan.md)"])


def _rule_cells(plan: Plan, answer: RuleAnswer, best: PlanRow | None) -> list[str]:
    first = [answer.rule, answer.typed, answer.because]
    row = answer.row
    if row is None:
        return [*first, "not possible", "-", "-"]
    if best is not None and answer.typed == best.typed:
        return [*first, row.verdict, "the same", "the same"]
    return [*first, row.verdict, _rule_time(plan, row, best), _rule_memory(row, best)]


def _rule_time(plan: Plan, row: PlanRow, best: PlanRow | None) -> str:
    """Time of a sample without transfers to the host, or bytes where no speed is known."""
    if row.choice is not None and row.choice.options.offload:
        return "not counted"
    if row.time is not None:
        if best is None or best.time is None:
            return f"{row.time.cost_s:.2g} s"
        share = row.time.cost_s / best.time.cost_s - 1
        return f"{row.time.cost_s:.2g} s ({100 * share:+.0f} %)"
    if not plan.counts_sent(row):
        return "?"
    return f"{exact_size(row.sent_bytes / row.samples)} sent"


def _rule_memory(row: PlanRow, best: PlanRow | None) -> str:
    assert row.memory is not None
    peak = gigabytes(row.memory.peak)
    if best is None or best.memory is None:
        return peak
    more = row.memory.peak - best.memory.peak
    return f"{peak} ({'+' if more >= 0 else '-'}{gigabytes(abs(more))})"
