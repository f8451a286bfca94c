"""Raw messages of several ranks become what is shown and what each rank did."""

from __future__ import annotations

import random
import time
from datetime import UTC, datetime
from typing import Any

import pytest

from nbdist.cells.line_merger import Bar, Line
from nbdist.cells.outputs import (
    KEPT_TEXT_CHARACTERS,
    CellResult,
    ClearOutput,
    DisplayOutput,
    Event,
    OutputReducer,
    RankResult,
    elapsed_line,
)
from nbdist.core.failures import RankFailure

PNG = {"image/png": "iVBORw0K", "text/plain": "<Figure>"}


def message(kind: str, **content: Any) -> dict[str, Any]:
    """A raw iopub message, as far as it is read."""
    return {"header": {"msg_type": kind}, "content": content}


def stream(text: str, name: str = "stdout") -> dict[str, Any]:
    return message("stream", name=name, text=text)


def result(text: str, **other: str) -> dict[str, Any]:
    data = {"text/plain": text, **other}
    return message("execute_result", data=data, metadata={}, execution_count=1)


def display(data: dict[str, Any] = PNG, display_id: str = "") -> dict[str, Any]:
    transient = {"display_id": display_id} if display_id else {}
    return message("display_data", data=data, metadata={}, transient=transient)


def update(data: dict[str, Any], display_id: str) -> dict[str, Any]:
    transient = {"display_id": display_id}
    return message("update_display_data", data=data, metadata={}, transient=transient)


def clear(*, wait: bool = False) -> dict[str, Any]:
    return message("clear_output", wait=wait)


def png(name: str) -> dict[str, Any]:
    """A figure that can be told from others."""
    return {"image/png": name, "text/plain": "<Figure>"}


def fed(feed: OutputReducer, *messages: tuple[int, dict[str, Any]]) -> list[Event]:
    """What is shown after these messages."""
    for rank, message in messages:
        feed.feed(rank, message, 0)
    return feed.due(0)


def ended(feed: OutputReducer) -> list[Event]:
    for rank in feed.ranks:
        feed.end(rank, 0)
    return feed.due(0)


def told(events: list[Event]) -> list[str]:
    texts = []
    for event in events:
        if isinstance(event, Line):
            texts.append(event.text.removesuffix("\n"))
        elif isinstance(event, Bar):
            texts.append(f"bar {event.text}")
        elif isinstance(event, ClearOutput):
            texts.append(f"clear {event.rank}{' wait' if event.wait else ''}")
        else:
            verb = "updates" if event.is_update else "shows"
            texts.append(f"{event.rank} {verb} {event.data.get('image/png', '')}".rstrip())
    return texts


# Text


_TENSOR = "tensor([1,\n        2])"
_X, _Y = {"text/plain": "'x'"}, {"text/plain": "'y'"}


@pytest.mark.parametrize(
    ("messages", "events", "hidden"),
    [
        # Text and results are merged over the ranks, a result as one block.
        ([(1, stream("x\n")), (0, stream("x\n"))], ["[0-1] x"], ""),
        (
            [(rank, message) for rank in range(2) for message in (stream("a\n"), result(_TENSOR))],
            ["[0-1] a", "[0-1] tensor([1,\n              2])"],
            "",
        ),
        ([(rank, result(f"{rank}")) for rank in (2, 0, 1)], ["[0] 0", "[1] 1", "[2] 2"], ""),
        # A display of text is a line like a result; one of nothing, and other messages, are none.
        ([(0, display(_X))], ["[0] 'x'"], ""),
        ([(0, display({}))], [], ""),
        ([(0, message("status", execution_state="busy"))], [], ""),
        ([(0, message("execute_input", code="x"))], [], ""),
        ([(0, message("comm_open", comm_id="x"))], [], ""),
        # The lowest rank shows its figure in its place, the others' are counted.
        (
            [(r, message) for r in (1, 0) for message in (stream("a\n"), display(), stream("b\n"))],
            ["[0-1] a", "0 shows iVBORw0K", "[0-1] b"],
            "1 display of rank 1",
        ),
        # So are bars.
        (
            [
                (rank, stream(f"\r 50%|  | {rank}.1it/s\r100%|##| {rank}.2it/s\n", "stderr"))
                for rank in range(3)
            ],
            ["[0] 100%|##| 0.2it/s"],
            "progress bars of ranks 1-2",
        ),
        ([(3, display()), (2, display())], ["2 shows iVBORw0K"], "1 display of rank 3"),
        (
            [(0, display()), (1, display()), (3, display()), (2, display()), (2, display())],
            ["0 shows iVBORw0K"],
            "1 display each of ranks 1,3, 2 displays of rank 2",
        ),
        # Text that may be updated is a display, since a line could not change any more; an
        # empty one is a place that updates fill, and leaves a line at hand whole.
        (
            [
                (0, display(_X, "a")),
                (1, display(_X, "b")),
                (0, update(_Y, "a")),
                (1, update(_Y, "b")),
            ],
            ["0 shows", "0 updates"],
            "1 display of rank 1",
        ),
        (
            [(0, display({}, "a")), (0, update(PNG, "a"))],
            ["0 shows", "0 updates iVBORw0K"],
            "",
        ),
        (
            [
                (0, display(display_id="a")),
                (0, stream("1 ")),
                (0, update(png("new"), "a")),
                (0, stream("2\n")),
            ],
            ["0 shows iVBORw0K", "0 updates new", "[0] 1 2"],
            "",
        ),
        # All that clear do it once, at rank 0's place; what is cleared is not counted.
        (
            [
                (r, message)
                for r in (1, 0)
                for message in (stream("a\n"), clear(wait=True), stream("b\n"))
            ],
            ["[0-1] a", "clear 0 wait", "[0-1] b"],
            "",
        ),
        (
            [
                (rank, message)
                for step in "12"
                for rank in range(2)
                for message in (clear(wait=True), display(png(step)))
            ],
            ["clear 0 wait", "0 shows 1", "clear 0 wait", "0 shows 2"],
            "1 display of rank 1",
        ),
    ],
)
def test_what_is_shown_and_what_is_counted(
    messages: list[tuple[int, dict[str, Any]]], events: list[str], hidden: str
) -> None:
    """Of messages that all have come, in the order in which they came."""
    feed = OutputReducer({rank for rank, _ in messages})

    assert told(fed(feed, *messages)) == events
    assert feed.hidden() == (
        f"not shown: {hidden} (%%distributed --tabs shows all)" if hidden else ""
    )


def test_streams_are_separate() -> None:
    """Lines of stdout and of stderr are counted apart and keep their stream."""
    feed = OutputReducer(range(2))
    events = fed(
        feed,
        (0, stream("w\n", "stderr")),
        (0, stream("x\n")),
        (1, stream("x\n")),
        (1, stream("w\n", "stderr")),
    )

    assert events == [Line("stdout", "[0-1] x\n"), Line("stderr", "[0-1] w\n")]


def test_a_silent_stream_does_not_hold_back_the_other() -> None:
    """A rank that warns alone is waited with on stderr only."""
    feed = OutputReducer(range(2))
    events = fed(
        feed, (0, stream("w\n", "stderr")), (0, stream("x\n")), (1, stream("x\n"))
    )  # fmt: skip

    assert told(events) == ["[0-1] x"]
    assert feed.next_due_s() == 1.0
    assert told(feed.due(1.0)) == ["[0] w"]


def test_next_due_is_the_earlier_of_both_streams() -> None:
    """What waits on either stream counts, whichever is due first; None for never."""
    feed = OutputReducer(range(2))
    nothing = feed.next_due_s()
    feed.feed(0, stream("x\n"), 4.0)
    feed.feed(0, stream("w\n", "stderr"), 4.5)
    feed.due(4.5)

    assert nothing is None
    assert feed.next_due_s() == 5.0


def test_text_of_a_rank() -> None:
    """A rank's text is what it printed on stdout and its results, as it wrote them."""
    feed = OutputReducer(range(2))
    fed(
        feed,
        (0, stream("a\n")),
        (0, stream("not this\n", "stderr")),
        (0, display()),
        (0, result("1")),
        (1, result("   x\n0  1", **{"text/html": "<table>"})),
    )

    assert feed.text(0) == "a\n1\n"
    assert feed.text(1) == "   x\n0  1\n"


def test_the_end_of_a_long_text_is_kept() -> None:
    """Of a very long text exactly the last million characters are kept."""
    feed = OutputReducer([0])
    pieces = [f"{number}\n" for number in range(400_000)]
    whole = "".join(pieces)
    for start in range(0, len(pieces), 1000):
        feed.feed(0, stream("".join(pieces[start : start + 1000])), 0)

    assert len(whole) > 2 * KEPT_TEXT_CHARACTERS
    assert feed.text(0) == whole[-KEPT_TEXT_CHARACTERS:]


# Displays


def test_everything_of_a_display_is_passed_on() -> None:
    """MIME bundle, metadata and display_id come through unchanged."""
    feed = OutputReducer([0])
    dated = message(
        "display_data",
        data=PNG,
        metadata={"image/png": {"width": 10}},
        transient={"display_id": "a"},
    )

    assert fed(feed, (0, dated)) == [
        DisplayOutput(0, PNG, {"image/png": {"width": 10}}, {"display_id": "a"})
    ]


def test_a_higher_rank_shows_once_the_lower_ended_without() -> None:
    """A figure of rank 2 alone is shown when ranks 0 and 1 have ended, and is not hidden."""
    feed = OutputReducer(range(3))
    first = fed(feed, (2, display()))
    feed.end(0, 0)
    second = feed.due(0)
    feed.end(1, 0)
    third = feed.due(0)
    later = fed(feed, (2, display(png("second"))))

    assert (first, second) == ([], [])
    assert told(third) == ["2 shows iVBORw0K"]
    assert told(later) == ["2 shows second"]
    assert feed.hidden() == ""


def test_a_figure_that_still_waits_counts() -> None:
    """Rank 0 has ended but its figure waits behind a line: rank 1's is not shown instead."""
    feed = OutputReducer(range(2))
    first = fed(feed, (0, stream("a\n")), (0, display(png("0"))), (1, display(png("1"))))
    feed.end(0, 0)
    second = feed.due(0.5)
    third = feed.due(1.0)

    assert (first, second) == ([], [])
    assert told(third) == ["[0] a", "0 shows 0"]
    assert feed.hidden() == "not shown: 1 display of rank 1 (%%distributed --tabs shows all)"


_CLEARED = [
    (0, stream("a\n")),
    (1, stream("a\n")),
    (1, display(png("1"))),
    (1, clear(wait=True)),
    (1, display(png("2"))),
    (1, clear()),
    (1, display(png("3"))),
]


@pytest.mark.parametrize(
    ("n_ranks", "messages", "events", "at_end", "hidden"),
    [
        # Rank 0's figure is the one shown, even when rank 1's came long before.
        (
            2,
            [(1, display(png("1"))), (0, display(png("0")))],
            ["0 shows 0"],
            [],
            "1 display of rank 1",
        ),
        # Of ranks 1 to 3, the first that has any.
        (
            4,
            [(r, display(png(f"{r}{name}"))) for r in (3, 2, 1) for name in "ab"],
            [],
            ["1 shows 1a", "1 shows 1b"],
            "2 displays each of ranks 2-3",
        ),
        # Rank 0 that clears but shows nothing does not keep rank 1's figure from being shown.
        (2, [(0, clear()), (1, display())], ["clear 0"], ["1 shows iVBORw0K"], ""),
        # Of figures that rank 1 cleared before they could be shown, only the last one comes.
        (2, _CLEARED, ["[0-1] a"], ["1 shows 3"], ""),
        # clear_output(wait=True) waits for the next output; without one the figure stays.
        (2, [(1, display(png("1"))), (1, clear(wait=True))], [], ["1 shows 1"], ""),
    ],
)
def test_what_is_shown_at_once_and_at_the_end(
    n_ranks: int,
    messages: list[tuple[int, dict[str, Any]]],
    events: list[str],
    at_end: list[str],
    hidden: str,
) -> None:
    """Messages come one by one, and then all ranks end."""
    feed = OutputReducer(range(n_ranks))

    assert told([event for message in messages for event in fed(feed, message)]) == events
    assert told(ended(feed)) == at_end
    assert feed.hidden() == (
        f"not shown: {hidden} (%%distributed --tabs shows all)" if hidden else ""
    )


def test_hidden_figures_are_not_kept_in_memory() -> None:
    """Figures that are known not to be shown are counted without their data."""
    feed = OutputReducer(range(2))
    fed(feed, (0, display()))
    for _ in range(3):
        fed(feed, (1, display()))

    assert [payload.data for payload in feed._feeds[1].unshown] == [{}, {}, {}]
    assert feed.hidden() == "not shown: 3 displays of rank 1 (%%distributed --tabs shows all)"


def test_widgets_are_shown_live_from_the_lowest_rank() -> None:
    """A widget is a display like any other: its messages find their way to the rank."""
    feed = OutputReducer(range(2))
    widget = {"application/vnd.jupyter.widget-view+json": {"model_id": "x"}, "text/plain": "0/3"}
    events = fed(feed, (0, display(widget)), (1, display(widget)))

    assert [event.data for event in events] == [widget]
    assert feed.hidden() == "not shown: 1 display of rank 1 (%%distributed --tabs shows all)"


def test_stored_widgets_are_text() -> None:
    """Where outputs are stored a widget is its text: nothing else of it would be left."""
    feed = OutputReducer(range(2), is_patient=True)
    widget = {
        "application/vnd.jupyter.widget-view+json": {"model_id": "x"},
        "text/plain": "  0%|          | 0/3",
    }
    events = fed(feed, (0, display(widget)), (1, display(widget)))

    assert told(events) == ["[0-1]   0%|          | 0/3"]
    assert feed.hidden() == ""


# Patience


CONTENTS = ("x\n", "y\n", "part", "\n", "\r10%", "\r20%", "\r    \r", "\r\n")


def written(generator: random.Random, *, is_rich: bool) -> list[dict[str, Any]]:
    """What one rank sends."""
    rich = (lambda n: display(png(f"{n}")), lambda _: clear(), lambda _: clear(wait=True))
    plain = (
        lambda _: stream(generator.choice(CONTENTS)),
        lambda _: stream(generator.choice(CONTENTS), "stderr"),
        lambda _: result(generator.choice(("1", "2\n3"))),
    )
    return [
        generator.choice(rich if is_rich and generator.random() < 0.3 else plain)(number)
        for number in range(generator.randrange(15))
    ]


def cut(generator: random.Random, message: dict[str, Any]) -> list[dict[str, Any]]:
    """The same message as one or two."""
    if message["header"]["msg_type"] != "stream":
        return [message]
    text, name = message["content"]["text"], message["content"]["name"]
    at = generator.randint(0, len(text))
    return [stream(text[:at], name), stream(text[at:], name)]


def played(messages: list[list[dict[str, Any]]], generator: random.Random) -> tuple[Any, ...]:
    """All that a patient feed makes of what the ranks sent, cut and interleaved by chance."""
    feed = OutputReducer(range(len(messages)), is_patient=True, keeps_outputs=True)
    left = [[piece for message in sent for piece in cut(generator, message)] for sent in messages]
    events: list[Event] = []
    going = list(feed.ranks)
    now_s = 0.0
    while going:
        now_s += generator.random()
        rank = generator.choice(going)
        if left[rank]:
            feed.feed(rank, left[rank].pop(0), now_s)
        else:
            going.remove(rank)
            feed.end(rank, now_s)
        if generator.random() < 0.7:
            events += feed.due(now_s)
    events += feed.due(now_s)
    stderr = [e for e in events if isinstance(e, Line) and e.stream == "stderr"]
    others = [e for e in events if e not in stderr]
    texts = [feed.text(rank) for rank in feed.ranks]
    return others, stderr, texts, feed.hidden(), [feed.outputs(rank) for rank in feed.ranks]


@pytest.mark.parametrize("seed", range(60))
def test_patient_result_depends_on_what_was_sent_alone(seed: int) -> None:
    """Lines, figures, clearing, counts and tabs are equal whatever arrives when."""
    generator = random.Random(seed)
    count = generator.randint(2, 4)
    rich_from = generator.randrange(count)
    messages = [written(generator, is_rich=rank >= rich_from) for rank in range(count)]
    first = played(messages, generator)
    for _ in range(15):
        assert played(messages, generator) == first


def test_a_patient_late_figure_comes_last() -> None:
    """When patient, a figure of a higher rank alone stands below all lines."""
    feed = OutputReducer(range(2), is_patient=True)
    feed.end(0, 0)
    events = fed(feed, (1, display()), (1, stream("a\n")))

    assert told(events) == ["[1] a"]
    assert told(ended(feed)) == ["1 shows iVBORw0K"]
    assert feed.hidden() == ""


# Outputs for tabs


def test_outputs_are_kept_on_request_only() -> None:
    """Without a need for tabs no outputs are collected."""
    feed = OutputReducer([0])
    fed(feed, (0, stream("x\n")), (0, display()))

    assert feed.outputs(0) == ()


def test_outputs_are_in_notebook_format() -> None:
    """Every rank's outputs come in order, neighbouring pieces of a stream joined."""
    feed = OutputReducer(range(2), keeps_outputs=True)
    figure = message("display_data", data=PNG, metadata={"image/png": {"width": 5}}, transient={})
    fed(
        feed,
        (1, stream("a\n")),
        (1, stream("b\n")),
        (1, stream("w\n", "stderr")),
        (1, figure),
        (1, stream("c\n")),
        (1, result("1")),
    )

    assert feed.outputs(0) == ()
    assert feed.outputs(1) == (
        {"output_type": "stream", "name": "stdout", "text": "a\nb\n"},
        {"output_type": "stream", "name": "stderr", "text": "w\n"},
        {"output_type": "display_data", "data": PNG, "metadata": {"image/png": {"width": 5}}},
        {"output_type": "stream", "name": "stdout", "text": "c\n"},
        {"output_type": "display_data", "data": {"text/plain": "1"}, "metadata": {}},
    )


def test_outputs_follow_updates() -> None:
    """A tab shows what a display became, in its place, on the rank that updated it."""
    feed = OutputReducer(range(2), keeps_outputs=True)
    fed(feed, (0, display(png("old"), "a")), (0, stream("x\n")), (1, display(png("old"), "a")))
    fed(feed, (0, update(png("new"), "a")))

    assert [o.get("data", {}).get("image/png") for o in feed.outputs(0)] == ["new", None]
    assert [o["data"]["image/png"] for o in feed.outputs(1)] == ["old"]


def test_outputs_follow_clear_output() -> None:
    """clear_output() empties the rank's tab at once, or at the next output with wait."""
    feed = OutputReducer([0], keeps_outputs=True)
    fed(feed, (0, stream("a\n")), (0, clear()), (0, stream("b\n")))
    cleared = feed.outputs(0)
    fed(feed, (0, clear(wait=True)))
    waiting = feed.outputs(0)
    fed(feed, (0, stream("c\n")))

    assert [o["text"] for o in cleared] == ["b\n"]
    assert [o["text"] for o in waiting] == ["b\n"]
    assert [o["text"] for o in feed.outputs(0)] == ["c\n"]


def test_a_long_output_says_what_it_lacks() -> None:
    """Of a very long text a tab keeps the end, and tells how much came before it."""
    feed = OutputReducer([0], keeps_outputs=True)
    for _ in range(30):
        feed.feed(0, stream("x" * 100_000), 0)
    (output,) = feed.outputs(0)
    note, _, end = output["text"].partition("\n")

    assert note == "... 2,000,000 characters before this are not kept"
    assert end == "x" * KEPT_TEXT_CHARACTERS


# Failures


@pytest.mark.parametrize(
    ("header", "at_s"),
    [
        ({"date": datetime(2026, 1, 1, tzinfo=UTC)}, 1767225600.0),
        ({"date": "2026-01-01T00:00:00Z"}, 1767225600.0),
        ({"date": "2026-01-01T01:00:00.5+01:00"}, 1767225600.5),
        ({}, 0.0),
    ],
)
def test_an_error_becomes_a_failure(header: dict[str, Any], at_s: float) -> None:
    """An error is not shown at once, but kept with its traceback and its date, if it has one."""
    feed = OutputReducer(range(2))
    error = message("error", ename="ValueError", evalue="boom", traceback=["a", "b"])
    error["header"] |= header

    assert fed(feed, (1, error)) == []
    assert feed.failure(0) is None
    assert feed.failure(1) == RankFailure(1, "ValueError", "boom", ("a", "b"), at_s)


def test_results_by_rank() -> None:
    """A result is found by its rank; a rank that did not run the cell is an error that tells."""
    failure = RankFailure(3, "E", "m")
    both = CellResult((RankResult(1, "ok", 0.1), RankResult(3, "error", 0.2, failure=failure)))

    assert both.numbers == (1, 3)
    assert both.failures == (failure,)
    assert both[3].status == "error"
    with pytest.raises(KeyError, match="rank 0 did not run this cell: ranks 1,3 did"):
        both[0]


# Elapsed times


@pytest.mark.parametrize(
    ("elapsed_s", "expected"),
    [
        ({}, ""),
        ({0: 9.0}, ""),
        ({0: 1.0, 1: 1.49}, ""),  # less than half a second
        ({0: 1.0, 1: 1.5}, "elapsed: [0] 1.0 s, [1] 1.5 s"),
        ({0: 9.4, 1: 10.0}, ""),  # less than a tenth
        ({0: 9.0, 1: 10.0}, "elapsed: [0] 9.0 s, [1] 10.0 s"),
        ({3: 3.41, 0: 1.2, 2: 3.36, 1: 3.4}, "elapsed: [0] 1.2 s, [1-3] 3.4 s"),
        ({0: 5.0, 1: 1.0, 2: 5.0}, "elapsed: [0,2] 5.0 s, [1] 1.0 s"),
    ],
)
def test_elapsed_line(elapsed_s: dict[int, float], expected: str) -> None:
    """Times are told where they differ by half a second and a tenth, alike ones together."""
    assert elapsed_line(elapsed_s) == expected


# Size


def test_many_small_messages() -> None:
    """40,000 messages of one line from each of two ranks pass in seconds, none lost."""
    feed = OutputReducer(range(2), keeps_outputs=True)
    began_s = time.monotonic()
    shown = []
    for number in range(40_000):
        for rank in range(2):
            feed.feed(rank, stream(f"this is line number {number:06}\n"), 0)
        shown += feed.due(0)
    texts = [feed.text(rank) for rank in range(2)]
    elapsed_s = time.monotonic() - began_s

    assert [e.text for e in shown if isinstance(e, Line)] == [
        f"[0-1] this is line number {number:06}\n" for number in range(40_000)
    ]
    assert [len(text) for text in texts] == [KEPT_TEXT_CHARACTERS] * 2
    assert elapsed_s < 20


def test_a_long_error_keeps_both_ends() -> None:
    """Of its text and of each frame, which a notebook would store whole."""
    feed = OutputReducer([0])
    text = "ValueError: " + "z" * 10**6 + " end"
    fed(feed, (0, message("error", ename="ValueError", evalue=text, traceback=["a", text])))
    failure = feed.failure(0)

    assert failure is not None
    assert failure.traceback == ("a", failure.message)
    assert failure.message.startswith("ValueError: zzz")
    assert failure.message.endswith("zzz end")
    assert "\n... 980,016 characters not shown\n" in failure.message
    assert len(failure.message) < 20_100
