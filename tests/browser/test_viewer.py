"""What live pictures have in common in JupyterLab: moved, reloaded, untrusted, as a page.

Memory and timeline are painters of one viewer: where a case of one shows it, the other's is marked.
"""

import contextlib
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from nbdist.core.view import View
from nbdist.memory.snapshot import CATEGORIES
from nbdist.trace.breakdown import TimeBreakdown
from nbdist.trace.trace import COMMUNICATION
from nbdist.trace.view.report import trace_report
from tests.support import drawn_memory, drawn_traces
from tests.support.lab import Lab, LabNotebook, browser_page, write_notebook
from tests.support.live import DEADLINE_MS, LivePicture

pytestmark = pytest.mark.browser

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Case:
    """A picture, a place in it, and what stands below it.

    Attributes:
        name: Of its notebook.
        source: The cell that shows it.
        view: What the cell shows.
        whole_ns: How long it is.
        point: A time and, as the frame's script has it, a height.
        tip: The tooltip's first lines there, whatever the zoom.
        alt, below: How the image's description begins; what stands in the text.
        colours: Of the image.
    """

    name: str
    source: str
    view: View
    whole_ns: int
    point: tuple[float, str]
    tip: list[str]
    alt: str
    below: str
    colours: tuple[tuple[int, int, int], ...]

    def move_to_point(self, picture: LivePicture) -> None:
        """Put the pointer there."""
        ns, height = self.point
        picture.point_at(ns, height)


def _memory() -> Case:
    """In rank 0's last block of Adam's state."""
    snapshot = drawn_memory.training(device="cuda")
    blocks = snapshot.ranks[0].blocks
    layers = [CATEGORIES.index(name) for name in ("parameters", "buffers", "optimizer state")]
    base = sum(int(blocks.size_bytes[blocks.category == layer].sum()) for layer in layers)
    at = np.flatnonzero(blocks.category == layers[-1])[-1]
    size_bytes = int(blocks.size_bytes[at])
    whole_ns = max(rank.duration_ns for rank in snapshot.ranks)
    height = f"tops[0] + HEADER - frame.scrollTop + yOf({base - size_bytes / 2}, memory.ranks[0])"
    return Case(
        name="memory",
        source="from tests.support.drawn_memory import remembered, training\n"
        "remembered(training(device='cuda'))",
        view=drawn_memory.remembered(snapshot),
        whole_ns=whole_ns,
        point=(whole_ns * 0.7, height),
        tip=[
            f"h.5.mlp.w: {size_bytes / 1e6:.1f} MB",
            "optimizer state, aten::zeros_like",
            "at cell 3:33 forward",
            "called at cell 3:40 <module>",
            "via nn/modules/linear.py:134 forward",
            f"rank 0, from {int(blocks.start_ns[at]) / 1e6:.3f} ms in optimizer of step 0, stays",
        ],
        alt="Memory over time: memory of ranks 0-1",
        below="rank 1 has the most in use",
        colours=((0x00, 0x72, 0xB2), (0x00, 0x9E, 0x73)),  # parameters, optimizer state
    )


def _timeline() -> Case:
    """In the middle of rank 0's second all-reduce."""
    trace = drawn_traces.training(3000)
    events = trace.ranks[0].events
    at = np.flatnonzero(events.kind == COMMUNICATION)[1]
    took_ns = int(events.duration_ns[at])
    row = 5  # main thread has three levels, autograd two
    return Case(
        name="timeline",
        source="from nbdist.trace.breakdown import TimeBreakdown\n"
        "from nbdist.trace.view.report import trace_report\n"
        "from tests.support.drawn_traces import training\n"
        "trace_report(training(3000), TimeBreakdown((), 0, None, (), (), 0.0), [])",
        view=trace_report(trace, TimeBreakdown((), 0, None, (), (), 0.0), []),
        whole_ns=max(step.end_ns for rank in trace.ranks for step in rank.steps),
        point=(int(events.start_ns[at]) + took_ns / 2, f"rowTops[{row}] - frame.scrollTop + 7"),
        tip=[
            f"all_reduce {events.size_bytes[at] / 1e6:.1f} MB",
            f"communication, takes {float(f'{took_ns / 1e3:.4g}'):g} us",
            "group world",
            f"rank 0, gloo 1, starts at {int(events.start_ns[at]) / 1e6:.3f} ms",
        ],
        alt="Timeline: trace of ranks 0-1",
        below="trace of ranks 0-1",
        colours=((0x00, 0x72, 0xB2), (0xD5, 0x5E, 0x00)),  # compute, communication
    )


CASES = {case.name: case for case in (_memory(), _timeline())}
# The one painter shows it as well as the other.
ONE = ["timeline", pytest.param("memory", marks=pytest.mark.more_browser)]


@dataclass(frozen=True)
class Shown:
    """A case in JupyterLab."""

    case: Case
    lab: Lab
    notebook: LabNotebook

    @property
    def file(self) -> Path:
        """Its notebook."""
        return self.lab.root / f"{self.case.name}.ipynb"

    def picture(self) -> LivePicture:
        """All of it is seen."""
        picture = LivePicture(self.notebook.page)
        picture.reset()
        return picture

    def works(self, picture: LivePicture) -> None:
        """The tooltip tells, a button zooms."""
        self.case.move_to_point(picture)
        assert picture.tip[: len(self.case.tip)] == self.case.tip
        picture.frame.locator("#in").click()
        begin, end = picture.seen_ns
        assert end - begin == pytest.approx(self.case.whole_ns / 2)


@pytest.fixture(scope="module")
def shown(lab: Lab, request: pytest.FixtureRequest) -> Iterator[Shown]:
    """The cell has been run."""
    case = CASES[request.param]
    write_notebook(lab.root / f"{case.name}.ipynb", case.source)
    with browser_page(1100, 1000) as page:
        # Otherwise playwright tells all frames that the user likes it light.
        page.emulate_media(color_scheme="null")
        notebook = LabNotebook(page, lab, f"{case.name}.ipynb")
        notebook.run_cell(0)
        yield Shown(case, lab, notebook)


@pytest.mark.parametrize("shown", ONE, indirect=True)
def test_the_wheel_zooms_at_the_pointer(shown: Shown) -> None:
    """Without a click the wheel is the page's; after it what is below the pointer stays there."""
    case, picture, ns = shown.case, shown.picture(), shown.case.point[0]
    case.move_to_point(picture)
    picture.page.mouse.wheel(0, 50)
    before = picture.seen_ns
    picture.page.mouse.wheel(0, -50)
    case.move_to_point(picture)
    picture.page.mouse.down()
    picture.page.mouse.up()
    for _ in range(4):
        picture.page.mouse.wheel(0, -300)
    begin, end = picture.seen_ns
    case.move_to_point(picture)
    # The pointer stands on whole pixels, of which each was so much of what is seen now:
    pixel = case.whole_ns / (end - begin) / picture.value("width - LEFT")

    assert picture.value("focused") == -1
    assert before == (0, case.whole_ns)
    assert begin < ns < end
    assert end - begin < case.whole_ns / 10
    assert (ns - begin) / (end - begin) == pytest.approx(ns / case.whole_ns, abs=pixel)
    assert picture.tip[: len(case.tip)] == case.tip


@pytest.mark.parametrize("shown", ONE, indirect=True)
def test_dragging_moves_the_picture(shown: Shown) -> None:
    """By as much time as the pointer has passed; not beyond the end."""
    picture = shown.picture()
    picture.frame.locator("#in").click()
    begin, end = picture.seen_ns
    box = picture.frame.locator("#canvas").bounding_box()
    assert box is not None
    right, y = box["x"] + box["width"] - 5, box["y"] + box["height"] / 2
    picture.page.mouse.move(right, y)
    picture.page.mouse.down()
    picture.page.mouse.move(right - 100, y, steps=3)
    moved, _ = picture.seen_ns
    picture.page.mouse.move(box["x"] + 5, y)
    last = picture.seen_ns
    picture.page.mouse.up()

    per_pixel = (end - begin) / picture.value("width - LEFT")
    assert moved - begin == pytest.approx(100 * per_pixel, rel=0.01)
    assert last[1] == shown.case.whole_ns
    assert last[1] - last[0] == pytest.approx(end - begin)


@pytest.mark.parametrize("shown", ONE, indirect=True)
def test_keys_are_the_pictures_and_not_the_notebooks(shown: Shown) -> None:
    """No cell comes or goes by them; the numbers stand below as a reader sees them."""
    picture, spans = shown.picture(), {}
    picture.frame.locator("#frame").focus()
    for key in ("w", "d", "a", "s", "+", "ArrowRight", "Home"):
        picture.page.keyboard.press(key)
        spans[key] = picture.seen_ns
    whole = (0, shown.case.whole_ns)
    length = spans["w"][1] - spans["w"][0]

    assert length == pytest.approx(0.7 * shown.case.whole_ns)
    assert spans["d"][0] - spans["w"][0] == pytest.approx(0.15 * length)
    assert spans["a"] == pytest.approx(spans["w"])
    assert spans["s"] == spans["Home"] == whole
    assert spans["+"] == pytest.approx(spans["w"])
    assert spans["ArrowRight"] == pytest.approx(spans["d"])
    assert picture.page.locator(".jp-Notebook .jp-Cell").count() == 1
    assert shown.case.below in shown.notebook.output_text(0)


@pytest.mark.parametrize("shown", ONE, indirect=True)
def test_it_follows_jupyterlabs_theme(shown: Shown) -> None:
    """Dark in the dark theme, light in the light one, without a reload."""
    picture, colours = shown.picture(), {}
    for theme in ("JupyterLab Dark", "JupyterLab Light"):
        shown.notebook.page.evaluate(
            "theme => window.jupyterapp.commands.execute('apputils:change-theme', { theme })", theme
        )
        wanted = "isDark" if theme.endswith("Dark") else "!isDark"
        picture.frame.wait_for_function(f"() => {wanted}", timeout=DEADLINE_MS)
        colours[theme] = picture.value("[...context.getImageData(2, 2, 1, 1).data].slice(0, 3)")

    assert sum(colours["JupyterLab Dark"]) < 150
    assert colours["JupyterLab Light"] == [255, 255, 255]


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.more_browser)])
@pytest.mark.parametrize("shown", ONE, indirect=True)
def test_the_image_is_seen_where_the_script_fails(shown: Shown, scheme: str) -> None:
    """In an old browser the frame over it stays empty and lets it through."""
    browser = shown.notebook.page.context.browser
    assert browser is not None
    failures: list[str] = []
    with contextlib.closing(browser.new_page(color_scheme="null")) as page:
        page.on("pageerror", lambda error: failures.append(error.message))
        page.set_content(
            f'<body style="color-scheme: {scheme}">'
            + shown.case.view.html.replace("DecompressionStream", "ThatIsNotThereYet")
        )
        page.wait_for_function("document.querySelector('img').complete", timeout=DEADLINE_MS)
        pixels = imread(io.BytesIO(page.screenshot()))
    counts = [
        (np.abs(pixels[..., :3] * 255 - colour).max(axis=-1) < 3).sum()
        for colour in shown.case.colours
    ]

    assert failures == ["ThatIsNotThereYet is not defined"]
    assert min(counts) > 500


@pytest.mark.parametrize("shown", ONE, indirect=True)
def test_it_is_there_again_with_another_kernel(shown: Shown) -> None:
    """Saved, the kernel restarted, the page loaded anew, no cell run: it works as before."""
    shown.notebook.command("docmanager:save")
    shown.notebook.restart()
    again = LabNotebook(shown.notebook.page, shown.lab, shown.file.name)

    assert again.prompt(0) == "[1]:"
    shown.works(LivePicture(again.page))


@pytest.mark.parametrize("shown", ONE, indirect=True)
def test_a_page_from_nbconvert_works_without_a_network(shown: Shown) -> None:
    """Opened from a file with the network cut."""
    shown.notebook.command("docmanager:save")
    path = shown.file.with_suffix(".html")
    import nbformat  # late: both take seconds in each process that collects tests
    from nbconvert import HTMLExporter

    stored = nbformat.read(shown.file, as_version=4)
    path.write_text(HTMLExporter().from_notebook_node(stored)[0])
    browser = shown.notebook.page.context.browser
    assert browser is not None
    context = browser.new_context(offline=True)
    with contextlib.closing(context):
        page = context.new_page()
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.frame.url))
        page.goto(path.as_uri(), wait_until="domcontentloaded")
        shown.works(LivePicture(page))

    assert "about:srcdoc" not in asked  # what is asked for is nbconvert's own


@pytest.mark.parametrize("shown", ONE, indirect=True)
def test_a_notebook_that_is_not_trusted_shows_the_image(shown: Shown) -> None:
    """No frame, no script; the image and the numbers stay."""
    shown.notebook.command("docmanager:save")
    content = json.loads(shown.file.read_text())
    content["cells"][0]["source"] = "# signed by nobody"
    (shown.lab.root / "other.ipynb").write_text(json.dumps(content))
    other = LabNotebook(shown.notebook.page, shown.lab, "other.ipynb")
    image = other.output(0).locator("img")
    image.wait_for(timeout=DEADLINE_MS)

    assert other.output(0).locator("iframe").count() == 0
    assert image.evaluate("image => image.naturalWidth") == 1600
    assert (image.get_attribute("alt") or "").startswith(shown.case.alt)
    assert shown.case.below in other.output_text(0)
