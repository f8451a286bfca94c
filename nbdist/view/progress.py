"""One line that tells what a long verb waits for, replaced by its result."""

from __future__ import annotations

from IPython import get_ipython
from IPython.display import DisplayHandle, display

from nbdist.core.shown import is_stored
from nbdist.view.cells import publish
from nbdist.view.mime import View


class ProgressLine:
    """A display that is updated in place in a notebook; plain lines in a terminal.

    Stored outputs have the result alone: no line, no update.
    """

    def __init__(self, title: str):
        self._title = title
        self._handle: object = None

    def __call__(self, text: str) -> None:
        """Show what is being waited for (in IPython only: a script asked for no lines)."""
        if not is_stored() and get_ipython() is not None:
            self._show(View(f"{self._title}: {text}"))

    def finish(self, view: View) -> None:
        """Put the result in the line's place."""
        self._show(view)

    def _show(self, view: View) -> None:
        shell = get_ipython()
        if shell is None or not hasattr(shell, "kernel") or is_stored():
            publish(view._repr_mimebundle_())
        elif isinstance(self._handle, DisplayHandle):
            self._handle.update(view)
        else:
            self._handle = display(view, display_id=True)
