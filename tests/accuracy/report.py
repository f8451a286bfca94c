"""Turns what `make accuracy` has measured into the table of docs/accuracy.md.

python -m tests.accuracy.report build/accuracy.jsonl docs/accuracy.md
"""

import statistics
import sys
from collections.abc import Sequence

from tests.accuracy.case import Result
from tests.support import tables

COMMAND = "make accuracy"
_HEAD = (
    "model", "strategy", "ranks", "batch", "states", "measured (MB)", "run", "formulas",
)  # fmt: skip
_PACKAGES = ("torch", "transformers")


def error(predicted: float | None, measured: float) -> float | None:
    """Of a prediction, as a share of what was measured; None where there is none."""
    return None if predicted is None else predicted / measured - 1


def summary(results: Sequence[Result]) -> str:
    """Median and worst error of each engine, a line each."""
    lines = []
    for what, of in (("A run", "run"), ("Formulas", "formulas")):
        found = [
            (abs(e), one)
            for one in results
            if (e := error(getattr(one, of), one.measured)) is not None
        ]
        if not found:
            continue
        worst, one = max(found, key=lambda pair: pair[0])
        median = _percent(statistics.median(share for share, _ in found))
        lines.append(
            f"{what}: {len(found)} peaks, median error {median}, worst {_percent(worst)} "
            f"({one.model}, `{one.typed}`)."
        )
    exact = sum(one.states for one in results)
    lines.append(
        f"Parameters, gradients and optimizer state: {exact} of {len(results)} exact, to the byte."
    )
    return "\n".join(f"- {line}" for line in lines)


def text(results: Sequence[Result]) -> str:
    """The summary and the table, with where they were made."""
    ordered = sorted(results, key=lambda one: one.n)
    table = tables.table(_HEAD, map(_row, ordered))
    return "\n\n".join([tables.machine(*_PACKAGES), summary(results), table])


def _row(one: Result) -> tuple[str, ...]:
    return (
        one.model,
        f"`{one.typed}`",
        str(one.n),
        f"{one.batch} x {one.sequence}",
        "exact" if one.states else "**off**",
        f"{one.measured / 1e6:.2f}",
        _signed(error(one.run, one.measured)),
        _signed(error(one.formulas, one.measured)),
    )


def _signed(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:+.1f} %"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


if __name__ == "__main__":
    tables.fill(sys.argv[1], sys.argv[2], COMMAND, Result, text)
