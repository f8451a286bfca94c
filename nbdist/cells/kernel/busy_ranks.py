"""Which ranks can take a cell now, and what to say where one cannot."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from nbdist.cells.kernel.interrupt import BEGIN_S
from nbdist.cluster.kernel.ranks import Ranks, RunningCell
from nbdist.core.failures import ranks_are
from nbdist.errors import RankBusy
from nbdist.hang.kernel.health import Health

BUSY_GRACE_S = 1.0
# A reply follows the end of its cell within milliseconds.
LOST_REPLY_S = 1.0
POLL_S = 0.01


class BusyRanks:
    """Which ranks run a cell, as far as the notebook has heard."""

    def __init__(self, ranks: Ranks, health: Health):
        self._ranks = ranks
        self._health = health

    def take(self, ranks: Sequence[int], cell: RunningCell) -> None:
        """Count ranks as running a cell from now on."""
        for rank in ranks:
            self._ranks.cells[rank] = (cell, time.monotonic())

    def end(self, rank: int, cell: RunningCell) -> None:
        """Count a rank as idle if this is the cell that it runs."""
        busy = self._ranks.cells.get(rank)
        if busy is not None and busy[0] is cell:
            self._ranks.ended_runs[rank] = cell.run_id
            del self._ranks.cells[rank]

    def interrupt_late(self, rank: int, cell: RunningCell) -> None:
        """Interrupt a rank that begins a cell only now that the notebook has stopped waiting."""

        def due() -> None:
            if rank in self.ranks_of(cell):
                self._ranks.interrupt(rank)

        threading.Timer(BEGIN_S, due).start()  # before that it may ignore an interrupt

    def running(self) -> list[RunningCell]:
        """The cells that run, each once."""
        return list({id(cell): cell for cell, _ in list(self._ranks.cells.values())}.values())

    def ranks_of(self, cell: RunningCell) -> tuple[int, ...]:
        """The ranks that run this cell."""
        running = list(self._ranks.cells.items())
        return tuple(sorted(rank for rank, (its_cell, _) in running if its_cell is cell))

    def check(self, ranks: Sequence[int]) -> None:
        """Refuse ranks that can take nothing now.

        Raises:
            NotRunning: After the ranks were stopped.
            RankGone: If one has ended.
            RankBusy: If one still runs an earlier cell, after a moment to come back in.
        """
        self._ranks.check_alive(ranks)
        self.free_silent()
        self._release_given_back()
        end_s = time.monotonic() + BUSY_GRACE_S
        # A rank may end its cell at any moment, in the client's thread.
        cells = self._ranks.cells
        while busy := {r: running for r in ranks if (running := cells.get(r)) is not None}:
            if time.monotonic() > end_s:
                first, since_s = next(iter(busy.values()))
                cell = "an earlier cell" if first.number is None else f"cell [{first.number}]"
                raise RankBusy(
                    f"{ranks_are(tuple(busy))} still running {cell}, for "
                    f"{time.monotonic() - since_s:.0f} s. Wait for it to end, choose other ranks "
                    "with %%rank, or replace them without their variables: "
                    f"{self._ranks.restart_verb(tuple(busy))}."
                )
            time.sleep(POLL_S)

    def free_silent(self) -> set[int]:
        """Count ranks as idle whose cell has ended without a reply; which ones.

        An interrupt in the moment of a cell's end can cost the reply. The call log has the end.
        """
        ended = {
            rank
            for rank, (cell, _) in list(self._ranks.cells.items())
            if self._health.has_ended(rank, cell.run_id, LOST_REPLY_S)
        }
        for rank in ended:
            self._ranks.free(rank)
        return ended

    def _release_given_back(self) -> None:
        """Break off collectives of interrupted cells that the notebook no longer waits for."""
        for rank, (cell, _) in list(self._ranks.cells.items()):
            log = self._health.log(rank)
            if cell.is_over and log is not None and log.run == cell.run_id and log.waiting:
                self._health.abort()
                return
