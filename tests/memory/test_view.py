"""Memory as text with its numbers, as an image, and as one piece of HTML, whatever is in it."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import numpy as np
import pytest
from matplotlib.image import imread

from nbdist.core.units import compared
from nbdist.memory.call_site import frame_text
from nbdist.memory.peak import peaks
from nbdist.memory.snapshot import (
    ACTIVATION,
    BEFORE,
    PARAMETER,
    STAYS,
    AllocationFrame,
    OutOfMemory,
    RankMemory,
    Segment,
    Snapshot,
)
from nbdist.memory.view import image as memory_image
from nbdist.memory.view.image import COLOURS
from nbdist.memory.view.report import memory_report
from nbdist.recording.view import iframe as recording_iframe
from nbdist.recording.view import png as recording_png
from tests.support.drawn_memory import MB, Piece, million, rank_memory, remembered, training
from tests.support.pages import MARKUP, STRANGE, check_drawn, data_of, size_of

MOST_BYTES = 2_000_000


def one_moment(snapshot: Snapshot) -> Snapshot:
    """What is in use at the end, without a history."""
    ranks = []
    for rank in snapshot.ranks:
        stays = rank.blocks.take(rank.blocks.end_ns == STAYS)
        stays = replace(stays, start_ns=np.full(len(stays), BEFORE))
        ranks.append(RankMemory(rank.rank, "a", "cpu", stays, names=rank.names, stacks=rank.stacks))
    return replace(snapshot, ranks=tuple(ranks))


def rows(text: str) -> list[list[str]]:
    return [re.split(r"  +", line.strip()) for line in text.splitlines()]


def test_the_text_has_all_numbers() -> None:
    """Head, findings, a row for each rank, categories, lines, owners and notes."""
    snapshot = replace(training(device="cuda"), notes=("Two files were read.",))
    text = remembered(snapshot).text
    lines, cells = text.splitlines(), rows(text)

    assert re.fullmatch(r"memory of ranks 0-1, ddp, dp 2, 4 steps, \d\d\.\d ms", lines[0])
    assert re.fullmatch(
        r"rank 1 has the most in use: 352\.5 MB, \d\d\.\d ms after the start, in backward of "
        r"step 1; the allocator holds 442\.0 MB; 442\.0 MB of 884\.0 MB left",
        lines[1],
    )
    assert "findings, the largest first:" in lines
    assert [
        *("0", "333.8 MB", "backward of step 1", "72.0 MB", "500.0 kB", "144.0 MB", "8.0 MB"),
        *("93.3 MB", "12.0 MB", "4.0 MB", "109.3 MB", "418.0 MB", "84.2 MB (20%)", "418.0 MB"),
    ] in cells
    assert ["activations", "112.0 MB", "31.8", "112.0 MB", "0 B", "0 B"] in cells
    assert ["gradients", "8.0 MB", "2.3", "0 B", "72.0 MB", "72.0 MB"] in cells
    assert "total 352.5 MB at the peak, 300.5 MB at the end" in lines
    assert [
        *("48.0 MB", "13.6", "6", "activations?", "aten::addmm", "cell 3:13 forward"),
        "nn/modules/linear.py:134 forward",
    ] in cells
    assert ["h.*.mlp.w", "optimizer state", "12", "96.0 MB"] in cells
    assert lines[-1] == "Two files were read."


def test_tables_below_that_of_the_ranks_are_folded() -> None:
    """Each under what it is of."""
    page = remembered(training()).html
    summaries = re.findall(r"<details><summary>([^<]+)</summary><div><table>", page)

    assert [title.partition(", ")[2] for title in summaries] == [
        "by category", "by allocating line", "by owner"
    ]  # fmt: skip
    assert page.count("<table>") == 1 + len(summaries)


def test_what_is_guessed_is_told_from_what_is_exact() -> None:
    """In every table: a column, or a question mark."""
    pieces = [
        Piece(3 * MB, category=ACTIVATION, is_exact=False),
        Piece(2 * MB, category=ACTIVATION, is_exact=True),
    ]
    cells = rows(remembered(Snapshot((rank_memory(0, pieces),))).text)

    assert ["0", "5.0 MB", "forward", "5.0 MB", "3.0 MB"] in cells
    assert ["activations", "5.0 MB", "100.0", "3.0 MB", "5.0 MB", "2.0 MB"] in cells
    assert ["3.0 MB", "60.0", "1", "activations?", "-", "-", "-"] in cells
    assert ["2.0 MB", "40.0", "1", "activations", "-", "-", "-"] in cells


def test_one_moment_has_no_times() -> None:
    """What is in use, no peak, phase or end; a bar for each rank."""
    view = remembered(one_moment(training(ranks=3)))
    head = data_of(view)

    assert view.text.startswith("memory of ranks 0-2, ddp, dp 2, at one moment\n")
    assert "rank 0 has the most in use: 300.5 MB\n" in view.text
    assert "step" not in view.text
    assert "at the end" not in view.text
    assert head["moment"]
    assert head["to"] == head["most"]


def test_failures_losses_and_other_counts_are_told() -> None:
    """Each with its numbers, below the tables; the picture marks what failed."""
    stack = (AllocationFrame("cell 2", 9, "forward"),)
    rank = replace(
        training().ranks[0],
        stacks=(*training().ranks[0].stacks, stack),
        allocator_peak_bytes=500 * MB,
        lost=1234,
        failures=tuple(OutOfMemory(n * MB, 7 * 10**9, MB, -1) for n in range(7)),
        segments=(Segment(0, 10 * MB, 4 * MB, 0, "large"), Segment(9, MB, MB, 0, "small")),
    )
    last = OutOfMemory(5 * MB, 10**9, -1, len(rank.stacks) - 1)
    text = remembered(Snapshot((replace(rank, failures=(last, *rank.failures)),))).text

    assert (
        "rank 0: out of memory 5.0 ms after the start, 1.0 GB requested at cell 2:9 forward\n"
    ) in text
    assert "7.0 GB requested; 1.0 MB were free\n" in text
    assert "rank 0: 3 more allocations failed\n" in text
    assert "rank 0: the oldest 1,234 events did not fit into the history" in text
    assert "the allocator counted 500.0 MB at its peak, the recorded blocks add up to 333.8" in text
    assert (
        "rank 0: at the end the allocator's segments hold 11.0 MB, of which 6.0 MB (55%) are free, "
        "at most 6.0 MB in one segment"
    ) in text


def test_the_page_packs_every_block() -> None:
    """Read back with plain Python: bytes, time, category, names and lines of each."""
    snapshot = training(device="cuda")
    head = data_of(remembered(snapshot))
    packed_blocks = []
    for place in range(2):
        start = 0
        for i in range(head["firsts"][place], head["firsts"][place + 1]):
            start += head["start"][i]
            names = [head["names"][head[key][i] - 1] if head[key][i] else "" for key in
                     ("name", "operator")]  # fmt: skip
            lines = head["stacks"][head["stack"][i] - 1] if head["stack"][i] else []
            packed_blocks.append(
                (
                    *(place, start, head["life"][i], head["size"][i], head["code"][i], *names),
                    [head["lines"][at] if at >= 0 else "" for at in lines],
                )
            )
    expected = []
    for place, rank in enumerate(snapshot.ranks):
        blocks_of_rank = rank.blocks
        for i in range(len(blocks_of_rank)):
            names = [
                rank.names[at] if at >= 0 else ""
                for at in (blocks_of_rank.name[i], blocks_of_rank.operator[i])
            ]
            start, end = max(0, int(blocks_of_rank.start_ns[i])), int(blocks_of_rank.end_ns[i])
            stack = rank.stacks[blocks_of_rank.stack[i]] if blocks_of_rank.stack[i] >= 0 else ()
            lines = [frame_text(frame) for frame in stack]
            code = 2 * int(blocks_of_rank.category[i]) + bool(blocks_of_rank.is_exact[i])
            life = 0 if end == STAYS else end - start
            expected.append(
                (place, start, life, int(blocks_of_rank.size_bytes[i]), code, *names, lines)
            )

    assert packed_blocks == expected
    assert head["merged"] == 0
    assert head["ranks"][0]["before"] == 14
    assert head["ranks"][1]["peak"][1] == peaks(snapshot)[1].size_bytes
    assert sum(head["held"][: head["heldFirsts"][1]][-1:]) == 418 * MB


def test_very_many_blocks_are_merged_and_it_says_so() -> None:
    """The bundle stays small although names and times cannot be compressed; the sums are exact."""
    snapshot = million(200_000)
    view = remembered(snapshot)
    head = data_of(view)
    merged = re.search(
        r"blocks smaller than ([\d.]+ [kM]B) by category "
        r"\(([\d,]+) of 200,000\)",
        view.text,
    )
    assert merged is not None
    last = [(r // 2) * (-1 if r % 2 else 1) for r in head["rest"][: head["restFirsts"][1]]]
    first_rank = slice(*head["firsts"][:2])
    stays = [
        size
        for size, life in zip(head["size"][first_rank], head["life"][first_rank], strict=True)
        if not life
    ]
    recorded = snapshot.ranks[0].blocks

    assert size_of(view) < MOST_BYTES
    assert head["merged"] == int(merged[2].replace(",", ""))
    assert head["merged"] + len(head["size"]) == 200_000
    assert len(head["size"]) > 1000
    assert sum(last) + sum(stays) == recorded.size_bytes[recorded.end_ns == STAYS].sum()


BAD = {
    "no ranks": Snapshot(()),
    "no blocks": Snapshot((rank_memory(0, []), rank_memory(1, [], problem="no file"))),
    "no blocks and no time": Snapshot((rank_memory(0, [], 0),)),
    "one block": Snapshot((rank_memory(0, [Piece(5, 3, 9)]),)),
    "one byte at one moment": Snapshot((rank_memory(0, [Piece(1)], 0),)),
    "the peak at the beginning": Snapshot((rank_memory(0, [Piece(9, BEFORE, 1), Piece(1)]),)),
    "more than a terabyte": Snapshot((rank_memory(0, [Piece(5 << 40, 1, 9), Piece(1 << 40)]),)),
    "equal times": Snapshot(
        (rank_memory(0, [Piece(n + 1, 5, 5 + n % 2, n % 8) for n in range(50)]),)
    ),
    "one moment longer than its blocks": Snapshot((rank_memory(0, [Piece(5, 500, 900)], 10),)),
    "64 ranks": Snapshot(tuple(rank_memory(r, [Piece(r + 1, r, 90)]) for r in range(64))),
    "30 days": Snapshot((rank_memory(0, [Piece(5, 0, STAYS)], 30 * 24 * 3600 * 10**9),)),
    "only a failure": Snapshot(
        (rank_memory(0, [], failures=(OutOfMemory(5, 9), OutOfMemory(0, 9, 3)), lost=5),)
    ),
    "strange names": Snapshot(
        (
            rank_memory(
                0,
                [Piece(9, i, 80, i % 8, name=i, operator=4 - i, stack=i % 2) for i in range(5)],
                names=STRANGE,
                stacks=(
                    (AllocationFrame(MARKUP, 1, "$"), AllocationFrame("x" * 900, 2, "f" * 900)),
                    (),
                ),
                problem=MARKUP + "\n" + "x" * 3000,
            ),
        ),
        strategy=MARKUP,
        notes=(MARKUP,),
    ),
    "one rank stopped": Snapshot(
        (training().ranks[0], rank_memory(1, [], 0, problem="rank 1 ended while recording"))
    ),
}


@pytest.mark.parametrize("snapshot", BAD.values(), ids=BAD)
def test_any_snapshot_is_drawn(snapshot: Snapshot) -> None:
    """Text, image and page of what is empty, tiny, huge or strangely named; no warnings either."""
    view = remembered(snapshot)
    head = check_drawn(view, MOST_BYTES / 4)

    assert view.text.startswith("memory of ")
    assert head["to"] > 0
    assert head["most"] > 0
    assert len(head["size"]) == sum(len(rank.blocks) for rank in snapshot.ranks)


def test_what_a_rank_lacks_is_told_and_long_lines_are_cut() -> None:
    """In the text, in one line; of the program, and of the text."""
    lines = remembered(BAD["no blocks"]).text.splitlines()
    strange = remembered(BAD["strange names"])

    assert {"rank 0: nothing was allocated", "rank 1: no file"} <= {*lines}
    assert max(map(len, data_of(strange)["lines"])) == recording_iframe.MOST_NAME
    assert max(map(len, strange.text.splitlines())) < 500


def test_only_what_is_equal_everywhere_is_shown_where_outputs_are_stored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two runs of one program print the same; what the model holds at the end is a number."""
    monkeypatch.setenv("NBDIST_TEST", "1")
    snapshot = training()
    ranks = []
    for rank in snapshot.ranks:  # what is guessed has other bytes and other times
        size = rank.blocks.size_bytes * np.where(rank.blocks.is_exact, 1, 3 - rank.rank)
        ranks.append(replace(rank, blocks=replace(rank.blocks, size_bytes=size), duration_ns=7))
    first, other = remembered(snapshot), remembered(replace(snapshot, ranks=tuple(ranks)))
    on_gpus = [
        replace(peak, reserved_bytes=2 * MB, reserved_peak_bytes=3 * MB, limit_bytes=80 * MB)
        for peak in peaks(snapshot)
    ]
    assert compared(memory_report(snapshot, on_gpus, []).text) == compared(first.text)

    assert first.text != other.text
    text = compared(first.text)
    assert text == compared(other.text)
    assert compared(first.html) == compared(other.html)
    assert "memory of ranks 0-1, ddp, dp 2, 4 steps, #" in text
    assert ["parameters", "#", "#", "#", "#", "72.0 MB"] in rows(text)
    assert ["optimizer state", "#", "#", "#", "#", "144.0 MB"] in rows(text)
    assert ["activations", "#", "#", "#", "#", "#"] in rows(text)
    assert "<iframe" not in first.html
    assert "<img" not in compared(first.html)
    assert set(first._repr_mimebundle_()) == {"text/plain", "text/html"}


def pixels_of(snapshot: Snapshot) -> np.ndarray:
    """The drawn area of the first rank, (rows, columns, 3)."""
    drawn = imread(io.BytesIO(memory_image.png(snapshot, peaks(snapshot))))
    top = recording_png.TOP + memory_image.HEADER
    area = drawn[
        top : top + memory_image.PANEL,
        recording_png.LEFT : recording_png.LEFT + recording_png.INNER,
        :3,
    ]
    return (area * 255).round().astype(int)


def rows_of(area: np.ndarray, category: str) -> np.ndarray:
    """Pixels of a category in each column."""
    return (area == recording_png.rgb(COLOURS[category])).all(-1).sum(axis=0)


def test_the_image_stacks_each_category_in_its_colour() -> None:
    """Heights are bytes, to a row of pixels; widths are times."""
    pieces = [
        Piece(30 * MB, 0, STAYS, PARAMETER),
        Piece(70 * MB, 50, 100, ACTIVATION, is_exact=True),
    ]
    area = pixels_of(Snapshot((rank_memory(0, pieces),)))
    rows_per_mb = memory_image.PANEL / 106
    parameters, activations = (rows_of(area, name) for name in ("parameters", "activations"))

    assert parameters[[100, 1200]] == pytest.approx(30 * rows_per_mb, abs=2)
    assert activations[100] == 0
    assert activations[1200] == pytest.approx(70 * rows_per_mb, abs=2)
    assert np.flatnonzero(activations)[0] == pytest.approx(recording_png.INNER / 2, abs=1)


def test_the_image_has_stripes_where_a_category_is_guessed() -> None:
    """A third of the pixels is paler; of what is exact none."""

    def pure(*, is_exact: bool) -> float:
        piece = Piece(30 * MB, 0, STAYS, ACTIVATION, is_exact=is_exact)
        area = pixels_of(Snapshot((rank_memory(0, [piece]),)))[50:250]
        return float(rows_of(area, "activations").mean() / len(area))

    assert pure(is_exact=True) == 1
    assert pure(is_exact=False) == pytest.approx(2 / 3, abs=0.01)


def test_a_peak_of_a_nanosecond_is_in_the_image() -> None:
    """As high as it was, one column wide."""
    pieces = [Piece(10 * MB), Piece(90 * MB, 5 * 10**8, 5 * 10**8 + 1, ACTIVATION)]
    area = pixels_of(Snapshot((rank_memory(0, pieces, 10**9),)))
    high = rows_of(area, "activations")

    assert high.max() == pytest.approx(90 / 106 * memory_image.PANEL, abs=3)
    assert (high > 0).sum() == 1


def test_noise_on_many_ranks_stays_small() -> None:
    """The image has the ranks that need most; its size counts too."""
    ranks = million(30_000, ranks=40).ranks
    ranks = tuple(
        replace(
            rank,
            blocks=replace(
                rank.blocks,
                size_bytes=1 + rank.blocks.size_bytes % 10**5 * (1 + rank.rank % 2),
                end_ns=rank.blocks.start_ns + rank.blocks.address % 10**8 + 1,
            ),
        )
        for rank in ranks
    )
    view = remembered(Snapshot(ranks))

    assert 100_000 < len(view.png) < 500_000
    assert size_of(view) < MOST_BYTES
    assert "The image shows the 24 ranks that need the most." in view.text.splitlines()
    assert len(data_of(view)["ranks"]) == 40
