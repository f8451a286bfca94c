"""The strategy that counts on the ranks, as it is to be configured elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from nbdist.config.emit import SCRIPT, Setting
from nbdist.rpc.kernel.functions import Caller

if TYPE_CHECKING:
    from nbdist.cells.kernel.session import Session

ASK_S = 30.0
_CLASSES = "nbdist.config.rank:block_classes"


def block_classes(call: Caller, engine: int) -> Future[tuple[str, ...]]:
    """The classes of the prepared models' blocks."""
    return call(engine, _CLASSES)


REMOTE_FUNCTIONS: dict[Callable[..., Future[Any]], str] = {block_classes: _CLASSES}


def setting(
    session: Session, *, hosts: int | None = None, script: str = SCRIPT, clip: float = 0.0
) -> Setting:
    """What counts on the ranks now: strategy, hosts, devices, and the models' blocks.

    Args:
        session: Its ranks; all are asked for the strategy.
        hosts: On how many; None for as many as they are on.
        script: What is to be started.
        clip: The norm that gradients are clipped to, for DeepSpeed; 0 for none.

    Raises:
        RankGone, RankBusy, NotRunning: As for a cell.
        NbdistError: Ranks have different strategies.
    """
    choice = session.strategy.current()
    [blocks] = session.call_all(block_classes, deadline_s=ASK_S, ranks=[0])
    first = session.topology.ranks[0]
    several = session.topology.n_hosts if hosts is None else hosts
    return Setting(
        choice,
        several,
        first.device.split(":")[0],
        tuple(blocks),
        clip,
        script,
        first.host if session.topology.n_hosts > 1 else "",
    )
