"""A View has a complete text; a table is the same as text and as HTML."""

from __future__ import annotations

import re
from html import unescape

import pytest
from IPython.core.formatters import DisplayFormatter, PlainTextFormatter

from nbdist.core.view import View, table


def test_a_view_is_its_text() -> None:
    """Text alone is a complete view; HTML, and a picture as notebooks store it, come beside it."""
    html = View("a", "<b>a</b>")._repr_mimebundle_(include=None, exclude=None)
    picture = View("a", png=b"\x89PNG")._repr_mimebundle_()

    assert str(View("a")) == "a"
    assert View("a")._repr_mimebundle_() == {"text/plain": "a"}
    assert html == {"text/plain": "a", "text/html": "<b>a</b>"}
    assert picture == {"text/plain": "a", "image/png": "iVBORw=="}


def test_ipython_shows_a_view() -> None:
    """IPython takes both forms of a view; a plain terminal prints the text, not the repr."""
    view = View("two\nlines", "<b>html</b>")
    data, _ = DisplayFormatter().format(view)

    assert data == {"text/plain": "two\nlines", "text/html": "<b>html</b>"}
    assert PlainTextFormatter()(view) == "two\nlines"


@pytest.mark.parametrize(
    ("head", "rows", "text"),
    [
        (["rank", "host"], [["0", "a"], ["10", "long-name"]],
         "rank  host\n   0  a\n  10  long-name"),
        (["threads", "x"], [["#", "a"]], "threads  x\n      #  a"),  # alike for any machine
        # One cell that is no number makes a column of words.
        (["n", "x"], [["1", "a"], ["-", "b"], ["100", "c"]],
         "n    x\n1    a\n-    b\n100  c"),
    ],
)  # fmt: skip
def test_columns_are_aligned(head: list[str], rows: list[list[str]], text: str) -> None:
    """Columns are as wide as their widest cell; numbers and placeholders right, words left."""
    assert table(head, rows).text == text


def test_lines_around_a_table() -> None:
    """Lines before and after are part of the text and of the HTML, in order."""
    view = table(["x"], [["1"]], before=["first", "second"], after=["last"])
    positions = [view.html.index(text) for text in ("first", "second", "<table>", "last")]

    assert view.text == "first\nsecond\nx\n1\nlast"
    assert positions == sorted(positions)


def test_html_has_the_same_cells() -> None:
    """The HTML table has the text's cells in order, numbers to the right, escaped."""
    rows = [["0", "<script>alert(1)</script>"], ["1", "a & b"]]
    page = table(["rank", "host"], rows).html
    cells = re.findall(r'<t[hd] style="text-align:(\w+)[^"]*">([^<]*)</t[hd]>', page)

    assert [side for side, _ in cells] == ["right", "left"] * 3
    assert [unescape(text) for _, text in cells] == ["rank", "host", *rows[0], *rows[1]]
    assert "<script" not in page
    assert page.count("<tr>") == 3


def test_names_stay_on_one_line() -> None:
    """The first column does not wrap, unless sentences stand in it."""
    names, sentences = (table(["what", "n"], [[word, "1"]]).html for word in ("a b", "a b " * 20))

    assert names.count("white-space:nowrap") == 2
    assert "nowrap" not in sentences


def test_lines_are_escaped() -> None:
    """Nothing in the lines around a table is taken for HTML."""
    view = table(["x"], [], before=["<script>"], after=["<img src=x onerror=y>"])

    assert set(re.findall(r"<(\w+)", view.html)) == {"div", "table", "thead", "tr", "th", "tbody"}
    assert view.text == "<script>\nx\n<img src=x onerror=y>"


def test_ragged_rows_are_our_bug() -> None:
    """A row of another length is refused, not cut."""
    with pytest.raises(ValueError, match="zip"):
        table(["a", "b"], [["1"]])
