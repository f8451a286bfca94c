"""A hung collective in a real JupyterLab: told below the cell, ended by the stop button."""

import time
from pathlib import Path

import pytest

from tests.support.lab import Lab, LabNotebook, browser_page, write_notebook

CELLS = {
    "load": "%load_ext nbdist",
    "start": "%dist_init -n 2 --grace 600",
    "bar": (
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
    "after": "%%distributed\nprint(kept, accelerator.reduce(torch.tensor(rank + 1)).item())",
}
NUMBER = {name: index for index, name in enumerate(CELLS)}
LINE = (
    "rank 0 waits in barrier() at line 5 of cell [4]: accelerator.wait_for_everyone(); "
    "rank 1 finished the cell without calling it"
)
PNG = b"\x89PNG"
TOLD_S = 2.0
BACK_S = 5.0

pytestmark = pytest.mark.browser


def text(notebook: LabNotebook, name: str) -> str:
    """What stands below a cell, each run of white space as one space."""
    return " ".join(notebook.output_text(NUMBER[name]).split())


def test_a_hang_is_told_and_the_stop_button_gives_everything_back(tmp_path: Path) -> None:
    """One line within 2 s of the wait, the notebook within 5 s of the button, variables kept."""
    write_notebook(tmp_path / "a.ipynb", *CELLS.values())
    with Lab(tmp_path) as lab, browser_page(1100, 1000) as page:
        notebook = LabNotebook(page, lab, "a.ipynb")
        for name in ("load", "start", "bar"):
            notebook.run_cell(NUMBER[name])

        notebook.run_cell(NUMBER["hang"], wait=False)
        notebook.wait_text(NUMBER["hang"], "saving")
        began_s = time.monotonic()
        notebook.wait_text(NUMBER["hang"], "waits in")
        told_s = time.monotonic() - began_s
        told, prompt = text(notebook, "hang"), notebook.prompt(NUMBER["hang"])
        notebook.screenshot(tmp_path / "told.png")

        pressed_s = time.monotonic()
        notebook.interrupt()
        notebook.wait_done(NUMBER["hang"])
        back_s = time.monotonic() - pressed_s
        ended = text(notebook, "hang")
        notebook.screenshot(tmp_path / "back.png")
        notebook.run_cell(NUMBER["after"])
        after, bar = text(notebook, "after"), text(notebook, "bar")

    assert told == f"[0] saving {LINE}"
    assert prompt == "[*]:"
    assert told_s < TOLD_S
    assert ended == (
        f"{told} KeyboardInterrupt: ranks 0-1 are back, variables kept, groups recovered; {LINE}"
    )
    assert back_s < BACK_S
    assert after == "[0-1] 41 3"
    assert bar.startswith("100% 42/42")
    assert all((tmp_path / name).read_bytes().startswith(PNG) for name in ("told.png", "back.png"))
