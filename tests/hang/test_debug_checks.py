"""--debug detail: torch's own checks name a wrong shape or order, and nothing else changes."""

from pathlib import Path

import pytest

from nbdist.cells.outputs import CellResult
from nbdist.cluster.kernel.start import StartOptions
from nbdist.errors import DistributedError
from nbdist.notebook.session import Session
from tests.support.ranks import session_of, temporary_folder

BACKEND = "type(dist.group.WORLD._get_backend(torch.device('cpu'))).__name__"
# What a notebook does with groups. With torch's own way of checking, DDP ends the process here.
WORK = """
import warnings
from torch.distributed.fsdp import fully_shard
x = torch.ones(3)
dist.all_reduce(x)
pair = dist.new_group([0, 1])
y = torch.ones(2) * (rank + 1)
dist.all_reduce(y, group=pair)
torch.manual_seed(0)
ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1))
ddp(torch.ones(2, 3) * (rank + 1)).sum().backward()
sharded = fully_shard(torch.nn.Linear(4, 4))
sharded(torch.ones(2, 4)).sum().backward()
objects = [None, None]
dist.all_gather_object(objects, rank)
dist.barrier()
print(x.tolist(), y.tolist(), ddp.module.weight.grad.tolist(), objects)
"""
# The gradient of the sum over two rows of ones and of twos, averaged over the ranks: (2 + 4) / 2.
WORKED = "[2.0, 2.0, 2.0] [3.0, 3.0] [[3.0, 3.0, 3.0]] [0, 1]"
ALONE = "work = torch.ones(3); dist.all_reduce(work); print(work.tolist())"


def printed(result: CellResult) -> set[str]:
    return {rank.text.strip() for rank in result.ranks}


def test_detail_names_shape_and_order_and_the_ranks_go_on(tmp_path: Path) -> None:
    """Two wrong calls fail on both ranks with what differs; right ones work before and after.

    Nothing but the cells' own output is shown, so the checks bring no noise.
    """
    options = StartOptions(2, gpus="none", debug="detail")
    with temporary_folder(tmp_path / "tmp"), session_of(options) as session:
        worked = printed(session.run(WORK))
        kind = printed(session.run(f"print({BACKEND}, dist.get_debug_level())"))
        with pytest.raises(DistributedError) as shape:
            session.run("x = torch.ones(3 + rank)\ndist.all_reduce(x)", timeout_s=30)
        with pytest.raises(DistributedError) as order:
            session.run(
                "x = torch.ones(3)\ndist.all_reduce(x) if rank else dist.broadcast(x, 0)",
                timeout_s=30,
            )
        with pytest.raises(DistributedError) as grouped:
            session.run("dist.all_reduce(torch.ones(5 + rank), group=pair)", timeout_s=30)
        after = printed(session.run(ALONE))

    assert worked == {WORKED}
    assert kind == {"_ProcessGroupWrapper DebugLevel.DETAIL"}
    assert "rank 0 is in all_reduce(float32[3])" in str(shape.value)
    assert "rank 1 is in all_reduce(float32[4])" in str(shape.value)
    assert "rank 0 is in broadcast(float32[3])" in str(order.value)
    assert "rank 1 is in all_reduce(float32[3])" in str(order.value)
    assert "rank 1 is in all_reduce(float32[6])" in str(grouped.value)
    assert after == {"[2.0, 2.0, 2.0]"}


def test_without_it_nothing_is_checked(pair: Session) -> None:
    """The same work gives the same numbers, with torch's plain backend and no variable set."""
    worked = printed(pair.run(WORK))
    kind = printed(
        pair.run(f"import os; print({BACKEND}, os.environ.get('TORCH_DISTRIBUTED_DEBUG'))")
    )

    assert worked == {WORKED}
    assert kind == {"ProcessGroupGloo None"}


def test_ranks_have_the_variables_of_nccl_and_the_users_win(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is not set is given; what the notebook has set reaches the rank as it is."""
    monkeypatch.setenv("NCCL_ASYNC_ERROR_HANDLING", "1")
    monkeypatch.setenv("TORCH_NCCL_ENABLE_MONITORING", "1")
    options = StartOptions(1, gpus="none", debug="info")
    names = "import os; print(sorted((k, v) for k, v in os.environ.items() if 'NCCL_' in k"
    with temporary_folder(tmp_path / "tmp"), session_of(options) as session:
        (variables,) = printed(session.run(f"{names} and 'IFNAME' not in k))"))
        level = printed(session.run("print(dist.get_debug_level())"))

    assert variables == str(
        [
            ("NCCL_ASYNC_ERROR_HANDLING", "1"),
            ("TORCH_NCCL_DUMP_ON_TIMEOUT", "0"),
            ("TORCH_NCCL_ENABLE_MONITORING", "1"),
            ("TORCH_NCCL_PROPAGATE_ERROR", "0"),
            ("TORCH_NCCL_RETHROW_CUDA_ERRORS", "0"),
            ("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "0"),
        ]
    )
    assert level == {"DebugLevel.INFO"}
