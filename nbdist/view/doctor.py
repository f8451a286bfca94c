"""What `%dist_doctor` and `nbdist status` show."""

from __future__ import annotations

import time
from collections.abc import Sequence

from nbdist.core.finding import BAD, OK, WARN, Finding
from nbdist.core.runs import Run
from nbdist.core.units import shown
from nbdist.view.mime import View, table


def findings(those: Sequence[Finding], done: Sequence[str] = ()) -> View:
    """All findings as a table, then for each that is not well why, and what to do.

    Args:
        those: In their order.
        done: What was cleaned before, a line each.
    """
    counts = {verdict: sum(one.verdict == verdict for one in those) for verdict in (BAD, WARN, OK)}
    rows = [[one.verdict, one.name, shown(one.found)] for one in those]
    after = [line for one in those if one.verdict != OK for line in _advice(one)]
    view = table(
        ["", "what", "found"],
        rows,
        before=[*done, ", ".join(f"{count} {verdict}" for verdict, count in counts.items())],
        after=after or ["nothing to do"],
    )
    return View(view.text, view.html, is_bad=counts[BAD] > 0)


def _advice(one: Finding) -> list[str]:
    what = f"; {one.what}" if one.what else ""
    return [f"{one.verdict} {one.name}: {one.why}{what}"]


def below(first: View, second: View) -> View:
    """Two views, one below the other."""
    return View(
        f"{first.text}\n\n{second.text}",
        first.html + second.html,
        is_bad=first.is_bad or second.is_bad,
    )


def running(those: Sequence[Run]) -> View:
    """The runs whose notebook lives, one row each."""
    rows = [
        [
            run.name,
            str(run.owner.pid if run.owner else "-"),
            str(len(run.hosts) or "-"),
            ", ".join(dict.fromkeys(run.hosts)) or "-",
            _clock(run),
            run.state,
            run.owner.where if run.owner else "-",
        ]
        for run in those
    ]
    if not rows:
        return View("no clusters of yours run on this machine")
    head = ["run", "kernel", "ranks", "hosts", "since", "state", "notebook"]
    return table(head, rows)


def _clock(run: Run) -> str:
    if run.owner is None:
        return "-"
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run.owner.since_s))
