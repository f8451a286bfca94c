"""Verbs that record what a cell allocates, and show whose memory it is."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from nbdist.commands import cells
from nbdist.commands.trace import step_count
from nbdist.core.option import Option, whole_number
from nbdist.core.view import View
from nbdist.errors import OptionError
from nbdist.memory import file as memory_file
from nbdist.memory import findings, peak
from nbdist.memory.diff import diff
from nbdist.memory.snapshot import MemoryOptions, Snapshot
from nbdist.memory.view.diff import growth_view
from nbdist.memory.view.report import memory_report
from nbdist.notebook.notebook import NOTEBOOK, CellOptions, Record
from nbdist.notebook.verb import Verb


def cell_options(values: Namespace) -> CellOptions:
    """The options of a recorded cell: it runs on all ranks, and some or all of them record."""
    options = MemoryOptions(values.steps, not values.has_no_stacks, values.most_events)
    record = Record(options, values.recorded, snapshot_view, lambda session: session.memories)
    return CellOptions(None, values.has_tabs, values.timeout_s, record)


def snapshot_view(snapshot: Snapshot) -> View:
    """Build the view of a snapshot."""
    peaks = peak.peaks(snapshot)
    return memory_report(snapshot, peaks, findings.findings(snapshot, peaks))


def dist_memory(values: Namespace) -> View:
    """Show the last recorded memory again, or whose it is now; keep, compare or save it."""
    folder = Path(values.folder[0]).expanduser() if values.folder else None
    if folder is not None and values.is_now:
        raise OptionError("%dist_memory: give a folder or --now, not both.")
    asked = [name for name in ("keep", "since", "save") if getattr(values, name) is not None]
    if len(asked) > 1:
        raise OptionError(f"%dist_memory: --{' and --'.join(asked)} cannot be combined.")
    if folder is not None:
        snapshot = memory_file.read_folder(folder)
    elif values.is_now:
        snapshot = NOTEBOOK.session.memories.now()
    else:
        snapshot = NOTEBOOK.session.memory()
    if values.keep is not None:
        NOTEBOOK.session.memories.keep(values.keep, snapshot)
        return View(f"kept as {values.keep}; %dist_memory --since {values.keep} shows what grew")
    if values.save is not None:
        paths = memory_file.write_folder(Path(values.save).expanduser(), snapshot)
        return View("\n".join(f"written: {path}" for path in paths))
    if values.since is not None:
        return _growth(values.since, snapshot)
    return snapshot_view(snapshot)


def _growth(since: str, snapshot: Snapshot) -> View:
    if NOTEBOOK.is_running:
        before = NOTEBOOK.session.memories.find(since)
    else:
        before = memory_file.read_folder(Path(since).expanduser())
    if before is snapshot:
        return View(
            f"{since} is the last recording itself. Record another one with %%dist_memory, "
            "or compare with the present: %dist_memory --now --since " + since
        )
    return growth_view(diff(before, snapshot), since)


_event_count = whole_number("a valid number of events (1 or more)")

AS_LINE = Verb(
    "dist_memory",
    "Show the last memory recording again; without one, current memory by owner.",
    "%dist_memory --now",
    dist_memory,
    (
        Option(("folder",), "show the snapshots in this folder instead", metavar="DIR"),
        Option(
            ("--now",), "show current memory by owner, without a history", None,
            name="is_now",
        ),
        Option(("--keep",), "keep the snapshot under a name, for --since", metavar="NAME"),
        Option(("--since",), "show what has grown since a kept or saved snapshot",
               metavar="NAME|DIR"),
        Option(("--save",), "write one file per rank, for torch's viewer", metavar="DIR"),
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
                ("--steps",), "record the first N steps; the cell runs on", step_count, metavar="N",
            ),
            Option(
                ("--ranks",), "record only these ranks, such as 0,2-3 (default: all)",
                metavar="RANKS", name="recorded",
            ),
            Option(
                ("--no-stacks",), "record no Python stacks: faster and smaller", None,
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
