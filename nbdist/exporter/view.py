"""What an export has made, as text."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from nbdist.core.view import View
from nbdist.exporter.export import ExportedScript


def script_view(path: Path, origin: str, notes: Sequence[str], exported: ExportedScript) -> View:
    """Which cells are in the script, what was left out and why, and how to run it.

    The origin is where the cells were read, the notes what to say of that.
    """
    name = shlex.quote(str(path))
    where = ", on each host" if "--nnodes" in exported.command else ""
    return View(
        "\n".join(
            (
                f"{path}: {len(exported.cells)} of {exported.total} code cells of {origin}",
                *notes,
                *exported.notes,
                f"run it{where}: {exported.command} {name}",
            )
        )
    )
