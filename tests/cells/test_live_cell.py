"""A running cell's output, drawn at a time of our own into streams of our own."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nbdist.cells.line_merger import Bar, Line
from nbdist.cells.outputs import CellResult, ClearOutput, DisplayOutput, Event, RankResult
from nbdist.cells.view import live_cell
from nbdist.cells.view.live_cell import LiveCell, clear, publish
from nbdist.core.units import compared

RESULT = CellResult((RankResult(0, "ok", 0.1),))


@dataclass
class Notebook:
    """What a cell has drawn: (stream, text) in order, and a clock that only tests move."""

    path: Path
    written: list[tuple[str, str]] = field(default_factory=list)
    published: list[tuple[Any, ...]] = field(default_factory=list)
    now_s: float = 100.0
    files: int = 0

    def output_file(self) -> Path:
        self.files += 1
        return self.path

    def cell(self, *, has_tabs: bool = False) -> LiveCell:
        return LiveCell(self.output_file, has_tabs=has_tabs, clock_s=lambda: self.now_s)

    def text(self, stream: str | None = None) -> str:
        """All that was written to a stream, or to both in order."""
        return "".join(text for name, text in self.written if stream in {None, name})

    def screen(self) -> list[str]:
        """The lines that a terminal shows in the end, both streams on one screen."""
        return [on_screen(line) for line in self.text().split("\n")]


@dataclass
class _Stream:
    name: str
    notebook: Notebook

    def write(self, text: str) -> None:
        self.notebook.written.append((self.name, text))

    def flush(self) -> None:
        """Everything is written at once."""


@pytest.fixture
def notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Notebook:
    book = Notebook(tmp_path / "cell-3-0.txt")

    def publish(*args: Any, **options: Any) -> None:
        book.written.append(("display", ""))
        book.published.append((*args, options))

    def clear(**options: Any) -> None:
        book.written.append(("clear", ""))
        book.published.append(("clear", options))

    streams = SimpleNamespace(stdout=_Stream("stdout", book), stderr=_Stream("stderr", book))
    monkeypatch.setattr(live_cell, "sys", streams)
    monkeypatch.setattr(live_cell, "publish", publish)
    monkeypatch.setattr(live_cell, "clear", clear)
    return book


def on_screen(line: str) -> str:
    """A line after its carriage returns, without the spaces that erase."""
    shown: list[str] = []
    column = 0
    for character in line:
        if character == "\r":
            column = 0
        else:
            shown[column : column + 1] = [character]
            column += 1
    return "".join(shown).rstrip()


def out(number: int) -> Line:
    return Line("stdout", f"[0] {number}\n")


# Lines


def test_lines_are_written_at_once(notebook: Notebook) -> None:
    """All lines of one call are one write per run of a stream, in order."""
    notebook.cell().draw(
        [Line("stdout", "a\n"), Line("stdout", "b\n"), Line("stderr", "w\n"), Line("stdout", "c\n")]
    )

    assert notebook.written == [("stdout", "a\nb\n"), ("stderr", "w\n"), ("stdout", "c\n")]


def test_displays_come_between_their_lines(notebook: Notebook) -> None:
    """What was written before a figure is out before the figure is published."""
    figure = DisplayOutput(0, {"image/png": "x"}, {}, {})
    notebook.cell().draw([Line("stdout", "a\n"), figure, Line("stdout", "b\n")])

    assert notebook.written == [("stdout", "a\n"), ("display", ""), ("stdout", "b\n")]


def test_displays_and_clears_are_passed_on(notebook: Notebook) -> None:
    """Data, metadata, display_id, whether it is an update and `wait` reach IPython unchanged."""
    changed = DisplayOutput(0, {"a": 1}, {"m": 1}, {"display_id": "d"}, is_update=True)
    notebook.cell().draw([changed, ClearOutput(0, wait=True), ClearOutput(0, wait=False)])

    assert notebook.published == [
        ({"a": 1}, {"m": 1}, {"display_id": "d"}, {"is_update": True}),
        ("clear", {"wait": True}),
        ("clear", {"wait": False}),
    ]


def test_a_short_cell_leaves_nothing_else(notebook: Notebook) -> None:
    """Up to 500 lines are shown as they are: no note, no file."""
    cell = notebook.cell()
    cell.draw([out(number) for number in range(500)])
    cell.close(RESULT)

    assert notebook.text() == "".join(f"[0] {number}\n" for number in range(500))
    assert notebook.files == 0


# Long outputs


@pytest.mark.parametrize(
    ("count", "step"), [(1001, 1001), (3_000, 1), (100_000, 7), (100_000, 100_000)]
)
def test_both_ends_of_a_long_output(notebook: Notebook, count: int, step: int) -> None:
    """500 lines at once, one note, the last 500 at the end, all in the file, in any pieces."""
    cell = notebook.cell()
    for start in range(0, count, step):
        numbers = range(start, min(start + step, count))
        cell.draw([Line("stdout", "".join(f"[0] {number}\n" for number in numbers))])
    before = notebook.text().splitlines()
    in_file = notebook.path.read_text()  # whose path has been told while the cell runs
    cell.close(RESULT)
    after = notebook.text().splitlines()

    assert before[:500] == [f"[0] {number}" for number in range(500)]
    assert before[500:] == [
        (
            f"... more than 500 lines: all go to {notebook.path}, the last 500 are shown when the "
            "cell ends"
        )
    ]
    assert after[501:] == [
        (
            f"... {count - 1000:,} lines not shown; "
            f"all of them, until the ranks end, in {notebook.path}"
        ),
        *(f"[0] {number}" for number in range(count - 500, count)),
    ]
    assert in_file == notebook.path.read_text() == "".join(f"[0] {n}\n" for n in range(count))
    assert notebook.files == 1


LONG = "[0] " + "x" * 5_000_000 + "\n"


@pytest.mark.parametrize(
    ("texts", "first", "skipped", "last"),
    [
        # One line, alone and between others; lines that are long together; in pieces.
        ([LONG], "[0] xx", "3,000,005 characters", "x"),
        ([f"[0] a\n{LONG}[0] b\n"], "[0] a\n[0] xx", "3,000,0", "[0] b"),
        (["x" * 9_999 + "\n"] * 500, "x", "300 lines", "x"),
        (["[0] a\n", LONG, "[0] b\n"], "[0] a\n[0] xx", "3,000,0", "[0] b"),
    ],
)
def test_both_ends_of_what_is_long_by_its_characters(
    notebook: Notebook, texts: list[str], first: str, skipped: str, last: str
) -> None:
    """A million characters at once and at the end, however few lines they are; all in the file."""
    cell = notebook.cell()
    for text in texts:
        cell.draw([Line("stdout", text)])
    before = notebook.text()
    cell.close(RESULT)
    after = notebook.text()[len(before) :]

    assert before.startswith(first)
    assert before.endswith(
        f"\n... more than 1,000,000 characters: all go to {notebook.path}, the last 1,000,000 are "
        "shown when the cell ends\n"
    )
    assert 1_000_000 <= len(before) < 1_001_000
    assert after.startswith(f"... {skipped}"), after[:80]
    assert after.endswith(f"{last}\n")
    assert 1_000_000 <= len(after) < 1_001_000
    assert notebook.path.read_text() == "".join(texts)


def test_an_unfinished_line_is_shown_by_its_beginning(notebook: Notebook) -> None:
    """It may become as long as the memory is, and is drawn again with each change."""
    notebook.cell().draw([Bar("stdout", "[0] " + "x" * 10**6)])

    assert notebook.text() == "\r[0] " + "x" * 996


def test_the_last_lines_keep_their_streams(notebook: Notebook) -> None:
    """What is kept for the end comes back as what it was."""
    cell = notebook.cell()
    cell.draw([*(out(number) for number in range(1000)), Line("stderr", "w\n"), out(1)])
    cell.close(RESULT)

    assert notebook.written[-2:] == [("stderr", "w\n"), ("stdout", "[0] 1\n")]


@pytest.mark.parametrize("count", [501, 999, 1000])
def test_a_file_that_is_not_needed_is_removed(notebook: Notebook, count: int) -> None:
    """Up to 1000 lines are all shown, nothing is said to be missing, and no file stays."""
    cell = notebook.cell()
    cell.draw([out(number) for number in range(count)])
    existed = notebook.path.exists()
    cell.close(RESULT)
    lines = notebook.text().splitlines()

    assert existed
    assert not notebook.path.exists()
    assert len(lines) == count + 1
    assert [line for line in lines if line.startswith("[0] ")] == [
        f"[0] {number}" for number in range(count)
    ]


def test_stored_outputs_have_no_path(
    notebook: Notebook, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """Under NBDIST_TEST=1 the path, which differs from run to run, is not compared."""
    monkeypatch.setenv("NBDIST_TEST", "1")
    cell = notebook.cell()
    cell.draw([out(number) for number in range(1500)])
    cell.close(RESULT)

    text = compared(notebook.text())
    assert "all go to #, the last" in text
    assert "... 500 lines not shown; all of them, until the ranks end, in #\n" in text


def test_blocks_are_counted_by_their_lines(notebook: Notebook) -> None:
    """A result of 3000 lines is clipped as 3000 printed lines would be."""
    cell = notebook.cell()
    text = "[0] " + "\n    ".join(str(number) for number in range(3000)) + "\n"
    cell.draw([Line("stdout", text)])
    cell.close(RESULT)

    assert "... 2,000 lines not shown" in notebook.text()
    assert notebook.path.read_text() == text


def test_any_text_can_be_written(notebook: Notebook) -> None:
    """The file takes any character, whatever the locale."""
    cell = notebook.cell()
    cell.draw([Line("stdout", "naïve 漢字 🏖 \udcff\n")] * 1001)
    cell.close(RESULT)

    assert notebook.path.read_text(encoding="utf-8").startswith("naïve 漢字 🏖 \\udcff\n")


def test_clear_output_begins_anew(notebook: Notebook) -> None:
    """After clear_output() the next 500 lines are shown again, and the old file is gone."""
    cell = notebook.cell()
    cell.draw([out(number) for number in range(2000)])
    cell.draw([ClearOutput(0, wait=True)])
    existed = notebook.path.exists()
    cell.draw([Line("stdout", "[0] fresh\n")])
    cell.close(RESULT)

    assert not existed
    assert notebook.written[-1] == ("stdout", "[0] fresh\n")
    assert not notebook.path.exists()


def test_both_ends_of_what_came_after_clear_output(notebook: Notebook) -> None:
    """A second long stretch has its own note and its own file."""
    cell = notebook.cell()
    cell.draw([out(number) for number in range(2000)])
    cell.draw([ClearOutput(0, wait=False), *(out(number) for number in range(5000, 7000))])
    cell.close(RESULT)

    assert notebook.files == 2
    assert notebook.text().endswith("[0] 6999\n")
    assert notebook.path.read_text().splitlines() == [f"[0] {n}" for n in range(5000, 7000)]


# Bars


def test_a_bar_is_erased_before_lines(notebook: Notebook) -> None:
    """A line never stands behind the remains of a bar; the bar comes back below it."""
    cell = notebook.cell()
    cell.draw([Bar("stderr", "[0] 50%")])
    notebook.now_s += 1
    cell.draw([Line("stdout", "[0] x\n")])

    assert notebook.written == [
        ("stderr", "\r[0] 50%"),
        ("stderr", "\r       \r"),
        ("stdout", "[0] x\n"),
        ("stderr", "\r[0] 50%"),
    ]
    assert notebook.screen() == ["[0] x", "[0] 50%"]


@pytest.mark.parametrize("lines", [[], [out(7)]])
def test_a_bar_is_redrawn_ten_times_a_second(notebook: Notebook, lines: list[Event]) -> None:
    """A thousand redraws in one second are shown ten times, also between a thousand lines."""
    cell = notebook.cell()
    for number in range(1000):
        notebook.now_s = 100 + number / 1000
        cell.draw([*lines, Bar("stderr", f"[0] {number}")])
    cell.close(RESULT)
    drawn = [text for _, text in notebook.written if text.startswith("\r[")]

    assert drawn == [f"\r[0] {number}" for number in range(0, 1000, 100)]


_FIGURE = DisplayOutput(0, {}, {}, {})


@pytest.mark.parametrize(
    ("steps", "is_closed", "screen"),
    [
        # A redraw that came too early is made up for when something else comes.
        ([(0.0, [Bar("stderr", "1%")]), (0.1, [Bar("stderr", "99%")]), (0.0, [])], False, ["99%"]),
        # A bar that shrinks is padded over what it was.
        ([(1.0, [Bar("stderr", text)]) for text in ("a long bar", "short", "xyz")], False, ["xyz"]),
        # The last redraw as a line takes the place of the bar.
        (
            [(1.0, [Bar("stderr", " 50%")]), (0.0, [Line("stderr", "100%\n"), Bar("stderr", "")])],
            True,
            ["100%", ""],
        ),
        # The end of the cell erases what is unfinished, and a figure the bar above it.
        ([(0.0, [Bar("stdout", "...")])], True, [""]),
        (
            [
                (0.0, [Bar("stderr", "50%"), _FIGURE]),
                (0.0, [Bar("stderr", "60%")]),
                (0.0, [_FIGURE]),
            ],
            True,
            [""],
        ),
    ],
)
def test_a_bar_leaves_nothing_of_itself(
    notebook: Notebook, steps: list[tuple[float, list[Event]]], is_closed: bool, screen: list[str]
) -> None:
    """Each step draws events, and then so many seconds pass."""
    cell = notebook.cell()
    for pause_s, events in steps:
        cell.draw(events)
        notebook.now_s += pause_s
    if is_closed:
        cell.close(RESULT)

    assert notebook.screen() == screen


def test_a_note_stands_beside_the_bar_and_goes(notebook: Notebook) -> None:
    """The panel is told of the bar alone; nothing comes after the end."""
    lines: list[str] = []
    cell = LiveCell(notebook.output_file, on_bar=lines.append, clock_s=lambda: notebook.now_s)
    cell.note("trace: recording")
    alone = notebook.screen()
    notebook.now_s += 1
    cell.draw([Bar("stderr", "[0] 50%")])
    both = notebook.screen()
    notebook.now_s += 1
    cell.note("")
    without = notebook.screen()
    cell.close(RESULT)
    cell.note("late")

    assert alone == ["trace: recording"]
    assert both == ["[0] 50%  trace: recording"]
    assert without == ["[0] 50%"]
    assert notebook.screen() == [""]
    assert lines[-2:] == ["[0] 50%", ""]


def test_the_bars_of_two_streams(notebook: Notebook) -> None:
    """With one unfinished line on each stream the newer is shown; then the other again."""
    cell = notebook.cell()
    screens = []
    for bar in (Bar("stderr", "[0] 50%"), Bar("stdout", "[0] wait"), Bar("stdout", "")):
        cell.draw([bar])
        notebook.now_s += 1
        screens.append(notebook.screen())

    assert screens == [["[0] 50%"], ["[0] wait"], ["[0] 50%"]]


def test_after_clear_output_a_bar_needs_no_erasing(notebook: Notebook) -> None:
    """What clear_output() removed is not erased again, which would be an output of its own."""
    cell = notebook.cell()
    cell.draw([Bar("stderr", "[0] 50%")])
    cell.draw([ClearOutput(0, wait=True), Bar("stderr", "")])
    cell.close(RESULT)

    assert notebook.written == [("stderr", "\r[0] 50%"), ("clear", "")]


@pytest.mark.parametrize("seed", range(20))
def test_no_bar_remains_among_lines(notebook: Notebook, seed: int) -> None:
    """Whatever lines and bars come when, the screen ends as the lines alone."""
    generator = random.Random(seed)
    cell = notebook.cell()
    lines: list[str] = []
    for number in range(100):
        events: list[Event] = []
        if generator.random() < 0.5:
            events.append(Line(generator.choice(("stdout", "stderr")), f"[0] {number}\n"))
            lines.append(f"[0] {number}")
        if generator.random() < 0.7:
            text = generator.choice(("", "[0] 5%", "[0] a longer bar", "[1] ..."))
            events.append(Bar(generator.choice(("stdout", "stderr")), text))
        cell.draw(events)
        notebook.now_s += generator.random() / 5
    cell.close(RESULT)

    assert notebook.screen() == [*lines, ""]


# Tabs


def test_tabs_come_at_the_end(notebook: Notebook) -> None:
    """With tabs every rank's own output is published when the cell closes, once."""
    output = {"output_type": "stream", "name": "stdout", "text": "hello\n"}
    result = CellResult((RankResult(0, "ok", 0.1, outputs=(output,)),))
    cell = notebook.cell(has_tabs=True)
    cell.draw([out(1)])
    before = list(notebook.published)
    cell.close(result)

    assert before == []
    ((bundle, _),) = notebook.published
    assert bundle["text/plain"] == "--- rank 0 ---\nhello"
    assert "hello" in bundle["text/html"]


# Without a notebook


def test_publish_outside_ipython(capsys: pytest.CaptureFixture[str]) -> None:
    """In a script a display is its text; one without text is nothing."""
    publish({"text/plain": "a table", "text/html": "<table>"})
    publish({"image/png": "x"})
    captured = capsys.readouterr()

    assert captured.out == "a table\n"
    assert captured.err == ""


def test_publish_inside_ipython(monkeypatch: pytest.MonkeyPatch) -> None:
    """In IPython the bundle is published with its metadata and its display_id."""
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr("IPython.get_ipython", object)
    monkeypatch.setattr("IPython.display.publish_display_data", lambda **kw: calls.append(kw))
    publish({"text/plain": "x"})
    publish({"a": 1}, {"m": 2}, {"display_id": "d"}, is_update=True)

    assert calls == [
        {"data": {"text/plain": "x"}, "metadata": {}, "transient": {}, "update": False},
        {"data": {"a": 1}, "metadata": {"m": 2}, "transient": {"display_id": "d"}, "update": True},
    ]


def test_clear_asks_ipython(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clearing is IPython's clear_output, with `wait` as it was asked for."""
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr("IPython.display.clear_output", lambda **kw: calls.append(kw))
    clear(wait=True)

    assert calls == [{"wait": True}]


def test_a_full_disk_costs_the_long_output_and_not_the_cell(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The first and the last lines are shown; that the others are lost is said with the reason."""
    full = tmp_path / "full"
    full.symlink_to("/dev/full")
    cell = LiveCell(lambda: full)
    cell.draw([Line("stdout", f"line {n}\n") for n in range(3000)])
    cell.close(CellResult(()))
    out = capsys.readouterr().out

    assert "line 0\n" in out
    assert "line 2999\n" in out
    assert "could not be saved (No space left on device: " in out
