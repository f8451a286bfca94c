"""The strategy that counts on the ranks, as it is to be configured elsewhere."""

from __future__ import annotations

from nbdist.cluster.kernel.ranks import Ranks
from nbdist.config.emit import Setting
from nbdist.rpc.kernel.functions import RankFunction
from nbdist.strategy.choice import Strategy

ASK_S = 30.0

block_classes: RankFunction[[], tuple[str, ...]] = RankFunction("nbdist.config.rank:block_classes")


def setting(ranks: Ranks, choice: Strategy, hosts: int | None, device: str) -> Setting:
    """Setting of the ranks now: strategy, hosts, device, and the blocks of rank 0's models.

    On so many hosts as the ranks are on where `hosts` is None, on their device where that is "".

    Raises:
        RankGone, RankBusy, NotRunning: As for a cell.
    """
    topology, first = ranks.topology, ranks.topology.ranks[0]
    several = topology.n_hosts if hosts is None else hosts
    first_host = first.host if topology.n_hosts > 1 else ""
    device = device or first.device.split(":")[0]
    return Setting(choice, several, device, blocks(ranks), first_host=first_host)


def blocks(ranks: Ranks) -> tuple[str, ...]:
    """The class names of the blocks of rank 0's models.

    Raises:
        RankGone, RankBusy, NotRunning: As for a cell.
    """
    [names] = ranks.call_all(block_classes, deadline_s=ASK_S, ranks=[0])
    return tuple(names)
