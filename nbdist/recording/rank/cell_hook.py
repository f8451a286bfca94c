"""Lets a recording run while its cell does, and never longer.

What records (trace/rank.py, memory/rank/record.py) is loaded when it is first asked for: a rank
starts without it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from nbdist.recording.rank.steps import CellRecording
from nbdist.rpc.rank import progress
from nbdist.rpc.rank.cell_hooks import CellContext
from nbdist.rpc.wire import CELL_RECORDING


@dataclass(slots=True)
class State:
    """At most one recording waits for its cell, and one runs."""

    armed: CellRecording | None = None
    running: CellRecording | None = None


state = State()


def step() -> None:
    """A step ends here, if a cell is being recorded; see nbdist.step."""
    if state.running is not None:
        state.running.after_step()


def install(shell: Any) -> None:
    """End a recording before a cell's error is formatted: 50,000 calls that are not the cell's.

    With Python's calls recorded they take seconds, and an interrupted rank has no more.
    """
    show = shell.showtraceback

    def showtraceback(*args: Any, **options: Any) -> Any:
        if state.running is not None:
            state.running.stop()
        return show(*args, **options)

    shell.showtraceback = showtraceback


@contextmanager
def around_cell(cell: CellContext) -> Iterator[None]:
    """Let an armed recording run while its cell does.

    A cell with another token, or none, is never recorded: a recording whose own cell was not sent
    waits until the next takes its place.
    """
    recording = state.armed
    if recording is None or recording.token != cell.metadata.get(CELL_RECORDING):
        yield
        return
    state.armed, state.running = None, recording
    with progress.during(recording.noun):
        progress.tell("recording")
        recording.start()
        try:
            yield
        finally:
            state.running = None
            progress.tell("ending the recording")
            recording.stop()
