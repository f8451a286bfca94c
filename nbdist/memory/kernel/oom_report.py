"""Asks ranks whose memory ran out what held it, and what would make room."""

from __future__ import annotations

from collections.abc import Callable

from nbdist.cluster.kernel.ranks import Ranks
from nbdist.core.failures import RankFailure, plain
from nbdist.memory import oom_message, oom_text
from nbdist.memory.oom_remedies import OomReport
from nbdist.rpc.kernel.functions import RankFunction

# The rank has looked already, before its reply: what is asked for lies ready.
ASK_S = 10.0

last_shortage: RankFunction[[], OomReport | None] = RankFunction("nbdist.memory.rank.oom_hook:last")


def advice(ranks: Ranks, note: Callable[[int], object], failure: RankFailure) -> str:
    """What to do about a shortage of memory, as lines of text; empty of any other failure.

    Args:
        ranks: Their cell has ended on the failure's rank.
        note: Called with a rank that has noted what was in use.
        failure: Of that cell.
    """
    message = oom_message.parse_oom(failure.name, failure.message)
    if message is None and not oom_message.has_oom(plain("\n".join(failure.traceback))):
        return ""
    report, why = _ask(ranks, failure.rank)
    if report is not None:
        note(failure.rank)
        return oom_text.block(report)
    return "" if message is None else oom_text.block_without_report(failure.rank, message, why)


def _ask(ranks: Ranks, rank: int) -> tuple[OomReport | None, str]:
    """What a rank knows, or why nothing is known."""
    if not ranks.is_connected(rank):
        return None, "the rank has ended"
    if ranks.is_busy(rank):
        return None, "the rank is still running"
    try:
        return last_shortage(ranks.call, rank).result(ASK_S), "nothing was recorded"
    except TimeoutError:
        return None, f"the rank did not answer within {ASK_S:.0f} s"
    except Exception as error:  # noqa: BLE001  # the cell's own error is the one to be raised
        return None, str(getattr(error, "evalue", error))
