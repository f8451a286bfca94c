"""The panel as text and HTML: the live one's table and log, and what stays without widgets."""

from __future__ import annotations

import html
import re
import time
from collections.abc import Iterable, Sequence

from nbdist.core import units
from nbdist.core.units import shown, shown_host, visible
from nbdist.core.view import View, drawing, table
from nbdist.panel.state import (
    OLD_S,
    SIGNS,
    LogEntry,
    PanelPlan,
    PanelState,
    Question,
    RankRow,
    bar_share,
    bar_text,
)
from nbdist.planner.plan import NO, RISKY, SAFE

# The live panel's page hides the picture that stands below it for when there is no panel.
STILL = "nbdist-panel-still"
SHOWN_LOG = 8
# Verdict of planner.plan -> a sign that tells it without colour, and one of Okabe and Ito's.
_VERDICTS = {
    SAFE: ("✓", "#009E73"),
    RISKY: ("!", "#E69F00"),
    NO: ("✕", "#D55E00"),
}
_HEAD = ("rank", "host", "device", "state", "memory", "use")

# Colours come from the page where it has a theme, so that light and dark both fit.
STYLE = """<style>
.nbdist-panel { line-height: 1.45; color: var(--jp-ui-font-color1, inherit);
  font-size: var(--jp-ui-font-size1, 13px);
  font-family: var(--jp-ui-font-family, system-ui, sans-serif); }
.nbdist-panel .np-title { font-weight: 600; }
.nbdist-panel .np-dim { opacity: .72; }
.nbdist-panel .np-group { font-weight: 600; opacity: .72; line-height: 32px; }
.nbdist-panel .widget-checkbox, .nbdist-panel .widget-checkbox label { display: flex;
  align-items: center; margin-top: 0; margin-bottom: 0; }
.nbdist-panel .widget-checkbox input { margin: 0 6px 0 0; }
.nbdist-panel table.np-ranks { border-collapse: collapse; width: 100%; margin: 6px 0; border: 0;
  font-size: inherit; table-layout: auto; color: inherit; }
.nbdist-panel table.np-ranks th, .nbdist-panel table.np-ranks td { text-align: left;
  padding: 3px 14px 3px 0; border: 0; border-bottom: 1px solid rgba(128,128,128,.28);
  background: none; white-space: nowrap; vertical-align: middle; }
.nbdist-panel table.np-ranks th { font-weight: 600; opacity: .72; }
.nbdist-panel table.np-ranks tr { background: none !important; }
.nbdist-panel table.np-ranks td.np-wide { white-space: normal; width: 48%; }
.nbdist-panel .np-sign { display: inline-block; min-width: 1.35em; font-weight: 700; }
.nbdist-panel .np-bar { display: inline-block; width: 84px; height: 9px; border-radius: 2px;
  background: rgba(128,128,128,.28); margin-right: 7px; vertical-align: middle; overflow: hidden; }
.nbdist-panel .np-bar i { display: block; height: 100%; background: #56B4E9; }
.nbdist-panel .np-bar i.np-full { background: #D55E00; }
.nbdist-panel .np-num { font-variant-numeric: tabular-nums; }
.nbdist-panel .np-waits, .nbdist-panel .np-busy, .nbdist-panel .np-question {
  border-left: 4px solid #E69F00; padding: 1px 8px; margin: 4px 0; }
.nbdist-panel .np-busy { border-left-color: #0072B2; }
.nbdist-panel .np-still { opacity: .72; font-size: smaller; }
.nbdist-panel .np-log { display: flex; flex-direction: column-reverse; /* the end is seen */
  max-height: 132px; overflow-y: auto; margin: 4px 0 0; padding: 4px 8px;
  border: 1px solid rgba(128,128,128,.28); border-radius: 3px; white-space: pre-wrap;
  font-family: var(--jp-code-font-family, monospace); font-size: 12px; line-height: 1.4; }
.nbdist-panel .np-log div div { overflow-wrap: anywhere; }
.nbdist-panel .np-failed { border-left: 3px solid #D55E00; padding-left: 6px; }
.nbdist-panel .np-done { border-left: 3px solid #009E73; padding-left: 6px; }
.nbdist-panel .np-note { border-left: 3px solid transparent; padding-left: 6px; }
</style>"""
# What the live panel has besides. The age counts up in the browser, from the moment in which the
# kernel has drawn the table last: also while the kernel can send nothing at all.
LIVE_STYLE = f"""{STYLE}<style>
@property --nbdist-age {{ syntax: "<integer>"; initial-value: 0; inherits: false; }}
@keyframes nbdist-age {{ from {{ --nbdist-age: 0 }} to {{ --nbdist-age: 36000 }} }}
@keyframes nbdist-old {{ to {{ visibility: visible }} }}
.nbdist-panel .np-progress .np-bar {{ width: 220px; }}
.nbdist-panel .np-age {{ visibility: hidden; counter-reset: nbdist-age var(--nbdist-age);
  animation: nbdist-age 36000s linear forwards, nbdist-old 0s linear {OLD_S:g}s forwards;
  border-left: 4px solid #D55E00; padding: 0 8px; float: right; }}
.nbdist-panel .np-age::after {{ content: "no news from the kernel for " counter(nbdist-age) " s"; }}
.nbdist-panel .np-detail table {{ border: 0; margin: 4px 0; }}
.nbdist-panel .np-detail td, .nbdist-panel .np-detail th {{ padding: 2px 14px 2px 0; border: 0; }}
.nbdist-panel .np-verdict {{ border: 1px solid; border-radius: 3px; padding: 0 6px;
  margin-right: 7px; font-weight: 600; }}
.nbdist-panel .np-plan {{ white-space: pre-line; opacity: .85; }}
.nbdist-panel .np-why {{ border-left: 4px solid #D55E00; padding: 1px 8px; }}
.{STILL}, .jp-OutputArea-child:has(.{STILL}) {{ display: none }}
</style>"""


def still(state: PanelState) -> View:
    """The panel without anything that moves, with its time: for saved notebooks and terminals."""
    log = state.log[-SHOWN_LOG:]
    drawn = f"as of {shown(time.strftime('%Y-%m-%d %H:%M:%S'))}"
    question = state.question
    lines = [
        *state.waits,
        *(f"prepared: {model}" for model in state.models),
        *filter(None, [state.batch]),
        *([f"under way: {state.acting}"] if state.acting else []),
        *([state.doing] if state.doing else []),
        *(f"queued until the cell ends: {job}" for job in state.queued),
        *(f"next cell on ranks: {magic}" for magic in state.armed),
        *([f"to be confirmed: {question.text}"] if question else []),
        *_log_lines(log),
        drawn,
    ]
    if not state.ranks:
        text = "\n".join([state.title, *lines])
    else:
        title = f"{state.title}; strategy {state.strategy}" if state.strategy else state.title
        text = table(_HEAD, [_cells(row) for row in state.ranks], before=[title], after=lines).text
    asks = "" if question is None else question_html(question)
    body = f'{top_html(state)}{asks}{log_html(log)}<div class="np-still">{drawn}</div>'
    return View(text, f'{STYLE}<div class="{STILL} nbdist-panel">{body}</div>')


def top_html(state: PanelState, *, drawn: int | None = None) -> str:
    """Title, table of ranks, and what is under way.

    With the number of a live picture the browser shows by itself how old it is.
    """
    age = "" if drawn is None else f'<span class="np-age" data-drawn="{drawn}"></span>'
    head = f'<span class="np-title">{html.escape(state.title)}</span>'
    if state.strategy:
        strategy = html.escape(state.strategy)
        head += f'; <span class="np-dim">strategy</span> <span class="np-title">{strategy}</span>'
    ranks = ""
    if state.ranks:
        words = "".join(f'<th scope="col">{word}</th>' for word in _HEAD)
        rows = "".join(_row_html(row) for row in state.ranks)
        ranks = f"<thead><tr>{words}</tr></thead><tbody>{rows}</tbody>"
        ranks = f'<table class="np-ranks">{ranks}</table>'
    busy = [
        *([f"under way: {state.acting}"] if state.acting else []),
        *(f"queued until {state.cell or 'the cell'} ends: {job}" for job in state.queued),
        *(f"the next cell on ranks will run as {magic}" for magic in state.armed),
    ]
    below = [
        _lines_html("np-dim", (*state.models, *filter(None, [state.batch]))),
        _lines_html("np-waits", state.waits),
        _progress_html(state.bar), _progress_html(state.doing), _lines_html("np-busy", busy),
    ]  # fmt: skip
    return f"<div>{age}{head}</div>{ranks}{''.join(below)}"


def _lines_html(kind: str, lines: Iterable[str]) -> str:
    return "".join(f'<div class="{kind}">{html.escape(line)}</div>' for line in lines)


def plan_html(plan: PanelPlan) -> str:
    """Plan of the chosen strategy, with a bar up to the device's limit and the verdict."""
    if not plan.is_possible:
        return f'<div class="np-why">{html.escape(plan.text)}</div>'
    mark = ""
    if plan.verdict in _VERDICTS:  # what is not known is said in words
        sign, color = _VERDICTS[plan.verdict]
        mark = (
            f'<span class="np-verdict" style="border-color:{color}">{sign} '
            f"{html.escape(plan.verdict)}</span>"
        )
    return f'<div class="np-plan">{mark}{_bar(plan.share)}{html.escape(plan.text)}</div>'


def question_html(question: Question | None) -> str:
    """Question to be confirmed; a screen reader says it at once."""
    if question is None:
        return ""
    return f'<div class="np-question" role="alert">{html.escape(question.text)}</div>'


def _progress_html(bar: str) -> str:
    if not bar:
        return ""
    return (
        f'<div class="np-num np-progress">{_bar(bar_share(bar))}{html.escape(bar_text(bar))}</div>'
    )


def _row_html(row: RankRow) -> str:
    sign, color = SIGNS[row.kind]
    rank, host, device, state, memory, use = map(html.escape, _cells(row))
    used, _, limit = visible(memory).partition(" of ")
    title = f' title="{visible(memory)}"' if limit else ""
    memory_cell = f'<td class="np-num"{title}>{_bar(row.share)}{used}</td>'
    sign = f'<span class="np-sign" style="color:{color}" aria-hidden="true">{sign}</span>'
    return (
        f'<tr data-rank="{rank}" data-kind="{row.kind}"><td class="np-num">{rank}</td>'
        f"<td>{host}</td><td>{device}</td>"
        f'<td class="np-wide">{sign}{state}</td>'
        f"{drawing(memory_cell)}"
        f'<td class="np-num">{_bar(row.utilisation)}{use}</td></tr>'
    )


def _bar(share: float | None) -> str:
    if share is None:
        return drawing("")
    full = ' class="np-full"' if share > 0.9 else ""
    inner = f'<i{full} style="width:{min(1.0, share):.0%}"></i>'
    return drawing(f'<span class="np-bar" aria-hidden="true">{inner}</span>')


def _cells(row: RankRow) -> list[str]:
    """A rank's row in words."""
    doing = row.doing
    if row.busy_s:
        doing += f" for {units.seconds(row.busy_s)}"
    memory = "-"
    if row.memory_bytes is not None:
        memory = units.size(row.memory_bytes)
        memory += f" of {units.size(row.limit_bytes)}" if row.limit_bytes else ""
        memory += f", {row.age_s:.0f} s old" if row.age_s >= OLD_S else ""
    use = "-" if row.utilisation is None else f"{row.utilisation:.0%}"
    where = (shown_host(row.host), shown(row.device))
    return [str(row.rank), *where, doing, shown(memory), shown(use)]


def log_html(log: Sequence[LogEntry]) -> str:
    """The log, newest last; a screen reader hears what is added."""
    if not log:
        return ""
    lines = "".join(
        f'<div class="np-{entry.kind}">{html.escape(line)}</div>'
        for entry, line in zip(log, _log_lines(log), strict=True)
    )
    return f'<div class="np-log" role="log" aria-label="log" tabindex="0"><div>{lines}</div></div>'


def _log_lines(log: Sequence[LogEntry]) -> list[str]:
    lines = []
    for entry in log:
        clock = shown(time.strftime("%H:%M:%S", time.localtime(entry.at_s)))
        # Measured times stand in parentheses behind a job.
        text = re.sub(r"\d+(\.\d+)?(?= s\b)", lambda time_s: shown(time_s[0]), entry.text)
        lines.append(f"{clock} {text}")
    return lines
