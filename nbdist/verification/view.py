"""View of `%dist_verify`: right or not, where and how, and a picture of all modules."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Sequence

from nbdist.core.failures import ranks_phrase
from nbdist.core.units import shown, size
from nbdist.core.view import View, figure_html, folded, lines_html, table
from nbdist.hang.text import place_text
from nbdist.verification.differences import (
    FACTOR,
    INPUT,
    OUTPUT_GRADIENT,
    PHASE_OF,
    ROUNDINGS,
    Row,
)
from nbdist.verification.verdict import SINGLE, Verification

# Modules in the picture: those nearest to their tolerance, in execution order.
_MOST_MODULES = 48
_MOST_NAMED = 4
_WIDTH_IN, _ROW_IN, _EDGE_IN, _DPI, _FONT_PT = 7.5, 0.16, 1.0, 110, 6
# Of the picture's colours: powers of ten of a difference as a share of its tolerance.
_FROM, _TO = -3.0, 3.0


def verification_result(verification: Verification) -> View:
    """The verdict and what has to be known beside it; of a right step the rest opens at a click.

    The rest is a row for each kind of tensor, how they were compared, and the picture.
    """
    lines = [*_verdict(verification), *_advices(verification), *_remarks(verification)]
    head = ["", "compared", "outside", "largest difference", "allowed there", "at"]
    cells = [_cells(what, rows) for what, rows in _by_what(verification.rows).items()]
    image = _png(verification)
    figure = figure_html(image, lines[0]) if image else ""
    rows = table(head, cells, after=list(_comparison(verification)))
    if verification.is_right:
        more = folded("what was compared, and a picture of all modules", rows.html + figure)
        return View("\n".join(lines), f"<div>{lines_html(lines)}{more}</div>")
    text = "\n".join([*lines, rows.text])
    html = f"<div>{lines_html(lines)}{figure}{rows.html}</div>"
    return View(text, html, is_bad=True, png=image)


def _verdict(verification: Verification) -> Iterator[str]:
    first = verification.first
    if first is None:
        n_tensors = len(verification.rows)
        if verification.is_right:
            beside = (
                "what one process computes"
                if verification.reference.partition(",")[0] == SINGLE
                else f"the same as under {verification.reference} with the whole batch on each rank"
            )
            yield (
                f"right: a step under {verification.strategy} computes {beside}; "
                f"{n_tensors} tensors were compared, none differs by more than rounding"
            )
        else:
            yield (
                f"NOT right under {verification.strategy}: {n_tensors} tensors differ by no more "
                "than is allowed, and yet something is wrong:"
            )
        return
    yield (
        f"NOT right: under {verification.strategy} the step leaves the tolerance first at the "
        f"{_named(first)}"
    )
    around = " in the code around it" if first.key.what in (INPUT, OUTPUT_GRADIENT) else ""
    module = verification.place.module or "the model itself"
    where = place_text(verification.place.line)
    yield f"  where: {module}{around and ', '}{around.strip()}{f', {where}' if where else ''}"
    error, allowed = shown(_percent(first.relative)), shown(_percent(first.allowed))
    ranks = shown(ranks_phrase(first.outside))
    yield f"  by how much: {error} of its size, {allowed} is allowed, on {ranks}"
    yield f"  looks like: {verification.kind}"


def _advices(verification: Verification) -> Iterator[str]:
    for finding in verification.findings:
        yield f"{finding.verdict} {finding.name}: {finding.found}"
        yield f"  {finding.why}; {finding.what}"


def _named(row: Row) -> str:
    call = f", call {row.key.call + 1}" if row.key.call else ""
    item = f" {row.key.item + 1}" if row.key.item else ""
    return f"{row.key.what}{item} of {row.key.name or 'the model'}{call} ({row.key.phase})"


def _by_what(rows: Sequence[Row]) -> dict[str, list[Row]]:
    by_what = {what: [row for row in rows if row.key.what == what] for what in PHASE_OF}
    return {what: of_kind for what, of_kind in by_what.items() if of_kind}


def _cells(what: str, rows: Sequence[Row]) -> list[str]:
    worst = max(rows, key=_share)
    return [
        what,
        str(len(rows)),
        str(sum(bool(row.outside) for row in rows)),
        shown(_percent(worst.relative)),
        shown(_percent(worst.allowed)),
        shown(worst.key.name or "the model"),
    ]


def _share(row: Row) -> float:
    share = max(row.errors.values())
    return math.inf if math.isnan(share) else share


def _percent(value: float) -> str:
    return f"{100 * value:.2g} %" if value < 1 else f"{100 * value:.0f} %"


def _remarks(verification: Verification) -> Iterator[str]:
    skipped = verification.not_compared
    if skipped:
        names = [name or "the model's own output" for name in skipped]
        more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
        why = next(iter(skipped.values()))
        yield f"not compared: {', '.join(names[:_MOST_NAMED])}{more}: {why}"
    if verification.note:
        yield verification.note
    if verification.n_calls > 1:
        yield (
            f"an optimizer steps after {verification.accumulate} accumulated backwards, so the "
            f"code was run {verification.n_calls} times for one step"
        )
    if not verification.n_steps:
        yield "no optimizer stepped, so values after the step are those of before"


def _comparison(verification: Verification) -> Iterator[str]:
    yield (
        f"reference: {verification.reference}, with the batches of all data-parallel ranks. "
        f"allowed: {FACTOR:g} times what inputs moved by one unit in the last place do to it, and "
        f"{ROUNDINGS:g} such units. Dropout was off in the values; its masks were compared."
    )
    yield shown(
        f"time: the step took {verification.step_s:.2f} s with hooks, the reference "
        f"{verification.reference_s:.2f} s. On the host the copies took "
        f"{size(verification.host_bytes)} per rank. Everything was put back."
    )


def _png(verification: Verification) -> bytes:
    """Modules down, ranks across: the largest difference of each against its tolerance."""
    shares: dict[str, dict[int, float]] = {}
    for row in verification.rows:
        by_rank = shares.setdefault(row.key.name or "(model)", {})
        for rank, share in row.errors.items():
            by_rank[rank] = max(by_rank.get(rank, 0.0), _share_of(share))
    if not shares:
        return b""
    worst = sorted(shares, key=lambda name: -max(shares[name].values()))[:_MOST_MODULES]
    names = [name for name in shares if name in set(worst)]
    n_ranks = 1 + max(rank for by_rank in shares.values() for rank in by_rank)
    import matplotlib.style
    from matplotlib.figure import Figure

    with matplotlib.style.context("default"):
        height_in = _EDGE_IN + _ROW_IN * len(names)
        figure = Figure(figsize=(_WIDTH_IN, height_in), dpi=_DPI, layout="constrained")
        axes = figure.subplots()
        grid = [[_power(shares[name].get(rank)) for rank in range(n_ranks)] for name in names]
        image = axes.imshow(grid, cmap="RdBu_r", vmin=_FROM, vmax=_TO, aspect="auto")
        axes.set_yticks(range(len(names)), names, fontsize=_FONT_PT, parse_math=False)
        axes.set_xticks(range(n_ranks), [f"rank {rank}" for rank in range(n_ranks)],
                        fontsize=_FONT_PT)  # fmt: skip
        bar = figure.colorbar(image, ax=axes, ticks=[-3, 0, 3], shrink=0.6)
        bar.ax.set_yticklabels(["1/1000", "the tolerance", "1000 times"], fontsize=_FONT_PT)
        file = io.BytesIO()
        figure.savefig(file, format="png", metadata={"Software": None})
    return file.getvalue()


def _share_of(share: float) -> float:
    return math.inf if math.isnan(share) else share


def _power(share: float | None) -> float:
    """nan, which stays white, for what a rank does not have."""
    if share is None:
        return math.nan
    return max(_FROM, min(_TO, math.log10(share) if share > 0 else _FROM))
