"""A receive from whichever rank sends first ends by an abort, though Gloo has no socket for it."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nbdist.hang.rank import process_groups
from tests.programs.rank import broken_off_on_0, is_interrupted, rank, refusal, total, wait_for
from tests.support.torch_ranks import on_ranks

pytestmark = [
    pytest.mark.skipif(not Path("/proc/self/fdinfo").is_dir(), reason="needs /proc"),
]


def transferred() -> list[Any]:
    """What rank 0 gets of rank 1, twice, and from whom."""
    fresh = torch.full((3,), float(rank))
    if rank == 1:
        dist.send(fresh, 0)
        dist.send(fresh, 0, tag=3)
        return []
    first = [dist.recv(fresh), fresh.tolist()]
    work = dist.irecv(fresh.zero_(), tag=3)
    return [*first, work.wait(), work._source_rank(), fresh.tolist()]


@on_ranks(2)
def test_a_receive_from_any_rank_ends_and_the_next_one_gets_its_own() -> None:
    """recv, irecv, in a group, and one issued long before; the old tensor is not written to."""
    pair, old = dist.new_group([0, 1]), torch.zeros(3)
    issued = dist.irecv(torch.zeros(3), tag=9) if rank == 0 else None
    waits = (
        lambda: dist.recv(old),
        lambda: dist.irecv(old, tag=3).wait(),
        lambda: dist.recv(old, group=pair),
    )
    for generation, wait in enumerate(waits, 1):
        name, _ = broken_off_on_0(wait, generation)
        assert name == ("" if rank else "RuntimeError"), generation
        process_groups.recover(generation)
        assert transferred() == ([] if rank else [1, [1.0] * 3, True, 1, [1.0] * 3])
        assert total() == 3.0
    if issued is not None:
        assert "until the wait was aborted" in refusal(issued.wait, RuntimeError)
    assert old.tolist() == [0.0] * 3


@on_ranks(2)
def test_an_interrupt_comes_at_the_end_and_takes_no_message_away() -> None:
    """As in C++: what was received is there, the next receive gets the next message."""
    if rank == 1:
        wait_for("pressed", [0])
        dist.send(torch.ones(3), 0)
        dist.send(torch.full((3,), 2.0), 0)
        return
    x = torch.zeros(3)
    assert is_interrupted(lambda: dist.recv(x))
    assert x.tolist() == [1.0] * 3
    assert dist.recv(x) == 1
    assert x.tolist() == [2.0] * 3
    late = refusal(lambda: dist.irecv(x, tag=1).wait(timedelta(seconds=0.2)), RuntimeError)
    assert "Timed out waiting 200ms" in late
