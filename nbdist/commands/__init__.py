"""Every verb once: its options, what it runs and what it shows. The magics read this table."""

from __future__ import annotations

from nbdist.commands import cells, export, running, training
from nbdist.commands.cells import cell_options
from nbdist.commands.running import start_and_show
from nbdist.verbs import Verb
from nbdist.view.cells import publish
from nbdist.view.mime import View

__all__ = ["REPLACED_MAGICS", "VERBS", "cell_options", "show", "start_and_show"]

# In the order of the help; each file of this folder holds those of one subject.
VERBS: dict[str, Verb] = {
    verb.name: verb for verb in (*running.VERBS, *training.VERBS, *cells.VERBS, *export.VERBS)
}

# Magics of nbdistributed that have no counterpart of the same name.
REPLACED_MAGICS = {
    "dist_debug": "%dist_status shows what every rank does",
    "dist_sync_ide": "not needed: no names are copied into the notebook",
    "timeline_save": "no timeline is kept; ranks that take longer are told under their cell",
    "timeline_debug": "no timeline is kept; ranks that take longer are told under their cell",
    "timeline_clear": "no timeline is kept; ranks that take longer are told under their cell",
}


def show(view: View) -> None:
    """Show a view in the running cell."""
    publish(view._repr_mimebundle_())
