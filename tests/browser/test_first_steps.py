"""nbdist in a real JupyterLab: what a person sees and clicks."""

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.front.conftest import IMPORTED
from tests.support.lab import Lab, LabNotebook, browser_page, write_notebook
from tests.support.processes import descendants, processes_of_run, wait_gone

CELLS = {
    "load": f"%load_ext nbdist\n{IMPORTED}",
    "start": "%dist_init -n 2 --grace 600",
    "bar": (
        "%%distributed\n"
        "import time\n"
        "from tqdm.auto import tqdm\n"
        "for _ in tqdm(range(5), desc=f'of rank {rank}'): time.sleep(0.02)"
    ),
    "tabs": (
        "%%distributed --tabs\n"
        "from IPython.display import HTML, display\n"
        "display(HTML(f'<b>table of rank {rank}</b>'))"
    ),
    "barriers": (
        "%%distributed\n"
        "from tqdm.auto import tqdm\n"
        "for kept in tqdm(range(42)): accelerator.wait_for_everyone()"
    ),
    "hang": (
        "%%distributed\n"
        "accelerator.wait_for_everyone()\n"
        "if accelerator.is_main_process:\n"
        "    print('saving')\n"
        "    accelerator.wait_for_everyone()"
    ),
    "after the hang": (
        "%%distributed\nprint(kept, accelerator.reduce(torch.tensor(rank + 1)).item())"
    ),
    "names": "%%distributed\nranks_model = torch.nn.Linear(4, 2)\nranks_loss = 0.5",
    "the notebook's name": "ranks_notebook = 1",
    "tab": "%%distributed\nranks_",
    "shift and tab": "%%distributed\nranks_model.weight",
    "status": "%dist_status",
}
NUMBER = {name: index for index, name in enumerate(CELLS)}
LINE = (
    "rank 0 waits in barrier() at line 5 of cell {}: accelerator.wait_for_everyone(); "
    "rank 1 finished without calling it"
)
PNG = b"\x89PNG"
TOLD_S = 2.0
BACK_S = 5.0

pytestmark = pytest.mark.browser


class Tab:
    """The notebook in the browser, its cells by name."""

    def __init__(self, notebook: LabNotebook, lab: Lab) -> None:
        self.notebook = notebook
        self.lab = lab

    def run(self, name: str) -> str:
        """Run a cell to its end; what stands below it then."""
        self.notebook.run_cell(NUMBER[name])
        return self.text(name)

    def text(self, name: str) -> str:
        """What stands below a cell, each run of white space as one space."""
        return " ".join(self.notebook.output_text(NUMBER[name]).split())


@pytest.fixture(scope="module")
def tab(lab: Lab) -> Iterator[Tab]:
    """A notebook with two ranks in JupyterLab."""
    write_notebook(lab.root / "first_steps.ipynb", *CELLS.values())
    with browser_page(1100, 2400) as page:
        tab = Tab(LabNotebook(page, lab, "first_steps.ipynb"), lab)
        tab.run("load")
        tab.run("start")
        yield tab


def test_the_ranks_stand_in_a_table(tab: Tab) -> None:
    """%dist_init leaves one table with a row for each rank, and no progress line."""
    assert tab.text("start").startswith("2 ranks on 1 host, ready in")
    assert tab.notebook.output(NUMBER["start"]).locator("table tbody tr").count() == 2


def test_a_bar_of_a_rank_is_a_live_widget(tab: Tab) -> None:
    """tqdm's widget of rank 0 is updated on the page; rank 1's is counted."""
    text = tab.run("bar")

    assert text.startswith("of rank 0: 100% 5/5")
    shown, *elapsed = text.split("\nelapsed: ")  # where the ranks' times differ
    assert shown.endswith("not shown: 1 display of rank 1 (%%distributed --tabs shows all)")
    assert len(elapsed) < 2


def test_tabs_show_each_rank(tab: Tab) -> None:
    """A click on a rank's tab shows its output in the place of the other's."""
    tab.run("tabs")
    output = tab.notebook.output(NUMBER["tabs"])
    before = [output.get_by_text(f"table of rank {rank}").is_visible() for rank in range(2)]
    output.get_by_text("rank 1", exact=True).click()
    after = [output.get_by_text(f"table of rank {rank}").is_visible() for rank in range(2)]

    assert before == [True, False]
    assert after == [False, True]


def test_a_hang_is_told_and_the_stop_button_gives_everything_back(tab: Tab, tmp_path: Path) -> None:
    """One line within 2 s of the wait, the notebook within 5 s of the button, variables kept."""
    notebook, cell = tab.notebook, NUMBER["hang"]
    tab.run("barriers")

    notebook.run_cell(cell, wait=False)
    notebook.wait_text(cell, "saving")
    began_s = time.monotonic()
    notebook.wait_text(cell, "waits in")
    told_s = time.monotonic() - began_s
    text, prompt = tab.text("hang"), notebook.prompt(cell)
    notebook.screenshot(tmp_path / "told.png")

    pressed_s = time.monotonic()
    notebook.interrupt()
    notebook.wait_done(cell)
    back_s = time.monotonic() - pressed_s
    ended, number = tab.text("hang"), notebook.prompt(cell).rstrip(":")
    notebook.screenshot(tmp_path / "back.png")
    after = tab.run("after the hang")

    line = LINE.format(number)
    assert text == f"[0] saving {line}"
    assert prompt == "[*]:"
    assert told_s < TOLD_S
    assert ended == (
        f"{text} KeyboardInterrupt: ranks 0-1 are back, variables kept, groups recovered; {line}"
    )
    assert back_s < BACK_S
    assert after == "[0-1] 41 3"
    assert tab.text("barriers").startswith("100% 42/42")
    assert all((tmp_path / name).read_bytes().startswith(PNG) for name in ("told.png", "back.png"))


@pytest.fixture
def named(tab: Tab) -> LabNotebook:
    """The ranks have names of their own, which begin as one of the notebook's does."""
    tab.run("names")
    tab.run("the notebook's name")
    return tab.notebook


def _at_the_end_of(notebook: LabNotebook, index: int) -> None:
    notebook.cell(index).locator(".cm-content").click()
    notebook.page.keyboard.press("Control+End")


def test_tab_offers_the_ranks_names(named: LabNotebook) -> None:
    """And not the notebook's; the one that is taken stands in the cell."""
    _at_the_end_of(named, NUMBER["tab"])
    named.page.keyboard.press("Tab")
    popup = named.page.locator(".jp-Completer:visible")
    popup.wait_for()

    assert re.findall(r"ranks_\w+", popup.inner_text()) == ["ranks_loss", "ranks_model"]
    named.page.keyboard.press("Enter")
    named.page.wait_for_function(
        f"() => jupyterapp.shell.currentWidget.content.widgets[{NUMBER['tab']}]"
        ".model.sharedModel.source === '%%distributed\\nranks_loss'"
    )


def test_shift_tab_shows_the_ranks_value(named: LabNotebook) -> None:
    """The parameter as rank 0 has it."""
    _at_the_end_of(named, NUMBER["shift and tab"])
    named.page.keyboard.press("Shift+Tab")
    tooltip = named.page.locator(".jp-Tooltip:visible")
    tooltip.wait_for()

    assert "Parameter containing" in tooltip.inner_text()
    named.page.keyboard.press("Escape")


def test_a_restart_from_the_menu_ends_the_ranks(tab: Tab) -> None:
    """All processes of the run are gone within 5 s of a restart of the kernel."""
    status = tab.run("status")
    below = set(descendants(tab.lab.pid))
    running = [process for process in processes_of_run() if process in below]
    tab.notebook.restart()
    left = wait_gone(running, timeout_s=5)

    assert "idle" in status
    assert running
    assert left == []
