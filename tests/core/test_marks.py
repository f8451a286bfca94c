"""Marks that no reader sees: what is between them is shown, and is not compared."""

from __future__ import annotations

import pickle
import re

import pytest
from nbval.plugin import get_sanitize_patterns

from nbdist.cells.line_merger import alike
from nbdist.core import units
from nbdist.core.units import MARK, PADDING, compared, visible
from nbdist.core.view import View, drawing, figure_html, lines_html, measured, table
from nbdist.testing.notebooks import SANITIZE

pytestmark = pytest.mark.usefixtures("stored")


@pytest.fixture
def stored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NBDIST_TEST", "1")


def sanitized(text: str) -> str:
    """As nbval compares a text: all pairs of the file, one after the other."""
    for regex, replacement in get_sanitize_patterns(SANITIZE.read_text()):
        text = re.sub(regex, replacement, text)
    return text


def test_what_is_seen_and_what_is_compared() -> None:
    """A value is seen as it was without marks; nbval's file replaces it as `compared` does."""
    text = f"loss {units.shown(2.31)}, {units.size(1.2e9)}, epoch 3"

    assert visible(text) == "loss 2.31, 1.2 GB, epoch 3"
    assert compared(text) == sanitized(text) == "loss #, #, epoch 3"
    assert text.replace(MARK, "") == visible(text)


def test_a_value_in_a_value_is_one() -> None:
    """The inner marks would end the outer value."""
    assert compared(units.shown(f"{units.size(10)} of {units.seconds(2)}")) == "#"
    assert compared(drawing(f"<b>{drawing('<i></i>')}</b>")) == "#"


def test_widths_are_those_of_what_is_seen() -> None:
    """And blanks belong to the value: the next machine's has another number of them."""
    texts = [f"{units.shown(value):>8}|" for value in (2.31, 12345.5)]

    assert [*map(visible, texts)] == ["    2.31|", " 12345.5|"]
    assert [*map(compared, texts)] == ["#|", "#|"]


def test_values_in_a_list_are_readable() -> None:
    """A text's own repr would spell the marks out."""
    assert visible(str([units.shown(2.31)])) == "['2.31']"
    assert type(pickle.loads(pickle.dumps(units.shown(2.31)))) is str


def test_a_table_is_as_wide_as_what_is_seen() -> None:
    """It has the look of one without marks, but numbers with units stand to the right."""
    view, other = (
        table(["rank", "memory", "what"], [["0", units.size(n), "a"], ["1", "-", "long"]])
        for n in (999, 12_345_678)
    )

    assert visible(view.text).splitlines() == [
        "rank  memory  what",
        "   0  999 B   a",
        "   1  -       long",
    ]
    assert compared(view.text) == sanitized(view.text) == compared(other.text)
    assert view.text != other.text
    assert compared(view.html) == sanitized(view.html) == compared(other.html)


def test_a_last_column_has_no_blanks_behind_it() -> None:
    """As without marks."""
    text = table(["a", "b"], [["x", units.size(5)], ["y", "-"]]).text

    assert [*map(len, map(visible, text.splitlines()))] == [4, 6, 4]
    assert not re.search(rf"[ {PADDING}]$", text, re.MULTILINE)


def test_drawings_and_whole_parts() -> None:
    """A picture and a part with as many lines as were found are not compared, in HTML neither."""
    parts = [measured(View("\n".join(lines), lines_html(lines))) for lines in (["a"], ["b", "c"])]

    assert visible(parts[1].text) == "b\nc"
    assert {compared(part.text) for part in parts} == {"#"}
    assert {sanitized(part.html) for part in parts} == {"#"}
    assert sanitized(figure_html(b"one", "a <b>\nc")) == sanitized(figure_html(b"two", "")) == "#"
    assert [*map(compared, units.shown_lines(["a", "b"]))] == ["#"]


def test_live_outputs_have_no_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever copies from them copies what is seen."""
    monkeypatch.setenv("NBDIST_TEST", "0")
    texts = [
        units.shown(2.31),
        *units.shown_lines(["a", "b"]),
        *[table(["a"], [[units.size(5)]]).text, drawing("<b>"), measured(View("a", "b")).html],
    ]

    assert texts == ["2.31", "a", "b", "a\n5 B", "<b>", "b"]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([2.31, 2.31], [([0, 1], "loss 2.31 of 3")]),
        ([2.31, 2.32], [([0, 1], "loss 2.31, 2.32 of 3")]),
        ([1, 2, 3, 4, 5], [([0, 1, 2, 3, 4], "loss 1 ... 5 of 3")]),
    ],
)
def test_ranks_whose_values_differ_have_one_line(
    values: list[float], expected: list[tuple[list[int], str]]
) -> None:
    """With the values of all in one, or the first and the last of many."""
    lines = alike((n, f"loss {units.shown(value)} of 3") for n, value in enumerate(values))

    assert [(ranks, visible(text)) for ranks, text in lines] == expected
    assert [compared(text) for _, text in lines] == ["loss # of 3"]


def test_ranks_whose_claims_differ_have_their_own() -> None:
    """Only values are joined."""
    texts = f"{units.shown(1)} a", f"{units.shown(2)} b", "c", "c", "# a"
    lines = alike(enumerate(texts))

    assert [(ranks, visible(text)) for ranks, text in lines] == [
        ([0], "1 a"), ([1], "2 b"), ([2, 3], "c"), ([4], "# a"),
    ]  # fmt: skip


def test_a_cut_line_is_cut_between_values() -> None:
    """Where it is cut does not depend on how long a value is."""
    lines = [
        units.one_line(f"{'a' * 20} {units.shown(value)} {'b' * 50}", 60) for value in ("1", "1234")
    ]

    assert compared(lines[0]) == compared(lines[1])
    assert visible(lines[1]) == f"{'a' * 20} 1234 {'b' * 6}...{'b' * 28}"
