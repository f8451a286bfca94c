"""A lost rank comes back on its host or on another one; the others keep what they have."""

import os
import signal
from pathlib import Path

import pytest

from nbdist.cluster.hosts import Host
from nbdist.cluster.kernel.start import StartOptions
from nbdist.notebook.session import Session
from tests.support.ranks import SUM, processes_under, session_of, texts, until

MAKE = "kept = [rank]; pair = dist.new_group([0, 1])"
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


@pytest.mark.parametrize(
    ("places", "lost"), [((1, 1), (0,)), pytest.param((1, 2), (0, 1), marks=pytest.mark.more_hosts)]
)
def test_killed_ranks_come_back_on_their_hosts(
    runs: Path, monkeypatch: pytest.MonkeyPatch, places: tuple[int, int], lost: tuple[int, ...]
) -> None:
    """Also the one whose process had the store; variables and groups of the others go on.

    The numbers: 1 + 2 and so on over all ranks, 1 + 2 over the pair.
    """
    monkeypatch.setenv("NBDIST_PRELOAD", "0")
    hosts = tuple(Host(name, count) for name, count in zip("ab", places, strict=True))
    n = sum(places)
    options = StartOptions(None, profile="pretended", gpus="none", hosts=hosts)
    with session_of(options) as session:
        texts(session, MAKE)
        before = session.topology
        for rank in lost:
            end_rank(session, rank)
            done = session.restart([rank])
            assert done.ranks == (rank,)
            assert texts(session, SUM) == [f"{n * (n + 1) / 2}\n"] * n
            assert texts(session, PAIR_SUM) == ["3.0\n"] * n
        after = session.topology
        seen = texts(session, PLACE)
        kept = texts(session, "print(globals().get('kept'))")

    for rank, (old, new) in enumerate(zip(before.ranks, after.ranks, strict=True)):
        assert (old.pid == new.pid) == (rank not in lost)
    at = [(host.name, local) for host in hosts for local in range(host.places)]
    assert [(place.host, place.local_rank) for place in after.ranks] == at
    numbers = {host.name: (str(host.places), str(index)) for index, host in enumerate(hosts)}
    assert seen == [f"{[str(local), *numbers[host]]}\n" for host, local in at]
    assert kept == ["None\n" if rank in lost else f"[{rank}]\n" for rank in range(n)]
    assert processes_under(runs) == []
