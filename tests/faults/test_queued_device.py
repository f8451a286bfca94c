"""The faults of ranks whose device works off a queue, as GPUs do, with NCCL's manners."""

from collections.abc import Callable

import pytest

from tests.faults.fault import Fault, cases, happen_as_promised, short_and_whole
from tests.faults.table import QUEUED, QUEUED_DEATHS
from tests.support.faults import Ranks


@pytest.mark.parametrize(("n", "fault"), short_and_whole(QUEUED))
def test_a_fault(n: int, fault: Fault, queued_ranks: Ranks) -> None:
    """As on Gloo: it is told once, in time, aborted, and ranks and models go on."""
    outcome = happen_as_promised(queued_ranks, fault)

    queued_ranks.conclude(fault.name, fault.kind, outcome.told_s, outcome.back_s)


@pytest.mark.parametrize(("n", "fault"), cases((), (2, 4), QUEUED[:1]))
def test_a_hang_of_the_newer_backend(n: int, fault: Fault, own_ranks: Callable[..., Ranks]) -> None:
    """It is told, aborted and renewed with its kind, whose recorder hears of ends again."""
    ranks = own_ranks(n, queued="QueuedNccl2")
    happen_as_promised(ranks, fault)
    cell = ranks.ok(
        "%%distributed\n"
        "kind = type(dist.group.WORLD._get_backend(device)).__name__\n"
        "dist.all_reduce(x)\nx.sum().item()\n"
        "from nbdist.hang.rank import main_thread\n"
        "print(kind, main_thread.device_calls()[-1].is_pending)"
    )

    assert cell.text.strip() == f"[0-{n - 1}] QueuedNccl2 False"


@pytest.mark.parametrize("n", [2])
def test_a_busy_device_is_no_hang(n: int, queued_ranks: Ranks) -> None:
    """Every rank waits long for work that all have called; one leaves a call that nobody awaits."""
    cell = queued_ranks.ok(
        "%%distributed\n"
        "queued_device.kernel(3.0)\ndist.all_reduce(total := torch.ones(1, device=device))\n"
        "print(total.item())\n"
        "work = dist.all_reduce(total, async_op=True)"
    )
    later = queued_ranks.ok("%%distributed\nwork.wait()\nprint(total.item())")

    assert (cell.text.strip(), cell.stderr) == (f"[0-1] {n}.0", "")
    assert later.text.strip() == f"[0-1] {n * n}.0"
    queued_ranks.conclude("queued, busy device", "queued", None, None)


@pytest.mark.parametrize("n", [2])
def test_a_device_that_has_failed_is_named(n: int, queued_ranks: Ranks) -> None:
    """Its rank cannot recover, and says so before anybody connects; the others keep everything."""
    broken = "the GPU of rank(s) 1 cannot be used any more by its process: CUDA error: device-side"
    cell = queued_ranks.kernel.run(
        "%%distributed\nif rank == 1:\n    queued_device.device_assert()\n    x.sum().item()\n"
        "dist.all_reduce(x)\nx.sum().item()",
        60,
    )
    next_cell = queued_ranks.kernel.run("%%distributed\npass")

    assert cell.failure.ename == "DistributedError"
    assert "rank 1 raised DeviceError: CUDA error: device-side assert" in cell.failure.evalue
    for message in (cell.failure.evalue, next_cell.failure.evalue):
        assert broken in message
        assert "%dist_restart 1 replaces it; the other ranks keep theirs" in message
        assert "%dist_reset" not in message


@pytest.mark.parametrize(("n", "fault"), cases((), (2, 4), QUEUED_DEATHS))
def test_a_death(n: int, fault: Fault, queued_ranks: Ranks) -> None:
    """It is told as on Gloo; who waits for the dead rank on a core is back, with its variables.

    No new rank takes its place here: a process that begins has no such device.
    """
    happen_as_promised(queued_ranks, fault)

    survivors = [rank for rank in range(n) if rank not in fault.dead]
    assert queued_ranks.are_kept(survivors)
