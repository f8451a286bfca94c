"""The cells of a kept run for a user who only looks on: read from journals, no rank is asked.

It never holds the run and never interrupts: it works beside the notebook that does.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path

from nbdist.cells import journal
from nbdist.cells.journal import CellHead, JournalReader
from nbdist.cells.kernel.cell_request import Sink
from nbdist.cells.kernel.kept_runs import is_here, journals
from nbdist.cells.line_merger import Bar, Line
from nbdist.cells.outputs import CellResult, Event, OutputReducer
from nbdist.cells.truncate import SHOWN_LINES
from nbdist.cluster.kernel import runs
from nbdist.cluster.run_owner import ELSEWHERE, KEPT, RUNNING, Run
from nbdist.core import host
from nbdist.core.failures import RankFailure, ranks_on_hosts
from nbdist.rpc.kernel.channel import Message

POLL_S = 0.05
# A rank begins a cell, and its journal, this long after the first one at most.
BEGUN_S = 1.0
PIECE_BYTES = 1 << 22


def newest(run: Run) -> CellHead | None:
    """The run's newest cell, as far as its journals are on this machine; None without one."""
    paths = journals(Path(run.folder)).values()
    heads = [head for path in paths if (head := journal.head_of(path)) is not None]
    return max(heads, key=lambda head: head.run, default=None)


def is_living(run: Run) -> bool:
    """Whether the run's ranks go on."""
    return runs.read(Path(run.folder)).state in {KEPT, RUNNING, ELSEWHERE}


def show(
    run: Run, head: CellHead, sink: Sink, *, shows_all: bool, follows: bool
) -> tuple[RankFailure, ...]:
    """Draw a cell, to its end if it `follows`; return the ranks' failures.

    It draws all earlier output of the cell, or the last SHOWN_LINES lines of it.
    """
    cell = _ShownCell(head, sink, shows_all=shows_all)
    has_pids, began_s = is_here(run), time.monotonic()
    try:
        while True:
            cell.open(journals(Path(run.folder)))
            has_news = cell.read()
            is_late = not follows or time.monotonic() > began_s + BEGUN_S
            if has_news:
                continue
            cell.catch_up()
            if is_late:
                cell.tell_unseen(run.hosts)
            if not follows or cell.is_over(has_pids=has_pids):
                return cell.close()
            time.sleep(POLL_S)
    finally:
        cell.release()


class _JournalFile(JournalReader):
    """One rank's journal of a cell; it stays open when the next cell begins another file."""

    def __init__(self, path: Path):
        super().__init__()
        self._file = path.open("rb")
        self._path = path
        self._was_cut_off = False
        self.take(self._file.readline())

    def read(self) -> list[Message]:
        """The messages that have come since."""
        messages = self.take(self._file.read(PIECE_BYTES))
        self.has_ended |= self.is_damaged  # nothing behind it can be shown
        return messages

    def is_cut_off(self, *, has_pids: bool) -> bool:
        """Whether the process was killed in the cell, or its file removed, now and a call ago.

        Its last output has been read between the two calls.
        """
        assert self.head is not None
        has_process = not has_pids or host.started(self.head.pid) is not None
        was_cut_off = self._was_cut_off
        self._was_cut_off = not has_process or journal.head_of(self._path) != self.head
        return was_cut_off and self._was_cut_off

    def close(self) -> None:
        self._file.close()


class _ShownCell:
    """A cell that is being drawn."""

    def __init__(self, head: CellHead, sink: Sink, *, shows_all: bool):
        self._head, self._sink = head, sink
        self._files: dict[int, _JournalFile] = {}
        self._unopened = set(head.ranks)
        self._reducer = OutputReducer(head.ranks)
        self._ended: set[int] = set()
        # Earlier output is drawn once all of it was read.
        self._earlier: deque[Event] | None = None if shows_all else deque(maxlen=SHOWN_LINES)
        self._bars: dict[str, Bar] = {}
        self._count = 0

    def open(self, paths: Mapping[int, Path]) -> None:
        """Take in the journals of ranks that have begun the cell by now."""
        for rank in sorted(self._unopened & paths.keys()):
            try:
                file = _JournalFile(paths[rank])
            except (OSError, ValueError):  # it has gone just now
                continue
            if file.head is not None and file.head.run == self._head.run:
                self._files[rank] = file
                self._unopened.discard(rank)
            else:
                file.close()

    def read(self) -> bool:
        """Draw what has come; whether anything has."""
        offsets = {rank: file.offset for rank, file in self._files.items()}
        pieces = {rank: file.read() for rank, file in self._files.items() if not file.has_ended}
        now_s = time.monotonic()
        for rank, message in journal.by_date(pieces):
            if _is_text(message):
                self._reducer.feed(rank, message, now_s)
        ended = {
            rank: file
            for rank, file in self._files.items()
            if file.has_ended and rank not in self._ended
        }
        for rank in sorted(ended):
            self._reducer.end(rank, now_s)
        self._ended.update(ended)
        self._draw(self._reducer.due(now_s))
        self._sink.draw([Line("stderr", f"{note}\n") for note in journal.loss_notes(ended)])
        return any(file.offset > offsets[rank] for rank, file in self._files.items())

    def _draw(self, events: Iterable[Event]) -> None:
        if self._earlier is None:
            self._sink.draw([*events])
            return
        for event in events:
            if isinstance(event, Line):
                lines = event.text.splitlines(keepends=True)
                self._earlier.extend(Line(event.stream, line) for line in lines)
                self._count += len(lines)
            elif isinstance(event, Bar):
                self._bars[event.stream] = event
            else:
                self._earlier.append(event)
                self._count += 1

    def catch_up(self) -> None:
        """Draw the end of the earlier output; from now on all is drawn."""
        if self._earlier is None:
            return
        earlier, self._earlier = self._earlier, None
        if skipped := self._count - len(earlier):
            note = f"... {skipped:,} lines before these; `nbdist logs` shows all\n"
            self._sink.draw([Line("stderr", note)])
        self._sink.draw([*earlier, *self._bars.values()])

    def tell_unseen(self, hosts: tuple[str, ...]) -> None:
        """Name the ranks whose journals are not on this machine, once."""
        unseen = {rank: hosts[rank] for rank in sorted(self._unopened) if rank < len(hosts)}
        for rank in self._unopened:  # the others' lines do not wait for it
            self._reducer.end(rank, time.monotonic())
        self._unopened.clear()
        if unseen:
            note = f"not shown: {ranks_on_hosts(unseen)}, whose journals are not on this machine\n"
            self._sink.draw([Line("stderr", note)])

    def is_over(self, *, has_pids: bool) -> bool:
        """Whether no rank that is seen here says anything more; once all was read."""
        for file in self._files.values():
            file.has_ended = file.has_ended or file.is_cut_off(has_pids=has_pids)
        has_ended = all(file.has_ended for file in self._files.values())
        return has_ended and not self._unopened

    def close(self) -> tuple[RankFailure, ...]:
        """Draw the rest; how ranks have failed."""
        now_s = time.monotonic()
        for rank in self._head.ranks:
            self._reducer.end(rank, now_s)
        self._sink.draw(self._reducer.due(now_s))
        self._sink.close(CellResult(()))
        failures = [self._reducer.failure(rank) for rank in self._head.ranks]
        return tuple(failure for failure in failures if failure is not None)

    def release(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()


def _is_text(message: Message) -> bool:
    """Whether a terminal can show anything of a message."""
    return message["header"]["msg_type"] != "display_data" or "text/plain" in (
        message["content"].get("data", ())
    )
