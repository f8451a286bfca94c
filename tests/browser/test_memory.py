"""The picture of memory by mouse and keys: what it has beside other live pictures."""

import re
from typing import TYPE_CHECKING

import numpy as np
import pytest

from nbdist.memory.snapshot import ACTIVATION, OutOfMemory, Snapshot
from nbdist.memory.timeline import changes, curve, peak_ns, totals
from tests.support.drawn_memory import MB, Piece, million, rank_memory, remembered, training
from tests.support.live import LivePicture, opened

if TYPE_CHECKING:  # playwright is an optional extra
    from playwright.sync_api import Page

pytestmark = pytest.mark.browser

MEMORY = training(device="cuda")
WHOLE_NS = max(rank.duration_ns for rank in MEMORY.ranks)


class Picture(LivePicture):
    """The frame with memory over time."""

    def move_to(self, ns: float, size_bytes: float, place: int = 0) -> None:
        """Put the pointer at a time and a height in a rank's area."""
        height = f"yOf({size_bytes}, memory.ranks[{place}])"
        self.point_at(ns, f"tops[{place}] + HEADER - frame.scrollTop + {height}")

    def drawn_bytes(self, place: int) -> list[float]:
        """How high each column of a rank is, in bytes, by the pixels of its blocks."""
        sizes: list[float] = self.value(
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
        return sizes


@pytest.fixture(scope="module")
def shown(page: "Page") -> Picture:
    """The picture in a page: what it is in JupyterLab shows test_viewer."""
    page.set_content(remembered(MEMORY).html)
    return Picture(page)


@pytest.fixture
def picture(shown: Picture) -> Picture:
    """All of it is seen."""
    shown.reset()
    return shown


def test_pointing_above_tells_what_is_in_use_then(picture: Picture) -> None:
    """All categories, exact and guessed, as the curve has them, and what the allocator holds."""
    rank = MEMORY.ranks[0]
    ns = peak_ns(rank.blocks)
    in_use = curve(rank.blocks)
    at = int(np.searchsorted(in_use.time_ns, ns))
    picture.move_to(ns, 395 * MB)
    tip = picture.tip
    activations = in_use.size_bytes[at, ACTIVATION, 0] / 1e6

    assert tip[0] == (
        f"rank 0: {in_use.total_bytes[at] / 1e6:.1f} MB in use at {ns / 1e6:.3f} ms, "
        "backward of step 1"
    )
    assert tip[1] == "held by the allocator 418.0 MB"
    assert f"activations (guessed) {activations:.1f} MB" in tip
    assert "parameters 72.0 MB" in tip


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


def test_keys_go_through_the_blocks_of_the_peak(picture: Picture) -> None:
    """The largest first, said to who cannot see it."""
    blocks = MEMORY.ranks[0].blocks
    picture.frame.locator("#all").focus()
    heard = []
    for key in ("Tab", "Shift+ArrowRight", "Shift+ArrowRight", "Shift+ArrowDown"):
        picture.page.keyboard.press(key)
        heard.append(picture.value("element('said').textContent"))
        assert ", ".join(picture.tip) == heard[-1]
    is_in_use = (blocks.start_ns <= peak_ns(blocks)) & (blocks.end_ns > peak_ns(blocks))
    largest = sorted(blocks.size_bytes[is_in_use].tolist(), reverse=True)[:3]

    assert [re.search(r": ([\d.]+) MB", text)[1] for text in heard[:3]] == [  # type: ignore[index]
        f"{size / 1e6:.1f}" for size in largest
    ]
    assert "rank 1" in heard[3]


def test_a_key_leads_to_the_peak(picture: Picture) -> None:
    """Of the rank that needs most."""
    picture.frame.locator("#frame").focus()
    picture.page.keyboard.press("p")
    begin, end = picture.seen_ns
    tip = picture.tip
    blocks = MEMORY.ranks[1].blocks
    _, total = totals(changes(blocks))

    assert begin < peak_ns(blocks) < end
    assert tip[0].startswith(f"rank 1: {total.max() / 1e6:.1f} MB in use at ")


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
        for column, height in enumerate(drawn):
            inside = (time_ns >= edges[column]) & (time_ns < edges[column + 1])
            carried = total[np.searchsorted(time_ns, edges[column], side="right") - 1]
            truth = max([carried, *total[inside]])
            assert height == pytest.approx(truth, abs=1.5 * most / rows), (place, column)


def test_a_million_blocks_keep_their_peaks(page: "Page") -> None:
    """Merged blocks are told as such; each rank's highest column is its true peak."""
    snapshot = million(200_000, ranks=2)
    view = remembered(snapshot)
    with opened(Picture, page, view) as picture:
        most, rows = picture.value("[memory.most, memory.ranks[0].drawn.rows]")
        highest = [max(picture.drawn_bytes(place)) for place in (0, 1)]
        merged = picture.value("memory.merged")
        totals_told = picture.value("memory.ranks.map(rank => Math.max(...rank.total))")
    peaks = [int(totals(changes(rank.blocks))[1].max()) for rank in snapshot.ranks]

    assert merged > 100_000
    assert totals_told == peaks
    assert highest == pytest.approx(peaks, abs=1.5 * most / rows)


def test_one_moment_is_a_bar_for_each_rank(page: "Page") -> None:
    """From left to right in bytes; zoom and tooltip as ever."""
    pieces = [Piece(30 * MB), Piece(70 * MB, category=ACTIVATION, is_exact=False)]
    view = remembered(Snapshot(tuple(rank_memory(rank, pieces, 0) for rank in (0, 1))))
    with opened(Picture, page, view) as picture:
        share = picture.value(
            "memory.ranks[1].drawn.ids.subarray(0, memory.ranks[1].drawn.columns)"
            ".filter(id => id === 4).length / memory.ranks[1].drawn.columns"
        )
        x, y = picture.value(f"[xOf({20 * MB}), tops[1] + HEADER + 10]")
        picture.frame.locator("#canvas").hover(position={"x": x, "y": y})
        tip = picture.tip

    assert share == pytest.approx(70 / 106, abs=0.01)
    assert tip == ["parameters: 30.0 MB", "parameters", "rank 1"]


def test_what_failed_is_marked_and_what_a_rank_lacks_is_told(page: "Page") -> None:
    """A red bar with what was asked for; the limit is a red line; a reason in the rank's bar."""
    failed = rank_memory(
        0,
        [Piece(80 * MB, 0, category=ACTIVATION)],
        1000,
        failures=(OutOfMemory(600, 30 * MB),),
        limit_bytes=100 * MB,
    )
    lacking = rank_memory(1, [], 0, problem="rank 1 <b>ended</b>")
    with opened(Picture, page, remembered(Snapshot((failed, lacking)))) as picture:
        picture.move_to(600, 90 * MB)
        tip = picture.tip
        red = picture.value(
            "[...context.getImageData(Math.round(xOf(600)), tops[0] + HEADER + 40, 1, 1).data]"
        )
        y = picture.value(f"tops[0] + HEADER + yOf({100 * MB}, memory.ranks[0])")
        limit = picture.value(
            f"[...context.getImageData(LEFT + 2, {round(y)}, 1, 1).data].slice(0, 3)"
        )
        header = picture.value("headerText(memory.ranks[1])")

    assert tip[:2] == [
        "out of memory: 30.0 MB requested",
        "rank 0: 80.0 MB in use at 0.6000 us, forward",
    ]
    assert red[:3] == [0xD0, 0, 0]
    assert limit[0] > limit[1] + 50
    assert header == "rank 1 <b>ended</b>"
