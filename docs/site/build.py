"""Builds the site from README, docs/, the lessons and the package: `make docs`.

The pages are copied and linked, and what the package itself says is made from it: a page for each
magic, the Python functions, the gallery. So none of it can go stale.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import nbdist
from nbdist.commands import VERBS, WORDS
from nbdist.core.units import visible
from nbdist.notebook.verb import NOTEBOOK, TERMINAL, Verb, help_view

SITE = Path(__file__).resolve().parent
ROOT = SITE.parents[1]
# Title -> pages of docs/, in the order of a reader.
GUIDES = {
    "Use": ("usage", "strategies", "checkpoints", "lora", "panel", "away", "configs"),
    "Measure": ("traces", "traces_picture", "memory", "memory_picture", "monitor", "bandwidth",
                "lints", "verify"),
    "Plan": ("plan", "accuracy"),
    "Machines": ("hosts", "gpu", "compatibility", "limits"),
    "Evidence": ("parity", "reliability", "benchmarks", "testing"),
    "Inside": ("architecture", "adding", "internals", "private_names"),
    "From other packages": ("coming_from_nbdistributed",),
}  # fmt: skip
_LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")
_LOADED = re.compile(
    r"<(?:script|link|img|iframe)\b[^>]*https?://[^>]*>|url\(['\"]?https?://[^)]*\)"
)


def write_source(folder: Path) -> None:
    """Write the source of the site into an empty folder.

    Raises:
        ValueError: If a page of docs/ is in no part of GUIDES, or a part names none.
    """
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")}
    if pages != (named := {name for names in GUIDES.values() for name in names}):
        raise ValueError(f"docs/ and GUIDES of {__file__} differ: {sorted(pages ^ named)}")
    shutil.copytree(ROOT / "docs" / "pictures", folder / "docs" / "pictures")
    for path in (ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.*")):
        if path.suffix == ".md":
            text = linked(path.read_text(encoding="utf-8"), path)
            (folder / path.relative_to(ROOT)).write_text(text, encoding="utf-8")
    shutil.copy(ROOT / "docs" / "grafana.json", folder / "docs")
    lessons = sorted((ROOT / "notebooks").glob("*.ipynb"))
    (folder / "notebooks").mkdir()
    for lesson in lessons:
        # A reader copies from these pages: no character that cannot be seen.
        text = visible(lesson.read_text(encoding="utf-8"))
        (folder / "notebooks" / lesson.name).write_text(text, encoding="utf-8")
    (folder / "reference").mkdir()
    references = dict(_references())
    for name, text in {**references, **dict(verb_pages()), "gallery": gallery()}.items():
        (folder / "reference" / f"{name}.md").write_text(text, encoding="utf-8")
    index = linked((ROOT / "README.md").read_text(encoding="utf-8"), ROOT / "README.md")
    parts = [
        toctree("Course", [f"notebooks/{lesson.stem}" for lesson in lessons]),
        *(toctree(title, [f"docs/{name}" for name in names]) for title, names in GUIDES.items()),
        toctree("Reference", [f"reference/{name}" for name in (*references, "gallery")]),
        toctree("Project", ["CONTRIBUTING", "CHANGELOG"]),
    ]
    (folder / "index.md").write_text("\n\n".join([index, *parts]), encoding="utf-8")


def linked(text: str, path: Path) -> str:
    """A page's text, in which links to files that are no pages of the site are their names."""

    def target(match: re.Match[str]) -> str:
        words, link = match.groups()
        name = link.partition("#")[0]
        is_elsewhere = re.match(r"[a-z]+:", link) or not name
        file = (path.parent / name).resolve()
        is_here = any(
            file.is_relative_to(place) for place in (ROOT / "docs", ROOT / "notebooks")
        ) or file in (ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md")
        return match.group() if is_elsewhere or is_here else words

    return _LINK.sub(target, text)


def toctree(title: str, names: list[str]) -> str:
    """A part of the table of contents, which stands beside each page."""
    caption = [f":caption: {title}"] if title else []
    return "\n".join(["```{toctree}", ":hidden:", *caption, "", *names, "```"])


def _references() -> Iterator[tuple[str, str]]:
    """Pages that the package itself makes: (name, text)."""
    magics = [verb for verb in VERBS.values() if verb.place != TERMINAL]
    words = [verb for verb in WORDS.values() if verb.place != NOTEBOOK]
    yield "magics", _table("Magics", magics)
    yield "terminal", _table("Commands of a terminal", words)
    functions = [name for name in nbdist.__all__ if not name.startswith(("_", "load_"))]
    lines = ["# Python", "", "```{eval-rst}"]
    lines += [f".. autofunction:: nbdist.{name}" for name in functions]
    lines += [".. autoclass:: nbdist.notebook.session.Session", "   :members:", "```"]
    yield "python", "\n".join([*lines, ""])


def verb_pages() -> Iterator[tuple[str, str]]:
    """A page for each verb, from its own help: (name, text)."""
    for verb in {**VERBS, **WORDS}.values():
        help_text = ["```text", help_view(verb).text, "```", ""]
        lines = [f"# `{verb.typed}`", "", verb.help, "", "```", verb.example, "```", "", *help_text]
        yield verb.name, "\n".join(lines)


def _table(title: str, verbs: list[Verb]) -> str:
    """Verbs with their first lines; each leads to its page."""
    rows = [f"| [`{verb.typed}`]({verb.name}.md) | {verb.help} |" for verb in verbs]
    contents = toctree("", [verb.name for verb in verbs])
    return "\n".join([f"# {title}", "", "| | |", "|---|---|", *rows, "", contents, ""])


def gallery() -> str:
    """The pictures of README and docs/, each with the page that it is from."""
    lines = ["# Gallery"]
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        text = page.read_text(encoding="utf-8")
        for words, link in re.findall(r"!\[([^\]]*)\]\(([^)\s]+)\)", text):
            source = (page.parent / link).resolve().relative_to(ROOT)
            name = "index" if page.name == "README.md" else f"docs/{page.stem}"
            lines += ["", f"![{words}](../{source})", "", f"{words}: [{page.stem}](../{name}.md)"]
    return "\n".join([*lines, ""])


def loaded_from_elsewhere(pages: Path) -> list[str]:
    """What pages and styles would fetch from another host, a line each; links are not fetched."""
    return [
        f"{path.relative_to(pages)}: {tag}"
        for path in sorted((*pages.rglob("*.html"), *pages.rglob("*.css")))
        for tag in _LOADED.findall(path.read_text(encoding="utf-8"))
    ]


def main(arguments: list[str] | None = None) -> int:
    """Build the site; 0 if Sphinx warns of nothing and no page needs another host."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where the site goes; replaced")
    folder: Path = parser.parse_args(arguments).folder
    source, pages = folder / "source", folder / "html"
    shutil.rmtree(folder, ignore_errors=True)
    source.mkdir(parents=True)
    write_source(source)
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-j", "2"]
    done = subprocess.run([*command, "-c", str(SITE), str(source), str(pages)], check=False)
    if done.returncode:
        return done.returncode
    if others := loaded_from_elsewhere(pages):
        sys.stderr.write("\n".join(["these pages load from another host:", *others, ""]))
        return 1
    sys.stdout.write(f"{pages / 'index.html'}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
