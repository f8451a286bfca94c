"""Verbs that record what a cell allocates, and show whose memory it is."""

from __future__ import annotations

import argparse
from argparse import Namespace
from pathlib import Path

from nbdist.commands import cells
from nbdist.commands.trace import step_count
from nbdist.core.view import View
from nbdist.errors import OptionError
from nbdist.memory import file as memory_file
from nbdist.memory import findings, peak
from nbdist.memory.diff import diff
from nbdist.memory.snapshot import MemoryOptions, Snapshot
from nbdist.memory.view.diff import grew
from nbdist.memory.view.report import memory_report
from nbdist.notebook.notebook import NOTEBOOK, CellOptions, Record, show
from nbdist.notebook.verb import Option, Verb


def cell_options(values: Namespace) -> CellOptions:
    """The options of a recorded cell: it runs on all ranks, and some or all of them record."""
    options = MemoryOptions(values.steps, not values.has_no_stacks, values.most_events)
    record = Record(
        options,
        values.recorded,
        lambda snapshot: show(shown(snapshot)),
        lambda session: session.memories,
    )
    return CellOptions(None, values.has_tabs, values.timeout_s, record)


def shown(snapshot: Snapshot) -> View:
    """What a snapshot says."""
    peaks = peak.peaks(snapshot)
    return memory_report(snapshot, peaks, findings.findings(snapshot, peaks))


def dist_memory(values: Namespace) -> View:
    """Show the last recorded memory again, or whose it is now; keep, compare or save it."""
    folder = Path(values.folder[0]).expanduser() if values.folder else None
    if folder is not None and values.is_now:
        raise OptionError("%dist_memory: a folder holds what was saved, not what is --now.")
    asked = [name for name in ("keep", "since", "save") if getattr(values, name) is not None]
    if len(asked) > 1:
        raise OptionError(f"%dist_memory: one of --{' and --'.join(asked)} at a time.")
    snapshot = _asked(folder, is_now=values.is_now)
    if values.keep is not None:
        NOTEBOOK.session.memories.keep(values.keep, snapshot)
        return View(f"kept as {values.keep}; %dist_memory --since {values.keep} shows what grew")
    if values.save is not None:
        made = memory_file.write_folder(Path(values.save).expanduser(), snapshot)
        return View("\n".join(f"written: {path}" for path in made))
    if values.since is not None:
        return _grown(values.since, snapshot)
    return shown(snapshot)


def _asked(folder: Path | None, *, is_now: bool) -> Snapshot:
    """The saved snapshots of a folder, or of the ranks: of now, or what was recorded last."""
    if folder is not None:
        return memory_file.read_folder(folder)
    session = NOTEBOOK.session
    return session.memories.now() if is_now else session.memory()


def _grown(since: str, snapshot: Snapshot) -> View:
    before = saved(since) if not NOTEBOOK.is_running else NOTEBOOK.session.memories.kept(since)
    if before is snapshot:
        return View(
            f"{since} is the recording that was made last: record another one with %%dist_memory, "
            "or compare with this moment: %dist_memory --now --since " + since
        )
    return grew(diff(before, snapshot), since)


def saved(folder: str) -> Snapshot:
    """The snapshots that were saved into a folder; see memory.file.read_folder."""
    return memory_file.read_folder(Path(folder).expanduser())


def _event_count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of events (1 or more)")
    return int(text)


AS_LINE = Verb(
    "dist_memory",
    "Show the last recorded memory again, or what holds memory now if none was recorded.",
    "%dist_memory --now",
    dist_memory,
    (
        Option(("folder",), "show the snapshots in this folder instead", metavar="DIR"),
        Option(
            ("--now",), "show what holds memory at this moment, without a history", None,
            name="is_now",
        ),
        Option(("--keep",), "keep it under this name, for --since", metavar="NAME"),
        Option(("--since",), "show growth since a kept or saved snapshot",
               metavar="NAME|DIR"),
        Option(("--save",), "write a file per rank for torch's memory viewer", metavar="DIR"),
    ),
)  # fmt: skip
VERBS = (
    Verb(
        "dist_memory",
        "Run the cell on all ranks and show what it allocates.",
        "%%dist_memory --steps 3",
        cell_options,
        (
            Option(
                ("--steps",), "record N steps; the cell goes on", step_count, metavar="N",
            ),
            Option(
                ("--ranks",), "ranks to record, such as 0,2-3 (default: all)", metavar="RANKS",
                name="recorded",
            ),
            Option(
                ("--no-stacks",), "leave out Python stacks: faster and smaller", None,
                name="has_no_stacks",
            ),
            Option(
                ("--most-events",), "keep the last N allocations and frees (default: 1,000,000)",
                _event_count, MemoryOptions().most_events, metavar="N",
            ),
            *cells.CELL_OPTIONS,
        ),
        is_cell=True,
        as_line=AS_LINE,
    ),
)  # fmt: skip
