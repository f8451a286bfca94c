"""Names and records that both ends of the wire have to agree on."""

from __future__ import annotations

import traceback
from importlib import import_module
from typing import Any

# Metadata of every cell that is sent: the notebook's cell number, for tracebacks.
CELL_NUMBER = "nbdist_cell"
# And a number of its own for each cell that is sent: the notebook's can come twice.
CELL_RUN = "nbdist_run"
# Whether all ranks were sent this cell.
CELL_FOR_ALL = "nbdist_for_all"
# Of kept ranks: all ranks that run this cell, which each writes down what it says.
CELL_KEPT = "nbdist_kept"
# Which recording is of this cell; without it the cell is not recorded.
CELL_RECORDING = "nbdist_recording"
# In the place of a MIME type: what a rank's lints have seen in a cell. Never shown.
SEEN = "application/vnd.nbdist.seen+json"
# Message types of what an engine answers beside its cells.
CONTROL_REQUEST = "nbdist_request"
CONTROL_REPLY = "nbdist_reply"
# In the run folder: where a rank's multiprocessing keeps its sockets. Short, as their addresses
# may not be long.
SCRATCH_FOLDER = "mp.{rank}"


def call(name: str, *args: Any, **kwargs: Any) -> Any:
    """The result of the function `package.module:function`, called with the arguments.

    An error that it raises keeps nothing but its message and its lines.
    """
    module, _, function = name.partition(":")
    try:
        return getattr(import_module(module), function)(*args, **kwargs)
    except BaseException as error:
        # The engine's shell remembers its last error, and with it models that the user has deleted.
        link: BaseException | None = error
        while link is not None:
            traceback.clear_frames(link.__traceback__)
            link = link.__cause__ or link.__context__
        raise
