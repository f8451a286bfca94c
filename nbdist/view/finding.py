"""Findings that have a verdict as a table, with what to do below."""

from __future__ import annotations

from collections.abc import Sequence

from nbdist.core.finding import BAD, OK, Finding, advice, summary
from nbdist.core.shown import shown
from nbdist.view.mime import View, table


def verdicts(
    findings: Sequence[Finding],
    *,
    before: Sequence[str] = (),
    title: str = "",
    none: str = "nothing to do",
) -> View:
    """All findings as a table, then for each that is not well why, and what to do.

    Args:
        findings: In their order. Those of a file have a column for its lines; those of a machine
            are not the same on the next one, and are not stored.
        before: Lines above.
        title: Stands before the counts.
        none: What to say where all is well.
    """
    head, rows = ["", "what", "found"], []
    for finding in findings:
        text = shown(finding.found) if finding.line is None else finding.found
        rows.append([finding.verdict, finding.name, text])
    if any(finding.line is not None for finding in findings):
        head = ["line", *head]
        rows = [[str(f.line or "-"), *row] for f, row in zip(findings, rows, strict=True)]
    after = [advice(finding) for finding in findings if finding.verdict != OK]
    above = [*before, f"{title}{summary(findings)}"]
    view = table(head, rows, before=above, after=after or [none])
    return View(view.text, view.html, is_bad=any(one.verdict == BAD for one in findings))
