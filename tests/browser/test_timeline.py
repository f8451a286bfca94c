"""The timeline of a trace in JupyterLab: by mouse and keys, reloaded, untrusted, as a page."""

import contextlib
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path

import nbformat
import numpy as np
import pytest
from matplotlib.image import imread
from nbconvert import HTMLExporter

from nbdist.core.finding import WARN, Finding, Spot
from nbdist.core.trace import COMMUNICATION, KINDS
from nbdist.core.trace_shares import Shares
from nbdist.view.trace import traced
from tests.support.drawn_traces import training
from tests.support.lab import Lab, LabNotebook, browser_page, write_notebook
from tests.support.live import DEADLINE_MS, LivePicture

pytestmark = pytest.mark.browser

ROOT = Path(__file__).resolve().parents[2]
CELL = (
    "from nbdist.core.trace_shares import Shares\n"
    "from nbdist.view.trace import traced\n"
    "from tests.support.drawn_traces import training\n"
    "traced(training(3000), Shares((), 0, None, (), (), 0.0), [])"
)
TRACE = training(3000)
WHOLE_NS = max(step.end_ns for rank in TRACE.ranks for step in rank.steps)


# Every text that the picture of so many nanoseconds has.
DRAWN_TEXTS = """length => {
    const told = [], fill = context.fillText;
    show(from, length);
    context.fillText = text => told.push(text);
    draw();
    context.fillText = fill;
    return told;
}"""


class Timeline(LivePicture):
    """The frame with the timeline, below a cell or in a page."""

    @property
    def seen_ns(self) -> tuple[float, float]:
        """From where to where the picture shows."""
        begin, end = self.value("[from, to]")
        return begin, end

    def move_to(self, ns: float, row: int) -> None:
        """Put the pointer at a time in a row, once nothing on the page moves any more."""
        x, y = self.place(ns, row)
        self.frame.locator("#canvas").hover(position={"x": x, "y": y}, timeout=DEADLINE_MS)

    def place(self, ns: float, row: int) -> tuple[float, float]:
        """Where in the picture that is."""
        x, y = self.value(f"[xOf({ns}), rowTops[{row}] - frame.scrollTop + 7]")
        return x, y


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A server whose kernels can import the made-up trace."""
    folder = tmp_path_factory.mktemp("lab")
    write_notebook(folder / "a.ipynb", CELL)
    with Lab(folder, {"PYTHONPATH": str(ROOT), "NBDIST_TEST": ""}) as lab:
        yield lab


@pytest.fixture(scope="module")
def notebook(lab: Lab) -> Iterator[LabNotebook]:
    """The cell has been run."""
    with browser_page(1100, 1000) as page:
        # Otherwise playwright tells all frames that the user likes it light.
        page.emulate_media(color_scheme="null")
        notebook = LabNotebook(page, lab, "a.ipynb")
        notebook.run_cell(0)
        yield notebook


@pytest.fixture
def timeline(notebook: LabNotebook) -> Timeline:
    """All of it is seen."""
    found = Timeline(notebook.page)
    found.reset()
    return found


def all_reduce() -> tuple[float, list[str]]:
    """The middle of rank 0's second all-reduce, and what the tooltip has to say of it."""
    rank = TRACE.ranks[0]
    at = np.flatnonzero(rank.events.kind == COMMUNICATION)[1]
    start_ns, took_ns = int(rank.events.start_ns[at]), int(rank.events.duration_ns[at])
    size_mb = rank.events.size_bytes[at] / 1e6
    return start_ns + took_ns / 2, [
        f"all_reduce {size_mb:.1f} MB",
        f"communication, takes {float(f'{took_ns / 1e3:.4g}'):g} us",
        "group world",
        f"rank 0, gloo 1, starts at {start_ns / 1e6:.3f} ms",
    ]


ALL_REDUCE_ROW = 5  # main thread has three levels, autograd two


def test_the_wheel_zooms_at_the_pointer_and_the_tooltip_tells_the_event(timeline: Timeline) -> None:
    """Without a click the wheel is the page's; after it the time below the pointer stays there."""
    ns, told = all_reduce()
    timeline.move_to(ns, ALL_REDUCE_ROW)
    timeline.page.mouse.wheel(0, 50)
    before = timeline.seen_ns
    timeline.page.mouse.wheel(0, -50)
    timeline.move_to(ns, ALL_REDUCE_ROW)
    timeline.page.mouse.down()
    timeline.page.mouse.up()
    for _ in range(4):
        timeline.page.mouse.wheel(0, -300)
    begin, end = timeline.seen_ns
    timeline.move_to(ns, ALL_REDUCE_ROW)

    assert timeline.value("focused") == -1
    assert before == (0, WHOLE_NS)
    assert begin < ns < end
    assert end - begin < WHOLE_NS / 10
    # The pointer stands on whole pixels, of which each was so much of what is seen now:
    pixel = WHOLE_NS / (end - begin) / timeline.value("width - LEFT")
    assert (ns - begin) / (end - begin) == pytest.approx(ns / WHOLE_NS, abs=pixel)
    # How exactly the start is told depends on the zoom.
    assert timeline.tip[:3] == told[:3]
    assert timeline.tip[3].startswith(told[3][: -len("5 ms")])


def test_dragging_moves_the_picture(timeline: Timeline) -> None:
    """By as much time as the pointer has passed; not beyond the end."""
    timeline.frame.locator("#in").click()
    begin, end = timeline.seen_ns
    box = timeline.frame.locator("#canvas").bounding_box()
    assert box is not None
    right, y = box["x"] + box["width"] - 5, box["y"] + box["height"] / 2
    timeline.page.mouse.move(right, y)
    timeline.page.mouse.down()
    timeline.page.mouse.move(right - 100, y, steps=3)
    moved, _ = timeline.seen_ns
    timeline.page.mouse.move(box["x"] + 5, y)
    last = timeline.seen_ns
    timeline.page.mouse.up()

    per_pixel = (end - begin) / timeline.value("width - LEFT")
    assert moved - begin == pytest.approx(100 * per_pixel, rel=0.01)
    assert last[1] == WHOLE_NS
    assert last[1] - last[0] == pytest.approx(end - begin)


def test_keys_move_zoom_and_go_from_event_to_event(timeline: Timeline) -> None:
    """What has the focus is said to who cannot see it; the notebook's own keys stay out of it."""
    press = timeline.page.keyboard.press
    events = TRACE.ranks[0].events
    names = [
        TRACE.ranks[0].names[name] for name in events.name[(events.lane == 0) & (events.depth == 0)]
    ]
    timeline.frame.locator("#all").focus()
    heard = []
    for key in ("Tab", "Shift+ArrowRight", "Shift+ArrowRight"):
        press(key)
        heard.append(timeline.value("element('said').textContent"))
        assert ", ".join(timeline.tip) == heard[-1]
    press("Shift+ArrowDown")
    below = timeline.value("rowTops.indexOf(rowTops[trace.rowOf[focused]])")
    press("+")
    zoomed = timeline.seen_ns
    press("ArrowRight")
    moved = timeline.seen_ns
    press("Home")

    assert [text.split(",")[0] for text in heard] == names[:3]
    assert below == 1
    assert zoomed[1] - zoomed[0] == pytest.approx(0.7 * WHOLE_NS)
    assert moved[0] - zoomed[0] == pytest.approx(0.15 * (zoomed[1] - zoomed[0]))
    assert timeline.seen_ns == (0, WHOLE_NS)
    assert timeline.page.locator(".jp-Notebook .jp-Cell").count() == 1


def test_the_axis_has_digits_enough_at_any_zoom(timeline: Timeline) -> None:
    """No two ticks read alike, down to single nanoseconds."""
    for length_ns in (WHOLE_NS, 10**6, 10**4, 200, 20):
        labels = timeline.frame.evaluate(DRAWN_TEXTS, length_ns)
        ticks = [label for label in labels if re.fullmatch(r"[\d.]+ [num]?s", label)]

        assert len(ticks) >= 3, length_ns
        assert len(set(ticks)) == len(ticks)


def test_the_legend_names_the_kinds_that_are_there(timeline: Timeline) -> None:
    """Each once, in the order of the record."""
    there = {int(kind) for rank in TRACE.ranks for kind in np.unique(rank.events.kind)}
    names = timeline.frame.locator("#legend span").all_inner_texts()

    assert names == [KINDS[kind] for kind in sorted(there)]


def test_it_follows_jupyterlabs_theme(timeline: Timeline, notebook: LabNotebook) -> None:
    """Dark in the dark theme, light in the light one, without a reload."""
    seen = {}
    for theme in ("JupyterLab Dark", "JupyterLab Light"):
        notebook.page.evaluate(
            "theme => window.jupyterapp.commands.execute('apputils:change-theme', { theme })", theme
        )
        wanted = "isDark" if theme.endswith("Dark") else "!isDark"
        timeline.frame.wait_for_function(f"() => {wanted}", timeout=DEADLINE_MS)
        seen[theme] = timeline.value("[...context.getImageData(2, 2, 1, 1).data].slice(0, 3)")

    assert sum(seen["JupyterLab Dark"]) < 150
    assert seen["JupyterLab Light"] == [255, 255, 255]


def test_the_numbers_stand_below_it(notebook: LabNotebook) -> None:
    """As a reader sees them."""
    assert "trace of ranks 0-1" in notebook.output_text(0)


def test_a_large_trace_has_blocks_and_one_stretch_in_full(notebook: LabNotebook) -> None:
    """A block says how many events it stands for; the button shows where there are none."""
    view = traced(training(400_000), Shares((), 0, None, (), (), 0.0), [])
    browser = notebook.page.context.browser
    assert browser is not None
    with contextlib.closing(browser.new_page()) as page:
        page.set_content(view.html)
        timeline = Timeline(page)
        row = 1  # of the operators inside "forward"
        first = timeline.value(f"trace.firsts[{row}]")
        merged, width_ns = timeline.value(f"[trace.count[{first}], trace.width]")
        timeline.value(f"(show(trace.start[{first}], 100 * trace.width), null)")
        timeline.move_to(timeline.value(f"(trace.start[{first}] + trace.end[{first}]) / 2"), row)
        told = timeline.tip
        timeline.frame.locator("#full").click()
        begins = "trace.start[i] >= from && trace.start[i] < to"
        counts = timeline.value(f"Array.from(trace.count).filter((_, i) => {begins})")

    assert merged > 1
    assert told[0] == f"{merged:g} compute events shorter than {width_ns / 1e3:g} us, merged"
    assert len(counts) > 1000
    assert set(counts) == {1}


def test_the_list_of_findings_leads_to_where_they_are(notebook: LabNotebook) -> None:
    """The rank's rows are seen, with the spot in the middle third of the picture."""
    spot = Spot(7, 10_000_000, 11_000_000)
    finding = Finding(
        "one <b>late</b> rank", "found", WARN, "why", "what", (7,), 0.1, spots=(spot,)
    )
    view = traced(training(4000, ranks=8), Shares((), 0, None, (), (), 0.0), [finding])
    browser = notebook.page.context.browser
    assert browser is not None
    with contextlib.closing(browser.new_page()) as page:
        page.set_content(view.html)
        timeline = Timeline(page)
        timeline.frame.locator("#spots").select_option(index=1)
        seen_ns, text = timeline.seen_ns, timeline.frame.locator("#spots").inner_text()
        top, bottom = timeline.value("[headers[7] - frame.scrollTop, height]")

    assert seen_ns == pytest.approx((9_000_000, 12_000_000))
    assert text.splitlines() == ["look at a finding", "one <b>late</b> rank: rank 7, 10.00 ms"]
    assert 0 < top < bottom


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.more_browser)])
def test_the_image_is_seen_where_the_script_fails(notebook: LabNotebook, scheme: str) -> None:
    """In an old browser the frame over it stays empty and lets it through."""
    view = traced(training(600), Shares((), 0, None, (), (), 0.0), [])
    browser = notebook.page.context.browser
    assert browser is not None
    failures: list[str] = []
    with contextlib.closing(browser.new_page(color_scheme="null")) as page:
        page.on("pageerror", lambda error: failures.append(error.message))
        page.set_content(
            f'<body style="color-scheme: {scheme}">'
            + view.html.replace("DecompressionStream", "ThatIsNotThereYet")
        )
        page.wait_for_function("document.querySelector('img').complete", timeout=DEADLINE_MS)
        pixels = imread(io.BytesIO(page.screenshot()))
    kinds = [(0x00, 0x72, 0xB2), (0xD5, 0x5E, 0x00)]  # compute, communication
    counts = [(np.abs(pixels[..., :3] * 255 - kind).max(axis=-1) < 3).sum() for kind in kinds]

    assert failures == ["ThatIsNotThereYet is not defined"]
    assert min(counts) > 500


def _works(timeline: Timeline) -> None:
    ns, told = all_reduce()
    timeline.move_to(ns, ALL_REDUCE_ROW)
    assert timeline.tip[:3] == told[:3]
    timeline.frame.locator("#in").click()
    begin, end = timeline.seen_ns
    assert end - begin == pytest.approx(WHOLE_NS / 2)


def test_it_is_there_again_with_another_kernel(lab: Lab, notebook: LabNotebook) -> None:
    """Saved, the kernel restarted, the page loaded anew, no cell run: it works as before."""
    notebook.command("docmanager:save")
    notebook.restart()
    again = LabNotebook(notebook.page, lab, "a.ipynb")

    assert again.prompt(0) == "[1]:"
    _works(Timeline(again.page))


def test_a_notebook_that_is_not_trusted_shows_the_image(lab: Lab, notebook: LabNotebook) -> None:
    """No frame, no script; the image and the numbers stay."""
    notebook.command("docmanager:save")
    content = json.loads((lab.root / "a.ipynb").read_text())
    content["cells"][0]["source"] = "# signed by nobody"
    (lab.root / "b.ipynb").write_text(json.dumps(content))
    other = LabNotebook(notebook.page, lab, "b.ipynb")
    image = other.output(0).locator("img")
    image.wait_for(timeout=DEADLINE_MS)

    assert other.output(0).locator("iframe").count() == 0
    assert image.evaluate("image => image.naturalWidth") == 1600
    assert (image.get_attribute("alt") or "").startswith("Timeline: trace of ranks 0-1")
    assert "trace of ranks 0-1" in other.output_text(0)


def test_a_page_from_nbconvert_works_without_a_network(lab: Lab, notebook: LabNotebook) -> None:
    """Opened from a file with the network cut."""
    notebook.command("docmanager:save")
    path = lab.root / "a.html"
    stored = nbformat.read(lab.root / "a.ipynb", as_version=4)
    path.write_text(HTMLExporter().from_notebook_node(stored)[0])
    browser = notebook.page.context.browser
    assert browser is not None
    context = browser.new_context(offline=True)
    with contextlib.closing(context):
        page = context.new_page()
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.frame.url))
        page.goto(path.as_uri(), wait_until="domcontentloaded")
        _works(Timeline(page))

    assert "about:srcdoc" not in asked  # what is asked for is nbconvert's own
