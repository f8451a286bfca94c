"""A table of a step's predicted and measured numbers."""

from __future__ import annotations

import re
from dataclasses import dataclass

from nbdist.core.units import shown, shown_lines
from nbdist.core.view import View, lines_html, table
from nbdist.planner.check import Check, MeasuredMemory, StepCheck
from nbdist.planner.live_model import described
from nbdist.planner.memory import Memory
from nbdist.strategy import choice as strategies

_HEAD = ["", "predicted (MB)", "measured (MB)", "error"]
# Strategies that reduce in pieces.
_COPIED = re.compile(r"\b(fsdp1?|tp)\b")
GLOO = (
    "Gloo, on the CPU, copies what it reduces in its own threads: the measured peak includes what "
    "is in flight at that moment, the prediction does not. NCCL makes no copy."
)


@dataclass(frozen=True, slots=True)
class PlanCheckView(View):
    """A check with its numbers.

    Attributes:
        checks: A record for each row, in bytes.
        measured: Of the rank that needed most.
    """

    checks: tuple[Check, ...] = ()
    memory: Memory | None = None
    measured: MeasuredMemory | None = None


def shown_check(step: StepCheck) -> PlanCheckView:
    """The table, with what was run above it."""
    live, load, memory, measured = step.live, step.load, step.memory, step.measured
    strategy = strategies.described(step.choice)
    tokens = f" x {load.sequence} tokens" if live.is_language_model else ""
    before = [
        *described(live),
        f"a step under {strategy}, batch {load.batch}{tokens}; everything was restored afterwards",
    ]
    by = "the GPU's allocator" if measured.is_device else "torch's profiler, of the CPU's allocator"
    what = f"Predicted by {memory.engine}, measured by {shown(by)}."
    after = [f"MB = 10^6 bytes, on the rank that needed most. {what}"]
    if _COPIED.search(strategy):
        after += shown_lines([] if measured.is_device else [GLOO])
    if not measured.has_optimizer:
        after.append("No variable holds an optimizer of the model, so no optimizer step was run.")
    if memory.is_partial:
        after.append(f"Activations and peak are not predicted: {memory.note}.")
    elif memory.note:
        after.append(f"By formulas: {memory.note}.")
    rows = table(_HEAD, [_cells(check) for check in step.checks])
    text = "\n".join([*before, "", rows.text, "", *after])
    page = f"<div>{lines_html(before)}{rows.html}{lines_html(after)}</div>"
    return PlanCheckView(text, page, checks=step.checks, memory=memory, measured=measured)


def _cells(check: Check) -> list[str]:
    error = "-" if check.error is None else f"{100 * check.error:+.1f} %"
    if check.is_exact:  # no matter of chance
        return [check.what, _mb(check.predicted), _mb(check.measured), error]
    return [check.what, _mb(check.predicted), shown(_mb(check.measured)), shown(error)]


def _mb(size_bytes: float) -> str:
    return f"{size_bytes / 1e6:.3f}"
