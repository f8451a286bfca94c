"""A running cell's output in the notebook: the one place of nbdist that draws live."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO

from nbdist.core.cells import CellResult, Clear, Event, Rich
from nbdist.core.clip import SHOWN_LINES, Clip
from nbdist.core.lines import Bar, Line
from nbdist.core.shown import shown
from nbdist.view.tabs import tabs

# tqdm redraws ten times a second; more often nobody can read.
BAR_PAUSE_S = 0.1


class LiveCell:
    """Draws one cell's events as they come, in the thread that runs the cell."""

    def __init__(
        self,
        output_file: Callable[[], Path],
        *,
        has_tabs: bool = False,
        clock_s: Callable[[], float] = time.monotonic,
    ):
        """Draw into the running cell.

        Args:
            output_file: A path for everything, asked for once there are too many lines.
            has_tabs: Show every rank's own output at the end.
            clock_s: For the pause between redraws of a bar.
        """
        self._output_file = output_file
        self._has_tabs = has_tabs
        self._clock_s = clock_s
        self._clip = Clip()
        self._path: Path | None = None
        self._file: TextIO | None = None
        self._bar: Bar | None = None
        self._bar_drawn_s = float("-inf")

    def draw(self, events: Sequence[Event]) -> None:
        """Show these, in order; runs of lines are written at once."""
        pending: list[str] = []
        stream = ""
        for event in events:
            if isinstance(event, Line) and self._takes(event):
                if event.stream != stream:
                    self._write(stream, pending)
                    stream, pending = event.stream, []
                pending.append(event.text)
            elif not isinstance(event, Line):
                self._write(stream, pending)
                pending = []
                self._draw_other(event)
        self._write(stream, pending)

    def close(self, result: CellResult) -> None:
        """Show what was kept back: the last lines, and the tabs."""
        self._erase_bar()
        skipped, last = self._clip.rest()
        if skipped:
            text = f"... {skipped:,} lines are not shown; all lines: {shown(self._path)}\n"
            self._write("stdout", [text])
        self._write("stdout", last)
        if self._file is not None:
            self._file.close()
        if self._path is not None and not skipped:
            self._path.unlink()
        if self._has_tabs:
            publish(tabs(result)._repr_mimebundle_())

    def _takes(self, line: Line) -> bool:
        if self._clip.needs_file:
            self._path = self._output_file()
            self._file = self._path.open("w")
            self._clip.write_to(self._file)
            note = (
                f"... more than {SHOWN_LINES} lines: all go to {shown(self._path)}, the last "
                f"{SHOWN_LINES} are shown when the cell ends\n"
            )
            self._write("stdout", [note])
        return self._clip.add(line.text)

    def _draw_other(self, event: Bar | Rich | Clear) -> None:
        if isinstance(event, Bar):
            self._draw_bar(event)
        elif isinstance(event, Rich):
            self._erase_bar()
            publish(event.data, event.metadata, event.transient, is_update=event.is_update)
        else:
            self._bar = None
            clear(wait=event.wait)

    def _draw_bar(self, bar: Bar) -> None:
        now_s = self._clock_s()
        if not bar.text:
            self._erase_bar()
        elif now_s >= self._bar_drawn_s + BAR_PAUSE_S:
            before = self._bar.text if self._bar is not None else ""
            self._bar, self._bar_drawn_s = bar, now_s
            _emit(bar.stream, "\r" + bar.text.ljust(len(before)))

    def _erase_bar(self) -> None:
        if self._bar is not None:
            _emit(self._bar.stream, "\r" + " " * len(self._bar.text) + "\r")
            self._bar = None

    def _write(self, stream: str, lines: Sequence[str]) -> None:
        if lines:
            self._erase_bar()
            _emit(stream, "".join(lines))


def _emit(stream: str, text: str) -> None:
    target = getattr(sys, stream or "stdout")
    target.write(text)
    target.flush()


def publish(
    data: Any, metadata: Any = None, transient: Any = None, *, is_update: bool = False
) -> None:
    """Show a MIME bundle, or its text where there is no notebook."""
    from IPython import get_ipython
    from IPython.display import publish_display_data

    if get_ipython() is None:
        _emit("stdout", data.get("text/plain", "") + "\n")
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
