"""What every table of rules has to hold."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from nbdist.core.finding import Rule

DOCS = Path(__file__).resolve().parents[2] / "docs"


def check_rules(rules: Sequence[Rule[Any]], cases: Iterable[str], page: str) -> None:
    """Each rule has a case, says why and what to do, and stands in the table of its page."""
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")

    assert sorted(cases) == sorted(rule.name for rule in rules)
    for rule in rules:
        assert f"\n| {rule.name} |" in text
        assert rule.why
        assert rule.what
        assert rule.look.__doc__
