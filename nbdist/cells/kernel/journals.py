"""The cell that kept ranks went on with while no notebook held them, read from their journals.

A journal has all of a cell from its beginning, so the output after an attach comes from there
alone until the cell has ended: nothing is missing, and nothing comes twice.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from threading import Thread
from typing import Any

import ipyparallel

from nbdist.cells import journal
from nbdist.cells.journal import CellHead, JournalReader
from nbdist.cells.kernel.cell_run import CellRun
from nbdist.cluster.kernel.ranks import Ranks
from nbdist.core import host
from nbdist.errors import NbdistError
from nbdist.hang.kernel.health import Health
from nbdist.rpc.kernel.functions import RankFunction

POLL_S = 0.03
# Bytes of a rank at a time: the first lines of a long output do not wait for the last.
PIECE_BYTES = 1 << 18
ANSWER_S = 10.0
# The number of the newest cell whose end a notebook has shown.
SHOWN = "shown"
# The reply of a cell whose journal ends without one, or whose rank has not written one.
NO_REPLY = "the rank could not write down how its cell ended: no space is left on its disk"
DAMAGED = (
    "the file with this rank's output is damaged, so it is not known how its cell ended. "
    "The rank and its variables are there"
)
# How long a cell has ended by the rank's call log when its journal counts as cut off.
CUT_OFF_S = 2.0

read: RankFunction[[int, int], bytes | None] = RankFunction("journal")

# Called with a rank, its reply, and when that was sent (None for now), from any thread.
Done = Callable[[int, Any, float | None], None]


class Journals:
    """The journals of all ranks: files where this host has them, else asked for."""

    def __init__(self, ranks: Ranks, health: Health):
        self._ranks = ranks
        self._health = health
        self._folder = ranks.cluster.run_dir / journal.FOLDER

    def note_shown(self, run: int) -> None:
        """Note that a notebook has shown a cell to its end: it is not shown after an attach."""
        with contextlib.suppress(OSError):
            self._folder.mkdir(mode=0o700, exist_ok=True)
            # In place: a file that is made anew would be written to the disk first.
            number = os.open(self._folder / SHOWN, os.O_CREAT | os.O_WRONLY, 0o600)
            try:
                os.pwrite(number, f"{run:020d}".encode(), 0)
            finally:
                os.close(number)

    def heads(self) -> tuple[CellHead, ...]:
        """The newest cell of each rank, each cell once, the newest of all first."""
        readers = {rank: self._begun(rank) for rank in self._ranks.ranks}
        heads = [reader.head for reader in readers.values() if reader.head is not None]
        damaged = [rank for rank, its in readers.items() if its.is_damaged and its.head is None]
        by_run = {head.run: head for head in (*self._stand_ins(damaged), *heads)}
        return tuple(by_run[run] for run in sorted(by_run, reverse=True))

    def was_shown(self, run: int) -> bool:
        """Whether a notebook has shown a cell to its end, or a later one."""
        with contextlib.suppress(OSError, ValueError):
            return run <= int((self._folder / SHOWN).read_text())
        return False

    def running_ranks(self, head: CellHead) -> tuple[int, ...]:
        """The ranks that still run a cell, by their call logs."""
        logs = {rank: self._health.log(rank) for rank in head.ranks}
        return tuple(
            rank
            for rank, log in logs.items()
            if log is not None and log.run == head.run and log.state == "running"
        )

    def _begun(self, rank: int) -> JournalReader:
        reader = JournalReader()
        reader.take(self._piece(rank, 0, 0) or b"")
        return reader

    def _stand_ins(self, ranks: Sequence[int]) -> list[CellHead]:
        """Cells from the call logs of ranks whose journals do not have theirs."""
        members: dict[int, tuple[int, ...]] = {}
        for rank in ranks:
            log = self._health.log(rank)
            if log is not None and log.run:
                members[log.run] = (*members.get(log.run, ()), rank)
        now_s = time.monotonic()
        return [CellHead(run, None, "", by, now_s, 0) for run, by in members.items()]

    def _piece(self, rank: int, run: int, offset: int) -> bytes | None:
        """A piece of a rank's journal of a cell (0: the newest), from an offset; None without."""
        with contextlib.suppress(OSError), (self._folder / str(rank)).open("rb") as file:
            file.seek(offset)
            return file.read(PIECE_BYTES)
        asked: Future[bytes | None] | None = self._ranks.ask(
            lambda call, rank: read(call, rank, run, offset), rank
        )
        if asked is None:
            return None
        with contextlib.suppress(TimeoutError, NbdistError):
            return asked.result(ANSWER_S)
        return b""

    def feed(self, cell: CellRun, ranks: Sequence[int], done: Done) -> None:
        """Hand a cell's messages and replies of ranks to it; in a thread of its own."""
        Thread(
            target=self._feed, args=(cell, ranks, done), name="nbdist-journal", daemon=True
        ).start()

    def _feed(self, cell: CellRun, ranks: Sequence[int], done: Done) -> None:
        readers, run = {rank: JournalReader() for rank in ranks}, cell.run_id
        while readers and not self._ranks.is_stopped:
            pieces = {
                rank: self._piece(rank, run, reader.offset) or b""
                for rank, reader in readers.items()
            }
            messages = journal.by_date(
                {rank: readers[rank].take(piece) for rank, piece in pieces.items()}
            )
            if messages:
                cell.messages(messages)
            for rank, piece in pieces.items():
                if readers[rank].has_ended or self._is_cut_off(rank, run, piece):
                    reader = readers.pop(rank)
                    if notes := journal.loss_notes({rank: reader}):
                        cell.note(notes)
                    reply = reader.reply
                    ended_s = reply.get("ended_s") if reply and self._is_here(rank) else None
                    problem = DAMAGED if reader.is_damaged else NO_REPLY
                    done(rank, _reply(reply, problem), ended_s)
            if not any(pieces.values()):
                time.sleep(POLL_S)

    def _is_cut_off(self, rank: int, run: int, piece: bytes) -> bool:
        """Whether nothing more will come: the rank has ended its cell without a word of it."""
        return not piece and self._health.has_ended(rank, run, CUT_OFF_S)

    def _is_here(self, rank: int) -> bool:
        """Whether the rank's clock is this host's."""
        return self._ranks.topology.ranks[rank].host == host.this_machine().host


def _reply(reply: dict[str, Any] | None, problem: str) -> Any:
    """A reply as a client makes it: an exception where the cell failed, or where there is none."""
    if reply is None:
        return NbdistError(problem)
    if reply["status"] == "ok":
        return reply
    return ipyparallel.error.RemoteError(
        reply.get("ename", "Error"), reply.get("evalue", ""), "\n".join(reply.get("traceback", ()))
    )
