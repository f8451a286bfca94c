"""A trace as text with its numbers, as an image, and as one piece of HTML, whatever is in it."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import numpy as np
import pytest
from matplotlib.image import imread

from nbdist.core.finding import WARN, Finding, Spot
from nbdist.core.units import compared
from nbdist.recording.view import png as recording_png
from nbdist.trace.breakdown import (
    Operation,
    RankBreakdown,
    Slowest,
    TimeBreakdown,
    Traffic,
    breakdown,
)
from nbdist.trace.downsample import layout_rows
from nbdist.trace.trace import COMMUNICATION, COMPUTE, KINDS, Lane, Step, Trace
from nbdist.trace.view import image as trace_image
from nbdist.trace.view.report import trace_report
from tests.support.drawn_traces import events, random_trace, rank_trace, training
from tests.support.pages import MARKUP, STRANGE, check_drawn, data_of, size_of

MOST_BYTES = 2_000_000
MS = 10**6

FINDING = Finding(
    "one late rank",
    "rank 1 starts 2 ms late",
    WARN,
    "the others wait",
    "give it less",
    (1,),
    0.12,
    spots=(Spot(1, 1_234_499, 2_000_000), Spot(0, 5, 6)),
)


def rank_shares(rank: int) -> RankBreakdown:
    steps_ns = (8 * MS, 10 * MS, 9 * MS)
    return RankBreakdown(rank, 20 * MS, 12 * MS, 3 * MS, MS, 2 * MS, 2 * MS, 6 * MS, MS, steps_ns)


SHARES = TimeBreakdown(
    (rank_shares(0), rank_shares(1)),
    step_ns=10 * MS,
    slowest=Slowest(1, 2 * MS, 0.125, 6, 0),
    operations=(Operation("aten::mm", COMPUTE, 120, 15 * MS, 0.4),),
    traffic=(Traffic("all-reduce", "world", 4_000_000, 2.0, 8e6, 1_500_000),),
    sent_bytes=8e6,
    formula_bytes=8.5e6,
    formula=("all-reduce gradients over dp",),
    notes=("Clocks were aligned at 12 collectives.",),
)
NO_SHARES = TimeBreakdown((), 0, None, (), (), 0.0)


def test_the_text_has_all_numbers() -> None:
    """Head, findings, a row for each rank, slowest rank, operations, traffic beside its formula."""
    trace = training(600)
    text = trace_report(trace, SHARES, [FINDING]).text
    lines = text.splitlines()

    took = f"{trace.duration_ns / 1e6:.1f} ms"
    assert lines[0] == f"trace of ranks 0-1, {took}, 6 steps of 10.0 ms, ddp, dp 2"
    assert lines[2:7] == [
        "findings, the most expensive first:",
        "- one late rank (rank 1, 12.0 %): rank 1 starts 2 ms late",
        "  why: the others wait",
        "  do: give it less",
        "  look at: rank 1, from 1.234 to 2.000 ms",
    ]
    assert lines[8].split("  ")[0] == "rank"
    assert lines[9].split() == ["0", "9.00", "60.0", "15.0", "5.0", "10.0", "10.0", "66.7"]
    assert "slowest rank: 1; without it a step would be 12.5 % faster (2.0 ms)" in lines
    assert "aten::mm   compute    120  15.00  40.0" in lines
    assert ["all-reduce", "world", "4.0", "MB", "2", "8.0", "MB", "1.5", "ms"] in [
        line.split() for line in lines
    ]
    assert (
        "a rank sends 8.0 MB per step; the strategy's formula gives 8.5 MB "
        "(all-reduce gradients over dp)"
    ) in lines
    assert lines[-1] == "Clocks were aligned at 12 collectives."


@pytest.mark.parametrize("seed", range(3))
def test_the_page_packs_every_event(seed: int) -> None:
    """Read back with plain Python: each event, where, what and when it is, its bytes and group."""
    trace = random_trace(300, ranks=2, seed=seed, depths=2)
    head = data_of(trace_report(trace, NO_SHARES, []))
    shown = []
    firsts = head["firsts"]
    for row, (place, lane, depth) in enumerate(head["rows"]):
        start = head["from"]
        for i in range(firsts[row], firsts[row + 1]):
            start = start + head["start"][i]
            group = head["groups"][head["group"][i] - 1] if head["group"][i] else None
            name, kind = head["names"][head["name"][i]], head["kinds"][head["kind"][i]]
            shown.append(
                (place, lane, depth, kind, name, start, head["busy"][i], head["size"][i], group)
            )
    expected = []
    for place, rank in enumerate(trace.ranks):
        events = rank.events
        for i in range(len(events)):
            group = rank.groups[events.group[i]] if events.group[i] >= 0 else None
            lane, kind = rank.lanes[events.lane[i]].name, KINDS[events.kind[i]]
            name = rank.names[events.name[i]]
            numbers = map(int, (events.start_ns[i], events.duration_ns[i], events.size_bytes[i]))
            expected.append((place, lane, int(events.depth[i]), kind, name, *numbers, group))

    assert head["width"] == 0
    assert sorted(shown, key=str) == sorted(expected, key=str)


def test_the_page_knows_where_findings_are() -> None:
    """The rank by its place among those that have recorded."""
    trace = training(300, ranks=3)
    view = trace_report(Trace(trace.ranks[1:]), SHARES, [replace(FINDING, spots=FINDING.spots[:1])])

    assert data_of(view)["spots"] == [["one late rank", 0, 1_234_499, 2_000_000]]


def test_a_large_trace_is_merged_and_says_so() -> None:
    """No event is lost; the bundle stays small although names and times cannot be compressed."""
    trace = random_trace(400_000, ranks=2, seed=1)
    names = tuple(
        f"{number:x}" * 40 for number in np.random.default_rng(0).integers(0, 2**60, 9000)
    )
    ranks = []
    for rank in trace.ranks:
        name = np.random.default_rng(rank.rank).integers(0, len(names), len(rank.events))
        ranks.append(
            replace(rank, names=names, events=replace(rank.events, name=name.astype(np.int32)))
        )
    view = trace_report(Trace(tuple(ranks)), SHARES, [])
    head = data_of(view)

    assert size_of(view) < MOST_BYTES
    assert sum(head["count"]) == 400_000
    assert sum(head["busy"]) == sum(int(rank.events.duration_ns.sum()) for rank in ranks)
    merged = (
        r"events shorter than [\d.]+ [nu]s are merged with their neighbours "
        r"\([\d,]+ of 400,000\), except in the [\d.]+ ms from 1\d\.\d ms on\."
    )
    assert re.search(merged, view.text)


def test_deep_events_that_have_no_room_are_told() -> None:
    """How many levels are shown, and how many events are not."""
    deep = events([(0, 100 - depth) for depth in range(20)], depth=list(range(20)))
    view = trace_report(Trace((rank_trace(0, deep),)), NO_SHARES, [])

    assert "It shows 8 levels of nested events; 12 deeper ones are left out." in view.text


NOTHING = Trace((rank_trace(0, events([])), rank_trace(1, events([]), problem="no file")))
BAD = {
    "no ranks": Trace(()),
    "no events": NOTHING,
    "one event": Trace((rank_trace(0, events([(5, 7)])),)),
    "one event of no duration": Trace((rank_trace(0, events([(0, 0)])),)),
    "many ranks": Trace(tuple(rank_trace(r, events([(r, 5)])) for r in range(64))),
    "steps without events": Trace((rank_trace(0, events([]), steps=(Step(0, 0, 50),)),)),
    "steps of no duration": Trace(
        (rank_trace(0, events([(0, 0)]), steps=(Step(0, 0, 0), Step(1, 0, 0))),)
    ),
    "before the beginning": Trace((rank_trace(0, events([(-50, 20), (3, 4)])),)),
    "strange names": Trace(
        (
            rank_trace(
                0,
                events([(i * 10, 9) for i in range(5)], name=list(range(5))),
                names=STRANGE,
                lanes=(Lane(MARKUP + "$" + "核" * 50),),
                problem=MARKUP + "\n" + "x" * 3000,
            ),
        ),
        strategy=MARKUP,
        notes=(MARKUP,),
    ),
    "one rank stopped": Trace(
        (training(300).ranks[0], rank_trace(1, events([]), problem="rank 1 ended while recording"))
    ),
    "30 days": Trace((rank_trace(0, events([(0, 5), (30 * 24 * 3600 * 10**9, 5)])),)),
}


@pytest.mark.parametrize("trace", BAD.values(), ids=BAD)
def test_any_trace_is_drawn(trace: Trace) -> None:
    """Text, image and page of what is empty, tiny, huge or strangely named; no warnings either."""
    view = trace_report(trace, NO_SHARES, [])
    head = check_drawn(view, MOST_BYTES / 4)

    assert view.text.startswith("trace of ")
    assert head["to"] > head["from"]
    assert sum(head["count"]) == sum(len(rank.events) for rank in trace.ranks)


def test_what_a_rank_lacks_is_told() -> None:
    """Once, in one line, as what is noted of the whole trace."""
    trace = replace(NOTHING, notes=("One file\nwas torn.",))

    lines = trace_report(trace, breakdown(trace), []).text.splitlines()

    assert lines.count("Rank 1: no file") == 1
    assert lines.count("One file was torn.") == 1


def test_measured_numbers_are_placeholders_where_outputs_are_stored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two runs of one program compare as equal, whatever was slow."""
    monkeypatch.setenv("NBDIST_TEST", "1")
    slower = replace(
        SHARES,
        ranks=(replace(rank_shares(0), compute_ns=0, overlap_ns=0), rank_shares(1)),
        slowest=replace(SHARES.slowest, rank=0, doubt="others"),  # type: ignore[type-var]
        operations=(Operation("aten::add", COMPUTE, 7, MS, 0.9), *SHARES.operations),
        traffic=(replace(SHARES.traffic[0], median_ns=7),),
    )
    report = trace_report(training(600, seed=1), SHARES, [FINDING])
    other = trace_report(training(600, seed=2), slower, [])

    text = compared(report.text)
    assert text == compared(other.text)
    assert compared(report.html) == compared(other.html)
    assert "trace of ranks 0-1, #, 6 steps of #, ddp, dp 2" in text
    assert "slowest rank: #" in text
    assert "<iframe" not in report.html
    assert "<img" not in compared(report.html)
    assert set(report._repr_mimebundle_()) == {"text/plain", "text/html"}


@pytest.mark.parametrize(
    ("slowest", "line"),
    [
        (None, "slowest rank: none (no rank waits for another)"),
        (
            Slowest(0, MS, 0.1, 3, 0, "others cost at least half as much"),
            (
                "slowest rank: 0; without it a step would be 10.0 % faster (1.0 ms); "
                "others cost at least half as much"
            ),
        ),
    ],
)
def test_the_slowest_rank_may_not_be_alone(slowest: Slowest | None, line: str) -> None:
    """The text says so, and also where nobody waits."""
    text = trace_report(training(100), replace(SHARES, slowest=slowest), []).text

    assert line in text.splitlines()


def test_many_collectives_are_counted() -> None:
    """The largest stand in the table."""
    many = tuple(replace(SHARES.traffic[0], size_bytes=size) for size in range(50))
    text = trace_report(training(100), replace(SHARES, traffic=many), []).text

    assert text.count("all-reduce  ") == 20
    assert "and 30 more with less traffic" in text.splitlines()


def test_each_pixel_has_the_share_of_each_kind() -> None:
    """Against adding up the events one by one; overlapping events add up too."""
    trace = random_trace(500, ranks=2, seed=3, depths=2)
    drawn = layout_rows(trace, 100)
    columns, end_ns = 40, trace.duration_ns
    slow = np.zeros((len(drawn.rows), len(KINDS), columns))
    edges = np.arange(columns + 1) * end_ns / columns
    for row, kind, start, took in zip(
        drawn.row, drawn.kind, drawn.start_ns, drawn.duration_ns, strict=True
    ):
        inside = np.minimum(edges[1:], start + took) - np.maximum(edges[:-1], start)
        slow[row, kind] += np.maximum(inside, 0) * columns / end_ns
    rows = slice(2, 7)
    share = trace_image.shares(drawn, rows, (0, end_ns), columns)

    np.testing.assert_allclose(share, slow[rows], atol=0.02)
    assert slow[rows].max() > 0.5


def test_the_image_shows_each_kind_in_its_colour_and_idle_as_the_lane() -> None:
    """Half of a row computes, a quarter is idle, a quarter communicates."""
    halves = events([(0, 50), (75, 25)], kind=[COMPUTE, COMMUNICATION])
    trace = Trace((rank_trace(0, halves),))
    pixels = imread(io.BytesIO(trace_image.png(trace, layout_rows(trace, 10))))
    y = recording_png.TOP + trace_image.HEADER + trace_image.ROW // 2
    line = (pixels[y, recording_png.LEFT : -recording_png.RIGHT, :3] * 255).round().astype(int)
    colours = {
        "compute": (0x00, 0x72, 0xB2),
        "idle": (0xF0, 0xF0, 0xF0),
        "communication": (0xD5, 0x5E, 0x00),
    }
    shares = {name: (line == colour).all(axis=1).mean() for name, colour in colours.items()}

    assert shares == pytest.approx({"compute": 0.5, "idle": 0.25, "communication": 0.25}, abs=0.01)


def test_an_image_of_many_ranks_stays_small() -> None:
    """Rows get lower, down to 3 pixels, so that all ranks are in it."""
    ranks = tuple(rank_trace(rank, random_trace(60, ranks=1).ranks[0].events) for rank in range(64))
    trace = Trace(tuple(replace(rank, names=("x",) * 40, groups=("a", "b")) for rank in ranks))
    drawn = trace_image.png(trace, layout_rows(trace, 64))
    height = imread(io.BytesIO(drawn)).shape[0]

    assert 64 * 4 * 3 <= height <= 1400
    assert len(drawn) < 300_000


def test_rows_of_a_rank_without_waiting_are_not_called_slow() -> None:
    """One rank waits for nobody: there is no such line."""
    alone = replace(SHARES, ranks=(rank_shares(0),), slowest=None)
    text = trace_report(Trace(training(100, ranks=1).ranks), alone, []).text

    assert "slowest" not in text
    assert text.startswith("trace of rank 0, ")
