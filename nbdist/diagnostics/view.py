"""What `%dist_doctor` and `nbdist status` show."""

from __future__ import annotations

import time
from collections.abc import Sequence

from nbdist.cluster.run_owner import Run
from nbdist.core.view import View, table


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
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run.owner.since_s))
            if run.owner
            else "-",
            run.state,
            run.owner.where if run.owner else "-",
        ]
        for run in those
    ]
    if not rows:
        return View("you have no clusters running on this machine")
    head = ["run", "kernel", "ranks", "hosts", "since", "state", "notebook"]
    return table(head, rows)
