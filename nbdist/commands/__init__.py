"""Every verb once: its options, what it runs and what it shows.

The magics read this table, and so does the command line.
"""

from __future__ import annotations

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
)
from nbdist.commands.cluster import start_and_show
from nbdist.notebook.notebook import show
from nbdist.notebook.verb import NOTEBOOK, TERMINAL, Verb

__all__ = ["REPLACED_MAGICS", "VERBS", "WORDS", "show", "start_and_show"]

# In the order of the help; each file of this folder holds those of one subject.
_ALL = (
    *cluster.VERBS,
    *strategy.VERBS,
    *checkpoint.VERBS,
    *variables.VERBS,
    *cells.VERBS,
    *trace.VERBS,
    *memory.VERBS,
    *compare.VERBS,
    *export.VERBS,
    *config.VERBS,
    *doctor.VERBS,
    *check.VERBS,
    *bandwidth.VERBS,
    *monitor.VERBS,
    *plan.VERBS,
    *panel.VERBS,
    *terminal.VERBS,
)
# The magics, by their names.
VERBS: dict[str, Verb] = {verb.name: verb for verb in _ALL if verb.place != TERMINAL}
panel.PANEL.verbs = VERBS
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
