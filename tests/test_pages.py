"""Pages and lessons as a reader has them: links lead somewhere, and the map names every lesson."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LESSONS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
MAP = LESSONS[0]


def text_of(path: Path) -> str:
    """A page, or a notebook's markdown cells, without blocks of code."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "markdown"]
        text = "\n\n".join("".join(cell["source"]) for cell in cells)
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def markdown(path: Path) -> str:
    """The same without code in a line, whose brackets are no links."""
    return re.sub(r"`[^`\n]*`", "", text_of(path))


def anchors(path: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ +(.*?) *$", text_of(path), flags=re.MULTILINE)
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain}


def dead_links(path: Path) -> Iterator[str]:
    """Links of a page or a lesson to files that are not there, and to headings that no page has."""
    for link in re.findall(r"\]\(([^)\s]+)\)", markdown(path)):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        if not target.exists() or (anchor and anchor not in anchors(target)):
            yield f"{path.name}: {link}"


def test_links_lead_somewhere() -> None:
    """Files and headings that pages and lessons link to are there."""
    assert [link for path in (*PAGES, *LESSONS) for link in dead_links(path)] == []


def test_a_dead_link_is_found(tmp_path: Path) -> None:
    """Of a file that is not there, and of a heading; code is not read."""
    (tmp_path / "page.md").write_text("# A `b` c\n", encoding="utf-8")
    page = tmp_path / "links.md"
    page.write_text(
        "[x](page.md#a-b-c) [x](no.md) [x](page.md#none) `[x](code.md)`\n", encoding="utf-8"
    )

    assert [*dead_links(page)] == ["links.md: no.md", "links.md: page.md#none"]


def test_the_map_and_the_readme_name_every_lesson() -> None:
    """In order, each with a link."""
    named = re.findall(r"^\| \[[^\]]*\]\((\S+)\.ipynb\)", markdown(MAP), flags=re.MULTILINE)
    assert named == [lesson.stem for lesson in LESSONS[1:]]
    readme = re.findall(r"`(\d\d_\w+)`", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert readme == [lesson.stem for lesson in LESSONS]


def test_lessons_have_one_form() -> None:
    """What one learns and needs at the top; summary, questions, answers, what is next below."""
    parts = (
        "**Afterwards you can**", "**You should know**", "**It takes**", "## Summary",
        "**Questions**", "<details>", "*Next:* [",
    )  # fmt: skip
    for lesson in LESSONS[1:]:
        text = markdown(lesson)
        places = [text.find(part) for part in parts]

        assert -1 not in places, f"{lesson.name} lacks {parts[places.index(-1)]}"
        assert places == sorted(places), lesson.name


def test_lessons_name_no_folder_of_the_machine_that_stored_them() -> None:
    """A traceback through a library has its path: `.venv/lib/...` says enough."""
    for lesson in LESSONS:
        paths = re.findall(r"(?<![\w.])/[\w./-]+/site-packages", lesson.read_text(encoding="utf-8"))
        assert paths == [], f"{lesson.name}: write .venv/lib/... in its stored output"
