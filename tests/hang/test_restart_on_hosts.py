"""A lost rank comes back on its host or on another one; the others keep what they have."""

import os
import signal
from pathlib import Path

from nbdist.cluster.hosts import Host
from nbdist.cluster.kernel.start import StartOptions
from nbdist.notebook.session import Session
from tests.support.ranks import SUM, processes_under, session_of, texts, until

MAKE = """
from torch.nn.parallel import DistributedDataParallel as DDP
kept = [rank]
pair = dist.new_group([0, 1])
torch.manual_seed(1)
model = DDP(torch.nn.Linear(2, 1))
sgd = torch.optim.SGD(model.parameters(), 0.1)
"""
STEP = """
sgd.zero_grad()
model(torch.ones(1, 2) * (rank + 1)).sum().backward()
sgd.step()
print(round(model.module.weight.sum().item(), 5))
"""
PAIR_SUM = (
    "total = torch.ones(1) * (rank + 1)\n"
    "if rank < 2: dist.all_reduce(total, group=pair)\nprint(total.item())"
)
PLACE = (
    "import os; print([os.environ[v] for v in ('LOCAL_RANK', 'LOCAL_WORLD_SIZE', 'GROUP_RANK')])"
)


def end_rank(session: Session, rank: int) -> None:
    os.kill(session.topology.ranks[rank].pid, signal.SIGKILL)
    assert until(lambda: rank in session.cluster.processes.exits)


def test_killed_ranks_come_back_on_their_hosts(runs: Path) -> None:
    """Also the one whose process had the store; models and groups of the others go on.

    The numbers: 1 + 2 + 3 over all ranks, 1 + 2 over the pair.
    """
    hosts = (Host("a", 1), Host("b", 2))
    options = StartOptions(None, profile="pretended", gpus="none", hosts=hosts)
    with session_of(options) as session:
        texts(session, MAKE)
        trained = texts(session, STEP)
        before = session.topology
        for rank in (0, 1):
            end_rank(session, rank)
            done = session.restart([rank])
            assert done.ranks == (rank,)
            assert texts(session, SUM) == ["6.0\n"] * 3
            assert texts(session, PAIR_SUM) == ["3.0\n", "3.0\n", "3.0\n"]
            texts(session, MAKE.replace("pair =", "#"), ranks=str(rank))
            session.sync_model(2)
            again = texts(session, STEP)
            assert len(set(again)) == 1
            assert again != trained
            trained = again
        after = session.topology
        places = texts(session, PLACE)
        printed = texts(session, "print(kept)")

    assert [p.pid == q.pid for p, q in zip(before.ranks, after.ranks, strict=True)] == [
        False,
        False,
        True,
    ]
    assert [(p.host, p.local_rank) for p in after.ranks] == [("a", 0), ("b", 0), ("b", 1)]
    assert places == ["['0', '1', '0']\n", "['0', '2', '1']\n", "['1', '2', '1']\n"]
    assert printed == ["[0]\n", "[1]\n", "[2]\n"]
    assert processes_under(runs) == []
