"""The consequences of an interrupt in time: SIGINT, abort, warning, the notebook back."""

import pytest

from nbdist.cells.kernel.interrupt import (
    GIVE_BACK_AGAIN_S,
    GIVE_BACK_S,
    NEVER_S,
    InterruptEscalation,
)


def test_nothing_happens_before_a_press() -> None:
    """No signal, no abort, no end."""
    ladder = InterruptEscalation()

    assert not ladder.has_begun
    assert {ladder.sigint_s(1.0), ladder.abort_s, ladder.warn_s, ladder.give_back_s} == {NEVER_S}


def test_one_press_interrupts_aborts_warns_and_gives_back_in_that_order() -> None:
    """SIGINT a moment after the cell has begun, abort after 1 s, the notebook within 5 s."""
    ladder = InterruptEscalation()
    ladder.press(100.0)

    assert ladder.sigint_s(90.0) < 100.0
    assert ladder.sigint_s(100.5) == pytest.approx(100.6)
    assert ladder.sigint_s(None) == ladder.give_back_s
    assert 100.0 < ladder.abort_s <= 101.0
    assert ladder.abort_s < ladder.warn_s < ladder.give_back_s == 100.0 + GIVE_BACK_S
    assert ladder.give_back_s < 105.0


def test_a_second_press_hurries_and_takes_no_rank_away() -> None:
    """Aborts at once and gives the notebook back soon; nobody was warned, so nobody is ended."""
    ladder = InterruptEscalation()
    ladder.press(100.0)
    ladder.press(100.3)

    assert ladder.abort_s == pytest.approx(100.3)
    assert ladder.give_back_s == pytest.approx(100.3 + GIVE_BACK_AGAIN_S)
    assert ladder.replace_s is None


def test_a_press_after_the_warning_gives_the_ranks_up() -> None:
    """Only a user who has read what it costs ends a rank."""
    ladder = InterruptEscalation()
    ladder.press(100.0)
    ladder.warned(101.6)
    ladder.press(101.6)
    hurried_s = ladder.give_back_s
    ladder.press(102.0)

    assert hurried_s > 102.0
    assert ladder.replace_s == 102.0
    assert ladder.give_back_s == 102.0


def test_a_warning_is_given_once() -> None:
    """After it nothing more is due."""
    ladder = InterruptEscalation()
    ladder.press(100.0)
    ladder.warned(101.6)

    assert ladder.is_warned
    assert ladder.warn_s == NEVER_S


def test_a_timeout_begins_the_same_without_a_press() -> None:
    """And the first press after it does not count as a second one."""
    ladder = InterruptEscalation()
    ladder.time_out(100.0)
    ladder.press(100.2)

    assert ladder.has_begun
    assert ladder.give_back_s == 100.0 + GIVE_BACK_S
    assert ladder.replace_s is None


def test_each_press_interrupts_once_more_but_not_at_once() -> None:
    """Code that has caught the first KeyboardInterrupt gets another; what cleans up has time."""
    ladder = InterruptEscalation()
    ladder.press(100.0)

    assert ladder.sigint_s(90.0, 100.0) == NEVER_S
    ladder.press(100.1)
    assert ladder.sigint_s(90.0, 100.0) == pytest.approx(100.5)
    assert ladder.sigint_s(90.0, 100.0) < ladder.give_back_s
    assert ladder.sigint_s(90.0, 100.5) == NEVER_S


def test_a_hurried_press_waits_for_an_abort_to_end() -> None:
    """Ranks that were just released get the time to come back, and their groups with them."""
    ladder = InterruptEscalation()
    ladder.press(100.0)
    ladder.press(100.05)
    ladder.aborted(100.1)

    assert ladder.give_back_s == pytest.approx(102.1)
    ladder.aborted(104.0)
    assert ladder.give_back_s == 100.0 + GIVE_BACK_S
