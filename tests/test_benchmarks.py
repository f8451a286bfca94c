"""The benchmarks' table: medians of turns, promises, and a page without names."""

import importlib
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import Row, compare, ranks, strategies, switching, verification
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
    text = runner.page([("cost", "Cost", rows)], runner.machine())

    assert "| a / b | 2 us | 1 us | 2.000 | ratio <= 1.5: NOT KEPT | 7 rounds |" in text
    assert " cores, " in text
    assert "torch 2." in text
    assert socket.gethostname() not in text


def test_one_benchmark_alone_makes_its_part_of_the_page() -> None:
    """Other parts stay word by word; a new one comes to its place; what is gone goes."""
    row = Row("x", 2.0, 1.0, "us", "how")
    old = runner.page([("a", "A", [row]), ("b", "B", [row]), ("z", "Gone", [row])], "Here.")
    new = Row("x", 4.0, 1.0, "us", "how")
    made = runner.merged(old, [("b", "B", [new]), ("c", "C", [row])], ["A", "C", "B"])

    assert made == runner.page([("a", "A", [row]), ("c", "C", [row]), ("b", "B", [new])], "Here.")
    assert runner.merged(made, [], ["A", "C", "B"]) == made


def test_every_benchmark_of_the_page_is_there() -> None:
    """Each name is a module with rows, and a first line for its title."""
    for name in runner.MODULES:
        module = importlib.import_module(f"benchmarks.{name}")

        assert callable(module.rows)
        assert (module.__doc__ or "").strip()


def test_pictures_are_drawn_and_shown() -> None:
    """Each stands behind its table, and is there."""
    assert set(runner.PICTURES) <= set(runner.MODULES)
    for name, shown in runner.PICTURES.items():
        path = shown.partition("(")[2].rstrip(")")
        text = runner.page([(name, "A title", [])], "Here.")

        assert text.endswith(f"{shown}\n")
        assert (runner.PAGE.parent / path).exists()


def test_the_same_times_draw_the_same_picture(tmp_path: Path) -> None:
    """No date, no random ids; other times draw another one."""

    def drawn(name: str, elapsed_s: float) -> bytes:
        taken = switching.Taken((elapsed_s, elapsed_s), 1.0)
        switching.draw({1: [(taken, taken)], 10: [(taken, taken)]}, tmp_path / name)
        return (tmp_path / name).read_bytes()

    assert drawn("a.svg", 1.0) == drawn("b.svg", 1.0) != drawn("c.svg", 2.0)


def test_rows_of_a_switch_are_sums_of_both_ways() -> None:
    """There and back, the middle of the rounds; the promise and the memory are the largest's."""
    taken = [
        (switching.Taken((0.1, 0.2), 5.0), switching.Taken((2.0, 2.0), 3.0)),
        (switching.Taken((0.2, 0.2), 7.0), switching.Taken((3.0, 3.0), 4.0)),
        (switching.Taken((9.0, 9.0), 9.0), switching.Taken((9.0, 9.0), 9.0)),
    ]
    (small,) = switching._rows(1, taken)
    large, memory = switching._rows(switching.LARGEST, taken)

    assert (small.ours, small.other, small.most_ratio) == (pytest.approx(0.4), 6.0, None)
    assert (large.most_ratio, large.is_kept) == (0.1, True)
    assert (memory.ours, memory.other, memory.unit) == (7.0, 4.0, "MiB")


def test_a_row_of_steps_is_the_middle_of_the_starts() -> None:
    """A start that was slow on both sides does not count."""
    row = strategies._row("ddp", [(50.0, 50.0), (90.0, 80.0), (51.0, 49.0)])

    assert (row.ours, row.other) == (51.0, 50.0)
    assert row.is_kept


def test_rows_of_a_verification_are_its_time_and_its_memory() -> None:
    """Beside a plain step, and beside the parameters; nothing is promised."""
    time, memory = verification._rows("tp", verification.Taken(2.0, 0.25, 90.0, 20.0))

    assert (time.ratio, time.unit) == (8.0, "s")
    assert (memory.ratio, memory.unit) == (4.5, "MiB")


def test_ranks_do_what_they_are_asked_and_say_why_they_ended(tmp_path: Path) -> None:
    """A strategy's losses and times are the rank's answers; its error is in ours."""
    with ranks.Ranks("strategies", "hand", 1, tmp_path / "hand") as hand:
        first = hand.ask("begin", "ddp")
        times_ms = hand.ask("turn")
        with pytest.raises(RuntimeError, match="KeyError: 'nothing'"):
            hand.ask("nothing")

    assert [len(losses) for losses in first] == [strategies.STEPS_IN_A_TURN]
    assert min(times_ms) > 0
