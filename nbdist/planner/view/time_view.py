"""Where a step's time goes in a plan, how much of the devices it uses, and what training costs."""

from __future__ import annotations

from collections.abc import Sequence

from nbdist.core.view import View, table
from nbdist.planner.plan import Plan, PlanRow
from nbdist.planner.step_time import Time

# Axes whose messages may be waited for, in the order of the columns.
AXES = ("dp", "tp", "cp", "ep", "pp")


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
    """Of all devices together, to train on so many tokens."""
    return tokens / time.tokens_per_s * plan.world_size / 3600


def cost_head(plan: Plan) -> list[str]:
    """Of the tokens that were named, or of a billion where only a price was."""
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
