"""Verbs that run a cell on ranks."""

from __future__ import annotations

from argparse import Namespace

from nbdist.core.option import Option, positive_number
from nbdist.errors import OptionError
from nbdist.notebook.notebook import CellOptions
from nbdist.notebook.verb import Verb


def cell_options(values: Namespace) -> CellOptions:
    """The options of a distributed cell, however its ranks were typed."""
    where = getattr(values, "where", None)
    if where == [] and not values.ranks:
        raise OptionError("%%rank: no rank is named. For example: %%rank [0] or %%rank [0,2-3].")
    named = " ".join(where or []) or None
    if named and values.ranks:
        raise OptionError(f"Ranks are given twice: {named} and --ranks {values.ranks}.")
    return CellOptions(named or values.ranks, values.has_tabs, values.timeout_s)


RANKS = Option(("--ranks",), "ranks such as 0,2-3 (default: all)", metavar="RANKS")
CELL_OPTIONS = (
    Option(("--tabs",), "at the end, show each rank's output in a tab", None, name="has_tabs"),
    Option(
        ("--timeout",), "interrupt the ranks after S seconds", positive_number, metavar="S",
        name="timeout_s",
    ),
)  # fmt: skip
_WHERE = Option(("where",), "ranks such as [0,2-3]", metavar="RANKS")

VERBS = (
    Verb(
        "distributed",
        "Run the cell on all ranks, or on some.",
        "%%distributed --ranks 0,2-3",
        cell_options,
        (RANKS, *CELL_OPTIONS),
        is_cell=True,
    ),
    Verb(
        "rank",
        "Run the cell on the ranks named.",
        "%%rank [0,2-3]",
        cell_options,
        (_WHERE, RANKS, *CELL_OPTIONS),
        is_cell=True,
    ),
)
