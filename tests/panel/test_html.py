"""The panel as text and HTML, without widgets."""

import re
from dataclasses import replace

import pytest

from nbdist.core.units import compared
from nbdist.panel.state import LogEntry, PanelPlan, PanelState, Question, RankRow
from nbdist.panel.view.html import log_html, plan_html, still, top_html

STATE = PanelState(
    "2 ranks on 1 host, gloo",
    is_running=True,
    ranks=(
        RankRow(0, "node7", "cpu", "waiting", "waiting in barrier() <1>", 0.0, 5e8, 1e9, 1.5),
        RankRow(1, "node7", "cpu", "dead", "ended (signal SIGKILL)"),
    ),
    waits=("rank 0 waits in barrier()",),
    strategy="fsdp, dp 2",
    models=("net: 12,600 parameters",),
    batch="effective batch 8: 4 samples x dp 2",
    queued=("%dist_strategy tp",),
    question=Question("restart", "Sure?"),
    log=(LogEntry(0.0, "%dist_restart 1 (2.5 s): <back>", "done"),),
)


def test_as_text_it_is_complete() -> None:
    """Rows, who waits, models, what is queued, and the log."""
    text = still(STATE).text

    for part in (
        "2 ranks on 1 host, gloo; strategy fsdp, dp 2",
        "waiting in barrier() <1>",
        "500.0 MB of 1.0 GB",
        "150%",
        "ended (signal SIGKILL)",
        "rank 0 waits in barrier()",
        "prepared: net: 12,600 parameters",
        "effective batch 8: 4 samples x dp 2",
        "queued until the cell ends: %dist_strategy tp",
        "%dist_restart 1 (2.5 s): <back>",
        "to be confirmed: Sure?",
    ):
        assert part in text
    assert re.search(r"\nas of \d{4}-\d\d-\d\d \d\d:\d\d:\d\d$", text)
    assert "gloo</span>; <span" in still(STATE).html


def test_stored_it_is_the_same_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hosts, devices, memory, use and times are not compared, in the HTML neither."""
    monkeypatch.setenv("NBDIST_TEST", "1")
    view = still(STATE)
    on_gpus = tuple(
        replace(row, device=f"cuda:{row.rank} NVIDIA H200", memory_bytes=row.memory_bytes and 7e9)
        for row in STATE.ranks
    )
    other = still(replace(STATE, ranks=on_gpus))

    assert compared(view.text) == compared(other.text)
    assert compared(view.html) == compared(other.html)
    for text in (compared(view.text), compared(view.html)):
        assert "node7" not in text
        assert "500" not in text
        assert "150%" not in text
        assert "2.5 s" not in text
        assert "# s" in text
        assert "as of #" in text


def test_texts_are_escaped() -> None:
    """What ranks and users wrote is no HTML."""
    assert "barrier() &lt;1&gt;" in top_html(STATE)
    assert "&lt;back&gt;" in log_html(STATE.log)


def test_a_bar_is_no_longer_than_its_place() -> None:
    """More than all of its cores is 150%, and a full bar."""
    body = top_html(STATE)

    assert "width:50%" in body
    assert "width:100%" in body
    assert "width:150%" not in body


def test_what_lasts_has_a_bar_as_long_as_it_is_far() -> None:
    """With its words, and only while it lasts."""
    body = top_html(replace(STATE, doing="switch: moving 9 kB of 36 kB, 25%"))

    assert "width:25%" in body
    assert "switch: moving 9 kB of 36 kB" in body
    assert "np-progress" not in top_html(STATE)


def test_a_verdict_has_a_mark_and_what_is_not_known_has_none() -> None:
    """A question mark alone would say nothing."""
    safe, unknown = (
        plan_html(PanelPlan("so", is_possible=True, verdict=word)) for word in ("safe", "?")
    )

    assert "✓ safe</span>" in safe
    assert "np-verdict" not in unknown
    assert "?" not in unknown


def test_only_the_live_one_counts_its_age() -> None:
    """The picture says nothing of the kernel, which is gone where it is seen."""
    assert "np-age" not in top_html(STATE)
    assert 'data-drawn="7"' in top_html(STATE, drawn=7)


def test_without_ranks_it_says_so() -> None:
    """One line, no table."""
    view = still(PanelState("no ranks are running"))

    assert re.fullmatch("no ranks are running\nas of [-0-9: ]{19}", view.text)
    assert "<table" not in view.html
