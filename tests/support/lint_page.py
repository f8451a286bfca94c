"""Writes the table of docs/lints.md from the lints: `python -m tests.support.lint_page`."""

from pathlib import Path

from nbdist.lints.rules import LINTS
from tests.support import tables

PAGE = Path(__file__).parents[2] / "docs/lints.md"
COMMAND = "python -m tests.support.lint_page"
_HEAD = ("lint", "reported when", "example", "not reported")


def render(page: str) -> str:
    """The page with a row for each lint."""
    rows = []
    for lint in LINTS.values():
        (hit, *_) = lint.judge(*lint.example)
        rows.append((f"`{lint.name}`", lint.conditions, hit.found, lint.exceptions))
    return tables.replaced(page, COMMAND, tables.table(_HEAD, rows))


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
