"""%dist_panel: the ranks, their strategy and what to do in trouble, in one widget."""

from __future__ import annotations

from nbdist.notebook.notebook import NOTEBOOK
from nbdist.notebook.verb import Verb
from nbdist.panel.kernel.panel import Panel

PANEL = Panel()
NOTEBOOK.panel = PANEL


VERBS = (
    Verb(
        "dist_panel",
        "Show the ranks, their strategy and what to do in trouble as a panel with buttons.",
        "%dist_panel",
        lambda _values: PANEL.show(),
    ),
)
