"""The one error in which a cell that was aborted, interrupted or failed ends."""

import pickle

import pytest

from nbdist.cells.kernel.cell_outcome import (
    CellOutcome,
    is_by_interrupt,
    still_aborting_message,
    unresponsive_message,
    waiting_message,
)
from nbdist.cells.outputs import CellResult, RankResult
from nbdist.core.failures import RankFailure
from nbdist.errors import CellTimeout, Deadlock, DistributedError, Interrupted
from nbdist.hang.kernel.group_recovery import RecoveryOutcome

LINE = "rank 0 waits in barrier at line 1 of cell [4]; rank 1 finished without calling it"
RELEASED = RankFailure(0, "RuntimeError", "[..] Connection closed by peer [127.0.0.1]:4711", ())
RECOVERED = RecoveryOutcome(is_recovered=True)


def raised(ending: CellOutcome, *ranks: RankResult) -> BaseException:
    with pytest.raises(BaseException) as caught:  # noqa: PT011  # which one is looked at
        ending.raise_for(CellResult(ranks), lambda failure: failure)
    return caught.value


def test_a_deadlock_fails_with_its_line_and_says_what_is_back() -> None:
    """What the released rank raised is noise, and not shown."""
    ending = CellOutcome("", False, None, LINE, is_deadlock=True, grace_s=5.0, outcome=RECOVERED)
    error = raised(ending, RankResult(0, "error", 6.0, "", RELEASED), RankResult(1, "ok", 0))

    assert isinstance(error, Deadlock)
    assert str(error) == (
        f"{LINE}; aborted after 5 s: ranks 0-1 are back, variables kept, groups recovered"
    )
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert type(pickle.loads(pickle.dumps(error))) is Deadlock


def test_an_aborted_cell_fails_although_the_code_caught_the_abort() -> None:
    """All ranks replied ok, and yet the collective was never made."""
    ending = CellOutcome("", False, None, LINE, is_deadlock=True, outcome=RECOVERED)

    assert isinstance(raised(ending, RankResult(0, "ok", 6.0)), Deadlock)


def test_the_peers_own_error_is_the_root_cause_of_a_deadlock() -> None:
    """Its traceback is shown; what came back is told."""
    failure = RankFailure(1, "ValueError", "boom", ("Traceback of rank 1",))
    ending = CellOutcome("", False, None, LINE, is_deadlock=True, grace_s=1.0, outcome=RECOVERED)
    error = raised(
        ending,
        RankResult(0, "error", 2.0, "", RELEASED),
        RankResult(1, "error", 0.1, "", failure),
    )

    assert type(error) is DistributedError
    assert error.ranks == (1,)
    assert str(error).startswith("rank 1 raised ValueError: boom; ")
    assert LINE in str(error)
    assert "ranks 0-1 are back, variables kept, groups recovered" in str(error)


def test_an_interrupted_collective_is_an_interrupt() -> None:
    """Released by the abort that an interrupt asked for: KeyboardInterrupt, not a failure."""
    text = waiting_message({0: "waiting in barrier at line 1 of cell [4]"})
    ending = CellOutcome("", True, None, text, outcome=RECOVERED)
    error = raised(ending, RankResult(0, "interrupted", 1.0, "", RELEASED), RankResult(1, "ok", 0))

    assert isinstance(error, Interrupted)
    assert str(error) == (
        "ranks 0-1 are back, variables kept, groups recovered; rank 0 was waiting in barrier at "
        "line 1 of cell [4]"
    )


def test_a_rank_in_c_code_is_named_with_the_way_to_replace_it() -> None:
    """After the notebook was given back."""
    problem = RecoveryOutcome(problem="the groups are made anew once rank 1 is back")
    ending = CellOutcome("", True, None, outcome=problem)
    error = raised(ending, RankResult(0, "interrupted", 1.0), RankResult(1, "unfinished", 4.5))

    assert "rank 0 is back, variables kept; rank 1 is not back yet" in str(error)
    assert "%dist_restart 1 replaces" in str(error)
    assert str(error).endswith("the groups are made anew once rank 1 is back")


def test_a_stopped_rank_is_named_with_the_way_to_wake_it() -> None:
    """No C code is to blame; the one beside it is told as ever."""
    ending = CellOutcome("", True, None, stopped=frozenset({1}))
    ranks = [RankResult(rank, "unfinished", 4.5) for rank in (0, 1)]
    error = raised(ending, *ranks)

    assert str(error).startswith("rank 1 is stopped (SIGSTOP): kill -CONT lets rank 1 go on")
    assert "; rank 0 is not back yet: C code" in str(error)


def test_ranks_that_the_user_gave_up_on_are_not_said_to_run() -> None:
    """They were ended by the press."""
    ending = CellOutcome("", True, None, replaced=(1,))
    error = raised(ending, RankResult(0, "interrupted", 1.0), RankResult(1, "unfinished", 2.0))

    assert "not back yet" not in str(error)
    assert "rank 1 was ended" in str(error)


def test_a_timeout_that_aborts_says_who_waited() -> None:
    """It is a CellTimeout with the wait in it."""
    ending = CellOutcome("", True, 3.0, LINE, outcome=RECOVERED)
    error = raised(ending, RankResult(0, "interrupted", 4.0, "", RELEASED))

    assert isinstance(error, CellTimeout)
    assert "--timeout 3" in str(error)
    assert LINE in str(error)


SLEEP = ("Cell In[4], line 3, in step(n)\n      1 def step(n):\n----> 3     time.sleep(60)\n",)
LIBRARY = "File /usr/lib/python3.11/threading.py:327, in wait(self)\n--> 327     waiter.acquire()"
COMPREHENSION = "Cell In[4], line 3, in step.<locals>.<listcomp>(.0)\n----> 3 def step(n):\n"
SCRIPT = "File ~/work/train.py:12, in main()\n---> 12     loop()"


def interrupted(rank: int, *frames: str) -> RankResult:
    """A rank that an interrupt ended, with IPython's frames of it, coloured."""
    coloured = tuple(frame.replace("Cell", "\x1b[36mCell\x1b[39m") for frame in frames)
    failure = RankFailure(rank, "KeyboardInterrupt", "", ("Traceback ...", *coloured, "Keyb.."))
    return RankResult(rank, "interrupted", 1.0, "", failure)


def test_an_interrupt_says_where_ranks_were_each_place_once() -> None:
    """The innermost line of the user's; of a rank in C code where it was last seen."""
    error = raised(
        CellOutcome("", True, 3.0, places={3: "line 9 of cell [4]: a @ b"}),
        interrupted(0, *SLEEP, LIBRARY),
        interrupted(1, *SLEEP, COMPREHENSION, LIBRARY),
        interrupted(2, *SLEEP, SCRIPT),
        RankResult(3, "unfinished", 4.5),
        RankResult(4, "ok", 1.0),
        RankResult(5, "interrupted", 1.0),
    )

    assert str(error).endswith(
        "\n[0-1] at line 3 of cell [4]: time.sleep(60)\n[2] at line 12 of train.py: loop()\n"
        "[3] at line 9 of cell [4]: a @ b\n[4] had finished the cell"
    )


def test_ranks_that_were_aborted_are_not_told_twice_and_many_places_are_cut() -> None:
    """Where those waited stands in the message already."""
    frames = [f"Cell In[4], line {line}\n----> {line} f{line}()" for line in range(10)]
    ranks = [interrupted(rank, frame) for rank, frame in enumerate(frames)]
    error = raised(CellOutcome("", True, None, LINE, waiting=frozenset({0})), *ranks[:1])
    many = str(raised(CellOutcome("", True, None), *ranks)).splitlines()

    assert "\n" not in str(error)
    assert many[-2:] == ["[7] at line 7 of cell [4]: f7()", "[8-9] at other lines"]
    assert len(many) == 1 + 8 + 1


@pytest.mark.parametrize(
    ("name", "message", "was_aborted", "expected"),
    [
        ("KeyboardInterrupt", "", False, True),
        ("CancelledError", "", False, True),
        ("RuntimeError", "Connection closed by peer", True, True),
        ("RuntimeError", "Connection closed by peer", False, False),
        ("ValueError", "boom", True, False),
    ],
)
def test_what_counts_as_interrupted(
    name: str, message: str, *, was_aborted: bool, expected: bool
) -> None:
    """A lost connection only where we have ended it."""
    assert is_by_interrupt((name, message, ()), was_aborted=was_aborted) is expected


def test_equal_waits_are_one_phrase() -> None:
    """Ranks in the same line are named together."""
    text = waiting_message({0: "waiting in a", 1: "waiting in a", 2: "waiting in b"})

    assert text == "ranks 0-1 were waiting in a; rank 2 was waiting in b"


def test_stuck_ranks_are_told_with_their_place_and_the_price() -> None:
    """The next press is explained before it does anything."""
    text = unresponsive_message([1], {1: "line 3 of cell [12]: a @ b"}, (), can_replace=True)

    assert "rank 1 is not back yet" in text
    assert "line 3 of cell [12]: a @ b" in text
    assert "variables are then lost" in text


def test_a_press_promises_no_replacement_where_there_is_none() -> None:
    """Ranks that a batch system or another host has started cannot be replaced one by one."""
    text = unresponsive_message([0, 1], {}, (), can_replace=False)

    assert "Another press gives the notebook back" in text
    assert "lost" not in text


def test_a_stopped_rank_is_not_said_to_be_in_c_code() -> None:
    """It is where it was when the signal came, and nothing reaches it there."""
    alone = unresponsive_message([1], {1: "line 3 of cell [12]: a @ b"}, {1}, can_replace=True)
    both = unresponsive_message([0, 1], {0: "line 1"}, {1}, can_replace=True)

    assert alone == (
        "rank 1 is stopped (SIGSTOP): no interrupt until kill -CONT. Another press ends and "
        "replaces rank 1, whose variables are then lost"
    )
    assert "rank 1 is stopped (SIGSTOP)" in both
    assert "rank 0 is not back yet (rank 0: line 1): C code" in both


def test_only_who_is_in_a_collective_is_held_by_the_abort() -> None:
    """A rank that computes had no part in the deadlock: its cell ends when it is done."""
    held = still_aborting_message([0, 1], {0}, is_interrupted=False)
    computing = still_aborting_message([1], {}, is_interrupted=False)

    assert [line.partition(":")[0] for line in held] == ["rank 0 is not back from the abort"]
    assert [line.partition(":")[0] for line in computing] == [
        "rank 1 is still running, in no collective"
    ]
    assert still_aborting_message([1], {}, is_interrupted=True) == ()


def test_stored_outputs_do_not_tell_who_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank on a busy machine may leave an aborted collective late; one still in it is told."""
    monkeypatch.setenv("NBDIST_TEST", "1")
    left = still_aborting_message([0], {}, is_interrupted=False)
    [held] = still_aborting_message([0], {0}, is_interrupted=False)

    assert left == ()
    assert held.startswith("rank 0 is not back from the abort")


def test_a_program_is_told_of_in_its_own_words() -> None:
    """Its ranks end with it: nothing is said of their variables, groups and replacements."""
    hung = CellOutcome("", False, None, LINE, is_deadlock=True, grace_s=5.0, is_program=True)
    stopped = CellOutcome("", True, None, "rank 0 was waiting in barrier", is_program=True)
    released = RankResult(0, "error", 6.0, "", RELEASED)
    failed = RankResult(1, "error", 0.1, "", RankFailure(1, "ValueError", "boom", ()))
    stuck = unresponsive_message([1], {}, (), can_replace=False, is_program=True)
    [held] = still_aborting_message([0], {0}, is_interrupted=False, is_program=True)
    [computing] = still_aborting_message([1], {}, is_interrupted=False, is_program=True)

    assert str(raised(hung, released)) == f"{LINE}; aborted after 5 s"
    assert str(raised(hung, released, failed)).endswith(f"{LINE}; aborted after 5 s")
    assert str(raised(stopped, RankResult(0, "unfinished", 6.0, ""))) == stopped.aborted
    assert stuck.endswith("Another press ends the program")
    assert held.endswith(": Ctrl-C ends the program")
    assert computing.endswith(": the program ends with rank 1 (Ctrl-C interrupts)")
