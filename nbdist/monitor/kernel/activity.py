"""What each rank does, read from its black box: nobody is asked, and no other thread disturbed."""

from __future__ import annotations

from collections.abc import Collection

from nbdist.cells.kernel import status
from nbdist.cluster.kernel.ranks import Ranks
from nbdist.hang import text as hang_text
from nbdist.hang import wait_graph
from nbdist.hang.kernel.health import BoxFiles, Health
from nbdist.hang.records import CallLog, RankView
from nbdist.monitor.samples import Doing

# An answer about a wait that C++ began is believed for this long.
LOOK_S = 2.0


class ActivityReader:
    """Reads the boxes of a session's ranks with maps of its own, for one thread."""

    def __init__(self, ranks: Ranks, health: Health):
        self._ranks = ranks
        self._health = health
        self._files = BoxFiles(ranks.cluster.run_dir / "boxes")

    def of(self, rank: int, now_s: float, stopped: Collection[int], *, is_here: bool) -> Doing:
        """What a rank does at this moment of the monotonic clock, without asking it.

        Where its box is no file of this host its newest answer is taken. Which processes a signal
        has stopped Health.stopped tells.
        """
        ranks, health = self._ranks, self._health
        box = self._files.read(rank) if is_here else health.box(rank)
        snapshot, looked_s = health.newest_snapshot(rank)
        is_new = looked_s >= wait_graph.last_event_s(box) and now_s < looked_s + LOOK_S
        view = RankView(rank, "running", "", box, snapshot if is_new else None, looked_s)
        state, text = status.situation(ranks, health, rank, view, stopped)
        if state == "dead" and is_here and not ranks.end_of(rank):
            # As while a controller that has ended is replaced.
            state, text = "unknown", "its process is alive, but its connection is lost"
        cell = ranks.running_cell(rank) if state in {"running", "waiting"} else None
        since_s = _since_s(state, box, cell)
        cell_s = now_s - cell[1] if cell else 0.0
        # Sends and recvs count as well.
        newest_first = reversed(box.calls if box else ())
        last = next((call for call in newest_first if call.state == "done"), None)
        if last is None:
            return Doing(state, text, since_s, cell_s)
        op = hang_text.call_signature(hang_text.act_of(last))
        age_s = max(0.0, now_s - (last.ended_s or now_s))
        return Doing(state, text, since_s, cell_s, op, age_s)


def _since_s(
    state: str, box: CallLog | None, cell: tuple[int | None, float] | None
) -> float | None:
    if state == "waiting":  # since when C++ waits nobody has written down
        return box.waiting.began_s if box is not None and box.waiting is not None else None
    if cell is not None:
        return cell[1]
    return box.since_s if state == "idle" and box is not None else None
