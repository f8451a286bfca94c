"""The benchmarks' table: medians of turns, promises, and a page without names."""

import socket
from collections.abc import Iterator

from benchmarks import Row, compare
from benchmarks import run as runner


def test_both_sides_take_turns_and_the_middle_counts() -> None:
    """Ours is measured first in each round; the warm-up and the outliers do not count."""
    order: list[str] = []
    ours, other = iter([99.0, 1.0, 50.0, 3.0]), iter([99.0, 2.0, 2.0, 90.0])

    def measure(name: str, values: Iterator[float]) -> float:
        order.append(name)
        return next(values)

    middle = compare(lambda: measure("a", ours), lambda: measure("b", other), rounds=3)

    assert middle == (3.0, 2.0)
    assert order == ["a", "b"] * 4


def test_promises() -> None:
    """A row is kept if its ratio and its difference both are; without promises always."""
    assert Row("x", 2, 1, "us", "").is_kept
    assert Row("x", 2, 1, "us", "", most_more=1).is_kept
    assert not Row("x", 2, 1, "us", "", most_more=0.9).is_kept
    assert Row("x", 1.01, 1, "us", "", most_ratio=1.02).is_kept
    assert not Row("x", 1.03, 1, "us", "", most_ratio=1.02, most_more=9).is_kept
    assert Row("x", 1, 0, "us", "").ratio == float("inf")


def test_the_page_names_the_machine_by_what_it_has() -> None:
    """Cores, memory and versions are in it, the host's name is not; bars do not break a table."""
    rows = [Row("a | b", 2.0, 1.0, "us", "7 rounds", most_ratio=1.5)]
    text = runner.page([("Cost", rows)], runner.machine())

    assert "| a / b | 2 us | 1 us | 2.000 | ratio <= 1.5: NOT KEPT | 7 rounds |" in text
    assert " cores, " in text
    assert "torch 2." in text
    assert socket.gethostname() not in text
