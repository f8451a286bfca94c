"""Reads each rank's activity from its call log: nobody is asked, no other thread disturbed."""

from __future__ import annotations

from collections.abc import Collection

from nbdist.cells.kernel import status
from nbdist.cluster.kernel.ranks import Ranks
from nbdist.hang import text as hang_text
from nbdist.hang import wait_graph
from nbdist.hang.kernel.health import CallLogFiles, Health
from nbdist.hang.records import CallLog, RankView
from nbdist.monitor.samples import Doing

# An answer about a wait that C++ began is believed for this long.
LOOK_S = 2.0


class ActivityReader:
    """Reads the logs of a session's ranks with maps of its own, for one thread."""

    def __init__(self, ranks: Ranks, health: Health):
        self._ranks = ranks
        self._health = health
        self._files = CallLogFiles(ranks.cluster.run_dir / "boxes")

    def of(self, rank: int, now_s: float, stopped: Collection[int], *, is_here: bool) -> Doing:
        """Activity of a rank at this moment of the monotonic clock, without asking it.

        Where its log is no file of this host its newest answer is taken. Which processes a signal
        has stopped Health.stopped tells.
        """
        ranks, health = self._ranks, self._health
        log = self._files.read(rank) if is_here else health.log(rank)
        snapshot, looked_s = health.newest_snapshot(rank)
        is_new = looked_s >= wait_graph.last_event_s(log) and now_s < looked_s + LOOK_S
        view = RankView(rank, "running", "", log, snapshot if is_new else None, looked_s)
        state, text = status.situation(ranks, health, rank, view, stopped)
        if state == "dead" and is_here and not ranks.end_of(rank):
            # As while a controller that has ended is replaced.
            state, text = "unknown", "its process is alive, but its connection is lost"
        cell = ranks.running_cell(rank) if state in {"running", "waiting"} else None
        since_s = _since_s(state, log, cell)
        cell_s = now_s - cell[1] if cell else 0.0
        # Sends and recvs count as well.
        newest_first = reversed(log.calls if log else ())
        last = next((call for call in newest_first if call.state == "done"), None)
        if last is None:
            return Doing(state, text, since_s, cell_s)
        op = hang_text.call_signature(hang_text.act_of(last))
        age_s = max(0.0, now_s - (last.ended_s or now_s))
        return Doing(state, text, since_s, cell_s, op, age_s)


def _since_s(
    state: str, log: CallLog | None, cell: tuple[int | None, float] | None
) -> float | None:
    if state == "waiting":  # since when C++ waits nobody has written down
        return log.waiting.began_s if log is not None and log.waiting is not None else None
    if cell is not None:
        return cell[1]
    return log.since_s if state == "idle" and log is not None else None
