"""The site's source: every page, lesson and verb is in it, from what they are today."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from nbdist.commands import VERBS, WORDS
from nbdist.core.units import visible
from nbdist.notebook.verb import help_view

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module", name="build")
def _build() -> ModuleType:
    """docs/site/build.py, which is no module of a package."""
    spec = importlib.util.spec_from_file_location("site_build", ROOT / "docs/site/build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module", name="source")
def _source(build: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    build.write_source(folder)
    return folder


def test_all_pages_lessons_and_verbs_are_in_it(source: Path) -> None:
    """A page that no part of the contents names stops the build; a verb has its own help."""
    for kind in ("docs/*.md", "notebooks/*.ipynb"):
        names = {path.name for path in ROOT.glob(kind)}
        assert {path.name for path in source.glob(kind)} == names
        contents = (source / "index.md").read_text()
        assert all(f"{Path(kind).parent}/{Path(name).stem}\n" in contents for name in names)
    for verb in {**VERBS, **WORDS}.values():
        page = (source / "reference" / f"{verb.name}.md").read_text()
        assert page.startswith(f"# `{verb.typed}`\n")
        assert help_view(verb).text in page


def test_a_reader_copies_no_character_that_cannot_be_seen(source: Path) -> None:
    """The marks around measured numbers are for comparisons."""
    for lesson in (source / "notebooks").glob("*.ipynb"):
        text = lesson.read_text()
        assert text == visible(text)


def test_a_page_in_no_part_of_the_contents_is_refused(
    build: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its name."""
    fewer = {title: names for title, names in build.GUIDES.items() if title != "Plan"}
    monkeypatch.setattr(build, "GUIDES", fewer)
    with pytest.raises(ValueError, match="'accuracy', 'plan'"):
        build.write_source(tmp_path)


def test_what_is_loaded_from_another_host_is_found(build: ModuleType, tmp_path: Path) -> None:
    """Scripts, styles, pictures and fonts; not links, which a reader follows or not."""
    (tmp_path / "a.html").write_text(
        '<a href="https://a.org">x</a><script src="x.js"></script>'
        '<script src="https://cdn.org/x.js"></script><img alt="" src="http://b.org/x.png">'
    )
    (tmp_path / "a.css").write_text("@font-face { src: url(https://fonts.org/x.woff) }")

    assert build.loaded_from_elsewhere(tmp_path) == [
        "a.css: url(https://fonts.org/x.woff)",
        'a.html: <script src="https://cdn.org/x.js">',
        'a.html: <img alt="" src="http://b.org/x.png">',
    ]


def test_links_to_files_that_are_no_pages_are_their_names(build: ModuleType) -> None:
    """A reader of the site has no source beside it."""
    page = ROOT / "docs" / "usage.md"
    text = "[`core/`](../nbdist/core), [limits](limits.md#x), [web](https://a.org), [up](#here)"

    assert build.linked(text, page) == text.replace("[`core/`](../nbdist/core)", "`core/`")
