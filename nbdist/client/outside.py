"""Ranks that somebody else than their notebook ends: `nbdist stop`, in a terminal."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from nbdist.core.units import shown
from nbdist.errors import NbdistError

NOTE = "stopped"
WHAT_NOW = "%dist_init starts new ones."


def leave_note(run_dir: Path) -> None:
    """Leave word for the run's notebook, before anything of it ends.

    Raises:
        NbdistError: If the run's folder cannot be written.
    """
    note = {"pid": os.getpid(), "at_s": time.time()}
    new = run_dir / f"{NOTE}.new"
    try:
        new.write_text(json.dumps(note))
        new.replace(run_dir / NOTE)
    except OSError as error:
        raise NbdistError(
            f"No word can be left for the notebook in {run_dir} ({error.strerror}), so nothing was "
            "ended. Free some space there, or stop the ranks in the notebook with %dist_shutdown."
        ) from error


def told(run_dir: Path) -> str:
    """That the ranks were ended from outside, as a sentence without its full stop; or "".

    Args:
        run_dir: Of the run; gone is as good as no note.
    """
    try:
        note = json.loads((run_dir / NOTE).read_text())
    except (OSError, ValueError):
        return ""
    clock = shown(time.strftime("%H:%M:%S", time.localtime(note["at_s"])))
    return f"The ranks are gone: `nbdist stop` in a terminal ended them at {clock}"
