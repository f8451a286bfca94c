"""Each fault on shared ranks is told in time, ends as promised, and costs no variable."""

import signal
import time

import pytest

from tests.faults.fault import Fault, cases, happen_as_promised, short_and_whole
from tests.faults.table import FAULTS
from tests.support import processes
from tests.support.faults import ABORT_S, DEATH_TOLD_S, GRACE_S, LOAD_S, TOLD_S, Ranks
from tests.support.ranks import until

_EXIT_SOON = "%%rank[1]\nimport threading\nthreading.Timer(0.3, os._exit, (3,)).start()"
_ENDS = {
    "SIGKILL": (signal.SIGKILL, "signal SIGKILL"),
    "SIGSEGV": (signal.SIGSEGV, "signal SIGSEGV"),
    "os._exit": (None, "exit code 3"),
}
# All ranks agree when to stop, however long one of them was away.
_AGREED_LOOP = """%%distributed
over = torch.zeros(1)
go()
while not over.item():
    if rank == 0 and os.path.exists('end'):
        over += 1
    dist.all_reduce(over)
print('passed')"""
_STOPS = {
    "SIGSTOP mid-cell": "%%distributed\ngo()\nuntil_end()\nprint('passed')",
    "SIGSTOP in a collective": _AGREED_LOOP,
}
# Rank 1 comes late to a collective, by far more than the grace, in three ways.
_LATE_S = GRACE_S + TOLD_S + ABORT_S + LOAD_S
_LATE = {
    "in a sleep": "time.sleep({s})",
    "in a loop": "end_s = time.monotonic() + {s}\n    while time.monotonic() < end_s: pass",
    "in C code": "end_s = time.monotonic() + {s}\n    while time.monotonic() < end_s: big @ big",
}


@pytest.mark.parametrize(("n", "fault"), short_and_whole(FAULTS))
def test_a_fault(n: int, fault: Fault, ranks: Ranks) -> None:
    """It is told once, in time; the cell fails as promised; survivors and models go on."""
    outcome = happen_as_promised(ranks, fault)

    if fault.dead:
        # A group that the dead rank is no member of works before the restart.
        survivors = [rank for rank in range(n) if rank not in fault.dead]
        code = "(dist.all_reduce(x := torch.ones(1), group=rest), x.item())[1]"
        assert ranks.values(code, survivors) == dict.fromkeys(survivors, len(survivors))
        ranks.revive(fault.dead)
    ranks.conclude(fault.name, fault.kind, outcome.told_s, outcome.back_s)


def _until_status(ranks: Ranks, text: str, timeout_s: float) -> float:
    """How long until %dist_status says it."""
    began_s = time.monotonic()
    assert until(lambda: text in ranks.ok("%dist_status").visible, timeout_s), text
    return time.monotonic() - began_s


@pytest.mark.parametrize(("n", "name"), cases((2, "SIGKILL"), (2, 4), _ENDS))
def test_a_rank_that_ends_while_idle(n: int, name: str, ranks: Ranks) -> None:
    """The status and the next cell name it, survivors work on, and a restart makes all whole."""
    which, how = _ENDS[name]
    if which is None:
        ranks.ok(_EXIT_SOON)
        assert processes.wait_gone([ranks.engines[1]]) == []
    else:
        ranks.engines[1].send_signal(which)
    told_s = _until_status(ranks, f"ended ({how}", 10)
    cell = ranks.kernel.run("%%distributed\nkept")
    ranks.revive([1])

    cell.check_failure("RankGone", f"rank 1: {how}", "%dist_restart")
    assert told_s < DEATH_TOLD_S + ranks.load_s
    ranks.conclude(f"{name} idle", "death", told_s, None)


@pytest.mark.parametrize(("n", "name"), cases((2, "SIGSTOP in a collective"), (2, 4), _STOPS))
def test_a_stopped_rank(n: int, name: str, ranks: Ranks) -> None:
    """It is told, nothing is aborted however long it lasts, and after SIGCONT the cell passes."""
    handle = ranks.kernel.start(_STOPS[name])
    ranks.begin_s(handle, n)
    stopped_s = time.monotonic()
    ranks.engines[1].suspend()
    try:
        ranks.kernel.wait_output(handle, "rank 1 is stopped", 20)
        told_s = time.monotonic() - stopped_s
        signal.sigtimedwait([], GRACE_S + TOLD_S + ABORT_S)  # in which nothing may happen
        so_far = ranks.kernel.so_far(handle)
    finally:
        (ranks.folder / "end").touch()
        began_s = time.monotonic()
        ranks.engines[1].resume()
    cell = ranks.finish(handle)
    back_s = time.monotonic() - began_s

    assert so_far.status == "running", so_far.visible
    assert cell.status == "ok", cell.visible
    assert "passed" in cell.text
    lines = [line for line in cell.stderr.splitlines() if line.startswith("rank 1 is stopped")]
    assert len(lines) == 1, cell.stderr
    assert "abort" not in cell.stderr
    assert told_s < DEATH_TOLD_S + ranks.load_s
    ranks.conclude(name, "stop", told_s, back_s)


@pytest.mark.faults
@pytest.mark.parametrize("n", [2, 4])
def test_a_rank_that_is_stopped_while_idle(n: int, ranks: Ranks) -> None:
    """The status says so, and a cell waits for SIGCONT."""
    ranks.engines[1].suspend()
    try:
        told_s = _until_status(ranks, "stopped", 10)
        handle = ranks.kernel.start("%%distributed\nprint(rank)")
        ranks.kernel.wait_output(handle, "rank 1 is stopped", 20)
    finally:
        ranks.engines[1].resume()
    cell = ranks.finish(handle)

    assert cell.status == "ok", cell.visible
    ranks.conclude("SIGSTOP idle", "stop", told_s, None)


@pytest.mark.parametrize("n", cases((2,), (2, 4)))
def test_a_wrong_small_shape(n: int, ranks: Ranks) -> None:
    """Whether Gloo hangs or mixes the numbers up, both shapes are named and nothing is lost."""
    cell, back_s = ranks.run_fault(
        "%%distributed\ngo()\ndist.all_reduce(torch.ones(4 if rank == 1 else 3))", n
    )

    assert "float32[3]" in cell.stderr, cell.visible
    assert "float32[4]" in cell.stderr, cell.visible
    assert cell.status == "ok" or cell.failure.ename in {"Deadlock", "DistributedError"}
    assert back_s < TOLD_S + GRACE_S + ABORT_S + ranks.load_s
    ranks.conclude("wrong small shape", "shape", None, back_s)


@pytest.mark.parametrize("n", cases((2,), (2, 4)))
def test_a_wrong_large_shape(n: int, ranks: Ranks) -> None:
    """Gloo ends a rank's process; both shapes are told, survivors keep all, a restart heals.

    It writes over the smaller rank's memory, so that one may lose its last line, and either of
    two signals ends it.
    """
    handle = ranks.kernel.start(
        "%%distributed\ngo()\ndist.all_reduce(torch.ones(10 if rank == 1 else 10**6))"
    )
    began_s = ranks.begin_s(handle)
    ranks.kernel.wait_output(handle, "ended (signal SIG", 30)
    told_s = time.monotonic() - began_s
    cell = ranks.finish(handle)
    back_s = time.monotonic() - began_s
    dead = [rank for rank, process in ranks.engines.items() if not processes.is_alive(process)]
    ranks.revive(dead)

    cell.check_failure("DistributedError", r"ended \(signal SIG(ABRT|SEGV)")
    for text in ("called all_reduce with different shapes", "float32[10]", "float32[1000000]"):
        assert text in cell.failure.evalue + cell.stderr, cell.visible
    ranks.conclude("wrong large shape", "shape", told_s, back_s)


@pytest.mark.parametrize(("n", "name"), cases((2, "in a sleep"), (2, 4), _LATE))
def test_a_slow_but_honest_rank(n: int, name: str, ranks: Ranks) -> None:
    """Far beyond the grace nothing is aborted, nobody is blamed, and the sum is right."""
    late = _LATE[name].format(s=_LATE_S)
    cell = ranks.kernel.run(
        f"%%distributed\nbig = torch.ones(300, 300)\nif rank == 1:\n    {late}\n"
        "total = torch.full((3,), rank + 1.0)\ndist.all_reduce(total)\nprint(total.tolist())",
        _LATE_S + 20,
    )

    assert cell.status == "ok", cell.visible
    assert f"[0-{n - 1}] {[n * (n + 1) / 2] * 3}" in cell.text
    assert "abort" not in cell.stderr
    assert "without calling" not in cell.stderr
    assert cell.seconds > _LATE_S
    ranks.conclude(f"slow but honest, {name}", "honest", None, None)
