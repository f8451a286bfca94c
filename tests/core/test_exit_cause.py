"""Why a process ended, from what it left behind."""

import signal

import pytest

from nbdist.core import exit_cause
from nbdist.core.exit_cause import OomCounts, Remains

CELL = "/tmp/ipykernel/123.py"
CELLS = {CELL: 12}
SHELL = (
    '  File "/e/lib/python3.11/site-packages/IPython/core/interactiveshell.py", line 9 in run_code'
)


def crash(*threads: tuple[str, tuple[str, ...]]) -> Remains:
    """What faulthandler leaves: (heading, frames innermost first) of each thread."""
    lines = ["Fatal Python error: Segmentation fault", ""]
    for heading, frames in threads:
        lines += [f"{heading} 0x00007f0000000001 (most recent call first):", *frames, ""]
    return Remains(crash_text="\n".join(lines), cells=CELLS)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (None, "unknown exit code"),
        (3, "exit code 3: the process ended itself, by os._exit or in a library"),
        (-signal.SIGTERM, "signal SIGTERM: sent by somebody else"),
        (-63, "signal 63: sent by somebody else"),
        (-signal.SIGSEGV, "signal SIGSEGV"),
    ],
)
def test_an_end_that_left_nothing(code: int | None, expected: str) -> None:
    """Without any remains the code alone is told, and nothing is made up."""
    if code == -63 and 63 in {int(signal_number) for signal_number in signal.Signals}:
        pytest.skip("signal 63 has a name on this system")

    assert exit_cause.cause(code, Remains()) == expected


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (OomCounts(3, 10, 2_000_000_000), OomCounts(4, 11, 2_000_000_000),
         "the system killed it for memory (cgroup limit 2.0 GB; oom_kill rose from 3 to 4)"),
        (OomCounts(0, 10), OomCounts(2, 12),
         "the system killed it for memory (oom_kill rose from 0 to 2)"),
        (OomCounts(3, 10), OomCounts(3, 11),
         "the system probably killed it for memory (oom_kill of the machine rose from 10 to 11)"),
        (OomCounts(3, 10), OomCounts(3, 10), "sent by somebody else"),
        (OomCounts(), OomCounts(), "sent by somebody else, or by the system for memory"),
        (OomCounts(3, None), OomCounts(None, None), "sent by somebody else, or by the system"),
    ],
)  # fmt: skip
def test_a_kill_for_memory_is_told_by_the_systems_counts(
    before: OomCounts, after: OomCounts, expected: str
) -> None:
    """Its own group's count is proof, the machine's is a hint, no count leaves it open."""
    cause = exit_cause.cause(-signal.SIGKILL, Remains(before=before, after=after))

    assert cause.startswith(f"signal SIGKILL: {expected}")


def test_our_own_kill_is_no_riddle() -> None:
    """What nbdist has killed is never blamed on memory or a bug."""
    risen = Remains(before=OomCounts(1), after=OomCounts(2), is_ours=True)

    assert exit_cause.cause(-signal.SIGKILL, risen) == "signal SIGKILL: sent by nbdist"
    assert exit_cause.cause(-signal.SIGABRT, risen) == "signal SIGABRT: sent by nbdist"


SITE = "/e/lib/python3.11/site-packages"
WAITING = ("Thread", ('  File "/usr/lib/python3.11/threading.py", line 331 in wait',))
IN_CELL = (("Current thread", (f'  File "{CELL}", line 3 in f', SHELL)),)


@pytest.mark.parametrize(
    ("number", "threads", "expected"),
    [
        # The innermost function, and the cell's line that called it.
        (signal.SIGSEGV,
         (WAITING, ("Current thread", (f'  File "{SITE}/torch/_ops.py", line 50 in op',
                                       f'  File "{CELL}", line 3 in <module>', SHELL))),
         "SIGSEGV in op (torch/_ops.py, line 50), called at line 3 of cell [12]"),
        # A C function called from the cell has no Python frame of its own.
        (signal.SIGSEGV, IN_CELL, "SIGSEGV at line 3 of cell [12]"),
        # Outside of any cell the innermost line is all that can be told.
        (signal.SIGFPE, (("Current thread", ('  File "/work/lib.py", line 8 in load',)),),
         "SIGFPE in lib.py, line 8, in load"),
        # Gloo ends the process from its own thread: no current thread in the text.
        (signal.SIGABRT,
         (WAITING, ("Thread", (f'  File "{SITE}/torch/distributed/c10d.py", line 52 in all_reduce',
                               f'  File "{CELL}", line 2 in <module>', SHELL))),
         ("SIGABRT in a thread of C code, while Python was in all_reduce "
         "(torch/distributed/c10d.py, line 52), called at line 2 of cell [12]")),
        # A full /dev/shm ends processes that way, and nobody guesses it.
        (signal.SIGBUS, IN_CELL,
         "SIGBUS at line 3 of cell [12]; usually shared memory (/dev/shm) was full"),
    ],
)  # fmt: skip
def test_a_crash_is_told_with_its_place(
    number: signal.Signals, threads: tuple[tuple[str, tuple[str, ...]], ...], expected: str
) -> None:
    """As far as faulthandler has written it."""
    assert exit_cause.cause(-number, crash(*threads)) == f"signal {expected}"
