"""Turns what `make parity` has compared into the tables of docs/parity.md.

python -m tests.parity.report build/parity.jsonl docs/parity.md
"""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from nbdist.strategy.table import ROWS
from tests.parity.case import Measured
from tests.parity.cases import SAVED, SWITCHED, WALKS
from tests.support import tables

COMMAND = "make parity"
_HEAD = (
    "strategy",
    "options",
    "ranks",
    "model",
    "loss",
    "gradients",
    "parameters",
    "tolerance of the loss",
)
_PACKAGES = ("torch", "accelerate", "transformers")


def rows_table(measured: Sequence[Measured]) -> str:
    """A line for each strategy and model: by row, ranks, model, in the order of the run."""
    names = list(ROWS)
    rows = [measured_case for measured_case in measured if measured_case.kind == "row"]
    models = list(dict.fromkeys(row.model for row in rows))
    rows.sort(key=lambda m: (names.index(_split(m.typed)[0]), m.n, models.index(m.model)))
    return tables.table(_HEAD, map(_row, rows))


def switch_table(measured: Sequence[Measured], n: int, model: str = "plain") -> str:
    """Rows are the strategies before, columns those after; the loss's largest difference."""
    walked = _switches(measured, n, model)
    corner = f"{n} ranks{'' if model == 'plain' else f', {model}'}: from, to"
    titles = {name: _code(name) for name in SWITCHED[n]}
    return _square(corner, titles, {(m.typed, m.after): m for m in walked})


def checkpoint_table(measured: Sequence[Measured]) -> str:
    """Rows are those who have saved, columns those who loaded; the loss's largest difference."""
    off = {((m.before_n, m.typed), (m.n, m.after)): m for m in measured if m.kind == "checkpoint"}
    titles = {(n, name): f"{n}: {_code(name)}" for n, names in SAVED.items() for name in names}
    return _square("saved by, loaded by", titles, off)


def text(measured: Sequence[Measured]) -> str:
    """All tables, with where they were made."""
    names = {
        _split(measured_case.typed)[0] for measured_case in measured if measured_case.kind == "row"
    }
    parts = [tables.machine(*_PACKAGES)]
    missing = (name for name in ROWS if name not in names)
    parts += [f"Not compared, as it is not installed: {name}." for name in missing]
    parts += ["### Strategies and options", rows_table(measured), "### Switches"]
    for n, model in WALKS:
        was_walked = _switches(measured, n, model)
        missed = f"{n} ranks, {model}: not walked this time."
        parts.append(switch_table(measured, n, model) if was_walked else missed)
    has_any = any(measured_case.kind == "checkpoint" for measured_case in measured)
    parts += ["### Checkpoints", checkpoint_table(measured) if has_any else "Not loaded this time."]
    return "\n\n".join(parts)


def _switches(measured: Sequence[Measured], n: int, model: str) -> list[Measured]:
    return [m for m in measured if (m.kind, m.n, m.model) == ("switch", n, model)]


def _square(corner: str, titles: Mapping[Any, str], measured: Mapping[Any, Measured]) -> str:
    """From each to each, by their titles."""
    rows = [(titles[old], *(_told(measured.get((old, new))) for new in titles)) for old in titles]
    return tables.table((corner, *titles.values()), rows)


def _split(typed: str) -> tuple[str, str]:
    name, _, options = typed.partition(" ")
    return name, options


def _row(measured: Measured) -> tuple[str, ...]:
    name, options = _split(measured.typed)
    return (
        _code(name),
        _code(options) if options else "",
        str(measured.n),
        measured.model,
        _told(measured),
        _number(measured.gradients),
        _number(measured.parameters),
        _number(measured.tolerance),
    )


def _told(measured: Measured | None) -> str:
    if measured is None:
        return "-"
    number = _number(measured.loss)
    return number if measured.loss <= measured.tolerance else f"**{number}**"


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1e}".replace("e-0", "e-") if value else "0"


def _code(words: str) -> str:
    return f"`{words}`"


if __name__ == "__main__":
    tables.fill(sys.argv[1], sys.argv[2], COMMAND, Measured, text)
