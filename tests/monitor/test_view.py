"""What ranks use and do as text, as HTML with pictures, and with placeholders."""

import base64
import io
import math
import re
from dataclasses import replace

import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from nbdist.core.finding import WARN, Finding
from nbdist.core.gpus import GpuReading
from nbdist.core.units import compared
from nbdist.monitor import view as views
from nbdist.monitor.process_usage import Usage
from nbdist.monitor.samples import Allocator, Doing, Sample, SampleHistory
from nbdist.monitor.view import monitor, png, serving

GPU = GpuReading(0, "GPU-a", "H", 20 * 10**9, 80 * 10**9, 50.0, 30.0, 61.0, 300.0, 700.0, ())
DOING = Doing("waiting", "running cell [3], waiting in barrier()", 8.0, 9.0, "barrier()", 1.25)
USAGE = Usage(1.0, 3 * 10**9, 2 * 10**9, 10, 100)
SAMPLE = Sample(0, 10.0, DOING, USAGE, 95.0, GPU, Allocator(5 * 10**9, 6 * 10**9, 7 * 10**9))
FINDING = Finding("heat", "rank 0: 99 C <hot>", WARN, "it slows", "cool it", (0,))


def recorded(*ranks: Sample, count: int = 11) -> tuple[list[Sample], SampleHistory]:
    """Samples whose utilisation goes up to theirs, 0 first, and their history."""
    history = SampleHistory()
    newest: list[Sample] = []
    for second in range(count):
        share = second / max(1, count - 1)
        newest = [
            replace(sample, time_s=float(second), gpu=sample.gpu and replace(
                sample.gpu, busy_percent=(sample.utilisation or 0) * share))
            for sample in ranks
        ]  # fmt: skip
        history.append(newest)
    return newest, history


def test_a_row_has_now_mean_and_peak() -> None:
    """Every number with its unit, what the rank does and for how long, and what stands out."""
    view = monitor(*recorded(SAMPLE), (FINDING,), ("a note",))
    lines = view.text.splitlines()

    assert lines[0].startswith("now / mean / peak of 11 samples over 10.0 s;")
    assert re.split(r"  +", lines[1]) == [
        "rank", "doing", "busy (%)", "device memory", "allocated", "reserved", "host memory",
        "temperature (C)", "power (W)", "last collective",
    ]  # fmt: skip
    assert re.split(r"  +", lines[2].strip()) == [
        "0", "running cell [3], waiting in barrier() for 2.0 s", "50 / 25 / 50",
        "20.0 GB / 20.0 GB / 20.0 GB", "5.0 GB / 5.0 GB / 7.0 GB", "6.0 GB / 6.0 GB / 6.0 GB",
        "3.0 GB / 3.0 GB / 3.0 GB", "61 / 61 / 61", "300 / 300 / 300", "barrier(), 1.2 s ago",
    ]  # fmt: skip
    assert lines[3:] == ["heat: rank 0: 99 C <hot>. It slows. Do: cool it.", "a note"]
    assert "&lt;hot&gt;" in view.html
    assert "<hot>" not in view.html


def test_what_no_rank_knows_has_no_column_and_what_one_lacks_is_a_dash() -> None:
    """On CPUs there are no GPU's columns; a dead rank beside others has dashes."""
    bare = replace(SAMPLE, gpu=None, allocator=None)
    dead = Sample(1, 10.0, Doing("dead", "ended (signal SIGKILL)"))
    text = monitor(*recorded(bare, dead)).text

    assert "device memory" not in text
    assert "allocated" not in text
    assert re.search(
        r"^ +1  ended \(signal SIGKILL\) +- / - / - +- / - / - +-$", text, re.MULTILINE
    )


def test_old_numbers_are_told_as_old() -> None:
    """A rank that could not answer: how old what is shown is."""
    text = monitor(*recorded(replace(SAMPLE, age_s=7.5))).text

    assert "for 2.0 s (numbers 7.5 s old)" in text
    assert " old)" not in monitor(*recorded(replace(SAMPLE, age_s=1.9))).text


def test_stored_output_has_no_number_that_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    """With NBDIST_TEST=1 two recordings that differ in all that is measured look the same."""
    monkeypatch.setenv("NBDIST_TEST", "1")
    other = replace(
        SAMPLE,
        usage=replace(USAGE, rss_bytes=77),
        doing=replace(DOING, since_s=1.0, collective_age_s=3.0),
        age_s=9.0,
    )
    on_a_cpu = replace(SAMPLE, gpu=None, allocator=None)
    views = [
        monitor(*recorded(SAMPLE), (FINDING,)),
        monitor(*recorded(other, count=99)),
        monitor(*recorded(on_a_cpu)),
    ]
    texts = [compared(view.text) for view in views]

    assert texts[0] == texts[1] == texts[2]
    assert len({compared(view.html) for view in views}) == 1
    assert "<img" not in compared(views[0].html)
    assert "running cell [3], waiting in barrier() for # s" in texts[0]
    assert re.split(r"  +", texts[0].splitlines()[2])[-2:] == ["#", "barrier(), # s ago"]


def test_the_picture_has_a_row_for_each_rank_and_a_column_for_each_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is in the HTML, and its height grows with the ranks; of many the first are drawn."""
    monkeypatch.setattr(views, "MOST_RANKS", 2)
    heights = []
    for count in (1, 2, 3):
        ranks = [replace(SAMPLE, rank=rank) for rank in range(count)]
        pixels = imread(io.BytesIO(png(*recorded(*ranks, count=3))))
        heights.append(pixels.shape[0])
        assert pixels.shape[1] == 5 * 286
    view = monitor(*recorded(SAMPLE))
    (data,) = re.findall(
        r'<img [^>]*alt="[^"]+" [^>]*src="data:image/png;base64,([^"]+)">', view.html
    )

    assert heights[0] < heights[1] == heights[2]
    assert base64.b64decode(data).startswith(b"\x89PNG")


def test_all_ranks_have_one_scale_that_ends_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shares go from 0 to 100 at least; the history may have gone on since the samples."""
    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    ranks = [replace(SAMPLE, rank=rank) for rank in range(2)]
    samples, history = recorded(*ranks, count=4)
    history.append([replace(sample, time_s=4.0) for sample in samples])
    png(samples, history)
    (figure,) = drawn
    times = [axes.lines[0].get_xdata() for axes in figure.axes]

    assert [(times_s[0], times_s[-1]) for times_s in times] == [(-4.0, 0.0)] * 10
    assert [axes.get_ylim()[0] for axes in figure.axes] == [0.0] * 10
    assert {figure.axes[at].get_ylim() for at in (0, 5)} == {(0.0, 100.0)}
    for axes in figure.axes:
        assert max(axes.lines[0].get_ydata()) <= axes.get_ylim()[1]


def test_nothing_to_draw_is_no_picture() -> None:
    """One sample alone is no line, and neither are ranks of which nothing is known."""
    unknown = Sample(0, 1.0, Doing("unknown", "?"))

    assert png(*recorded(SAMPLE, count=1)) == b""
    assert png(*recorded(unknown, count=5)) == b""
    assert "<img" not in monitor(*recorded(SAMPLE, count=1)).html


def test_a_gap_is_drawn_as_a_gap() -> None:
    """What was not known for a while is no 0: the line is interrupted."""
    samples, history = recorded(SAMPLE)
    _, values = history.series(0, "temperature")
    history.append([replace(samples[0], time_s=20.0, gpu=None)])
    _, after = history.series(0, "temperature")

    assert not math.isnan(values[-1])
    assert math.isnan(after[-1])
    assert png([replace(samples[0], time_s=20.0)], history)


def test_where_prometheus_finds_it_is_told_with_its_configuration() -> None:
    """Address, token's file, command and configuration, as text and as HTML."""
    view = serving("http://127.0.0.1:9/metrics", "/run/<x>/token", "scrape_configs:\n  - job: a")

    assert "\nscrape_configs:\n  - job: a" in view.text
    assert '$(cat /run/<x>/token)" http://127.0.0.1:9/metrics' in view.text
    assert "/run/&lt;x&gt;/token" in view.html
