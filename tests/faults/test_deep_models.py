"""A deep model under every strategy trains on as if ten broken steps in a row had not been."""

import pytest

from tests.support.deep_model import DEEP_MODEL
from tests.support.faults import Ranks

pytestmark = pytest.mark.faults

_BREAKS = 10
_BROKEN = """%%distributed
import time
def how():
    if {how!r} == 'stop':
        print('go', time.monotonic(), flush=True)
        time.sleep(3600)
    raise (Left if {how!r} == 'hang' else ValueError)('broken off')
if rank == {rank}:
    Block.breaks = ({block}, {phase!r})
try:
    forward_backward()
except Left:
    pass
"""


@pytest.mark.parametrize("n", [2])
@pytest.mark.parametrize(
    "typed", ["ddp", "zero1", "fsdp", "fsdp --shard grad-op", "tp", "pp", "cp"]
)
def test_ten_broken_steps_under_every_strategy(typed: str, ranks: Ranks) -> None:
    """Forward and backward, at each block, on either rank; by exception, by stop and by hang."""
    ranks.ok(f"%dist_strategy {typed}")
    ranks.ok(DEEP_MODEL)
    ranks.ok("%%distributed\nmodel, optimizer = fresh()")
    expected = [ranks.values("train_step()") for _ in range(_BREAKS + 1)]
    ranks.ok("%%distributed\nmodel, optimizer = fresh()")
    losses = [ranks.values("train_step()")]
    for number in range(_BREAKS):
        how = ("exception", "hang", "stop")[number % 3]
        block = number % 6
        # Of a pipeline's two stages the rank that has the block breaks off.
        rank = block // 3 if typed == "pp" else number // 3 % 2
        phase = ("forward", "backward")[number % 2]
        handle = ranks.kernel.start(_BROKEN.format(how=how, rank=rank, block=block, phase=phase))
        if how == "stop":
            ranks.begin_s(handle)
            ranks.kernel.interrupt()
        cell = ranks.finish(handle)
        assert cell.error is not None, (number, how, cell.visible)
        losses.append(ranks.values("train_step()"))

    assert len({losses[0] for losses in expected}) == _BREAKS + 1  # it does train
    for now, then in zip(losses, expected, strict=True):
        assert now == pytest.approx(then, rel=1e-6)
    ranks.ok("%dist_strategy ddp")
    ranks.conclude(f"ten broken steps of a deep model, {typed}", "repeat", None, None)
