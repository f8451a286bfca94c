"""One cell's state, fed by hand: what it does where ranks, sink or cluster do not play along."""

from collections.abc import Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from nbdist.cells.kernel.cell_request import CellRequest
from nbdist.cells.kernel.cell_run import TOGETHER_S, CellRun
from nbdist.cells.kernel.hang_policy import SETTLED_S
from nbdist.cells.kernel.wait import wait
from nbdist.cells.line_merger import Line
from nbdist.cells.outputs import CellResult, Event
from nbdist.errors import DistributedError, RankGone
from nbdist.hang.records import UnmatchedCall
from nbdist.lints.kernel.lints import Lints


class FakeMaintenance:
    """Ends ranks, where they can be replaced."""

    def __init__(self) -> None:
        self.can_replace = True
        self.given_up: list[int] = []

    def give_up(self, ranks: Sequence[int]) -> None:
        self.given_up += ranks

    def take_notes(self) -> list[str]:
        return []


def fake_session(**health: Any) -> Any:
    """Ranks that exist in name alone, whose calls always fit together."""
    never_s = float("inf")
    blind = SimpleNamespace(next_s=never_s, abort_s=never_s, deadlock=None, stopped=frozenset())
    blind.waiting, blind.places, blind.look = {}, {}, lambda *_, **__: []
    session = SimpleNamespace(
        grace_s=5.0,
        ranks=(),
        busy_ranks=(),
        silent=set[int](),
        health=SimpleNamespace(
            **{
                "needs_recovery": False,
                "logs": dict,
                "mismatches": lambda _run: (),
                "unmatched": lambda _run, _ranks: None,
            }
            | health
        ),
        hooks=(Lints(),),
        is_leaving=None,
        maintenance=FakeMaintenance(),
        watchdog=lambda *_, **__: blind,
        death=lambda _rank: "ended",
        interrupt=lambda _rank: None,
        is_connected=lambda _rank: True,
        ask_all=lambda _question: {},
        rank_states=dict,
        explain=lambda failure: failure,
    )
    session.busy = SimpleNamespace(free_silent=lambda: session.silent)
    return session


class Kept:
    """A sink that keeps what is drawn."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def draw(self, events: Sequence[Event]) -> None:
        self.events += events

    def close(self, result: CellResult) -> None:
        """Nothing."""


class Broken(Kept):
    """A sink on a full disk."""

    def draw(self, events: Sequence[Event]) -> None:
        raise OSError("No space left on device")

    def close(self, result: CellResult) -> None:
        raise OSError("No space left on device")


class Failed(Exception):
    """A reply that is an exception, as ipyparallel's are."""

    ename, evalue, traceback = "ValueError", "boom", ()


def cell(sink: Kept, ranks: tuple[int, ...] = (0,)) -> CellRun:
    return CellRun(fake_session(), CellRequest("code", ranks), sink)


def text(words: str) -> dict[str, Any]:
    return {"header": {"msg_type": "stream"}, "content": {"name": "stdout", "text": words}}


@pytest.mark.parametrize(
    ("numbers", "pauses_s"),
    [((None,), [0.0]), ((7, 7), [SETTLED_S, 0.0]), ((7, 8), [SETTLED_S, 0.0])],
)
def test_a_call_that_is_missing_twice_is_missed(
    numbers: Sequence[int | None], pauses_s: list[float]
) -> None:
    """Another one of the same line is a thread's that goes on, on each rank at its own pace."""
    calls = [n and UnmatchedCall("rank 0 called broadcast", "0", n) for n in numbers]
    ranks = fake_session(unmatched=lambda *_: looks.pop(0))
    looks, run = [*calls], CellRun(ranks, CellRequest("code", (0,)), Kept())

    assert [run._hang.find_unmatched(at * SETTLED_S) for at in range(len(calls))] == pauses_s
    assert run._hang.unmatched == (calls[-1] if len({*numbers}) == 1 else None)


def test_a_sink_that_fails_at_the_end_does_not_hide_the_codes_failure() -> None:
    """The user's exception is raised, with the sink's as its context."""
    run = cell(Broken())
    run.done(0, Failed())
    run.step(0.0)

    with pytest.raises(DistributedError, match="ValueError: boom") as caught:
        run.finish()

    assert isinstance(caught.value.__context__, OSError)


def test_a_sink_that_fails_alone_fails_the_cell() -> None:
    """Where the code has worked, what could not be shown is still told."""
    run = cell(Broken())
    run.done(0, "ok")
    run.step(0.0)

    with pytest.raises(OSError, match="No space left"):
        run.finish()


def test_nothing_is_kept_of_a_rank_that_writes_on() -> None:
    """After the end, or after drawing failed, messages are dropped and wake nobody."""
    broken = cell(Broken())
    broken.message(0, text("one\n"))
    with pytest.raises(OSError, match="No space left"):
        wait(lambda: broken)
    woken: list[float] = []
    broken.on_item = woken.append
    broken.message(0, text("two\n"))

    assert woken == []


def test_who_waits_is_woken_at_once_by_the_last_reply_and_soon_by_the_others() -> None:
    """Of 64 ranks each would wake it; what a person or a process does cannot wait."""
    run = cell(Kept(), tuple(range(64)))
    woken: list[float] = []
    run.on_item = woken.append
    for rank in range(64):
        run.message(rank, text("line\n"))
        run.done(rank, "ok")
    run.press()

    assert woken == [TOGETHER_S] * 127 + [0.0, 0.0]


def test_ranks_that_are_stopped_meanwhile_end_the_cell() -> None:
    """A stop from a widget or a task leaves nobody waiting; what came before it is shown."""
    sink = Kept()
    run = cell(sink, (0, 1))
    run.message(0, text("before\n"))
    run.cut_off("The ranks were stopped", "%dist_init starts new ones.")

    assert run.step(0.0) is None
    with pytest.raises(RankGone, match=r"^The ranks were stopped while this cell ran"):
        run.finish()
    assert "before" in str(sink.events)


def test_a_flood_of_output_keeps_neither_drawing_nor_deadlines_waiting() -> None:
    """One step takes in what was there when it began."""
    sink = Kept()
    run = cell(sink)

    class Endless(dict[str, Any]):
        """A message during which the next one comes."""

        def __getitem__(self, key: str) -> Any:
            if key == "content":
                run.message(0, Endless(self))
            return super().__getitem__(key)

    run.message(0, Endless(text("more\n")))

    assert run.step(0.0) is not None
    assert sink.events != []


def longest_wait_s(run: CellRun, began_s: float) -> float:
    """How long a run waits at most once a rank's failure is two seconds old."""
    run.step(began_s + 2.0)
    pause_s = run.step(began_s + 2.1)
    assert pause_s is not None
    return pause_s


def test_a_failure_that_was_told_is_waited_for_no_more() -> None:
    """An error without a displayed traceback is told as well, and then nothing polls."""
    sink = Kept()
    run = cell(sink, (0, 1))
    run.done(1, Failed())
    pause_s = longest_wait_s(run, run._began_s)

    texts = [event.text for event in sink.events if isinstance(event, Line)]
    assert texts == [
        "rank 1 raised ValueError: boom; rank 0 still running (the stop button interrupts)\n"
    ]
    assert pause_s > 60


def test_a_failure_is_not_waited_for_after_an_interrupt() -> None:
    """After an interrupt only the notebook's return is waited for, not what is no longer told."""
    run = cell(Kept(), (0, 1))
    run.done(1, Failed())
    run.step(run._began_s)
    run.press()
    run.step(run._began_s + 0.1)

    assert longest_wait_s(run, run._began_s) > 1


@pytest.mark.parametrize(("can_replace", "given_up"), [(True, [1]), (False, [])])
def test_a_press_after_the_warning_ends_ranks_only_where_others_can_take_their_place(
    *, can_replace: bool, given_up: list[int]
) -> None:
    """The cell ends at once in both cases."""
    session, sink = fake_session(), Kept()
    session.maintenance.can_replace = can_replace
    run = CellRun(session, CellRequest("code", (0, 1)), sink)
    run.done(0, Failed())
    began_s = run._began_s
    run.press()
    run.step(began_s)
    run.step(began_s + 1.6)
    warned = str(sink.events)
    run.press()
    run.step(began_s + 1.7)
    run.press()
    run.step(began_s + 1.8)
    after_s = run.step(began_s + 1.9)

    assert ("Another press ends and replaces rank 1" in warned) == can_replace
    assert session.maintenance.given_up == given_up
    assert run.missing == ()
    assert after_s is None or after_s < 2.0


class Cut(Exception):
    """A rank's reply when another one has shut their connection."""

    ename, evalue, traceback = "RuntimeError", "Connection closed by peer [127.0.0.1]:1234", ()


def test_a_connection_that_is_gone_is_made_anew_though_no_call_is_missing() -> None:
    """Otherwise every later cell would fail by it."""
    begun: list[dict[int, Future[Any]]] = []
    session = fake_session(begin_recovery=lambda: begun.append({0: Future()}) or begun[-1])
    run = CellRun(session, CellRequest("code", (0,)), Kept())
    run.done(0, Cut())
    run.step(run._began_s)

    assert len(begun) == 1


def test_a_recovery_that_lasts_does_not_keep_the_notebook_after_an_interrupt() -> None:
    """It is back within five seconds of the press, and the next cell recovers."""
    session = fake_session(begin_recovery=lambda: {0: Future()})
    run = CellRun(session, CellRequest("code", (0,)), Kept())
    run.press()
    run.step(run._began_s)
    run.done(0, Cut())
    pause_s = run.step(run._began_s + 1.0)

    assert pause_s is not None
    assert 1.0 + pause_s < 5.0
    assert run.step(run._began_s + 4.6) is None
    assert session.health.needs_recovery


def test_a_rank_whose_reply_was_lost_is_not_waited_for_after_an_interrupt() -> None:
    """Its call log says that its cell has ended; the interrupt came in that moment."""
    session = fake_session()
    run = CellRun(session, CellRequest("code", (0, 1)), Kept())
    run.done(0, Failed())
    began_s = run._began_s
    session.silent = {1}
    before = run.step(began_s)
    run.press()
    run.step(began_s + 0.1)
    run.step(began_s + 0.2)

    assert before is not None
    assert run.missing == ()
