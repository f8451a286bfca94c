"""What rules find on ranks, and findings as lines of text and as a table."""

import pytest

from nbdist.core.finding import (
    BAD,
    MOST_SPOTS,
    WARN,
    Finding,
    Rule,
    RuleHit,
    Spot,
    advice,
    on_ranks,
    report,
)
from nbdist.core.units import compared, visible
from nbdist.core.view import verdicts


def _large(number: int) -> RuleHit | None:
    if number <= 2:
        return None
    spots = tuple(Spot(number, 0, length) for length in range(1, number))
    return RuleHit(f"{number} is large", share=number / 10, places=(f"line {number}",), spots=spots)


def _odd(number: int) -> RuleHit | None:
    return RuleHit(f"{number} is odd", share=0.01) if number % 2 else None


LARGE = Rule("large", _large, "it takes room", "make it small")
ODD = Rule("odd", _odd, "it is not even", "add one")


def test_a_rule_is_told_with_the_numbers_of_the_worst_rank() -> None:
    """On all ranks that have it, with the longest stretches of all; the largest share is first."""
    large, odd = on_ranks((ODD, LARGE), {0: 1, 1: 4, 2: 7, 3: 2})

    assert large == Finding(
        "large", "7 is large", WARN, "it takes room", "make it small",
        ranks=(1, 2), share=0.7, places=("line 7",), spots=large.spots,
    )  # fmt: skip
    lengths = [spot.end_ns for spot in large.spots]
    assert lengths == sorted([1, 2, 3, 1, 2, 3, 4, 5, 6], reverse=True)[:MOST_SPOTS]
    assert (odd.rule, odd.ranks, odd.found) == ("odd", (0, 2), "1 is odd")


def test_nothing_found() -> None:
    """No rule, no rank, or nothing that a rule looks for."""
    assert on_ranks((), {0: 4}) == on_ranks((LARGE,), {}) == on_ranks((LARGE,), {0: 2}) == ()


def test_a_report_has_a_block_for_each_finding() -> None:
    """With its lines of code, or else its longest stretch of time."""
    spots = (Spot(1, 1_234_499, 2_000_000), Spot(0, 5, 6))
    finding = Finding("a", "b", WARN, "c", "d", (0, 1), 0.125, places=("f.py:1\n", "g.py:2"))
    other = Finding("e", "f", WARN, "g", "h", (2,), 0.1, spots=spots)
    last = Finding("i", "j", WARN, "k", "l", (3,))

    assert report((finding, other), order="the largest first", none="", has_share=True) == [
        "findings, the largest first:",
        "- a (ranks 0-1, 12.5 %): b",
        "  why: c",
        "  do: d",
        "  look at: f.py:1; g.py:2",
        "- e (rank 2, 10.0 %): f",
        "  why: g",
        "  do: h",
        "  look at: rank 1, from 1.234 to 2.000 ms",
    ]
    assert report([last], order="", none="")[1:] == ["- i (rank 3): j", "  why: k", "  do: l"]


def test_a_report_of_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Says so; which findings there are is not compared."""
    assert report((), order="", none="all is well") == ["findings: none; all is well"]

    monkeypatch.setenv("NBDIST_TEST", "1")
    assert [*map(compared, report((), order="", none="all is well"))] == ["#"]


@pytest.mark.parametrize(
    ("finding", "expected"),
    [
        (Finding("a", "b", WARN, "c", "d"), "warn a: c; d"),
        (Finding("a", "b", BAD, "c"), "bad a: c"),
        (Finding("a", "b", BAD, "c", "d", line=3), "line 3 bad a: c; d"),
        (Finding("a", "b", BAD, "c", "d", line=0), "bad a: c; d"),
    ],
)
def test_advice_is_one_line(finding: Finding, expected: str) -> None:
    """Where, why, and what to do."""
    assert advice(finding) == expected


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

    assert (
        visible(view.text) == "0 bad, 0 warn, 1 ok\n    what  found\nok  a     7,000\nall is well"
    )
    assert compared(view.text) == "0 bad, 0 warn, 1 ok\n    what  found\nok  a     #\nall is well"
    assert not view.is_bad
