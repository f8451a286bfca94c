"""A running cell's output in the notebook: the one place of nbdist that draws live."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from nbdist.cells.line_merger import Bar, Line
from nbdist.cells.outputs import WIDGET_TYPE, CellResult, ClearOutput, DisplayOutput, Event
from nbdist.cells.truncate import Clip
from nbdist.cells.view.output_file import OutputFile
from nbdist.cells.view.tabs import tabs
from nbdist.core.units import shown

# nbdist's own lines go where no reader takes them for an error.
_NOTED = "stdout"
# tqdm redraws ten times a second; a person cannot read more.
BAR_PAUSE_S = 0.1
# The shown part of an unfinished line, which may have any length.
SHOWN_BAR_CHARACTERS = 1_000


class LiveCell:
    """Draws one cell's events as they come, in the thread that runs the cell."""

    def __init__(
        self,
        output_file: Callable[[], Path],
        *,
        has_tabs: bool = False,
        is_clipped: bool = True,
        on_bar: Callable[[str], object] = lambda _text: None,
        clock_s: Callable[[], float] = time.monotonic,
    ):
        """Draw into the running cell, or for a program that is not clipped, into the terminal.

        The path for everything is asked for once there are too many lines. `on_bar` is called with
        the progress bar that is drawn, and at its end with "".
        """
        self._output_file = output_file
        self._has_tabs = has_tabs
        self._is_clipped = is_clipped
        self._on_bar = on_bar
        self._clock_s = clock_s
        self._clip = Clip()
        self._file: OutputFile | None = None
        self._bars: dict[str, Bar] = {}  # by stream, the one that changed last at the end
        self._drawn: Bar | None = None
        self._drawn_s = float("-inf")
        self._lock = threading.RLock()
        self._note = ""
        self._is_closed = False

    def note(self, text: str) -> None:
        """Show how far something is beside the bars, or "" for nothing; from any thread."""
        with self._lock:
            if not self._is_closed and text != self._note:
                self._note = text
                self._draw_bar()

    def draw(self, events: Sequence[Event]) -> None:
        """Show these, in order; runs of lines are written at once."""
        pending: list[Line] = []
        with self._lock:
            for event in events:
                if isinstance(event, Line):
                    pending += self._clipped(event)
                else:
                    self._write(pending)
                    pending = []
                    self._draw_other(event)
            self._write(pending)
            self._draw_bar()
            if self._file is not None:
                self._file.flush()  # its path has been told: it can be read while the cell runs

    def _clipped(self, lines: Line) -> list[Line]:
        """The part of these lines that is shown at once."""
        if not self._is_clipped:
            return [lines]
        first, rest = self._clip.first(lines.text)
        visible = [Line(lines.stream, first)] if first else []
        if rest and self._clip.needs_file:
            self._file = OutputFile(self._output_file())
            self._clip.write_to(self._file.write)
            note = (
                f"... more than {self._clip.limit}: all go to {shown(self._file.path)}, the last "
                f"{self._clip.limit.split()[0]} are shown when the cell ends\n"
            )
            visible.append(Line("stdout", note))
        if rest:
            self._clip.keep(lines.stream, rest)
        return visible

    def close(self, result: CellResult) -> None:
        """Show the output that was held back: the last lines, and the tabs."""
        with self._lock:
            self._is_closed, self._note = True, ""
            self._erase_bar()
        skipped, last = self._clip.rest()
        if skipped.characters and self._file is not None:
            self._file.flush()
            where = (
                f"they could not be saved ({self._file.problem}: {shown(self._file.path)})"
                if self._file.problem
                else f"all of them, until the ranks end, in {shown(self._file.path)}"
            )
            self._write([Line("stdout", f"... {skipped} not shown; {where}\n")])
        self._write(last)
        self._end_file(is_needed=skipped.characters > 0)
        if self._has_tabs:
            publish(tabs(result)._repr_mimebundle_())

    def _end_file(self, *, is_needed: bool) -> None:
        if self._file is not None:
            self._file.close(is_needed=is_needed)
        self._file = None

    def _draw_other(self, event: Bar | DisplayOutput | ClearOutput) -> None:
        if isinstance(event, Bar):
            self._bars.pop(event.stream, None)
            if event.text:
                self._bars[event.stream] = Bar(event.stream, event.text[:SHOWN_BAR_CHARACTERS])
        elif isinstance(event, DisplayOutput):
            if self._has_tabs and WIDGET_TYPE not in event.data:
                return  # in the tabs at the end; a live widget cannot stand there
            self._erase_bar()
            publish(event.data, event.metadata, event.transient, is_update=event.is_update)
        else:
            self._drawn = None
            self._end_file(is_needed=False)
            self._clip = Clip()
            clear(wait=event.wait)

    def _draw_bar(self) -> None:
        bar = next(reversed(self._bars.values()), None)
        bar_text = "" if bar is None else bar.text
        if self._note:
            bar = Bar(
                _NOTED if bar is None else bar.stream,
                "  ".join(filter(None, [bar_text, self._note])),
            )
        if bar is None or (self._drawn is not None and self._drawn.stream != bar.stream):
            self._erase_bar()
        now_s = self._clock_s()
        if bar is None or bar == self._drawn or now_s < self._drawn_s + BAR_PAUSE_S:
            return
        before = self._drawn.text if self._drawn is not None else ""
        self._drawn, self._drawn_s = bar, now_s
        _emit(bar.stream, "\r" + bar.text.ljust(len(before)))
        self._on_bar(bar_text)

    def _erase_bar(self) -> None:
        if self._drawn is not None:
            _emit(self._drawn.stream, "\r" + " " * len(self._drawn.text) + "\r")
            self._drawn = None
            self._on_bar("")

    def _write(self, lines: Sequence[Line]) -> None:
        if lines:
            self._erase_bar()
        for stream, run in groupby(lines, key=lambda line: line.stream):
            _emit(stream, "".join(line.text for line in run))


def _emit(stream: str, text: str) -> None:
    target = getattr(sys, stream)
    target.write(text)
    target.flush()


def publish(
    data: Any, metadata: Any = None, transient: Any = None, *, is_update: bool = False
) -> None:
    """Show a MIME bundle, or its text where there is no notebook."""
    from IPython import get_ipython
    from IPython.display import publish_display_data

    if get_ipython() is None:
        if "text/plain" in data:
            _emit("stdout", data["text/plain"] + "\n")
        return
    publish_display_data(
        data=dict(data),
        metadata=dict(metadata or {}),
        transient=dict(transient or {}),
        update=is_update,
    )


def clear(*, wait: bool) -> None:
    """Clear the running cell's output."""
    from IPython.display import clear_output

    clear_output(wait=wait)
