"""Tab and Shift-Tab in JupyterLab: the ranks' names stand below the cursor."""

import re
from collections.abc import Iterator

import pytest

from tests.support.lab import Lab, LabNotebook, browser_page, write_notebook

pytestmark = pytest.mark.browser

CELLS = (
    "%load_ext nbdist",
    "%dist_init -n 2",
    "%%distributed\nimport torch._dynamo\nranks_model = torch.nn.Linear(4, 2)\nranks_loss = 0.5",
    "ranks_notebook = 1",
    "%%distributed\nranks_",
    "%%distributed\nranks_model.weight",
)


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LabNotebook]:
    """A notebook with two ranks that have names of their own."""
    folder = tmp_path_factory.mktemp("lab")
    write_notebook(folder / "a.ipynb", *CELLS)
    with Lab(folder) as lab, browser_page(1100, 1200) as page:
        notebook = LabNotebook(page, lab, "a.ipynb")
        for index in range(4):
            notebook.run_cell(index)
        yield notebook


def _at_the_end_of(notebook: LabNotebook, index: int) -> None:
    notebook.cell(index).locator(".cm-content").click()
    notebook.page.keyboard.press("Control+End")


def test_tab_offers_the_ranks_names(notebook: LabNotebook) -> None:
    """And not the notebook's; the one that is taken stands in the cell."""
    _at_the_end_of(notebook, 4)
    notebook.page.keyboard.press("Tab")
    popup = notebook.page.locator(".jp-Completer:visible")
    popup.wait_for()

    assert re.findall(r"ranks_\w+", popup.inner_text()) == ["ranks_loss", "ranks_model"]
    notebook.page.keyboard.press("Enter")
    notebook.page.wait_for_function(
        "() => jupyterapp.shell.currentWidget.content.widgets[4].model.sharedModel.source"
        " === '%%distributed\\nranks_loss'"
    )


def test_shift_tab_shows_the_ranks_value(notebook: LabNotebook) -> None:
    """The parameter as rank 0 has it."""
    _at_the_end_of(notebook, 5)
    notebook.page.keyboard.press("Shift+Tab")
    tooltip = notebook.page.locator(".jp-Tooltip:visible")
    tooltip.wait_for()

    assert "Parameter containing" in tooltip.inner_text()
    notebook.page.keyboard.press("Escape")
