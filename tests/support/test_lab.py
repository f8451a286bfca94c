"""The browser helpers on a plain JupyterLab."""

from pathlib import Path

import psutil
import pytest

from tests.support.lab import Lab, LabNotebook, browser_page, write_notebook
from tests.support.processes import descendants, wait_gone


@pytest.mark.browser
def test_a_cell_runs_in_jupyterlab(tmp_path: Path) -> None:
    """JupyterLab runs, interrupts and restarts; output and prompts are read from the page."""
    write_notebook(
        tmp_path / "a.ipynb",
        "1+1",
        "import time\nprint('sleeping', flush=True)\ntime.sleep(60)",
        "1/0",
        "'never run'",
        "6 * ",
    )
    with Lab(tmp_path) as lab, browser_page() as page:
        notebook = LabNotebook(page, lab, "a.ipynb")
        server = psutil.Process(lab.pid)
        kernels = descendants(lab.pid)
        notebook.run_cell(0)

        assert notebook.output_text(0).strip().endswith("2")
        assert notebook.prompt(0) == "[1]:"
        notebook.run_cell(1, wait=False)
        notebook.wait_text(1, "sleeping")
        assert notebook.prompt(1) == "[*]:"
        notebook.interrupt()
        notebook.wait_done(1, timeout_s=20)
        assert "KeyboardInterrupt" in notebook.output_text(1)
        notebook.type_into(4, "7")
        notebook.run_cell(4)
        assert "42" in notebook.output_html(4)
        notebook.restart()
        notebook.run_cell(0)
        assert notebook.prompt(0) == "[1]:"
        with pytest.raises(TimeoutError, match=r"'never' in cell 0.*(?s:.*)1\+1"):
            notebook.wait_text(0, "never", timeout_s=0.5)
        picture = tmp_path / "lab.png"
        notebook.screenshot(picture)

        assert picture.read_bytes().startswith(b"\x89PNG")
    assert kernels
    assert wait_gone([server, *kernels]) == []


@pytest.mark.browser
def test_run_all_in_jupyterlab_stops_at_an_error(tmp_path: Path) -> None:
    """The cells behind a failing one are not run, and waiting for Run All ends all the same."""
    # A kernel leaves out what has reached it when a cell fails, and runs what comes later. So the
    # cell fails on an answer, which JupyterLab sends behind all the cells.
    write_notebook(tmp_path / "a.ipynb", "'first'", "1 / int(input('by: '))", "'never run'")
    with Lab(tmp_path) as lab, browser_page() as page:
        notebook = LabNotebook(page, lab, "a.ipynb")
        notebook.run_all(wait=False)
        notebook.answer(1, "0")
        notebook.wait_all()

        assert [notebook.prompt(i) for i in range(3)] == ["[1]:", "[2]:", "[ ]:"]
        assert "ZeroDivisionError" in notebook.output_text(1)
