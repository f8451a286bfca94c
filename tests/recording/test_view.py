"""What the live pictures of traces and of memory have in common, whatever is in them."""

from __future__ import annotations

import html
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

import matplotlib as mpl
import pytest
from matplotlib import pyplot as plt

from nbdist.core.view import View
from nbdist.memory.peak import peaks
from nbdist.memory.view import image as memory_image
from nbdist.recording.view import iframe as recording_iframe
from nbdist.trace.downsample import layout_rows
from nbdist.trace.view import image as trace_image
from nbdist.trace.view.report import trace_report
from tests.memory import test_view as memory_views
from tests.support import drawn_memory, drawn_traces
from tests.support.pages import STRANGE, Tags, data_of
from tests.trace import test_view as trace_views


@dataclass(frozen=True, slots=True)
class Subject:
    """One of the two.

    Attributes:
        view: Of a training.
        strange: Of one with strange names.
        image: Of a training, as a PNG.
        alt: What its image shows, with a place for the first line of the text.
        module, draws: What draws it, and a line of Python that draws nothing recorded.
    """

    view: Callable[[], View]
    strange: Callable[[], View]
    image: Callable[[], bytes]
    alt: str
    module: str
    draws: str


MEMORY = Subject(
    lambda: drawn_memory.remembered(drawn_memory.training()),
    lambda: drawn_memory.remembered(memory_views.BAD["strange names"]),
    lambda: memory_image.png(training := drawn_memory.training(), peaks(training)),
    "Memory over time: {}. The numbers stand below it.",
    "nbdist.memory.view.report",
    "report.memory_report(report.Snapshot(()), (), ())",
)
TRACE = Subject(
    lambda: trace_report(drawn_traces.training(600), trace_views.SHARES, [trace_views.FINDING]),
    lambda: trace_report(trace_views.BAD["strange names"], trace_views.NO_SHARES, []),
    lambda: trace_image.png(training := drawn_traces.training(300), layout_rows(training, 64)),
    "Timeline: {}. The numbers are below it.",
    "nbdist.trace.view.report",
    "report.trace_report(report.Trace(()), report.TimeBreakdown((), 0, None, (), (), 0.0), [])",
)


@pytest.fixture(params=[MEMORY, TRACE], ids=["memory", "trace"])
def subject(request: pytest.FixtureRequest) -> Subject:
    drawn: Subject = request.param
    return drawn


def test_the_bundle_has_html_image_and_text(subject: Subject) -> None:
    """The HTML has the same image, described, below a sandboxed frame that covers it."""
    view = subject.view()
    bundle = view._repr_mimebundle_()
    tags = Tags(view.html)
    picture, over = tags.one("img"), tags.one("iframe")

    assert set(bundle) == {"text/plain", "text/html", "image/png"}
    assert picture["src"] == f"data:image/png;base64,{bundle['image/png']}"
    assert picture["alt"] == subject.alt.format(view.text.splitlines()[0])
    assert over["sandbox"] == "allow-scripts"
    assert "position:absolute;inset:0" in over["style"]
    assert "script" not in {tag for tag, _ in tags.tags}
    below = html.unescape(re.sub(r"<[^>]*>", "", view.html)).replace("\N{NO-BREAK SPACE}", " ")
    for line in view.text.splitlines():
        for cell in re.split(r"  +", line.strip()):
            assert cell.removesuffix(":") in below  # a fold's title has none


def test_nothing_comes_from_the_network(subject: Subject) -> None:
    """No address stands in the page, and the frame's own policy forbids all of them."""
    view = subject.view()
    inner = Tags(view.html).one("iframe")["srcdoc"]

    assert "http:" not in view.html
    assert "https:" not in view.html
    assert "//cdn" not in inner
    assert "default-src 'none'" in Tags(inner).tags[3][1]["content"]


def test_names_cannot_end_the_script_that_holds_them(subject: Subject) -> None:
    """The frame has its own scripts' text and the data, whatever things are called."""
    view = subject.strange()
    inner, names = Tags(view.html).one("iframe")["srcdoc"], data_of(view)["names"]

    assert "alert(1)" not in inner
    assert len(re.findall("<script", inner)) == len(re.findall("</script", inner)) == 2
    assert set(names) >= set(STRANGE[:2])
    assert max(map(len, names)) == recording_iframe.MOST_NAME


def test_drawing_leaves_matplotlib_as_it_is(subject: Subject) -> None:
    """No figure of pyplot's, the same backend and settings; the user's style does not matter."""
    plain = subject.image()
    with mpl.rc_context({"axes.facecolor": "black", "font.size": 30, "savefig.transparent": True}):
        before = dict(mpl.rcParams)
        again = subject.image()
        after = dict(mpl.rcParams)

    assert plt.get_fignums() == []
    assert before == after
    assert plain == again


def test_matplotlib_is_loaded_by_the_first_picture_and_pyplot_never(subject: Subject) -> None:
    """It takes long to load, and pyplot would choose a backend."""
    program = (
        f"import sys, {subject.module} as report\n"
        f"before = 'matplotlib' in sys.modules\n{subject.draws}\n"
        "print(before, 'matplotlib' in sys.modules, 'matplotlib.pyplot' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=True
    )

    assert done.stdout.split() == ["False", "True", "False"]


def test_the_same_record_gives_the_same_bundle(subject: Subject) -> None:
    """No date, no random ids."""
    once, again = (subject.view()._repr_mimebundle_() for _ in range(2))

    assert once == again
