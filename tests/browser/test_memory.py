"""The picture of memory in JupyterLab: by mouse and keys, reloaded, untrusted, as a page."""

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

from nbdist.core.snapshot import ACTIVATION, CATEGORIES, OutOfMemory, Snapshot
from nbdist.core.snapshot_curve import changes, curve, peak_ns, totals
from tests.support.drawn_memory import MB, Piece, million, rank_memory, remembered, training
from tests.support.lab import Lab, LabNotebook, browser_page, write_notebook
from tests.support.live import DEADLINE_MS, LivePicture

pytestmark = pytest.mark.browser

ROOT = Path(__file__).resolve().parents[2]
CELL = (
    "from tests.support.drawn_memory import remembered, training\n"
    "remembered(training(device='cuda'))"
)
MEMORY = training(device="cuda")
WHOLE_NS = max(rank.duration_ns for rank in MEMORY.ranks)
STATE = "h.5.mlp.w"


class Picture(LivePicture):
    """The frame with memory over time."""

    @property
    def seen_ns(self) -> tuple[float, float]:
        """From where to where the picture shows."""
        begin, end = self.value("[from, to]")
        return begin, end

    def move_to(self, ns: float, size_bytes: float, place: int = 0) -> None:
        """Put the pointer at a time and a height in a rank's area."""
        x, y = self.value(
            f"[xOf({ns}), tops[{place}] + HEADER - frame.scrollTop"
            f" + yOf({size_bytes}, memory.ranks[{place}])]"
        )
        self.frame.locator("#canvas").hover(position={"x": x, "y": y}, timeout=DEADLINE_MS)

    def drawn_bytes(self, place: int) -> list[float]:
        """How high each column of a rank is, in bytes, by the pixels of its blocks."""
        found: list[float] = self.value(
            """(place => {
                const { ids, columns, rows } = memory.ranks[place].drawn, high = [];
                for (let x = 0; x < columns; x++) {
                    let count = 0;
                    for (let y = 0; y < rows; y++) count += ids[y * columns + x] !== 0;
                    high.push(count * memory.most / rows);
                }
                return high;
            })"""
            f"({place})"
        )
        return found


# Frame and image are those of a trace's picture too, of which test_timeline shows the same.
LIKE_A_TRACE = pytest.mark.more_browser


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A server whose kernels can import the made-up memory."""
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
def picture(notebook: LabNotebook) -> Picture:
    """All of it is seen."""
    found = Picture(notebook.page)
    found.reset()
    return found


def optimizer_block() -> tuple[float, float, list[str]]:
    """(time, height in bytes) in rank 0's last block of Adam's state, and what is told of it."""
    rank = MEMORY.ranks[0]
    own = rank.blocks
    layers = [CATEGORIES.index(name) for name in ("parameters", "buffers", "optimizer state")]
    base = sum(int(own.size_bytes[own.category == layer].sum()) for layer in layers)
    at = np.flatnonzero(own.category == layers[-1])[-1]
    start_ns = int(own.start_ns[at])
    return (
        WHOLE_NS * 0.7,
        base - own.size_bytes[at] / 2,
        [
            f"{STATE}: {own.size_bytes[at] / 1e6:.1f} MB",
            "optimizer state, aten::zeros_like",
            "at cell 3:33 forward",
            "called at cell 3:40 <module>",
            "via nn/modules/linear.py:134 forward",
            f"rank 0, from {start_ns / 1e6:.3f} ms in optimizer of step 0, stays",
        ],
    )


def test_pointing_at_a_block_tells_its_bytes_and_its_lines(picture: Picture) -> None:
    """Name, size, category, operator, the user's lines first, when, in which phase."""
    ns, size_bytes, told = optimizer_block()
    picture.move_to(ns, size_bytes)

    assert picture.tip == told


def test_pointing_above_tells_what_is_in_use_then(picture: Picture) -> None:
    """All categories, exact and guessed, as the curve has them, and what the allocator holds."""
    rank = MEMORY.ranks[0]
    ns = peak_ns(rank.blocks)
    made = curve(rank.blocks)
    at = int(np.searchsorted(made.time_ns, ns))
    picture.move_to(ns, 395 * MB)
    told = picture.tip
    activations = made.size_bytes[at, ACTIVATION, 0] / 1e6

    assert told[0] == (
        f"rank 0: {made.total_bytes[at] / 1e6:.1f} MB in use at {ns / 1e6:.3f} ms, "
        "backward of step 1"
    )
    assert told[1] == "held by the allocator 418.0 MB"
    assert f"activations (guessed) {activations:.1f} MB" in told
    assert "parameters 72.0 MB" in told


def test_the_wheel_zooms_at_the_pointer(picture: Picture) -> None:
    """Without a click the wheel is the page's; after it what is below the pointer stays there."""
    ns, size_bytes, told = optimizer_block()
    picture.move_to(ns, size_bytes)
    picture.page.mouse.wheel(0, 50)
    before = picture.seen_ns
    picture.page.mouse.wheel(0, -50)
    picture.move_to(ns, size_bytes)
    picture.page.mouse.down()
    picture.page.mouse.up()
    for _ in range(4):
        picture.page.mouse.wheel(0, -300)
    begin, end = picture.seen_ns
    picture.move_to(ns, size_bytes)
    pixel = WHOLE_NS / (end - begin) / picture.value("width - LEFT")

    assert picture.value("focused") == -1
    assert before == (0, picture.value("memory.to"))
    assert end - begin < WHOLE_NS / 10
    assert (ns - begin) / (end - begin) == pytest.approx(ns / WHOLE_NS, abs=pixel)
    assert picture.tip[:5] == told[:5]


def test_shift_and_the_wheel_zoom_bytes(picture: Picture) -> None:
    """The height below the pointer stays; dragging moves it then; Home shows all."""
    picture.move_to(WHOLE_NS * 0.7, 200 * MB)
    picture.page.mouse.down()
    picture.page.mouse.up()
    picture.page.keyboard.down("Shift")
    for _ in range(3):
        picture.page.mouse.wheel(0, -300)
    picture.page.keyboard.up("Shift")
    low, high = picture.value("[low, high]")
    picture.page.mouse.down()
    picture.page.mouse.move(600, 500, steps=2)
    picture.page.mouse.up()
    moved = picture.value("low")
    picture.page.keyboard.press("Home")

    whole = picture.value("memory.most")
    assert high - low < whole / 4
    assert low < 200 * MB < high
    assert moved != low
    assert picture.value("[low, high]") == [0, whole]


def test_dragging_moves_the_picture(picture: Picture) -> None:
    """By as much time as the pointer has passed; not beyond the end."""
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
    assert last[1] == picture.value("memory.to")
    assert last[1] - last[0] == pytest.approx(end - begin)


def test_keys_go_through_the_blocks_of_the_peak(picture: Picture) -> None:
    """The largest first, said to who cannot see it."""
    own = MEMORY.ranks[0].blocks
    picture.frame.locator("#all").focus()
    heard = []
    for key in ("Tab", "Shift+ArrowRight", "Shift+ArrowRight", "Shift+ArrowDown"):
        picture.page.keyboard.press(key)
        heard.append(picture.value("element('said').textContent"))
        assert ", ".join(picture.tip) == heard[-1]
    there = (own.start_ns <= peak_ns(own)) & (own.end_ns > peak_ns(own))
    largest = sorted(own.size_bytes[there].tolist(), reverse=True)[:3]

    assert [re.search(r": ([\d.]+) MB", text)[1] for text in heard[:3]] == [  # type: ignore[index]
        f"{size / 1e6:.1f}" for size in largest
    ]
    assert "rank 1" in heard[3]


def test_keys_move_and_zoom(picture: Picture) -> None:
    """And lead to the peak of the rank that needs most; the notebook's own keys stay out of it."""
    seen = {}
    picture.frame.locator("#frame").focus()
    for key in "wdasp":
        picture.page.keyboard.press(key)
        seen[key] = picture.seen_ns
    told = picture.tip
    picture.page.keyboard.press("Home")
    blocks = MEMORY.ranks[1].blocks
    _, total = totals(changes(blocks))
    length = seen["w"][1] - seen["w"][0]

    assert length == pytest.approx(0.7 * picture.value("memory.to"))
    assert seen["d"][0] - seen["w"][0] == pytest.approx(0.15 * length)
    assert seen["s"] == (0, picture.value("memory.to"))
    assert seen["p"][0] < peak_ns(blocks) < seen["p"][1]
    assert told[0].startswith(f"rank 1: {total.max() / 1e6:.1f} MB in use at ")
    assert picture.page.locator(".jp-Notebook .jp-Cell").count() == 1


def test_a_click_on_a_header_folds_the_rank(picture: Picture) -> None:
    """The next one moves up; another click unfolds it."""
    box = picture.frame.locator("#canvas")
    before = picture.value("tops")
    box.click(position={"x": 300, "y": before[0] + 8})
    folded = picture.value("tops")
    box.click(position={"x": 300, "y": before[0] + 8})

    assert folded[1] - folded[0] < before[1] - before[0] - 100
    assert picture.value("tops") == before


def test_the_legend_names_what_is_there_and_what_is_guessed(picture: Picture) -> None:
    """Each category once, from the bottom up."""
    names = picture.frame.locator("#legend span").all_inner_texts()

    assert names == [
        *("parameters", "buffers", "optimizer state", "gradients", "activations"),
        *("communication", "temporary", "striped: guessed"),
        *("backward", "optimizer"),
    ]


def test_columns_are_as_high_as_the_most_in_use_of_their_stretch(picture: Picture) -> None:
    """To a pixel, on both ranks, on one scale; the peak is the highest."""
    most, rows = picture.value("[memory.most, memory.ranks[0].drawn.rows]")
    for place, rank in enumerate(MEMORY.ranks):
        drawn = picture.drawn_bytes(place)
        time_ns, total = totals(changes(rank.blocks))
        edges = np.arange(len(drawn) + 1) * picture.value("memory.to") / len(drawn)
        for column, found in enumerate(drawn):
            inside = (time_ns >= edges[column]) & (time_ns < edges[column + 1])
            carried = total[np.searchsorted(time_ns, edges[column], side="right") - 1]
            truth = max([carried, *total[inside]])
            assert found == pytest.approx(truth, abs=1.5 * most / rows), (place, column)


@LIKE_A_TRACE
def test_it_follows_jupyterlabs_theme(picture: Picture, notebook: LabNotebook) -> None:
    """Dark in the dark theme, light in the light one, without a reload."""
    seen = {}
    for theme in ("JupyterLab Dark", "JupyterLab Light"):
        notebook.page.evaluate(
            "theme => window.jupyterapp.commands.execute('apputils:change-theme', { theme })", theme
        )
        wanted = "isDark" if theme.endswith("Dark") else "!isDark"
        picture.frame.wait_for_function(f"() => {wanted}", timeout=DEADLINE_MS)
        seen[theme] = picture.value("[...context.getImageData(2, 2, 1, 1).data].slice(0, 3)")

    assert sum(seen["JupyterLab Dark"]) < 150
    assert seen["JupyterLab Light"] == [255, 255, 255]


def test_a_million_blocks_keep_their_peaks(notebook: LabNotebook) -> None:
    """Merged blocks are told as such; each rank's highest column is its true peak."""
    snapshot = million(200_000, ranks=2)
    view = remembered(snapshot)
    browser = notebook.page.context.browser
    assert browser is not None
    with contextlib.closing(browser.new_page()) as page:
        page.set_content(view.html)
        picture = Picture(page)
        most, rows = picture.value("[memory.most, memory.ranks[0].drawn.rows]")
        highest = [max(picture.drawn_bytes(place)) for place in (0, 1)]
        merged = picture.value("memory.merged")
        totals_told = picture.value("memory.ranks.map(rank => Math.max(...rank.total))")
    peaks = [int(totals(changes(rank.blocks))[1].max()) for rank in snapshot.ranks]

    assert merged > 100_000
    assert totals_told == peaks
    assert highest == pytest.approx(peaks, abs=1.5 * most / rows)


def test_one_moment_is_a_bar_for_each_rank(notebook: LabNotebook) -> None:
    """From left to right in bytes; zoom and tooltip as ever."""
    pieces = [Piece(30 * MB), Piece(70 * MB, category=ACTIVATION, is_exact=False)]
    view = remembered(Snapshot(tuple(rank_memory(rank, pieces, 0) for rank in (0, 1))))
    browser = notebook.page.context.browser
    assert browser is not None
    with contextlib.closing(browser.new_page()) as page:
        page.set_content(view.html)
        picture = Picture(page)
        share = picture.value(
            "memory.ranks[1].drawn.ids.subarray(0, memory.ranks[1].drawn.columns)"
            ".filter(id => id === 4).length / memory.ranks[1].drawn.columns"
        )
        x, y = picture.value(f"[xOf({20 * MB}), tops[1] + HEADER + 10]")
        picture.frame.locator("#canvas").hover(position={"x": x, "y": y})
        told = picture.tip

    assert share == pytest.approx(70 / 106, abs=0.01)
    assert told == ["parameters: 30.0 MB", "parameters", "rank 1"]


def test_what_failed_is_marked_and_what_a_rank_lacks_is_told(notebook: LabNotebook) -> None:
    """A red bar with what was asked for; the limit is a red line; a reason in the rank's bar."""
    failed = rank_memory(
        0,
        [Piece(80 * MB, 0, category=ACTIVATION)],
        1000,
        failures=(OutOfMemory(600, 30 * MB),),
        limit_bytes=100 * MB,
    )
    lacking = rank_memory(1, [], 0, problem="rank 1 <b>ended</b>")
    browser = notebook.page.context.browser
    assert browser is not None
    with contextlib.closing(browser.new_page()) as page:
        page.set_content(remembered(Snapshot((failed, lacking))).html)
        picture = Picture(page)
        picture.move_to(600, 90 * MB)
        told = picture.tip
        red = picture.value(
            "[...context.getImageData(Math.round(xOf(600)), tops[0] + HEADER + 40, 1, 1).data]"
        )
        y = picture.value(f"tops[0] + HEADER + yOf({100 * MB}, memory.ranks[0])")
        limit = picture.value(
            f"[...context.getImageData(LEFT + 2, {round(y)}, 1, 1).data].slice(0, 3)"
        )
        header = picture.value("told(memory.ranks[1])")

    assert told[:2] == [
        "out of memory: 30.0 MB asked for",
        "rank 0: 80.0 MB in use at 0.6000 us, forward",
    ]
    assert red[:3] == [0xD0, 0, 0]
    assert limit[0] > limit[1] + 50
    assert header == "rank 1 <b>ended</b>"


@LIKE_A_TRACE
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_image_is_seen_where_the_script_fails(notebook: LabNotebook, scheme: str) -> None:
    """In an old browser the frame over it stays empty and lets it through."""
    view = remembered(training())
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
    colours = [(0x00, 0x72, 0xB2), (0x00, 0x9E, 0x73)]  # parameters, optimizer state
    counts = [(np.abs(pixels[..., :3] * 255 - one).max(axis=-1) < 3).sum() for one in colours]

    assert failures == ["ThatIsNotThereYet is not defined"]
    assert min(counts) > 500


def _works(picture: Picture) -> None:
    ns, size_bytes, told = optimizer_block()
    picture.move_to(ns, size_bytes)
    assert picture.tip == told
    picture.frame.locator("#in").click()
    begin, end = picture.seen_ns
    assert end - begin == pytest.approx(WHOLE_NS / 2)


@LIKE_A_TRACE
def test_it_is_there_again_with_another_kernel(lab: Lab, notebook: LabNotebook) -> None:
    """Saved, the kernel restarted, the page loaded anew, no cell run: it works as before."""
    notebook.command("docmanager:save")
    notebook.restart()
    again = LabNotebook(notebook.page, lab, "a.ipynb")

    assert again.prompt(0) == "[1]:"
    _works(Picture(again.page))


@LIKE_A_TRACE
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
    assert (image.get_attribute("alt") or "").startswith("Memory over time: memory of ranks 0-1")
    assert "rank 1 has the most in use" in other.output_text(0)


@LIKE_A_TRACE
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
        _works(Picture(page))

    assert "about:srcdoc" not in asked  # what is asked for is nbconvert's own
