"""A rank that hangs on its GPU comes back, keeps its variables, and its groups work again.

Written without a GPU at hand. Like the code that they test they are not verified on one.
"""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nbdist.cluster.kernel.start import StartOptions
from nbdist.errors import NbdistError
from nbdist.notebook.session import Session
from tests.support.ranks import session_of, temporary_folder

# Runs beside the cell, as the notebook's request does, once the cell is stuck.
ABORT_LATER = """
import threading, time
from nbdist.hang.rank import nccl_abort as nccl
told = {}
def abort_later():
    time.sleep(2)
    told["groups"] = nccl.abort()
threading.Thread(target=abort_later, daemon=True).start()
"""
RENEW = """
from datetime import timedelta
from torch.distributed import distributed_c10d as c10d
for pg, name in list(c10d._world.pg_names.items()):
    fresh = dist.FileStore(os.path.join(os.environ["NBDIST_RUN"], "renewed"), world_size)
    nccl.renew(pg, dist.PrefixStore(f"{name}/", fresh), timedelta(minutes=1))
"""
AFTER = "x = torch.ones(3, device=device); dist.all_reduce(x); print(kept, x.tolist(), told)"


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Callable[[int], Session]]:
    """Start so many ranks, each on its own GPU; they end with the test."""
    with temporary_folder(tmp_path / "tmp"), contextlib.ExitStack() as stack:
        yield lambda n: stack.enter_context(session_of(StartOptions(n)))


@pytest.mark.gpu(1)
def test_the_group_of_one_rank_is_aborted_and_renewed(ranks: Callable[[int], Session]) -> None:
    """While a kernel spins on the GPU the cell is voided; then the same group adds up again."""
    session = ranks(1)
    session.run("import os; kept = 7; dist.all_reduce(torch.ones(1, device=device))")
    session.run(ABORT_LATER)
    with pytest.raises(NbdistError, match="is void"):
        # About five seconds at 2 GHz; its end and not the abort lets go of the main thread here.
        session.run(
            "torch.cuda._sleep(10_000_000_000)\nx = torch.ones(1, device=device)\n"
            "dist.all_reduce(x)\nvalue = x.item()",
            timeout_s=60,
        )
    session.run(RENEW)
    (rank,) = session.run(AFTER).ranks

    assert rank.text.strip() == "7 [1.0, 1.0, 1.0] {'groups': 1}"


@pytest.mark.gpu(2)
def test_a_missing_call_is_aborted_and_the_groups_renewed(
    ranks: Callable[[int], Session],
) -> None:
    """Rank 0 waits on its GPU for rank 1, which never calls: it comes back, and all goes on.

    Rank 1 is voided as well: it may have received from rank 0 what rank 0 never computed.
    """
    session = ranks(2)
    session.run(
        "import os; kept = 7 + rank; pair = dist.new_group([0, 1])\n"
        "dist.all_reduce(torch.ones(1, device=device), group=pair)"
    )
    session.run(ABORT_LATER)
    with pytest.raises(NbdistError, match="is void"):
        session.run(
            "import time\nx = torch.ones(1, device=device)\n"
            "if rank == 0:\n    dist.all_reduce(x, group=pair)\n    value = x.item()\n"
            "else:\n    while 'groups' not in told:\n        time.sleep(0.01)",
            timeout_s=60,
        )
    session.run(RENEW)
    printed = [rank.text.strip() for rank in session.run(AFTER).ranks]
    bound = [rank.text.strip() for rank in session.run("print('value' in globals())").ranks]

    assert [text.split(" {")[0] for text in printed] == ["7 [2.0, 2.0, 2.0]", "8 [2.0, 2.0, 2.0]"]
    assert all("'groups': 2" in text for text in printed)
    assert bound == ["False", "False"]
