"""What takes long is told after a while, by the notebook's records or those of ranks, and ended."""

from __future__ import annotations

import contextvars
from collections.abc import Iterator
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

import pytest

from nbdist.cells.kernel import progress
from nbdist.core.progress import Progress

DEADLINE_S = 20.0
CELL: contextvars.ContextVar[str] = contextvars.ContextVar("cell")


class Heard:
    def __init__(self) -> None:
        self.records: SimpleQueue[tuple[Progress | None, str]] = SimpleQueue()

    def __call__(self, now: Progress | None) -> None:
        """Keep it, with the context that it came in."""
        self.records.put((now, CELL.get("")))

    def next(self) -> tuple[Progress | None, str]:
        return self.records.get(timeout=DEADLINE_S)


class Ranks:
    """A session whose control threads answer at once; one of them never."""

    ranks = (0, 1, 2)

    def __init__(self) -> None:
        self.told: dict[int, Progress | None] = {}

    def ask(self, _question: Any, rank: int) -> Future[Progress | None] | None:
        """As Health.ask: none of one that has ended."""
        if rank not in self.told:
            return None
        answer: Future[Progress | None] = Future()
        if rank != 2:
            answer.set_result(self.told[rank])
        return answer


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> Iterator[Heard]:
    """Alone, and told at once."""
    heard = Heard()
    monkeypatch.setattr(progress, "listeners", [heard])
    monkeypatch.setattr(progress, "SHOW_S", 0.001)
    yield heard

    assert progress._works == []


def test_what_is_told_arrives_in_the_cells_context(heard: Heard) -> None:
    """So what is displayed belongs to the cell; the end is told too, once."""
    CELL.set("cell 3")
    with progress.during("plan", period_s=0.001) as tell:
        tell("counting", 1, 4, "strategies")
        first = heard.next()
        while first[0] is not None and not first[0].what:  # before it was told
            first = heard.next()
    last = heard.next()

    assert first == (Progress("plan", "counting", 1, 4, "strategies", phase=2), "cell 3")
    assert last[0] is None
    assert heard.records.empty()


def test_what_is_short_is_told_to_nobody(heard: Heard, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even its end."""
    monkeypatch.setattr(progress, "SHOW_S", 1000.0)
    with progress.during("switch") as tell:
        tell("planning")

    assert heard.records.empty()


def test_what_is_inside_is_told_and_ended_alone(heard: Heard) -> None:
    """The outer one is told again afterwards."""
    with progress.during("compare", period_s=0.001):
        assert heard.next()[0] == Progress("compare", "", phase=1)
        with progress.during("switch", period_s=0.001):
            assert heard.next()[0] == Progress("switch", "", phase=1)
        assert heard.next()[0] == Progress("compare", "", phase=1)
    assert heard.next()[0] is None


def test_an_error_inside_ends_it(heard: Heard) -> None:
    """Nothing goes on being told."""

    def failing() -> None:
        with progress.during("switch", period_s=0.001):
            heard.next()
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        failing()

    assert heard.next()[0] is None


def test_ranks_are_asked_and_nobody_is_waited_for(heard: Heard) -> None:
    """The slowest that has answered counts; one that never answers, or has ended, keeps nobody."""
    ranks: Any = Ranks()
    ranks.told = {
        0: Progress("switch", "moving", 3, 4, phase=1),
        1: Progress("switch", "moving", 1, 4, phase=1),
        2: None,
    }
    with progress.of_ranks(ranks, "switch", period_s=0.001):
        shown = heard.next()[0]
        while shown == Progress("switch", "", phase=1):  # before they have answered
            shown = heard.next()[0]

    assert shown == Progress("switch", "moving", 1, 4, phase=1, ranks="rank 1; 0: 75%")
