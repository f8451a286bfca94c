"""Findings with a verdict as a table."""

import pytest

from nbdist.core.finding import BAD, WARN, Finding
from nbdist.core.view import verdicts


@pytest.fixture(autouse=True)
def _not_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NBDIST_TEST", raising=False)


def test_findings_of_a_file_have_their_lines() -> None:
    """And are the same on every machine, so they are stored too."""
    findings = [Finding("a", "1", WARN, "c", "d", line=3), Finding("whole", "2", BAD, "e", line=0)]

    view = verdicts(findings, before=["read"], title="x.json: ")

    assert view.text == (
        "read\n"
        "x.json: 1 bad, 1 warn, 0 ok\n"
        "line        what   found\n"
        "3     warn  a          1\n"
        "-     bad   whole      2\n"
        "line 3 warn a: c; d\n"
        "bad whole: e"
    )
    assert view.is_bad


def test_findings_of_a_machine_are_not_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another machine has others."""
    monkeypatch.setenv("NBDIST_TEST", "1")

    view = verdicts([Finding("a", "7,000")], none="all is well")

    assert view.text == "0 bad, 0 warn, 1 ok\n    what  found\nok  a         #\nall is well"
    assert not view.is_bad
