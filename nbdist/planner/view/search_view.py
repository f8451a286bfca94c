"""A search as its ten best, the Pareto front, and a picture of memory against time."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

from nbdist.core.units import gigabytes
from nbdist.core.view import View, folded, lines_html, table
from nbdist.planner.advice import Advice, crossing, objection, percent, widest_gradients
from nbdist.planner.plan import RISKY, SAFE, PlanRow
from nbdist.planner.search import BEST, Search, step_s
from nbdist.planner.view.plan_view import (
    PlanView,
    cost_cells,
    cost_head,
    footing,
    heading,
    seconds,
)

_HEAD = ("", "strategy, as typed", "batch", "peak (GB)", "% of device", "s per step", "tokens/s",
         "more than the first")  # fmt: skip
# The picture: pixels, and the margins around its axes.
_WIDTH, _HEIGHT, _LEFT, _TOP, _RIGHT, _BOTTOM = 720, 390, 60, 24, 20, 70
# Of rows that fit, those of each mesh that are drawn.
_OF_MESH = 4
# Times of the fastest row and shares of the device that are drawn.
_SLOWEST, _LARGEST = 4.0, 2.0
_COLOURS = {SAFE: "#4477aa", RISKY: "#ccbb44"}
_NO_COLOUR, _FRONT_COLOUR, _CHOSEN_COLOUR = "#bb3344", "#228833", "#aa3377"


@dataclass(frozen=True, slots=True)
class SearchView(PlanView):
    """View of a search, with its numbers; `plan.rows` are those that were timed."""

    search: Search | None = None


def shown_search(search: Search, advice: Advice, lines: Sequence[str]) -> SearchView:
    """The choice with the lines that take it first, then the ten best and the front.

    `lines` are what to type for the chosen row.
    """
    chosen = advice.row
    take = _take(search, chosen, lines)
    best, front = _best(search, chosen), _front(search)
    before, after = [*heading(search), _counts(search)], footing(search)
    parts = [*advice.sentences, *take, "", *before, ""]
    for view in (best, front):
        parts += [view.text, ""] if view.text else []
    page = (
        f'<div><div style="font-weight:600">{lines_html(advice.sentences)}</div>'
        f"{lines_html(take)}{_picture(search, chosen)}{best.html}"
        f"{folded('the Pareto front as a table', front.html) if front.html else ''}"
        f"{lines_html(before)}"
        f'<div style="font-size:smaller">{lines_html(after)}</div></div>'
    )
    return SearchView("\n".join([*parts, *after]), page, plan=search, advice=advice, search=search)


def _take(search: Search, chosen: PlanRow | None, lines: Sequence[str]) -> list[str]:
    """Word the options for a row, and the batch that goes with it."""
    if chosen is None:
        return []
    samples = search.load.samples
    loader = f"The data loader gives each data-parallel rank {chosen.batch} of {samples} samples"
    return [*lines, f"{loader} at once."]


def _counts(search: Search) -> str:
    fit = f"{search.safe:,} are safe, {search.risky:,} risky" if search.safe + search.risky else (
        "none fits"
    )  # fmt: skip
    rest = (search.safe or search.risky) - search.timed
    left = f"; {rest:,} of these compute too slowly to be near the fastest" if rest else ""
    return f"{search.counted:,} configurations: {fit}{left}."


def _best(search: Search, chosen: PlanRow | None) -> View:
    """The ten fastest and the chosen one, with what each costs more than the first."""
    ranked = search.ranked
    if not ranked:
        return View("")
    shown = list(enumerate(ranked, 1))[:BEST]
    place = next((n for n, row in enumerate(ranked, 1) if row is chosen), None)
    if chosen is not None and place is not None and place > BEST:
        shown.append((place, chosen))
    head = [*_HEAD, *cost_head(search)]
    rows = [[_mark(number, row, chosen), *_cells(search, row)] for number, row in shown]
    before = [f"The fastest of {len(ranked):,} (> is the choice):"]
    return table(head, rows, before=before, after=_notes(search, shown))


def _mark(number: int, row: PlanRow, chosen: PlanRow | None) -> str:
    return f"> {number}" if row is chosen else f"{number}"


def _cells(search: Search, row: PlanRow) -> list[str]:
    first, time, memory = search.ranked[0], row.time, row.memory
    assert time is not None
    assert memory is not None
    more = 100 * (step_s(row) / step_s(first) - 1)
    return [
        row.typed, str(row.batch), f"{memory.peak / 1e9:,.1f}", f"{100 * row.share:.1f}",
        f"{time.step_s:.3g}", f"{time.tokens_per_s:,.0f}", f"+{more:.1f} %" if more else "-",
        *cost_cells(search, time),
    ]  # fmt: skip


def _notes(search: Search, shown: Sequence[tuple[int, PlanRow]]) -> list[str]:
    """Why some of the fastest are not compared, and what leaving a host costs, by row."""
    widest = widest_gradients(search.ranked)
    reasons: dict[str, list[str]] = {}
    for number, row in shown:
        if reason := objection(search, widest, row):
            reasons.setdefault(f"{reason}.", []).append(str(number))
        for axis in crossing(search, row):
            assert row.time is not None
            waits_s = row.time.exposed_s.get(axis, 0.0)
            share = 100 * waits_s / row.time.step_s
            note = f"{axis} crosses hosts, and a step waits so long for its messages."
            reasons.setdefault(note, []).append(f"{number} ({seconds(waits_s)} s, {share:.0f} %)")
    return [f"{', '.join(numbers)}: {reason}" for reason, numbers in reasons.items()]


def _front(search: Search) -> View:
    """Less memory, and what it costs."""
    front = search.front
    if len(front) < 2:
        return View("")
    rows = [_cells(search, row) for row in front]
    before = ["Pareto front: no other row is as fast with as little memory."]
    return table([*_HEAD[1:], *cost_head(search)], rows, before=before)


@dataclass(frozen=True, slots=True)
class _Scale:
    """Seconds and shares of the device's memory as places in the picture."""

    fastest_s: float
    slowest_s: float
    largest: float

    def x(self, at_s: float) -> float:
        """Logarithmic."""
        part = math.log(at_s / self.fastest_s) / math.log(self.slowest_s / self.fastest_s)
        return _LEFT + 10 + min(part, 1.0) * (_WIDTH - _LEFT - _RIGHT - 20)

    def y(self, share: float) -> float:
        """Linear, from 0 at the bottom."""
        return _HEIGHT - _BOTTOM - min(share / self.largest, 1.0) * (_HEIGHT - _TOP - _BOTTOM)


def _picture(search: Search, chosen: PlanRow | None) -> str:
    """Memory against time: what fits as discs, what does not as crosses, the front as a line."""
    front = search.front
    drawn = _drawn(search, chosen)
    if not drawn:
        return ""
    times, shares = [step_s(row) for row in drawn], [row.share for row in drawn]
    fastest_s = min(times)
    slowest_s = max(1.5 * fastest_s, min(max(times), _SLOWEST * fastest_s))
    scale = _Scale(fastest_s, slowest_s, min(max(1.1, *shares), _LARGEST))
    shapes = [*_axes(search, scale), _front_line(front, scale)]
    shapes += [_point(row, scale, row in front, row is chosen) for row in drawn]
    name = html.escape(f"Memory against time of {search.model.name}'s configurations")
    return (
        f'<svg role="img" aria-label="{name}; the tables have the numbers." width="{_WIDTH}" '
        f'height="{_HEIGHT}" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" '
        f'font-size="11">{"".join(shapes)}</svg>'
    )


def _drawn(search: Search, chosen: PlanRow | None) -> list[PlanRow]:
    """Rows to draw: each mesh's fastest that fit, or its smallest; the front; and the choice."""
    count: dict[object, int] = {}
    drawn = []
    keep = {id(row) for row in (*search.front, *search.ranked[:BEST], chosen)}
    for row in search.rows:
        assert row.choice is not None
        mesh = row.choice.name, row.choice.degrees
        count[mesh] = count.get(mesh, 0) + 1
        if count[mesh] <= _OF_MESH or id(row) in keep:
            drawn.append(row)
    # What is chosen, and the front, lie above the others.
    return sorted(drawn, key=lambda row: (row is chosen, id(row) in keep))


def _axes(search: Search, scale: _Scale) -> list[str]:
    device = search.device
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    shapes = [_line(_LEFT, bottom, right, bottom), _line(_LEFT, _TOP, _LEFT, bottom)]
    for share, dash, label in (
        (device.safe_share, "3,3", f"safe: {100 * device.safe_share:g} %"),
        (1.0, "", gigabytes(device.memory_bytes)),
    ):
        y = scale.y(share)
        shapes += [_line(_LEFT, y, right, y, dash), _text(right, y - 4, label, "end")]
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        shapes.append(_text(_LEFT - 6, scale.y(share) + 4, f"{100 * share:.0f} %", "end"))
    for at_s in _ticks(scale):
        x = scale.x(at_s)
        shapes += [_line(x, bottom, x, bottom + 4), _text(x, bottom + 16, f"{at_s:g}", "middle")]
    shapes.append(_text((_LEFT + right) / 2, bottom + 32, "s per step", "middle"))
    shapes.append(_text(_LEFT - 6, _TOP - 10, "memory", "end"))
    edges = f"What takes more than {_SLOWEST:g} times the fastest, or needs more than "
    edges += f"{100 * _LARGEST:.0f} % of the device, is at the edge."
    return [*shapes, *_legend(bottom + 50), _text(_LEFT, bottom + 66, edges, "start")]


def _legend(y: float) -> list[str]:
    parts = [
        ("safe", _disc(_LEFT + 5, y - 4, 4, _COLOURS[SAFE]), 0),
        ("risky", _disc(_LEFT + 65, y - 4, 4, _COLOURS[RISKY]), 60),
        ("does not fit", _cross(_LEFT + 125, y - 4), 120),
        ("Pareto front", _disc(_LEFT + 225, y - 4, 4, _FRONT_COLOUR), 220),
        ("choice", _ring(_LEFT + 325, y - 4), 328),
    ]
    return [shape + _text(_LEFT + x + 14, y, word, "start") for word, shape, x in parts]


def _ticks(scale: _Scale) -> list[float]:
    """Round numbers on a logarithmic axis."""
    low, high = math.floor(math.log10(scale.fastest_s)), math.ceil(math.log10(scale.slowest_s))
    ticks = [
        digit * 10.0**power for power in range(low, high + 1) for digit in (1, 1.5, 2, 3, 5, 7)
    ]
    return [tick for tick in ticks if scale.fastest_s <= tick <= scale.slowest_s]


def _front_line(front: Sequence[PlanRow], scale: _Scale) -> str:
    if not front:
        return ""
    points = " ".join(f"{scale.x(step_s(row)):.1f},{scale.y(row.share):.1f}" for row in front)
    return f'<polyline points="{points}" fill="none" stroke="{_FRONT_COLOUR}"></polyline>'


def _point(row: PlanRow, scale: _Scale, is_front: bool, is_chosen: bool) -> str:
    x, y = scale.x(step_s(row)), scale.y(row.share)
    assert row.memory is not None
    assert row.time is not None
    title = html.escape(
        f"{row.typed}, batch {row.batch}: {gigabytes(row.memory.peak)} ({percent(row)}, "
        f"{row.verdict}), {seconds(row.time.step_s)} s per step, {row.time.tokens_per_s:,.0f} "
        "tokens/s"
    )
    if row.verdict not in _COLOURS:
        shape = _cross(x, y)
    else:
        colour = _FRONT_COLOUR if is_front else _COLOURS[row.verdict]
        shape = _disc(x, y, 5 if is_front else 3.5, colour)
    return f"<g>{_ring(x, y) if is_chosen else ''}{shape}<title>{title}</title></g>"


def _disc(x: float, y: float, radius: float, colour: str) -> str:
    return (
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{colour}" fill-opacity="0.8">'
        "</circle>"
    )


def _ring(x: float, y: float) -> str:
    return (
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="9" fill="none" stroke="{_CHOSEN_COLOUR}" '
        'stroke-width="2.5"></circle>'
    )


def _cross(x: float, y: float) -> str:
    return (
        f'<path d="M{x - 4:.1f} {y - 4:.1f}l8 8m0 -8l-8 8" stroke="{_NO_COLOUR}" '
        'stroke-width="1.5" fill="none" pointer-events="bounding-box"></path>'
    )


def _line(x1: float, y1: float, x2: float, y2: float, dash: str = "") -> str:
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="currentColor"'
        f"{dashed}></line>"
    )


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" fill="currentColor" text-anchor="{anchor}">'
        f"{html.escape(text)}</text>"
    )
