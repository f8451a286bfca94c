"""The notebook's file is found where the front end tells of it, and read without its packages."""

import json
from pathlib import Path

import pytest

from nbdist.exporter import kernel as exporter_kernel
from nbdist.exporter.export import NotebookCell


@pytest.fixture
def notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A notebook in the working folder."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "a.ipynb"
    cells = [
        {"cell_type": "markdown", "source": ["# One\n", "two"]},
        {"cell_type": "code", "source": ["x = 1\n", "x"]},
        {"cell_type": "raw", "source": "# no heading"},
        {"cell_type": "code", "source": "y = 'é'"},
    ]
    path.write_text(json.dumps({"nbformat": 4, "cells": cells}), encoding="utf-8")
    return path


def test_cells_have_their_text_and_number(notebook: Path) -> None:
    """Code cells count from 1; text in lines or in one piece is the same; raw cells are empty."""
    assert exporter_kernel.read(notebook) == [
        NotebookCell(0, "# One\ntwo", is_code=False),
        NotebookCell(1, "x = 1\nx"),
        NotebookCell(0, "", is_code=False),
        NotebookCell(2, "y = 'é'"),
    ]


@pytest.mark.parametrize(
    ("variables", "environment", "is_found"),
    [
        ({"__vsc_ipynb_file__": "{}"}, {}, True),
        ({}, {"JPY_SESSION_NAME": "{}"}, True),
        ({}, {"JPY_SESSION_NAME": "from/the/servers/folder/a.ipynb"}, True),
        ({"__vsc_ipynb_file__": "{}"}, {"JPY_SESSION_NAME": "other.ipynb"}, True),
        ({}, {"JPY_SESSION_NAME": "renamed.ipynb"}, False),
        ({}, {"JPY_SESSION_NAME": "Console 1"}, False),
        ({}, {}, False),
    ],
)
def test_the_file_is_found_where_it_is_told(
    notebook: Path, variables: dict[str, str], environment: dict[str, str], *, is_found: bool
) -> None:
    """VS Code's variable comes before the server's; what is no file there is none."""
    path = exporter_kernel.notebook_path(
        {name: value.format(notebook) for name, value in variables.items()},
        {name: value.format(notebook) for name, value in environment.items()},
    )

    assert (path is not None and path.samefile(notebook)) == is_found
