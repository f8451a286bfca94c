"""The panel in a real JupyterLab: clicks while cells run, a switch, a dead rank, a reload."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from matplotlib.image import imread

from tests.front.conftest import IMPORTED
from tests.support.lab import Lab, LabNotebook, write_notebook

if TYPE_CHECKING:  # playwright is an optional extra
    from playwright.sync_api import Locator, Page

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

ROOT = Path(__file__).resolve().parents[2]
CELLS = {
    "load": f"%load_ext nbdist\n{IMPORTED}",
    "start": "%dist_init -n 2 --grace 600",
    "panel": "%dist_panel",
    "again": "%dist_panel",
    "sleep": "%%distributed\nimport time\nprint('begun')\ntime.sleep(600)",
    "loop": "%%distributed\nprint('begun')\nwhile True: pass",
    "hang": "%%distributed\nprint('begun')\nif rank == 0:\n    dist.all_reduce(torch.ones(3))",
    "define": (
        "%%distributed\n"
        "import copy\n"
        "def batch(step):\n"
        "    seeded = torch.Generator().manual_seed(step)\n"
        "    return torch.randn(8, 64, generator=seeded)\n"
        "class Net(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(3))\n"
        "    def forward(self, x):\n"
        "        for layer in self.layers: x = torch.tanh(layer(x))\n"
        "        return x.square().mean()\n"
        "torch.manual_seed(0)\n"
        "net = Net()\n"
        "plain = copy.deepcopy(net)\n"
        "plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)\n"
        "optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)\n"
        "net, optimizer = accelerator.prepare(net, optimizer)\n"
        "at = 0\n"
        "def step(number):\n"
        "    whole = batch(number)\n"
        "    loss = net(whole.chunk(world_size)[rank])\n"
        "    accelerator.backward(loss); optimizer.step(); optimizer.zero_grad()\n"
        "    reference = plain(whole)\n"
        "    reference.backward(); plain_optimizer.step(); plain_optimizer.zero_grad()\n"
        "    mean = accelerator.reduce(loss.detach(), 'mean').item()\n"
        "    return abs(mean - reference.item()) < 1e-5\n"
    ),
    "train": (
        "%%distributed\nprint('begun')\nwhile True:\n    step(at)\n    at += 1\n"
        "    torch.manual_seed(at)\n"
    ),
    "steps": (
        "%%distributed\nprint(all([step(number) for number in range(100, 105)]), "
        "sum(p.to_local().numel() if hasattr(p, 'to_local') else p.numel() "
        "for p in net.parameters()))"
    ),
    "local": "print('begun', flush=True)\nimport time\ntime.sleep(600)",
    # PyDLL keeps the interpreter's lock, so no thread of the kernel can run.
    "locked": "print('begun', flush=True)\nimport ctypes, time\ntime.sleep(1)\n"
    "ctypes.PyDLL(None).sleep(5)",
    "brief": "print('begun', flush=True)\nimport pathlib, time\n"
    "while not pathlib.Path('go').exists(): time.sleep(0.05)",
    "kill": "%%rank [1]\nimport os, signal\nos.kill(os.getpid(), signal.SIGKILL)",
    "monitor": "%dist_monitor",
    "count": "%%distributed\nx = torch.ones(1)\ndist.all_reduce(x)\nprint(x.item())",
}
NUMBER = {name: index for index, name in enumerate(CELLS)}
DEADLINE_S = 40.0
# Beyond one case of each class: `make test-browser` runs all.
MORE = pytest.mark.more_browser
PICTURES = Path(os.environ.get("NBDIST_PICTURES", ROOT / "build" / "panel"))


class Tab(LabNotebook):
    """A notebook with the cells above, by their names, and its panel."""

    @property
    def panel(self) -> Locator:
        """The first panel on the page."""
        return self.output(NUMBER["panel"]).locator(".nbdist-panel").first

    def run(self, name: str, *, wait: bool = True) -> str:
        """Run a cell; what it printed, where it is waited for."""
        self.run_cell(NUMBER[name], DEADLINE_S, wait=wait)
        return self.output_text(NUMBER[name]) if wait else ""

    def begin(self, name: str) -> None:
        """Run a cell and wait until it says that it has begun, and not that it had before."""
        self.run(name, wait=False)
        self._wait(_IS_STARTED, NUMBER[name], DEADLINE_S, "the cell's begin", NUMBER[name])
        self.wait_text(NUMBER[name], "begun", DEADLINE_S)

    def is_running(self, name: str) -> bool:
        """Whether a cell runs."""
        return self.prompt(NUMBER[name]) == "[*]:"

    def button(self, name: str) -> Locator:
        """A button of the panel."""
        return self.panel.get_by_role("button", name=name, exact=True)

    def click(self, name: str, logged: str) -> float:
        """Click, and wait for the log's line; how many milliseconds that took in the browser."""
        self.page.evaluate(_WATCH_LOG, [NUMBER["panel"], logged])
        self.button(name).click(timeout=DEADLINE_S * 1000)
        self._wait(_IS_LOGGED, None, DEADLINE_S, f"{logged!r} in the log", NUMBER["panel"])
        took: float = self.page.evaluate("() => window.nbdistLogged - window.nbdistClicked")
        return took

    def wait_panel(self, text: str) -> None:
        """Wait until a text stands in the panel."""
        self.wait_text(NUMBER["panel"], text, DEADLINE_S)

    def wait_rank(self, rank: int, kind: str) -> None:
        """Wait until a rank is drawn in a state."""
        self.panel.locator(f'tr[data-rank="{rank}"][data-kind="{kind}"]').wait_for(
            timeout=DEADLINE_S * 1000
        )

    def picture(self, name: str) -> None:
        """Keep what the browser shows."""
        PICTURES.mkdir(parents=True, exist_ok=True)
        self.panel.scroll_into_view_if_needed()
        self.screenshot(PICTURES / f"{name}.png")


# The log's lines that were there before do not count.
_WATCH_LOG = """([index, text]) => {
    const cell = document.querySelectorAll('.jp-Notebook .jp-Cell')[index];
    const count = () => cell.innerText.split(text).length;
    const before = count();
    window.nbdistLogged = 0;
    window.nbdistClicked = 0;
    cell.addEventListener('click', () => { window.nbdistClicked = performance.now(); },
        { capture: true, once: true });
    const observer = new MutationObserver(() => {
        if (window.nbdistClicked && count() > before) {
            window.nbdistLogged = performance.now();
            observer.disconnect();
        }
    });
    observer.observe(cell, { childList: true, subtree: true, characterData: true });
}"""
_IS_LOGGED = "() => window.nbdistLogged > 0"
# With this prompt the outputs of the last run are gone.
_IS_STARTED = """index => document.querySelectorAll('.jp-Notebook .jp-Cell')[index]
    .querySelector('.jp-InputPrompt').innerText.trim() == '[*]:'"""
# How far a checkbox stands above or below the middle of its label, in pixels.
_OFF_MIDDLE = """all => all.map(label => {
    const box = one => one.getBoundingClientRect();
    const middle = one => (box(one).top + box(one).bottom) / 2;
    const text = document.createRange();
    text.selectNodeContents(label);
    return Math.abs(middle(label.querySelector('input')) - middle(text));
})"""
_HAS_STILL = """text => [...document.querySelectorAll('.nbdist-panel-still')]
    .some(one => one.textContent.includes(text))"""
_DRAWN = "() => Number(document.querySelector('.np-age').dataset.drawn)"


@pytest.fixture(scope="module")
def opened(lab: Lab, page: Page) -> Tab:
    """A notebook with two ranks and a panel."""
    write_notebook(lab.root / "panel.ipynb", *CELLS.values())
    tab = Tab(page, lab, "panel.ipynb")
    for name in ("load", "start", "panel"):
        tab.run(name)
    return tab


@pytest.fixture
def tab(opened: Tab) -> Tab:
    """The same, idle."""
    opened.wait_idle()
    return opened


@pytest.fixture(scope="module")
def times_ms() -> Iterator[dict[str, float]]:
    """From click to log, by cell and button; kept beside the pictures."""
    times: dict[str, float] = {}
    yield times
    PICTURES.mkdir(parents=True, exist_ok=True)
    (PICTURES / "clicks_ms.json").write_text(json.dumps(times, indent=1))


def test_it_shows_ranks_with_memory_and_use(tab: Tab) -> None:
    """Each rank's row has a bar of memory; the strategy and its plan stand below."""
    tab.wait_rank(0, "idle")
    tab.wait_panel("each rank holds")
    tab.panel.locator("tr[data-rank='1'] .np-bar").first.wait_for(timeout=DEADLINE_S * 1000)
    tab.picture("first")
    text = tab.panel.inner_text()

    assert "2 ranks on 1 host, gloo" in text
    assert "gloo; strategy ddp, dp 2" in text
    assert tab.panel.locator(".np-group").all_inner_texts() == ["Control", "Record", "Strategy"]
    assert tab.panel.locator("tr[data-rank]").count() == 2


def test_every_control_has_a_name_and_is_reached_by_keyboard(tab: Tab) -> None:
    """Tab goes from one to the next, and Space presses."""
    tab.button("More options").click()
    tab.panel.get_by_label("accumulate gradients").wait_for(timeout=DEADLINE_S * 1000)
    controls = tab.panel.locator("button:visible, select:visible, input:visible")
    names = controls.evaluate_all(
        "all => all.map(one => (one.labels && one.labels[0] || one).innerText.trim())"
    )
    enabled = controls.evaluate_all("all => all.filter(one => !one.disabled).length")
    tab.button("Interrupt").focus()
    boxes = tab.panel.locator("label:has(input[type=checkbox]):visible").evaluate_all(_OFF_MIDDLE)
    reached = 1
    for _ in range(enabled - 1):
        tab.page.keyboard.press("Tab")
        reached += tab.page.evaluate("() => !!document.activeElement.closest('.nbdist-panel')")
    tab.button("More options").focus()
    tab.page.keyboard.press("Space")
    tab.page.wait_for_function(
        "() => ![...document.querySelectorAll('.nbdist-panel label')]"
        ".some(one => one.innerText == 'accumulate gradients' && one.offsetParent)"
    )

    assert all(names), names
    assert not any(name.startswith("--") for name in names)
    assert boxes
    assert max(boxes) < 2
    assert len(names) > 15
    assert reached == enabled


@pytest.mark.parametrize(
    "name", [*(pytest.param(name, marks=MORE) for name in ("sleep", "loop", "train")), "hang"]
)
def test_buttons_act_while_a_cell_runs(tab: Tab, name: str, times_ms: dict[str, float]) -> None:
    """Status and Interrupt are logged while it runs, and Interrupt ends it; bars go on."""
    if name == "train":
        tab.run("define")
    tab.begin(name)
    tab.wait_rank(0, "waiting" if name == "hang" else "running")
    drawn = tab.page.evaluate(_DRAWN)
    tab.page.wait_for_function(f"() => ({_DRAWN})() > {drawn + 2}", timeout=DEADLINE_S * 1000)
    times_ms[f"{name}: Status"] = tab.click("Status", "asking the ranks")
    was_running = tab.is_running(name)
    tab.wait_panel("status: see below")
    tab.picture(f"during-{name}")
    times_ms[f"{name}: Interrupt"] = tab.click("Interrupt", "interrupting cell [")
    tab.wait_done(NUMBER[name], DEADLINE_S)
    tab.wait_rank(0, "idle")

    assert was_running
    assert "KeyboardInterrupt" in tab.output_text(NUMBER[name])
    if name == "hang":
        assert "waits in all_reduce" in tab.output_text(NUMBER[name])


def test_buttons_act_while_the_notebooks_own_cell_blocks(
    tab: Tab, times_ms: dict[str, float]
) -> None:  # fmt: skip
    """Nothing runs on the ranks: the interrupt is the notebook's."""
    tab.begin("local")
    times_ms["local: Interrupt"] = tab.click("Interrupt", "interrupting cell [")
    tab.wait_done(NUMBER["local"], DEADLINE_S)

    assert "KeyboardInterrupt" in tab.output_text(NUMBER["local"])


def test_buttons_act_in_a_frontend_without_subshells(
    tab: Tab, times_ms: dict[str, float]
) -> None:  # fmt: skip
    """A distributed cell leaves the kernel's loop free, so clicks arrive in the main shell."""
    kernel = "window.jupyterapp.shell.currentWidget.sessionContext.session.kernel"
    before = tab.page.evaluate(f"() => {kernel}.commsOverSubshells")
    tab.page.evaluate(f"() => {{ {kernel}.commsOverSubshells = 'disabled'; }}")
    for name in ("sleep", "hang"):
        tab.begin(name)
        times_ms[f"no subshells, {name}: Status"] = tab.click("Status", "asking the ranks")
        assert tab.is_running(name)
        times_ms[f"no subshells, {name}: Interrupt"] = tab.click("Interrupt", "interrupting cell [")
        tab.wait_done(NUMBER[name], DEADLINE_S)
        assert "KeyboardInterrupt" in tab.output_text(NUMBER[name])
    tab.page.evaluate(f"mode => {{ {kernel}.commsOverSubshells = mode; }}", before)


@MORE
def test_it_shows_how_old_its_numbers_are_where_nothing_can_react(tab: Tab) -> None:
    """The browser counts by itself while C code holds the kernel's lock; then it is gone."""
    age = tab.panel.locator(".np-age")
    tab.begin("locked")
    age.wait_for(state="visible", timeout=DEADLINE_S * 1000)
    age_shown = age.evaluate("one => getComputedStyle(one).getPropertyValue('--nbdist-age')")
    tab.picture("old")
    tab.wait_done(NUMBER["locked"], DEADLINE_S)
    age.wait_for(state="hidden", timeout=DEADLINE_S * 1000)

    assert int(age_shown) >= 3


def test_a_strategy_is_switched_by_mouse_and_the_loss_goes_on(tab: Tab) -> None:
    """Losses stay those of one process; each rank holds half of the parameters afterwards."""
    tab.run("define")
    before = tab.run("steps")
    tab.panel.get_by_label("strategy", exact=True).select_option("fsdp")
    tab.wait_panel("each rank holds 99.8 kB between steps")
    tab.click("Apply", "ddp, dp 2 -> fsdp, dp 2")
    tab.wait_panel("strategy fsdp, dp 2")
    tab.picture("switched")
    after = tab.run("steps")
    tab.panel.get_by_label("strategy", exact=True).select_option("ddp")
    tab.click("Apply", "fsdp, dp 2 -> ddp, dp 2")

    assert before.strip() == "[0-1] True 12480"
    assert after.strip() == "[0-1] True 6240"


def test_during_a_cell_a_switch_is_queued_and_can_be_taken_back(tab: Tab, lab: Lab) -> None:
    """It says so at once, and happens when the cell ends; after Cancel it does not."""
    choose = tab.panel.get_by_label("strategy", exact=True)
    tab.begin("brief")
    choose.select_option("zero1")
    tab.click("Apply", "%dist_strategy zero1 is queued until cell [")
    tab.click("Cancel queued", "%dist_strategy zero1 is removed from the queue: cancelled")
    choose.select_option("fsdp")
    tab.click("Apply", "%dist_strategy fsdp is queued until cell [")
    tab.picture("queued")
    was_running = tab.is_running("brief")
    (lab.root / "go").touch()
    tab.wait_done(NUMBER["brief"], DEADLINE_S)
    (lab.root / "go").unlink()
    tab.wait_panel("strategy fsdp, dp 2")
    choose.select_option("ddp")
    tab.click("Apply", "fsdp, dp 2 -> ddp, dp 2")

    assert was_running
    assert "-> zero1" not in tab.panel.inner_text()


def test_what_cannot_be_had_cannot_be_applied_and_says_why(tab: Tab) -> None:
    """With the same words as %dist_strategy."""
    tab.panel.get_by_label("strategy", exact=True).select_option("fsdp")
    tab.panel.get_by_label("what is sharded", exact=True).select_option("hybrid")
    tab.wait_panel("2 data-parallel ranks cannot form them")
    why = "the chosen strategy is not possible with these ranks and models"
    disabled = tab.panel.locator(f"button:disabled[title='{why}']", has_text="Apply")
    disabled.wait_for(timeout=DEADLINE_S * 1000)  # widgets change one after the other
    tab.panel.get_by_label("strategy", exact=True).select_option("ddp")


def test_two_panels_show_the_same(tab: Tab) -> None:
    """A choice in one stands in the other, and so does a click's line."""
    tab.run("again")
    other = tab.output(NUMBER["again"]).locator(".nbdist-panel").first
    other.get_by_label("strategy", exact=True).select_option("tp")
    tab.page.wait_for_function(
        "() => [...document.querySelectorAll('.nbdist-panel select')]"
        ".filter(one => one.value == 'tp').length == 2"
    )
    other.get_by_role("button", name="Interrupt", exact=True).click()
    tab.wait_panel("nothing is running to interrupt")
    tab.wait_text(NUMBER["again"], "nothing is running to interrupt", DEADLINE_S)
    other.get_by_label("strategy", exact=True).select_option("ddp")


def test_a_killed_rank_is_restarted_by_mouse(tab: Tab) -> None:
    """It is drawn as dead with the reason; after the click all ranks are in step."""
    tab.run("kill")
    tab.wait_rank(1, "dead")
    tab.picture("dead")
    dead = tab.panel.locator("tr[data-rank='1']").inner_text()
    tab.click("Restart rank", "%dist_restart begins")
    tab.wait_panel("rank 1 is back after")
    tab.wait_rank(1, "idle")

    assert "SIGKILL" in dead
    assert tab.run("count").strip() == "[0-1] 2.0"


def test_a_living_rank_is_not_restarted_by_one_click(tab: Tab) -> None:
    """It asks, in the panel, and does nothing until that is confirmed."""
    tab.panel.get_by_label("rank", exact=True).select_option("1")
    tab.button("Restart rank").click()
    tab.wait_panel("A restart ends its process, and all its variables are lost")
    tab.picture("asked")
    tab.button("Leave it").click()
    tab.button("Leave it").wait_for(state="hidden", timeout=DEADLINE_S * 1000)
    tab.panel.get_by_label("rank", exact=True).select_option("ended")

    assert "%dist_restart 1" not in tab.panel.inner_text()


@MORE
def test_after_a_reload_in_the_middle_of_a_cell_the_panel_lives(tab: Tab) -> None:
    """The page is loaded anew while ranks sleep: rows go on, and Interrupt ends the cell."""
    tab.begin("sleep")
    tab.command("docmanager:save")
    tab.page.reload(wait_until="domcontentloaded")
    tab.button("Interrupt").wait_for(timeout=DEADLINE_S * 1000)
    tab.wait_rank(0, "running")
    drawn = tab.page.evaluate(_DRAWN)
    tab.page.wait_for_function(f"() => ({_DRAWN})() > {drawn}", timeout=DEADLINE_S * 1000)
    tab.picture("reloaded")
    tab.click("Interrupt", "interrupting cell [")
    tab.wait_rank(0, "idle")
    tab.wait_idle()

    assert tab.run("count").strip() == "[0-1] 2.0"


def test_it_and_figures_follow_jupyterlabs_theme(tab: Tab) -> None:
    """Text is light on dark, and dark on light; so is a figure of matplotlib's, in its output."""
    seen, figures = {}, {}
    tab.run("monitor")
    figure = tab.output(NUMBER["monitor"]).locator("img.nbdist-figure")
    for theme in ("JupyterLab Dark", "JupyterLab Light"):
        tab.page.evaluate(
            "theme => window.jupyterapp.commands.execute('apputils:change-theme', { theme })", theme
        )
        is_light = "true" if theme.endswith("Light") else "false"
        tab.page.wait_for_function(f"() => document.body.dataset.jpThemeLight == '{is_light}'")
        tab.picture(theme.split()[1].lower())
        seen[theme] = tab.panel.evaluate(
            "one => getComputedStyle(one).color.match(/\\d+/g).slice(0, 3).map(Number)"
        )
        pixels = imread(io.BytesIO(figure.screenshot()))[..., :3]
        figures[theme] = float(np.median(pixels)), float(pixels.min()), float(pixels.max())

    background, _, text = figures["JupyterLab Dark"]
    assert background < 0.15
    assert text > 0.7
    background, text, _ = figures["JupyterLab Light"]
    assert background > 0.9
    assert text < 0.3
    assert min(seen["JupyterLab Dark"]) > 200
    assert max(seen["JupyterLab Light"]) < 80


@MORE
def test_a_saved_notebook_without_its_kernel_shows_the_last_state(tab: Tab, lab: Lab) -> None:
    """The picture below the widgets, which hide it while they live."""
    tab.run("panel")  # the page was loaded anew since: the picture of before is of that time
    tab.click("Interrupt", "nothing is running to interrupt")
    tab.page.wait_for_function(_HAS_STILL, arg="nothing is running to interrupt")
    stills = tab.output(NUMBER["panel"]).locator(".nbdist-panel-still")
    hidden = stills.evaluate_all("all => all.every(one => !one.offsetParent)")
    tab.command("docmanager:save")
    tab.restart()
    again = Tab(tab.page, lab, "panel.ipynb")
    still = again.output(NUMBER["panel"]).locator(".nbdist-panel-still")
    still.wait_for(state="visible", timeout=DEADLINE_S * 1000)
    again.picture("still")

    assert hidden
    assert "2 ranks on 1 host, gloo" in still.inner_text()
    assert "nothing is running to interrupt" in still.inner_text()
