"""A View: what a verb shows, as text always and as HTML where that is better."""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from nbdist.core.finding import BAD, OK, Finding, advice, summary
from nbdist.core.units import BEGIN, END, MARK, PADDING, compared, is_stored, shown, visible

_NUMBER = re.compile(r"[0-9.,#]+")
# A first column up to so wide is one of names, and stays on one line.
_NAME_CHARS = 40
_FIGURE = "nbdist-figure"
_DARK = (
    f'<style>[data-jp-theme-light="false"] .{_FIGURE}, .vscode-dark .{_FIGURE} '
    "{filter:invert(1) hue-rotate(180deg);mix-blend-mode:screen}</style>"
)


@dataclass(frozen=True, slots=True)
class View:
    """A result as text and as HTML: IPython shows one of them.

    Attributes:
        text: For terminals, nbval and screen readers; complete by itself.
        html: The same for notebooks; scripts only inside a sandboxed frame. Empty where text does.
        is_bad: It tells of something that has to be mended: a command line's exit code is then 1.
        png: A picture, for wherever the HTML is not shown; empty where there is none.
    """

    text: str
    html: str = ""
    is_bad: bool = False
    png: bytes = b""

    def __str__(self) -> str:
        return self.text

    def _repr_mimebundle_(self, **_options: object) -> dict[str, str]:
        bundle = {"text/plain": self.text}
        if self.html:
            bundle["text/html"] = self.html
        if self.png and not (self.html and is_stored()):  # once is enough: the HTML has it
            bundle["image/png"] = base64.b64encode(self.png).decode("ascii")
        return bundle

    def _repr_pretty_(self, printer: object, _cycle: bool) -> None:
        printer.text(self.text)  # type: ignore[attr-defined]


def table(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    before: Sequence[str] = (),
    after: Sequence[str] = (),
) -> View:
    """A table with lines of text around it. Columns of numbers are set to the right."""
    columns = list(zip(head, *rows, strict=True))
    as_compared = [[*map(compared, column)] for column in columns]
    is_number = [all(map(_NUMBER.fullmatch, column[1:])) for column in as_compared]
    fitted = [
        _fitted(column, is_right=right) for column, right in zip(columns, is_number, strict=True)
    ]
    texts = ["  ".join(cells).rstrip(f" {PADDING}") for cells in zip(*fitted, strict=True)]
    styles = [f"text-align:{'right' if right else 'left'}" for right in is_number]
    if max(map(len, as_compared[0])) <= _NAME_CHARS:  # in a wide table a browser breaks names first
        styles[0] += ";white-space:nowrap"

    def row_html(tag: str, cells: Sequence[str]) -> str:
        inner = "".join(
            f'<{tag} style="{style}">{html.escape(cell)}</{tag}>'
            for cell, style in zip(cells, styles, strict=True)
        )
        return f"<tr>{inner}</tr>"

    text = "\n".join([*before, *texts, *after])
    body = "".join(row_html("td", cells) for cells in rows)
    page = f"<table><thead>{row_html('th', head)}</thead><tbody>{body}</tbody></table>"
    return View(text, f"<div>{lines_html(before)}{page}{lines_html(after)}</div>")


def _fitted(column: Sequence[str], *, is_right: bool) -> list[str]:
    """The cells with blanks up to the width of the column, to the left of them or to the right."""
    texts = [visible(cell) for cell in column]
    width = max(map(len, texts))
    around = PADDING if any(MARK in cell for cell in column) else ""
    blanks = [f"{around}{' ' * (width - len(text))}{around}" for text in texts]
    pairs = zip(blanks, column, strict=True)
    return [f"{blank}{cell}" if is_right else f"{cell}{blank}" for blank, cell in pairs]


def verdicts(
    findings: Sequence[Finding],
    *,
    before: Sequence[str] = (),
    title: str = "",
    none: str = "nothing to do",
) -> View:
    """All findings as a table, then for each that is not well why, and what to do.

    Those of a file have a column for its lines; those of a machine are not the same on the next
    one, and are not stored. `title` stands before the counts, `none` where all is well.
    """
    head = ["", "what", "found"]
    rows = [[f.verdict, f.name, shown(f.found) if f.line is None else f.found] for f in findings]
    if any(finding.line is not None for finding in findings):
        head = ["line", *head]
        rows = [[str(f.line or "-"), *row] for f, row in zip(findings, rows, strict=True)]
    after = [advice(finding) for finding in findings if finding.verdict != OK]
    above = [*before, f"{title}{summary(findings)}"]
    view = table(head, rows, before=above, after=after or [none])
    return View(view.text, view.html, is_bad=any(finding.verdict == BAD for finding in findings))


def measured(view: View) -> View:
    """The view; where outputs are stored it is one value: not even its rows are counted."""
    if not is_stored():
        return view
    return replace(view, text=shown(view.text), html=drawing(view.html))


def folded(title: str, body: str, *, is_open: bool = False) -> str:
    """HTML that a reader opens who wants to know more; the title says what is in it."""
    state = " open" if is_open else ""
    return f"<details{state}><summary>{html.escape(title)}</summary>{body}</details>"


def figure_html(png: bytes, alt: str) -> str:
    """A figure on white as HTML: as wide as there is room, on a dark page dark.

    It has black text and lines on white; where JupyterLab's theme is dark (Notebook's and VS
    Code's too) it is inverted with its hues kept, and black becomes the page's own colour.
    """
    source = base64.b64encode(png).decode("ascii")
    return drawing(
        f'{_DARK}<img class="{_FIGURE}" alt="{html.escape(alt)}" style="max-width:100%" '
        f'src="data:image/png;base64,{source}">'
    )


def drawing(page: str) -> str:
    """HTML that is drawn from measured values; where outputs are stored it is not compared."""
    return f"{BEGIN}{visible(page)}{END}" if is_stored() else page


def lines_html(texts: Iterable[str]) -> str:
    """Each text as a line of its own."""
    escaped = (html.escape(text).replace("\n", "<br>") for text in texts)
    return "".join(f"<div>{text}</div>" for text in escaped)


def lines(texts: Iterable[str]) -> View:
    """Lines of text; spaces at their beginnings stay."""
    listed = list(texts)
    body = "".join(
        f'<div style="white-space:pre-wrap">{html.escape(line)}</div>' for line in listed
    )
    return View("\n".join(listed), f'<div style="margin:0.5em 0">{body}</div>')
