"""Bandwidth as tables, and as a picture of bus bandwidth against size."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from nbdist.bandwidth.links import LINKS, around
from nbdist.bandwidth.results import OPS, BandwidthRow, Bench
from nbdist.bandwidth.sizes import size_text
from nbdist.core.failures import ranks_phrase
from nbdist.core.units import shown, shown_lines, visible
from nbdist.core.view import View, figure_html, folded, lines_html, measured, table

_ROW = ["op", "size", "time (us)", "algbw (GB/s)", "busbw (GB/s)", "result"]
_WIDTH_PX = 640
# Lines for links go down to the fastest row over this.
_LINKS_SHOWN = 30


def bench(result: Bench, *, has_picture: bool = True) -> View:
    """Model and picture, then rows, what was left out, what links can carry.

    The picture is left out where text alone is seen; rows are folded unless one of them is wrong.
    """
    head, left_out = _head(result), [f"left out: {sentence}" for sentence in result.left_out]
    rows = table(
        _ROW, [_cells(row, result.world_size) for row in result.rows], after=_legend(result)
    )
    model, links = _model(result), _links(result)
    is_wrong = any(row.wrong for row in result.rows)
    parts = ["\n".join(head), model.text, rows.text, "\n".join(left_out), links.text]
    image = ""
    if has_picture and result.rows:
        alt = f"Bus bandwidth against size of {', '.join(result.ops)}; the table has the numbers."
        image = figure_html(picture(result), alt)
    body = (
        f'<div>{lines_html(head)}<div style="display:flex;flex-wrap:wrap;align-items:flex-start">'
        f'<div style="margin-right:2em">{model.html}</div>'
        f'<div style="max-width:{_WIDTH_PX}px">{image}</div></div>'
        f"{folded(f'measurements ({len(result.rows)})', rows.html, is_open=is_wrong)}"
        f"{lines_html(left_out)}{folded('links to compare with', links.html)}</div>"
    )
    return View("\n\n".join(part for part in parts if part), body, is_bad=is_wrong)


def _head(result: Bench) -> list[str]:
    """Lines on where it was measured, on the fastest row, and on its links if that counts."""
    hosts = "1 host" if result.n_hosts == 1 else f"{result.n_hosts} hosts"
    n = result.world_size
    head = [f"{n} ranks on {hosts}, {shown(result.backend)}, {shown(result.device)}"]
    return head + shown_lines(_fastest(result))


def _fastest(result: Bench) -> list[str]:
    n = result.world_size
    if result.caveat:
        return [result.caveat]
    if not result.rows:
        return []
    best = max(result.rows, key=lambda row: row.busbw(n))
    near = [f"{link.name} {_gb(link.bytes_per_s)}" for link in around(best.busbw(n)) if link]
    what = f"{best.op} of {size_text(best.size_bytes)}"
    beside = f"links of similar speed, one direction: {', '.join(near)}"
    return [f"highest bus bandwidth: {_gb(best.busbw(n))} GB/s, {what} ({beside})"]


def _cells(row: BandwidthRow, n: int) -> list[str]:
    result = f"WRONG on {ranks_phrase(row.wrong)}" if row.wrong else "ok"
    return [
        row.op,
        size_text(row.size_bytes),
        shown(f"{row.time_s * 1e6:.1f}"),
        _gb(row.algbw),
        _gb(row.busbw(n)),
        result,
    ]


def _gb(bytes_per_s: float) -> str:
    value = bytes_per_s / 1e9
    digits = 1 if value >= 100 else 2 if value >= 1 else 4
    return shown(f"{value:.{digits}f}")


def _legend(result: Bench) -> list[str]:
    n = result.world_size
    factors = []
    for op in result.ops:
        value = f"{OPS[op].factor(n):g}"
        factors.append(f"{op} " + " = ".join(dict.fromkeys([OPS[op].text, value])))
    if not factors:
        return []
    how = f"busbw = algbw x bytes that a rank sends per byte (n = {n}): {', '.join(factors)}."
    return [_TIMES, how]


_TIMES = (
    "time: median of all runs as a caller sees it; a run ends with its slowest rank. GB/s are "
    "decimal. algbw = size / time."
)


def _model(result: Bench) -> View:
    fits = result.model.fits
    rows = [
        [
            op,
            shown(f"{fit.alpha_s * 1e6:.1f}"),
            _gb(1 / fit.beta_s),
            shown(f"{100 * fit.error:.0f}"),
        ]
        for op, fit in fits.items()
    ]
    lacking = [op for op in result.ops if op not in fits]
    after = [f"no model of {', '.join(lacking)}: {_NO_MODEL}"] if lacking else []
    if not rows:
        return measured(View("\n".join(after), lines_html(after)))
    head = ["op", "latency (us)", "bandwidth (GB/s)", "median error (%)"]
    # Whether times grow with the size is measured, too.
    return measured(table(head, rows, before=[_MODEL], after=after))


_MODEL = (
    "model: time = latency + bytes that a rank sends / bandwidth; the last column is the median "
    "error of its predictions"
)
_NO_MODEL = "it needs two sizes or more, large enough that the time grows with them"


def _links(result: Bench) -> View:
    rows = [[link.name, f"{link.bytes_per_s / 1e9:.2f}", link.found] for link in LINKS]
    title = "peak rates of links, one direction of one device"
    if result.caveat:
        title += " (not measured here)"
    title = shown(title)
    return table(["link", "GB/s", "where"], rows, before=[title])


def picture(result: Bench) -> bytes:
    """Bus bandwidth against size, both logarithmic, a line for each operation, as PNG.

    Where it says something of links, those in its range are lines too.
    """
    from matplotlib.figure import Figure  # half a second, for those who look at it

    figure = Figure(figsize=(6.4, 4.2), dpi=160, layout="constrained", facecolor="white")
    axes = figure.add_subplot()
    n = result.world_size
    for op, marker in zip(result.ops, "osD^v<>", strict=False):
        its = sorted((r for r in result.rows if r.op == op), key=lambda row: row.size_bytes)
        speeds = [row.busbw(n) / 1e9 for row in its]
        op_sizes = [row.size_bytes for row in its]
        axes.loglog(op_sizes, speeds, marker=marker, markersize=4, label=op, zorder=3)
    if not result.caveat:
        _draw_links(axes, result.rows, n)
    sizes = sorted({row.size_bytes for row in result.rows})
    labelled = sizes[:: -(-len(sizes) // 8)]  # more would overlap
    axes.set_xticks(labelled, [size_text(size) for size in labelled])
    axes.set_xticks([], minor=True)
    axes.set_xlabel("size")
    axes.set_ylabel("bus bandwidth (GB/s)")
    axes.grid(visible=True, alpha=0.3)
    axes.margins(y=0.1)  # room for a name above the uppermost line
    axes.legend(fontsize="small", frameon=False, loc="lower right")
    title = f"{n} ranks, {result.backend}, {result.device}"
    axes.set_title(f"{title}: not speeds of links" if result.caveat else title, fontsize="medium")
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()


def _draw_links(axes: Any, rows: Sequence[BandwidthRow], n: int) -> None:
    """The next link above the fastest row, and those below it whose names have room."""
    fastest = max(row.busbw(n) for row in rows)
    _, above = around(fastest)
    line = float("inf")
    for link in sorted(LINKS, key=lambda link: -link.bytes_per_s):
        speed = link.bytes_per_s
        if not (fastest / _LINKS_SHOWN < speed <= fastest or link is above) or speed * 1.4 > line:
            continue
        line = speed
        axes.axhline(speed / 1e9, linestyle="--", linewidth=0.7, color="grey")
        axes.annotate(
            f"{link.name} {visible(_gb(speed))}",
            (0.01, speed / 1e9),
            xycoords=("axes fraction", "data"),
            va="bottom",
            fontsize="x-small",
            color="grey",
        )
