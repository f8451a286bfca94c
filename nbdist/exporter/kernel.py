"""The notebook's file: where it is, and its cells."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from pathlib import Path

from nbdist.errors import OptionError
from nbdist.exporter.export import NotebookCell

FORMAT = 4


def notebook_path(variables: Mapping[str, object], environment: Mapping[str, str]) -> Path | None:
    """The file of the notebook that this kernel runs, as far as its front end tells; else None.

    VS Code puts the path among the notebook's variables, Jupyter's server into the environment.
    """
    name = variables.get("__vsc_ipynb_file__") or environment.get("JPY_SESSION_NAME") or ""
    path = Path(str(name))
    # The server may tell it from its own folder; a kernel runs in its notebook's.
    places = [path, Path(path.name)] if path.suffix == ".ipynb" else []
    return next((place for place in places if place.is_file()), None)


def read(path: Path) -> list[NotebookCell]:
    """The cells of a notebook's file; code cells are numbered from 1.

    Raises:
        OptionError: If it is no notebook that can be read.
    """
    try:
        notebook = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise OptionError(f"{path} cannot be read as a notebook: {error}") from error
    cells = notebook.get("cells") if isinstance(notebook, dict) else None
    if not isinstance(cells, list) or notebook.get("nbformat") != FORMAT:
        raise OptionError(
            f"{path} is not a notebook of format {FORMAT}. Open it in Jupyter and save it: that "
            "converts an older one."
        )
    numbers = itertools.count(1)
    read_cells = []
    for cell in cells:
        kind, source = cell.get("cell_type"), cell.get("source", "")
        text = "".join(source) if isinstance(source, list) else str(source)
        if kind == "code":
            read_cells.append(NotebookCell(next(numbers), text))
        else:
            read_cells.append(NotebookCell(0, text if kind == "markdown" else "", is_code=False))
    return read_cells
