"""Tabs show all that each rank wrote, without scripts, as text and as HTML."""

from __future__ import annotations

import base64
import re
from html.parser import HTMLParser
from typing import Any

import pytest

from nbdist.cells.outputs import CellResult, RankResult
from nbdist.cells.view.tabs import tabs
from nbdist.core.failures import RankFailure

PNG = base64.b64encode(b"\x89PNG+/=").decode()


class _Page(HTMLParser):
    """Every tag with its attributes, the text in each section, and whether tags are balanced."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.sections: list[str] = []
        self._open: list[str] = []
        self.feed(page)
        assert self._open == []

    def named(self, name: str) -> list[dict[str, str | None]]:
        return [attributes for tag, attributes in self.tags if tag == name]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in {"input", "img"}:
            self._open.append(tag)
        if tag == "section":
            self.sections.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "section" in self._open:
            self.sections[-1] += data


def stream(text: str, name: str = "stdout") -> dict[str, Any]:
    return {"output_type": "stream", "name": name, "text": text}


def shown(data: dict[str, Any], metadata: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"output_type": "display_data", "data": data, "metadata": metadata or {}}


def result(*outputs: tuple[dict[str, Any], ...]) -> CellResult:
    """Ranks 0, 1, ... with these outputs."""
    ranks = [RankResult(rank, "ok", 0.1, outputs=mine) for rank, mine in enumerate(outputs)]
    return CellResult(tuple(ranks))


def test_text_has_all_ranks() -> None:
    """As text the ranks come one after another, each under its number."""
    view = tabs(result((stream("a\nb\n"),), (), (stream("c"),)))

    assert view.text == ("--- rank 0 ---\na\nb\n\n--- rank 1 ---\n(no output)\n\n--- rank 2 ---\nc")


def test_each_output_begins_a_line() -> None:
    """Text without a newline does not run into what comes after it."""
    failure = RankFailure(0, "ValueError", "boom")
    outputs = (stream("a"), shown({"text/plain": "42"}), stream("b", "stderr"))
    view = tabs(CellResult((RankResult(0, "error", 0.1, failure=failure, outputs=outputs),)))

    assert view.text == "--- rank 0 ---\na\n42\nb\nValueError: boom"


def test_one_tab_per_rank() -> None:
    """There is a radio input, a label and a section for each rank; the first is chosen."""
    page = _Page(tabs(result((stream("zero\n"),), (stream("one\n"),))).html)
    inputs, labels, sections = page.named("input"), page.named("label"), page.named("section")

    assert [i["type"] for i in inputs] == ["radio", "radio"]
    assert ["checked" in i for i in inputs] == [True, False]
    assert len({i["name"] for i in inputs}) == 1
    assert [label["for"] for label in labels] == [i["id"] for i in inputs]
    assert [s["id"] for s in sections] == [f"{i['id']}-out" for i in inputs]
    assert page.sections == ["zero\n", "one\n"]


def test_style_shows_the_chosen_section() -> None:
    """Each input's check shows its own section, by style alone."""
    html = tabs(result((), (), ())).html
    ids = [i["id"] for i in _Page(html).named("input")]
    pairs = re.findall(r"#(\S+):checked ~ #(\S+?)[, \n]", html)

    assert pairs == [(tab_id, f"{tab_id}-out") for tab_id in ids]


def test_ids_are_unique() -> None:
    """A hundred cells on one page, of any number of kernels, have a hundred groups of tabs."""
    pages = [_Page(tabs(result((), ())).html) for _ in range(100)]
    groups = {page.named("input")[0]["name"] or "" for page in pages}
    ids = [a["id"] for page in pages for tag in ("input", "section") for a in page.named(tag)]

    assert len(groups) == 100
    assert len(set(ids)) == len(ids) == 400
    assert all(len(group) > 20 for group in groups)  # not a number that another kernel has too


def test_stored_ids_are_the_same_in_every_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where outputs are compared the ids are numbers, each once in a kernel."""
    monkeypatch.setenv("NBDIST_TEST", "1")
    names = [_Page(tabs(result(())).html).named("input")[0]["name"] or "" for _ in range(2)]
    first, second = (int(name.removeprefix("nbdist-tabs-")) for name in names)

    assert second == first + 1


def test_text_is_escaped() -> None:
    """Whatever ranks print is text, and no tag of ours is a script."""
    evil = "<script>alert('x')</script></pre></section>&amp;\n"
    failure = RankFailure(2, "<b>", "<script>", ("<script>trace</script>",))
    view = tabs(
        CellResult(
            (
                RankResult(0, "ok", 0.1, outputs=(stream(evil),)),
                RankResult(1, "ok", 0.1, outputs=(shown({"text/plain": evil}),)),
                RankResult(2, "<i>", 0.1, failure=failure),
            )
        )
    )
    page = _Page(view.html)

    assert page.sections == [evil, evil, "<script>trace</script>"]
    assert {tag for tag, _ in page.tags} == {"style", "div", "input", "label", "section", "pre"}


@pytest.mark.parametrize("kind", ["image/png", "image/jpeg"])
def test_images_are_inside_the_page(kind: str) -> None:
    """A figure is embedded as base64, line breaks of its encoding removed, with its text."""
    data = {kind: f"{PNG[:4]}\n{PNG[4:]}\n", "text/plain": '<Figure "a">'}
    (image,) = _Page(tabs(result((shown(data),))).html).named("img")

    assert image == {"src": f"data:{kind};base64,{PNG}", "alt": '<Figure "a">'}


@pytest.mark.parametrize(
    ("asked", "size"),
    [
        ({"width": 320, "height": 240.0, "other": "x"}, {"width": "320", "height": "240"}),
        ({"width": '1" onload="x', "height": None}, {}),
    ],
)
def test_figures_keep_their_size(asked: dict[str, Any], size: dict[str, str]) -> None:
    """As asked for (a retina figure has twice the pixels); only a number becomes an attribute."""
    figure = shown({"image/png": PNG}, {"image/png": asked})
    (image,) = _Page(tabs(result((figure,))).html).named("img")

    assert {name: image[name] for name in image.keys() - {"src", "alt"}} == size


def test_rich_output_is_shown_as_such() -> None:
    """HTML and SVG that a rank displayed are shown as they are; SVG before HTML."""
    page = tabs(
        result(
            (
                shown({"text/html": "<table><tr><td>1</td></tr></table>", "text/plain": "x"}),
                shown({"image/svg+xml": "<svg></svg>", "text/html": "<b>no</b>"}),
            )
        )
    ).html

    assert "<div><table><tr><td>1</td></tr></table></div>" in page
    assert "<div><svg></svg></div>" in page
    assert "<b>no</b>" not in page


def test_colours_are_taken_out() -> None:
    """ANSI colours, which HTML does not know, are left out of every kind of text."""
    failure = RankFailure(0, "E", "m", ("\x1b[0;31mE\x1b[0m: m",))
    outputs = (stream("\x1b[1mbold\x1b[0m\n"), shown({"text/plain": "\x1b[32mgreen\x1b[0m"}))
    view = tabs(CellResult((RankResult(0, "error", 0.1, failure=failure, outputs=outputs),)))

    assert _Page(view.html).sections == ["bold\ngreenE: m"]
    assert "\x1b" not in view.html


def test_a_failed_rank_is_marked() -> None:
    """A label tells what became of a rank that did not succeed, and the tab why."""
    failure = RankFailure(1, "RankDied", "ended (killed by SIGKILL)")
    view = tabs(
        CellResult((RankResult(0, "ok", 0.1), RankResult(1, "died", 0.1, failure=failure)))
    )  # fmt: skip

    assert ">rank 0</label>" in view.html
    assert ">rank 1 (died)</label>" in view.html
    assert _Page(view.html).sections == ["(no output)", "ended (killed by SIGKILL)"]


def test_bars_are_shown_as_they_ended() -> None:
    """Of a bar's redraws the last one stands in the tab."""
    view = tabs(result((stream("\r 50%|#  \r100%|###\r\nnext\r\n", "stderr"),)))

    assert view.text == "--- rank 0 ---\n100%|###\nnext"
    assert _Page(view.html).sections == ["100%|###\nnext\n"]


@pytest.mark.parametrize(
    ("count", "note"),
    [(1000, None), (1001, "... 1 lines"), (100_000, "... 99,000 lines")],
)
def test_long_outputs_are_clipped(count: int, note: str | None) -> None:
    """The first and the last 500 lines are in the tab; what is missing is counted."""
    lines = tabs(result((stream("".join(f"{n}\n" for n in range(count))),))).text.splitlines()[1:]
    numbers = [line for line in lines if not line.startswith("...")]

    assert len(numbers) == 1000
    assert (numbers[0], numbers[499], numbers[500], numbers[-1]) == (
        "0",
        "499",
        str(count - 500),
        str(count - 1),
    )
    assert [line for line in lines if line.startswith("...")] == ([note] if note else [])
