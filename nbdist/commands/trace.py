"""Verbs that record where the time of a cell goes, and show it."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from nbdist.commands import cells
from nbdist.core.option import Option, whole_number
from nbdist.core.view import View
from nbdist.errors import OptionError
from nbdist.notebook.notebook import NOTEBOOK, CellOptions, Record
from nbdist.notebook.verb import Verb
from nbdist.trace import breakdown, findings
from nbdist.trace.kernel.recordings import read_folder
from nbdist.trace.trace import Trace, TraceOptions
from nbdist.trace.view.report import trace_report


def cell_options(values: Namespace) -> CellOptions:
    """The options of a recorded cell: it runs on all ranks, and some or all of them record."""
    options = TraceOptions(values.steps, values.has_memory, values.has_stacks)
    record = Record(options, values.recorded, report, lambda session: session.traces)
    return CellOptions(None, values.has_tabs, values.timeout_s, record)


def dist_trace(values: Namespace) -> View:
    """Show the last trace again, or those of a folder; save it."""
    folder = Path(values.folder[0]) if values.folder else None
    if folder is not None and values.save is not None:
        raise OptionError(
            "%dist_trace: --save writes the last recorded cell, not a folder's traces."
        )
    trace = NOTEBOOK.session.trace() if folder is None else read_folder(folder.expanduser())
    if values.has_page:
        url = NOTEBOOK.session.traces.page(trace)
        return View(f"{url} shows it in Perfetto, on this host, until %dist_shutdown.")
    if values.save is None:
        return report(trace)
    paths = NOTEBOOK.session.traces.save(Path(values.save).expanduser())
    return View("\n".join(f"written: {path}" for path in paths))


def report(trace: Trace) -> View:
    """Build the report of a trace."""
    shares = breakdown.breakdown(trace)
    return trace_report(trace, shares, findings.findings(trace, shares))


step_count = whole_number("a valid number of steps (1 or more)")


VERBS = (
    Verb(
        "dist_profile",
        "Run the cell on all ranks and show where its time goes.",
        "%%dist_profile --steps 3",
        cell_options,
        (
            Option(
                ("--steps",),
                "record N steps after one that is left out; the cell goes on",
                step_count,
                metavar="N",
            ),
            Option(
                ("--ranks",), "ranks to record, such as 0,2-3 (default: all)", metavar="RANKS",
                name="recorded",
            ),
            Option(
                ("--memory",), "record allocations, in the saved files only", None,
                name="has_memory",
            ),
            Option(("--stacks",), "record Python functions too", None, name="has_stacks"),
            *cells.CELL_OPTIONS,
        ),
        is_cell=True,
    ),
    Verb(
        "dist_trace",
        "Show the last recorded cell again, or saved traces; save it.",
        "%dist_trace --save traces",
        dist_trace,
        (
            Option(("folder",), "show the traces in this folder instead", metavar="DIR"),
            Option(
                ("--save",), "write one file per rank, and one of all for Perfetto", metavar="DIR",
            ),
            Option(
                ("--perfetto",), "open it in Perfetto, offline (pip install nbdist[perfetto])",
                None, name="has_page",
            ),
        ),
    ),
)  # fmt: skip
