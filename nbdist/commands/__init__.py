"""Every verb once: its options, what it runs and what it shows.

The magics read this table, and so does the command line.
"""

from __future__ import annotations

from argparse import Namespace

from nbdist.commands import (
    bandwidth,
    cells,
    check,
    checkpoint,
    cluster,
    compare,
    config,
    doctor,
    export,
    memory,
    monitor,
    panel,
    plan,
    strategy,
    terminal,
    trace,
    variables,
    verify,
)
from nbdist.commands.cluster import start_and_show
from nbdist.core.view import View
from nbdist.notebook.notebook import show
from nbdist.notebook.verb import NOTEBOOK, TERMINAL, Verb

__all__ = ["REPLACED_MAGICS", "VERBS", "WORDS", "show", "start_and_show"]


def dist_help(_values: Namespace) -> View:
    """All verbs of a notebook by subject, with a line each."""
    shown = {
        title: [verb for verb in verbs if verb.place != TERMINAL]
        for title, verbs in SUBJECTS.items()
    }
    width = max(len(verb.typed) for verbs in shown.values() for verb in verbs)
    listed = ["%NAME --help shows a verb's options with an example."]
    for title, verbs in shown.items():
        listed += ["", title, *(f"  {verb.typed:{width}}  {verb.help}" for verb in verbs)]
    return View("\n".join(listed))


# Subject -> its verbs, in the order of the help; each file of this folder has those of one subject.
SUBJECTS: dict[str, tuple[Verb, ...]] = {
    "Ranks": cluster.VERBS,
    "Cells and variables": (*cells.VERBS, *variables.VERBS),
    "Training in parallel": (*strategy.VERBS, *checkpoint.VERBS),
    "Time and memory": (*trace.VERBS, *memory.VERBS, *monitor.VERBS, *bandwidth.VERBS),
    "Choosing a strategy": (*plan.VERBS, *compare.VERBS),
    "Checks": (*check.VERBS, *verify.VERBS, *doctor.VERBS, *config.VERBS),
    "Outside the notebook": (*export.VERBS, *terminal.VERBS),
    "Overview": (
        *panel.VERBS,
        Verb("dist_help", "Show all verbs by subject.", "%dist_help", dist_help),
    ),
}
_ALL = tuple(verb for verbs in SUBJECTS.values() for verb in verbs)
# The magics, by their names.
VERBS: dict[str, Verb] = {verb.name: verb for verb in _ALL if verb.place != TERMINAL}
panel.PANEL.verbs = export.magics = VERBS
# What can be typed after `nbdist`. `status` lists all clusters there; %dist_status is another one.
WORDS: dict[str, Verb] = {
    **{verb.word: verb for verb in _ALL if verb.place == NOTEBOOK},
    **{verb.word: verb.in_terminal() for verb in _ALL if verb.place != NOTEBOOK},
}

# Magics of nbdistributed that have no counterpart of the same name.
REPLACED_MAGICS = {
    "dist_debug": "%dist_status shows what every rank does",
    "dist_sync_ide": "not needed: no names are copied into the notebook",
    "timeline_save": "no timeline is kept; slower ranks are named below their cell",
    "timeline_debug": "no timeline is kept; slower ranks are named below their cell",
    "timeline_clear": "no timeline is kept; slower ranks are named below their cell",
}
