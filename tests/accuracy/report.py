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
        errors = [
            (abs(e), result)
            for result in results
            if (e := error(getattr(result, of), result.measured)) is not None
        ]
        if not errors:
            continue
        worst, first = max(errors, key=lambda pair: pair[0])
        median = _percent(statistics.median(share for share, _ in errors))
        lines.append(
            f"{what}: {len(errors)} peaks, median error {median}, worst {_percent(worst)} "
            f"({first.model}, `{first.typed}`)."
        )
    exact = sum(result.states for result in results)
    lines.append(
        f"Parameters, gradients and optimizer state: {exact} of {len(results)} exact, to the byte."
    )
    return "\n".join(f"- {line}" for line in lines)


def text(results: Sequence[Result]) -> str:
    """The summary and the table, with where they were made."""
    ordered = sorted(results, key=lambda result: result.n)
    table = tables.table(_HEAD, map(_row, ordered))
    return "\n\n".join([tables.machine(*_PACKAGES), summary(results), table])


def _row(result: Result) -> tuple[str, ...]:
    return (
        result.model,
        f"`{result.typed}`",
        str(result.n),
        f"{result.batch} x {result.sequence}",
        "exact" if result.states else "**off**",
        f"{result.measured / 1e6:.2f}",
        _signed(error(result.run, result.measured)),
        _signed(error(result.formulas, result.measured)),
    )


def _signed(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:+.1f} %"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


if __name__ == "__main__":
    tables.fill(sys.argv[1], sys.argv[2], COMMAND, Result, text)
