"""Usage and activity of ranks, as a table and as small pictures."""

from __future__ import annotations

import html
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nbdist.core import units
from nbdist.core.finding import Finding
from nbdist.core.units import is_stored, shown, shown_lines
from nbdist.core.view import View, drawing, figure_html, table
from nbdist.monitor.samples import Sample, SampleHistory

# More pictures than this are too small, or too many, to be read.
MOST_RANKS = 8
_WIDTH_IN, _HEIGHT_IN = 2.6, 1.1
_TOP_IN, _BOTTOM_IN = 0.4, 0.45
_DPI = 110
# A number that is this old, in seconds, is told with its age.
OLD_S = 2.0


@dataclass(frozen=True, slots=True)
class _Field:
    """A column of the table: now / mean / peak of a number.

    Attributes:
        column: Of monitor.samples.COLUMNS.
        peak: The column whose peak is told; empty for the same one. What torch itself has counted
            lies between samples too.
        is_usual: It has a column in stored outputs, known or not.
    """

    title: str
    column: str
    text: Callable[[float], str]
    peak: str = ""
    is_usual: bool = True


def _whole(value: float) -> str:
    return f"{value:.0f}"


_FIELDS = (
    _Field("busy (%)", "utilisation", _whole),
    _Field("device memory", "device_used", units.size),
    _Field("allocated", "allocated", units.size, peak="allocated_peak"),
    _Field("reserved", "reserved", units.size),
    _Field("host memory", "rss", units.size),
    _Field("temperature (C)", "temperature", _whole),
    _Field("power (W)", "power", _whole),
    _Field("expert load", "expert_load", "{:.1f}".format, is_usual=False),
)
# What the picture shows of each rank: the column, what a value is multiplied by, the title, and
# how far its axis goes at least.
_PICTURED = (
    ("utilisation", 1.0, "busy (%)", 100.0),
    ("device_part", 100.0, "device memory (%)", 100.0),
    ("rss", 1e-9, "host memory (GB)", 0.1),
    ("temperature", 1.0, "temperature (C)", 50.0),
    ("power", 1.0, "power (W)", 50.0),
)


def monitor(
    samples: Sequence[Sample],
    history: SampleHistory,
    findings: Sequence[Finding] = (),
    notes: Sequence[str] = (),
) -> View:
    """Every rank now, with mean and peak since the recording began, and what stands out.

    `samples` are the newest of each rank; `notes` say what could not be read, and what else.
    """
    fields = [
        field
        for field in _FIELDS
        if (is_stored() and field.is_usual) or _is_known(history, field.column)
    ]
    rows = [_row(sample, history, fields) for sample in samples]
    head = ["rank", "doing", *(field.title for field in fields), "last collective"]
    lines = [
        f"{f.rule}: {f.found}. {f.why[:1].upper()}{f.why[1:]}. Do: {f.what}." for f in findings
    ]
    span_s = max((history.span_s(rank) for rank in history.ranks), default=0.0)
    title = (
        f"now / mean / peak of {shown(len(history))} samples over {units.seconds(span_s)}; "
        "see docs/monitor.md for what the numbers mean"
    )
    view = table(head, rows, before=[title], after=[*shown_lines(lines), *notes])
    image = png(samples, history)
    alt = (
        "Utilisation, memory, temperature and power of each rank over time; the table has numbers."
    )
    return View(view.text, view.html + (figure_html(image, alt) if image else drawing("")))


def _is_known(history: SampleHistory, column: str) -> bool:
    return any(history.summary(rank, column).peak is not None for rank in history.ranks)


def _row(sample: Sample, history: SampleHistory, fields: Sequence[_Field]) -> list[str]:
    doing = sample.doing
    last = doing.last_collective or "-"
    if doing.collective_age_s is not None:
        last += f", {units.seconds(doing.collective_age_s)} ago"
    text = sample.doing_text
    if sample.age_s > OLD_S and not is_stored():
        text += f" (numbers {units.seconds(sample.age_s)} old)"
    cells = [_cell(history, sample.rank, field) for field in fields]
    return [str(sample.rank), text, *cells, last]


def _cell(history: SampleHistory, rank: int, field: _Field) -> str:
    summary = history.summary(rank, field.column)
    peak = history.summary(rank, field.peak or field.column).peak
    values = (summary.now, summary.mean, peak)
    return shown(" / ".join("-" if value is None else field.text(value) for value in values))


def recorded(view: View, line: str) -> View:
    """The same with a line above it."""
    return View(f"{line}\n{view.text}", f"<div>{html.escape(line)}</div>{view.html}")


def serving(url: str, token_path: str, config: str) -> View:
    """View of the URL that Prometheus reads, and of the configuration for it."""
    lines = [
        f"serving the numbers of all ranks at {url}, to this host only, until %dist_monitor --off",
        f"the token is in {token_path}; to try it:",
        f'  curl -H "Authorization: Bearer $(cat {token_path})" {url}',
        "in Prometheus' configuration:",
        *config.splitlines(),
    ]
    body = html.escape("\n".join(lines))
    return View("\n".join(lines), f"<pre>{body}</pre>")


def png(samples: Sequence[Sample], history: SampleHistory) -> bytes:
    """Small multiples: a row for each rank, a column for each number that is known, one time axis.

    Of more than MOST_RANKS ranks the first are drawn, and the title says so. Empty where nothing
    was recorded for longer than a moment.
    """
    ranks = [sample.rank for sample in samples][:MOST_RANKS]
    drawn = [pictured for pictured in _PICTURED if _is_known(history, pictured[0])]
    # Not the samples': the history may have gone on meanwhile.
    times = [history.series(rank, "rss")[0] for rank in ranks]
    newest_s = max((float(rank_times[-1]) for rank_times in times if len(rank_times)), default=0.0)
    if not drawn or not any(history.span_s(rank) > 0 for rank in ranks):
        return b""
    from matplotlib.figure import Figure  # half a second, for those who look at it

    width, height = _WIDTH_IN * len(drawn), _HEIGHT_IN * len(ranks) + _TOP_IN + _BOTTOM_IN
    figure = Figure(figsize=(width, height), dpi=_DPI, facecolor="white")
    grid = figure.subplots(len(ranks), len(drawn), sharex=True, sharey="col", squeeze=False)
    # By hand: a layout that fits itself takes seconds for eighty axes.
    figure.subplots_adjust(
        left=0.6 / width,
        right=1 - 0.1 / width,
        top=1 - _TOP_IN / height,
        bottom=_BOTTOM_IN / height,
        wspace=0.2,
        hspace=0.25,
    )
    for axes, (column, factor, _, least) in zip(grid[0], drawn, strict=True):
        # One scale for all ranks.
        values = np.concatenate([history.series(rank, column)[1] for rank in ranks])
        axes.set_ylim(0, max(least, 1.05 * factor * float(np.nanmax(values, initial=0.0))))
    for row, rank in zip(grid, ranks, strict=True):
        for axes, (column, factor, title, _) in zip(row, drawn, strict=True):
            _draw(axes, history, (rank, column, factor), newest_s)
            if rank == ranks[0]:
                axes.set_title(title, fontsize="small")
            if rank == ranks[-1]:
                axes.set_xlabel("seconds before now", fontsize="x-small")
        row[0].set_ylabel(f"rank {rank}", fontsize="x-small")
    if len(ranks) < len(samples):
        title = f"the first {len(ranks)} of {len(samples)} ranks"
        figure.text(0.5 / width, 1 - 0.15 / height, title, fontsize="small")
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()


def _draw(
    axes: Any, history: SampleHistory, curve: tuple[int, str, float], newest_s: float
) -> None:
    rank, column, factor = curve
    times, values = history.series(rank, column)
    axes.plot(times - newest_s, values * factor, linewidth=0.9, color="#0072b2")
    mean = history.summary(rank, column).mean
    if mean is not None:
        axes.axhline(mean * factor, linewidth=0.6, linestyle=":", color="#8a8a8a")
    axes.tick_params(labelsize="xx-small")
    axes.grid(visible=True, alpha=0.3)
