"""Checks of all ranks' models, asked for between cells, or every so many steps."""

from __future__ import annotations

from collections.abc import Sequence

from nbdist.cluster.kernel.ranks import Ranks
from nbdist.errors import OptionError
from nbdist.lints import replicas
from nbdist.lints.replicas import ModelLook, ReplicaCheck, ReplicaDifference
from nbdist.rpc.kernel.functions import RankFunction

# Every element of every tensor is read once, on a GPU in milliseconds for a GB.
LOOK_S = 300.0
SET_S = 30.0

look: RankFunction[[], tuple[ModelLook, ...]] = RankFunction("nbdist.lints.rank.replicas:look")
spread: RankFunction[[Sequence[ReplicaDifference]], list[float]] = RankFunction(
    "nbdist.lints.rank.replicas:spread"
)
set_every: RankFunction[[int], None] = RankFunction("nbdist.lints.rank.check_every:set_every")
begin_trace_nan: RankFunction[[], None] = RankFunction("nbdist.lints.rank.trace_nan:trace_nan")


def check(ranks: Ranks) -> ReplicaCheck:
    """Compare the models of all ranks, which are idle, and look for NaN and inf.

    Collectives only where something differs.

    Raises:
        RankGone, RankBusy, NotRunning, Interrupted: As for a cell.
        NbdistError: What a rank raised.
    """
    ranks.recover_if_needed()
    looks = ranks.call_all(look, deadline_s=LOOK_S)
    result = replicas.compare(dict(zip(ranks.ranks, looks, strict=True)))
    wanted = result.to_measure
    if not wanted:
        return result
    sizes = ranks.call_all(spread, wanted, deadline_s=LOOK_S, is_collective=True)
    return result.measured(dict(zip(wanted, sizes[0], strict=True)))


def check_every(ranks: Ranks, every: int) -> None:
    """Let all ranks look before every Nth step of an optimizer; 0 ends it.

    Raises:
        OptionError: Below 0.
        RankGone, RankBusy, NotRunning: As for a cell.
    """
    if every < 0:
        raise OptionError(f"--every {every}: use 1 or more steps, or 0 to end it.")
    ranks.call_all(set_every, every, deadline_s=SET_S)


def trace_nan(ranks: Ranks) -> None:
    """Let the next cell report the first module whose output is not finite.

    Raises:
        RankGone, RankBusy, NotRunning: As for a cell.
    """
    ranks.call_all(begin_trace_nan, deadline_s=SET_S)
