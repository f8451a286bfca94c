"""A trace from its record to a picture in a real browser, and how smoothly it moves."""

from __future__ import annotations

import io
import json
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks import Row
from nbdist.trace.breakdown import TimeBreakdown
from nbdist.trace.downsample import layout_rows
from nbdist.trace.trace import KINDS, Trace
from nbdist.trace.view.report import MOST_ROWS, trace_report
from tests.support.drawn_traces import training
from tests.support.lab import browser_page

if TYPE_CHECKING:  # playwright is an optional extra
    from playwright.sync_api import Frame, Page

COUNTS = (10**4, 10**5, 10**6)
ROUNDS = 5
RANKS = 4
FRAMES = 180
FRAME_MS = 1000 / 60
MOST_MB = 2
DEADLINE_MS = 60_000
NOTHING = TimeBreakdown((), 0, None, (), (), 0.0)
# Half of the time the picture is moved by a hundredth of its width for each frame of the screen,
# then it is zoomed in and out again.
MOVE = """count => new Promise(done => {
    zoom(1 / 2);
    const times = [];
    let turn = 0;
    frame.dataset.frames = frame.dataset.drawMs = 0;
    const next = now => {
        times.push(now);
        if (times.length > count) {
            const seen = frame.dataset;
            return done({ drawMs: seen.drawMs / seen.frames, frameMs: (now - times[0]) / count });
        }
        turn += 1;
        if (turn < count / 2) pan(turn < count / 4 ? 0.01 : -0.01);
        else zoom(turn < count * 3 / 4 ? 0.97 : 1 / 0.97);
        requestAnimationFrame(next);
    };
    requestAnimationFrame(next);
})"""


def rows() -> list[Row]:
    """Rows of each number of events, and of moving the largest."""
    rows = []
    traces = {count: training(count, ranks=RANKS, steps=20) for count in COUNTS}
    with browser_page(1100, 900) as page:
        for count, trace in traces.items():
            shown = [_shown(trace, page) for _ in range(ROUNDS)]
            rows += _times(count, shown, _bars_s(trace))
        moved = _frame(page).evaluate(MOVE, FRAMES)
    size = Row(
        f"{COUNTS[-1]:,} events: the bundle",
        shown[-1].size_mb,
        MOST_MB,
        unit="MB",
        how="JSON of text, HTML and PNG; other: the most that a notebook may grow by",
        most_ratio=1,
    )
    return [*rows, size, *_moved(moved)]


def _times(count: int, shown: list[_Shown], bars_s: float) -> list[Row]:
    """From the record to the bundle, and on to the screen."""
    how = f"median of {ROUNDS}, {RANKS} ranks; matplotlib's broken_barh to PNG, once"
    bundle_s = statistics.median(page.bundle_s for page in shown)
    painted_s = statistics.median(page.bundle_s + page.painted_s for page in shown)
    return [
        Row(f"{count:,} events: record to bundle", bundle_s, bars_s, "s", how),
        Row(f"{count:,} events: record to painted in Chromium", painted_s, bars_s, "s", how),
    ]


def _moved(moved: dict[str, float]) -> list[Row]:
    """How long a picture takes, and how many the screen gets."""
    name = f"{COUNTS[-1]:,} events, moved and zoomed"
    return [
        Row(
            f"{name}: to draw a picture",
            moved["drawMs"],
            FRAME_MS,
            unit="ms",
            how=f"mean of {FRAMES}; other: what a screen of 60 Hz leaves for it",
            most_ratio=0.48,
        ),
        Row(
            f"{name}: from picture to picture",
            moved["frameMs"],
            FRAME_MS,
            unit="ms",
            how=f"mean of {FRAMES}; other: a screen of 60 Hz",
            most_ratio=1.1,
        ),
    ]


@dataclass(frozen=True, slots=True)
class _Shown:
    """One trace, shown once.

    Attributes:
        bundle_s: From the record to the bundle.
        painted_s: From there to the screen.
        size_mb: Of the bundle.
    """

    bundle_s: float
    painted_s: float
    size_mb: float


def _shown(trace: Trace, page: Page) -> _Shown:
    began_s = time.perf_counter()
    bundle = trace_report(trace, NOTHING, [])._repr_mimebundle_()
    made_s = time.perf_counter()
    page.set_content(bundle["text/html"], wait_until="commit")
    _frame(page)
    painted_s = time.perf_counter() - made_s
    return _Shown(made_s - began_s, painted_s, len(json.dumps(bundle)) / 1e6)


def _frame(page: Page) -> Frame:
    """The timeline, as soon as it is painted."""
    handle: Any = page.wait_for_selector("iframe[srcdoc]", timeout=DEADLINE_MS)
    frame: Frame = handle.content_frame()
    frame.wait_for_selector("#frame[data-painted-ms]", timeout=DEADLINE_MS)
    return frame


def _bars_s(trace: Trace) -> float:
    """The same rows with a bar for each event."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    began_s = time.perf_counter()
    events = layout_rows(trace, MOST_ROWS)
    figure = Figure(figsize=(10, 6), dpi=160)
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for row in range(len(events.rows)):
        for kind in range(len(KINDS)):
            is_row = (events.row == row) & (events.kind == kind)
            bars = list(zip(events.start_ns[is_row], events.duration_ns[is_row], strict=True))
            axes.broken_barh(bars, (-row, 0.8), facecolors=f"C{kind}")
    axes.autoscale()
    figure.savefig(io.BytesIO(), format="png")
    return time.perf_counter() - began_s
