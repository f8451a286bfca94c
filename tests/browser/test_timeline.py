"""The timeline of a trace by mouse and keys: what it has beside other live pictures."""

import re
from typing import TYPE_CHECKING

import numpy as np
import pytest

from nbdist.core.finding import WARN, Finding, Spot
from nbdist.trace.breakdown import TimeBreakdown
from nbdist.trace.trace import KINDS
from nbdist.trace.view.report import trace_report
from tests.support.drawn_traces import training
from tests.support.live import LivePicture, opened

if TYPE_CHECKING:  # playwright is an optional extra
    from playwright.sync_api import Page

pytestmark = pytest.mark.browser

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

    def move_to(self, ns: float, row: int) -> None:
        """Put the pointer at a time in a row."""
        self.point_at(ns, f"rowTops[{row}] - frame.scrollTop + 7")


@pytest.fixture(scope="module")
def shown(page: "Page") -> Timeline:
    """The picture in a page: what it is in JupyterLab shows test_viewer."""
    page.set_content(trace_report(TRACE, TimeBreakdown((), 0, None, (), (), 0.0), []).html)
    return Timeline(page)


@pytest.fixture
def timeline(shown: Timeline) -> Timeline:
    """All of it is seen."""
    shown.reset()
    return shown


def test_keys_go_from_event_to_event(timeline: Timeline) -> None:
    """What has the focus is said to who cannot see it."""
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

    assert [text.split(",")[0] for text in heard] == names[:3]
    assert below == 1


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


def test_a_large_trace_has_blocks_and_one_stretch_in_full(page: "Page") -> None:
    """A block says how many events it stands for; the button shows where there are none."""
    view = trace_report(training(400_000), TimeBreakdown((), 0, None, (), (), 0.0), [])
    with opened(Timeline, page, view) as timeline:
        row = 1  # of the operators inside "forward"
        first = timeline.value(f"trace.firsts[{row}]")
        merged, width_ns = timeline.value(f"[trace.count[{first}], trace.width]")
        timeline.value(f"(show(trace.start[{first}], 100 * trace.width), null)")
        timeline.move_to(timeline.value(f"(trace.start[{first}] + trace.end[{first}]) / 2"), row)
        tip = timeline.tip
        timeline.frame.locator("#full").click()
        begins = "trace.start[i] >= from && trace.start[i] < to"
        counts = timeline.value(f"Array.from(trace.count).filter((_, i) => {begins})")

    assert merged > 1
    assert tip[0] == f"{merged:g} compute events shorter than {width_ns / 1e3:g} us, merged"
    assert len(counts) > 1000
    assert set(counts) == {1}


def test_the_list_of_findings_leads_to_where_they_are(page: "Page") -> None:
    """The rank's rows are seen, with the spot in the middle third of the picture."""
    spot = Spot(7, 10_000_000, 11_000_000)
    finding = Finding(
        "one <b>late</b> rank", "found", WARN, "why", "what", (7,), 0.1, spots=(spot,)
    )
    view = trace_report(training(4000, ranks=8), TimeBreakdown((), 0, None, (), (), 0.0), [finding])
    with opened(Timeline, page, view) as timeline:
        timeline.frame.locator("#spots").select_option(index=1)
        seen_ns, text = timeline.seen_ns, timeline.frame.locator("#spots").inner_text()
        top, bottom = timeline.value("[headers[7] - frame.scrollTop, height]")

    assert seen_ns == pytest.approx((9_000_000, 12_000_000))
    assert text.splitlines() == ["look at a finding", "one <b>late</b> rank: rank 7, 10.00 ms"]
    assert 0 < top < bottom
