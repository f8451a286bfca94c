"""Processes that a cell forks on a rank end as those of a plain kernel do."""

import pytest

from nbdist.core.ranks import parse_ranks
from tests.support.kernel import Kernel

# Three times each: a signal may also come before the child has run a line.
_POOL = """
import multiprocessing as mp
def square(x): return x * x
for _ in range(3):
    with mp.get_context('fork').Pool(2) as pool:
        print(sum(pool.map(square, range(4))))
"""
_TERMINATED = """
import multiprocessing as mp, time
for _ in range(3):
    process = mp.get_context('fork').Process(target=time.sleep, args=(60,))
    process.start()
    process.terminate()
    process.join(10)
    print(process.exitcode)
"""
_SIGNALS = """
import os, signal, time
def interrupted():
    try:
        os.write(ready, b'x')
        # A signal just before a sleep begins does not end it, only what follows it.
        for _ in range(6000):
            time.sleep(0.01)
    except KeyboardInterrupt:
        os._exit(7)
    os._exit(8)
for number in signal.SIGINT, signal.SIGTERM:
    started, ready = os.pipe()
    pid = os.fork()
    if pid == 0:
        interrupted()
    os.read(started, 1)
    os.kill(pid, number)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


@pytest.mark.parametrize(
    ("code", "expected"),
    [(_POOL, ["14"] * 3), (_TERMINATED, ["-15"] * 3), (_SIGNALS, ["7", "-15"])],
    ids=["pool", "terminated", "signals"],
)
def test_forks_take_signals_as_in_a_plain_kernel(
    kernel: Kernel, code: str, expected: list[str]
) -> None:
    """SIGTERM ends them, SIGINT is a KeyboardInterrupt; the rank that forked goes on."""
    cell = kernel.run(f"%%distributed --timeout 40\n{code}", 60)
    after = kernel.run("%%distributed\nprint(rank >= 0)")

    assert cell.status == "ok", cell.visible
    lines = [line.removeprefix("[").split("] ") for line in cell.text.splitlines()]
    for rank in range(2):
        assert [text for label, text in lines if rank in parse_ranks(label, 2)] == expected
    assert after.text == "[0-1] True\n"
