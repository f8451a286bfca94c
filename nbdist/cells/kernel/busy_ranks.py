"""Which ranks can take a cell now, and what to say where one cannot."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from nbdist.cells.kernel.cell_run import CellRun
from nbdist.cells.kernel.interrupt import BEGIN_S
from nbdist.cluster.kernel import outside
from nbdist.core.failures import ranks_are, ranks_phrase
from nbdist.core.ranks import rank_label
from nbdist.errors import NotRunning, RankBusy, RankGone
from nbdist.rpc.kernel.gather import END_KNOWN_S

if TYPE_CHECKING:
    from nbdist.cells.kernel.session import Session

BUSY_GRACE_S = 1.0
# A reply follows the end of its cell within milliseconds.
LOST_REPLY_S = 1.0
POLL_S = 0.01


class BusyRanks:
    """Which of a session's ranks run a cell, as far as the notebook has heard."""

    def __init__(self, session: Session):
        self._session = session
        self._busy: dict[int, tuple[CellRun, float]] = {}

    def take(self, ranks: Sequence[int], one: CellRun) -> None:
        """Count ranks as running a cell from now on."""
        for rank in ranks:
            self._busy[rank] = (one, time.monotonic())

    def free(self, rank: int) -> None:
        """Count a rank as idle, whatever cell it runs."""
        self._busy.pop(rank, None)

    def end(self, rank: int, one: CellRun) -> None:
        """Count a rank as idle if this is the cell that it runs."""
        busy = self._busy.get(rank)
        if busy is not None and busy[0] is one:
            del self._busy[rank]

    def interrupt_late(self, rank: int, one: CellRun) -> None:
        """Interrupt a rank that begins a cell only now that nobody waits for it any more."""

        def due() -> None:
            if rank in self.ranks_of(one):
                self._session.interrupt(rank)

        threading.Timer(BEGIN_S, due).start()  # before that it may ignore an interrupt

    def is_busy(self, rank: int) -> bool:
        """Whether a rank runs a cell, or did when it ended."""
        return rank in self._busy

    def cell_of(self, rank: int) -> tuple[int | None, float] | None:
        """(the notebook's cell number, since when) of a rank's cell; None if it is idle."""
        busy = self._busy.get(rank)
        return None if busy is None else (busy[0].request.number, busy[1])

    def running(self) -> list[CellRun]:
        """The cells that run, each once."""
        return list({id(one): one for one, _ in list(self._busy.values())}.values())

    def ranks_of(self, one: CellRun) -> tuple[int, ...]:
        """The ranks that run this cell."""
        return tuple(sorted(rank for rank, (own, _) in list(self._busy.items()) if own is one))

    def check(self, ranks: Sequence[int]) -> None:
        """Refuse ranks that can take nothing now.

        Raises:
            NotRunning: After the ranks were stopped.
            RankGone: If one has ended.
            RankBusy: If one still runs an earlier cell, after a moment to come back in.
        """
        self.check_alive(ranks)
        self._check_idle(ranks)

    def check_alive(self, ranks: Sequence[int]) -> None:
        """Refuse ranks that have ended, busy or not.

        Raises:
            NotRunning, RankGone: As `check`.
        """
        session = self._session
        if session.is_stopped:
            told = outside.told(session.cluster.run_dir) or "These ranks were stopped"
            raise NotRunning(f"{told}. {outside.WHAT_NOW}")
        gone = {r: session.health.end_of(r) for r in ranks if not session.is_connected(r)}
        if gone:
            alive = [rank for rank in session.ranks if session.is_connected(rank)]
            others = f"%%rank [{rank_label(alive)}] runs on the others; " if alive else ""
            verb = "have" if len(gone) > 1 else "has"
            how = ", ".join(
                f"rank {rank}: {end or 'its connection is lost'}" for rank, end in gone.items()
            )
            raise RankGone(
                f"{ranks_phrase(tuple(gone))} {verb} ended ({how}). %dist_restart "
                f"{rank_label(tuple(gone))} brings it back; {others}%dist_reset starts all afresh."
            )

    def check_death(self, ranks: Sequence[int]) -> None:
        """Say that one of the ranks has ended, which a failed call may tell before its process.

        Raises:
            NotRunning, RankGone: As `check`; nothing if all live on.
        """
        end_s = time.monotonic() + END_KNOWN_S
        while all(map(self._session.is_connected, ranks)) and time.monotonic() < end_s:
            time.sleep(POLL_S)
        self.check_alive(ranks)

    def free_silent(self) -> set[int]:
        """Count ranks as idle whose cell has ended without a reply; which ones.

        An interrupt in the moment of a cell's end can cost the reply. The black box has the end.
        """
        ended = {
            rank
            for rank, (one, _) in list(self._busy.items())
            if self._session.health.has_ended(rank, one.run_id, LOST_REPLY_S)
        }
        for rank in ended:
            self.free(rank)
        return ended

    def _release_given_back(self) -> None:
        """Break off collectives of cells that nobody waits for any more: they were interrupted."""
        health = self._session.health
        for rank, (one, _) in list(self._busy.items()):
            box = health.box(rank)
            if one.is_over and box is not None and box.run == one.run_id and box.waiting:
                health.abort()
                return

    def _check_idle(self, ranks: Sequence[int]) -> None:
        """Give ranks that were interrupted a moment to come back before refusing."""
        self.free_silent()
        self._release_given_back()
        end_s = time.monotonic() + BUSY_GRACE_S
        # A rank may end its cell at any moment, in the client's thread.
        while busy := {r: own for r in ranks if (own := self._busy.get(r)) is not None}:
            if time.monotonic() > end_s:
                one, since_s = next(iter(busy.values()))
                number = one.request.number
                cell = "an earlier cell" if number is None else f"cell [{number}]"
                raise RankBusy(
                    f"{ranks_are(tuple(busy))} still running {cell}, for "
                    f"{time.monotonic() - since_s:.0f} s. Wait for it to end, choose other ranks "
                    "with %%rank, or start afresh with %dist_reset."
                )
            time.sleep(POLL_S)
