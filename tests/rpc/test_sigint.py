"""Interrupts are counted while a cell runs, and raise again afterwards."""

import signal
import threading

import pytest

from nbdist.rpc.kernel.sigint import PendingInterrupts, deferred_sigint


def test_presses_are_counted_and_do_not_raise() -> None:
    """Inside, every SIGINT is one press, those before somebody listens included."""
    presses_taken: list[int] = []
    with deferred_sigint() as presses:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        presses.send_to(lambda: presses_taken.append(1))
        signal.raise_signal(signal.SIGINT)

    assert len(presses_taken) == 3


def test_a_press_that_waits_can_be_raised_later() -> None:
    """Once what must not be broken off is done."""
    with deferred_sigint() as presses:
        presses.check()
        signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        presses.check()


def test_the_handler_of_before_is_back_afterwards() -> None:
    """After the block, left by an error or not, SIGINT raises as it did."""
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(ValueError, match="left"), deferred_sigint():
        raise ValueError("left")

    assert signal.getsignal(signal.SIGINT) is before
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_nested_blocks_count_in_the_inner_one() -> None:
    """A cell within a cell takes the presses; the outer one goes on after it."""
    inner_taken: list[int] = []
    outer_taken: list[int] = []
    with deferred_sigint() as outer:
        outer.send_to(lambda: outer_taken.append(1))
        with deferred_sigint() as inner:
            inner.send_to(lambda: inner_taken.append(1))
            signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    assert (len(inner_taken), len(outer_taken)) == (1, 1)


def test_other_threads_leave_signals_alone() -> None:
    """Outside the main thread nothing is taken over, and nothing fails."""
    states: list[object] = []

    def enter() -> None:
        with deferred_sigint() as presses:
            states.extend([presses, signal.getsignal(signal.SIGINT)])

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()

    assert isinstance(states[0], PendingInterrupts)
    assert states[1] is before
