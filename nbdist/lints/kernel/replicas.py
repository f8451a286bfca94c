"""Checks of all ranks' models, asked for between cells, or every so many steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbdist.errors import OptionError
from nbdist.lints import replicas
from nbdist.lints.kernel import remote_check
from nbdist.lints.replicas import ReplicaCheck

if TYPE_CHECKING:
    from nbdist.cells.kernel.session import Session

# Every element of every tensor is read once, on a GPU in milliseconds for a GB.
LOOK_S = 300.0
SET_S = 30.0


def check(session: Session) -> ReplicaCheck:
    """Compare the models of all ranks, and look for NaN and inf.

    Args:
        session: Its ranks, all idle. Collectives only where something differs.

    Raises:
        RankGone, RankBusy, NotRunning, Interrupted: As for a cell.
        NbdistError: What a rank raised.
    """
    session.upkeep.recover_if_needed()
    told = session.call_all(remote_check.look, deadline_s=LOOK_S)
    found = replicas.compare(dict(zip(session.ranks, told, strict=True)))
    wanted = found.to_measure
    if not wanted:
        return found
    sizes = session.call_all(remote_check.spread, wanted, deadline_s=LOOK_S, is_collective=True)
    return found.measured(dict(zip(wanted, sizes[0], strict=True)))


def check_every(session: Session, every: int) -> None:
    """Let all ranks look before each so manieth step of an optimizer; 0 ends it.

    Raises:
        OptionError: Below 0.
        RankGone, RankBusy, NotRunning: As for a cell.
    """
    if every < 0:
        raise OptionError(f"--every {every}: use 1 or more steps, or 0 to end it.")
    session.call_all(remote_check.set_every, every, deadline_s=SET_S)


def trace_nan(session: Session) -> None:
    """Let the next cell tell the first module whose output is not finite.

    Raises:
        RankGone, RankBusy, NotRunning: As for a cell.
    """
    session.call_all(remote_check.trace_nan, deadline_s=SET_S)
