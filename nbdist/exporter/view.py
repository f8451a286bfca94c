"""Summary of an export, as text."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from nbdist.config.emit import ACCELERATE, SBATCH
from nbdist.core.view import View
from nbdist.exporter.export import ExportedScript


def script_view(
    path: Path,
    origin: str,
    notes: Sequence[str],
    exported: ExportedScript,
    launchers: Mapping[str, Path],
) -> View:
    """Which cells are in the script, what was left out and why, and how to run it.

    The origin is where the cells were read, the notes what to say of that; `launchers` are the
    files that start it, by form.
    """
    name = shlex.quote(str(path))
    files = {form: shlex.quote(str(file)) for form, file in launchers.items()}
    uses = {
        SBATCH: f"or: sbatch {files.get(SBATCH)}",
        ACCELERATE: f"or: accelerate launch --config_file {files.get(ACCELERATE)} {name}",
    }
    needs = f"it needs nbdist: {'; '.join(exported.needs)}"
    where = ", on each host" if "--nnodes" in exported.command else ""
    return View(
        "\n".join(
            (
                f"{path}: {len(exported.cells)} of {exported.total} code cells of {origin}",
                *notes,
                *exported.notes,
                *([needs] if exported.needs else []),
                f"run it{where}: {exported.command} {name}",
                *(uses[form] for form in files),
            )
        )
    )
