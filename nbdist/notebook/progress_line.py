"""One line that tells what a long verb waits for, or how far it is, replaced by its result."""

from __future__ import annotations

import contextlib
import html
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from IPython import get_ipython
from IPython.display import DisplayHandle, display

from nbdist.cells.view.live_cell import publish
from nbdist.core.progress import Progress
from nbdist.core.units import is_stored
from nbdist.core.view import View


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """Takes what there is to see, and what verbs wait for, while no cell waits for them."""

    result: Callable[[View], object]
    step: Callable[[str], object]


class ProgressLine:
    """A display that is updated in place in a notebook; plain lines in a terminal.

    Stored outputs have the result alone: no line, no update.
    """

    def __init__(self, title: str, elsewhere: Elsewhere | None = None):
        self._title = title
        self._elsewhere = elsewhere
        self._handle: object = None

    def __call__(self, text: str) -> None:
        """Show what is being waited for (in IPython only: a script asked for no lines)."""
        if self._elsewhere is not None:
            self._elsewhere.step(text)
        elif not is_stored() and get_ipython() is not None:
            self._show(View(f"{self._title}: {text}"))

    def finish(self, view: View) -> None:
        """Put the result in the line's place."""
        if self._elsewhere is not None:
            self._elsewhere.result(view)
        else:
            self._show(view)

    def _show(self, view: View) -> None:
        shell = get_ipython()
        if shell is None or not hasattr(shell, "kernel") or is_stored():
            publish(view._repr_mimebundle_())
        elif isinstance(self._handle, DisplayHandle):
            self._handle.update(view)
        else:
            self._handle = display(view, display_id=True)


class ShownProgress:
    """Shows long work as one line of the cell that waits for it; taken away at the end.

    A listener of cells.kernel.progress. In a terminal there is a line for each thing that is done.
    Stored outputs have nothing of it.
    """

    def __init__(self) -> None:
        self._handle: DisplayHandle | None = None
        self._cell = ""
        self._last_line = ""
        self._is_silent = False
        self._elsewhere: Elsewhere | None = None
        # Where it is shown instead of in a line of its own: beside the bars of a cell on ranks.
        self.note: Callable[[str], object] | None = None

    @contextlib.contextmanager
    def silenced(self) -> Iterator[None]:
        """Show nothing meanwhile: no cell waits for it, or it would stand above what is shown."""
        before, self._is_silent = self._is_silent, True
        try:
            yield
        finally:
            self._is_silent = before

    @contextlib.contextmanager
    def redirected(
        self, result: Callable[[View], object], step: Callable[[str], object]
    ) -> Iterator[None]:
        """Show nothing below the cell meanwhile, but hand it over: a button has run the verb."""
        with self.silenced():
            before, self._elsewhere = self._elsewhere, Elsewhere(result, step)
            try:
                yield
            finally:
                self._elsewhere = before

    def line(self, title: str) -> ProgressLine:
        """A line of a verb's own, for what it waits for and then its result."""
        return ProgressLine(title, self._elsewhere)

    def __call__(self, now: Progress | None) -> None:
        """Show this; from any thread, in the context of its cell. None for the end."""
        shell = get_ipython()
        if shell is None or is_stored() or self._is_silent:
            return
        if self.note is not None:
            self.note("" if now is None else str(now))
        elif not hasattr(shell, "kernel"):
            self._say(now)
        elif now is not None:
            self._draw(View(str(now), line_html(str(now), now.share)))
        elif self._handle is not None:
            self._handle.update(View(""))

    def begin(self) -> None:
        """A verb begins: lines of before stand above what was shown since."""
        self._handle = None

    def replace(self, view: View) -> bool:
        """Put a result in the line's place; whether the running cell has one."""
        if self._elsewhere is not None:
            self._elsewhere.result(view)
            return True
        handle, self._handle = self._handle, None
        if handle is None or self._cell != _running_cell():
            return False
        handle.update(view)
        return True

    def _draw(self, view: View) -> None:
        if self._handle is not None and self._cell == _running_cell():
            self._handle.update(view)
            return
        self._cell = _running_cell()
        handle = display(view, display_id=True)
        assert isinstance(handle, DisplayHandle)
        self._handle = handle

    def _say(self, now: Progress | None) -> None:
        line = "" if now is None else f"{now.name}: {now.what}"
        if line and line != self._last_line:
            publish(View(str(now))._repr_mimebundle_())
        self._last_line = line


def line_html(text: str, share: float | None) -> str:
    """A line with a bar, where it is known how far it is."""
    if share is None:
        return f"<div>{html.escape(text)}</div>"
    inner = f'<i style="display:block;height:100%;width:{share:.0%};background:#56B4E9"></i>'
    bar = (
        '<span aria-hidden="true" style="display:inline-block;width:220px;height:9px;'
        "border-radius:2px;background:rgba(128,128,128,.28);margin-right:7px;overflow:hidden;"
        f'vertical-align:middle">{inner}</span>'
    )
    return f"<div>{bar}{html.escape(text)}</div>"


def _running_cell() -> str:
    """The message that the running cell came with; the same in a thread with its context."""
    kernel = getattr(get_ipython(), "kernel", None)
    parent = {} if kernel is None else kernel.get_parent("shell")
    return str(parent.get("header", {}).get("msg_id", ""))
