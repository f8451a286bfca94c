"""What several ranks answer, and which of several errors is told."""

import os
import signal
import threading
import time
from concurrent.futures import Future
from typing import Any

import pytest

from nbdist.errors import CheckpointError, NbdistError, OptionError, RankGone
from nbdist.rpc.kernel.gather import gather_results, remote_error_message, wait_done

LOST = "Connection closed by peer [127.0.0.1]:1"


def done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


def failed(message: str) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_exception(RuntimeError(message))
    return future


def lives() -> str:
    return ""


def test_answers_come_in_rank_order() -> None:
    """As the futures are given."""
    assert gather_results({0: done("a"), 1: done("b")}, 1.0, lives) == ["a", "b"]


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        # Rank 0 has failed because rank 1 had: the root cause is told, not the lost connection.
        ([failed(LOST), failed("out of memory")], "rank 1: out of memory"),
        # Who waits for one that failed is not waited for, also where it is asked first.
        ([failed("boom"), Future()], "rank 0: boom"),
        ([Future(), failed("boom")], "rank 1: boom"),
        # What others still answer is no failure.
        ([done("a"), failed("boom"), done("c")], "rank 1: boom"),
    ],
)
def test_a_failure_is_told_at_once(answers: list[Future[Any]], message: str) -> None:
    """Long before the deadline, with the rank that has failed."""
    with pytest.raises(NbdistError, match=f"^{message}$"):
        gather_results(dict(enumerate(answers)), 60.0, lives)


def test_the_end_of_a_rank_is_told_as_such_once_it_is_known() -> None:
    """The controller tells of a death some milliseconds before the process has been reaped."""
    asked = []

    def ends_soon() -> str:
        asked.append(1)
        if len(asked) > 2:
            raise RankGone("rank 0 has ended (signal SIGKILL)")
        return ""

    died: Future[Any] = Future()
    error = RuntimeError("Engine 0 died while running task 'c2'")
    error.ename = "EngineError"  # type: ignore[attr-defined]
    died.set_exception(error)
    follower = failed(LOST)

    with pytest.raises(RankGone, match="signal SIGKILL"):
        gather_results({0: died, 1: follower}, 1.0, ends_soon)
    with pytest.raises(NbdistError, match=r"^rank 0: Engine 0 died"):  # nothing is known of it
        gather_results({0: died, 1: follower}, 1.0, lives)


def test_who_has_not_answered_is_named() -> None:
    """After the deadline, all that are late."""
    with pytest.raises(NbdistError, match=r"^ranks 1-2 did not answer within 0.01 s$"):
        gather_results({0: done(1), 1: Future(), 2: Future()}, 0.01, lives)


def test_the_end_of_the_controller_ends_the_wait() -> None:
    """Long before the deadline."""
    with pytest.raises(RankGone, match=r"controller ended \(signal SIGKILL\)"):
        gather_results({0: Future()}, 60.0, lambda: "signal SIGKILL")


def test_calls_may_end_by_themselves_after_an_interrupt() -> None:
    """As soon as all have, or not at all where there is no patience."""
    late: Future[Any] = Future()
    threading.Timer(0.05, late.set_result, (1,)).start()
    wait_done([done(1), late], 60.0)
    assert late.done()
    wait_done([Future()], 0.0)


def test_a_further_interrupt_ends_the_patience() -> None:
    """It does not raise: the ranks are interrupted next."""
    began_s = time.monotonic()
    threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
    wait_done([Future()], 60.0)

    assert time.monotonic() < began_s + 30


def test_what_a_rank_refuses_is_told_in_its_words() -> None:
    """By the class that it raised; what it raised otherwise is no refusal."""

    class Remote(Exception):
        ename, evalue = "OptionError", "no such model"

    error = NbdistError("rank 0: no such model")
    error.__cause__ = Remote()
    refusal = remote_error_message(error, CheckpointError, OptionError)

    assert type(refusal) is OptionError
    assert str(refusal) == "no such model"
    assert remote_error_message(error, CheckpointError) is None
    assert remote_error_message(NbdistError("rank 0 ended"), OptionError) is None
