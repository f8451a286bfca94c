"""The kernel or the controller goes while ranks are idle, or stuck in a collective."""

import time
from collections.abc import Callable

import psutil
import pytest

from tests.faults.fault import cases
from tests.support import processes
from tests.support.faults import (
    BACK_S,
    DEATH_TOLD_S,
    GONE_S,
    Measured,
    Ranks,
    record,
    shm_files,
)

# Workers of a loader, a child in a session of its own, and a rank that waits for ever.
_STUCK = """%%distributed
import subprocess
subprocess.Popen(['sleep', '3600'], start_new_session=True)
batches = iter(DataLoader(range(10**9), num_workers=1))
next(batches)
go()
if rank != 1:
    dist.all_reduce(x)
time.sleep(3600)"""
_ENDS = ("shutdown", "restart", "kill")


@pytest.mark.parametrize(("n", "end", "is_busy"), cases((), (2, 4), _ENDS, (False, True)))
def test_nothing_outlives_the_kernel(
    n: int, end: str, *, is_busy: bool, own_ranks: Callable[..., Ranks]
) -> None:
    """Within 5 s no process, no folder and no /dev/shm file is left; a stranger lives on."""
    with psutil.Popen(["sleep", "300"], start_new_session=True) as stranger:
        ranks = own_ranks(n)
        if is_busy:
            ranks.begin_s(ranks.kernel.start(_STUCK), n)
        everything = ranks.everything()
        if end == "restart":  # the new kernel is below the same manager, and nobody's rank
            everything = [p for p in everything if p.pid != ranks.kernel.pid]
        began_s = time.monotonic()
        getattr(ranks.kernel, end)()
        remaining = processes.wait_gone(everything, GONE_S + ranks.load_s)
        gone_s = time.monotonic() - began_s
        is_alive = processes.is_alive(stranger)
        stranger.kill()
    n_left = len(remaining) + len(ranks.processes())
    case = f"kernel {end}, {'mid-cell' if is_busy else 'idle'}"
    record(Measured(case, "kernel", n, back_s=gone_s, n_left=n_left))

    assert len(everything) >= n + 2  # controller, guardian, ranks
    assert [processes.describe(process) for process in remaining] == []
    assert n_left == 0
    assert list((ranks.folder / "tmp").glob("nbdist-*")) == []
    assert shm_files(everything) == []
    assert is_alive


@pytest.mark.parametrize(("n", "is_busy"), cases((), (2, 4), (True, False)))
def test_the_controller_is_killed(n: int, *, is_busy: bool, ranks: Ranks) -> None:
    """The running cell fails at once with a plain line; the next one works, all variables kept."""
    controller = ranks.look()[2][0]
    if is_busy:
        handle = ranks.kernel.start("%%distributed\ngo()\nuntil_end()")
        ranks.begin_s(handle, n)
    began_s = time.monotonic()
    controller.kill()
    if not is_busy:
        processes.wait_gone([controller])
        handle = ranks.kernel.start("%%distributed\nprint('alive')")
    cell = ranks.finish(handle)
    told_s = time.monotonic() - began_s
    (ranks.folder / "end").touch()
    ranks.ok("%%distributed\nprint('reached')")
    back_s = time.monotonic() - began_s

    assert told_s < DEATH_TOLD_S + BACK_S + ranks.load_s
    if is_busy or cell.status != "ok":  # sent before the end was noticed
        cell.check_failure("RankGone", r"controller ended \(signal SIGKILL\)")
    else:
        assert "controller had ended (signal SIGKILL)" in cell.visible
    case = f"controller killed, {'mid-cell' if is_busy else 'idle'}"
    ranks.conclude(case, "controller", told_s, back_s)
