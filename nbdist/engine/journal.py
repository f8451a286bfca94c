"""The journal of a kept rank: each message of its cell is written to a file before it is sent.

A notebook that attaches later reads the cell's messages there, however the old kernel ended. Only
cells that bring CELL_KEPT are written down; ranks that are not kept pay nothing.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from nbdist.cells import journal
from nbdist.cells.journal import CellHead
from nbdist.core.rank import this_rank
from nbdist.rpc.rank.cell_hooks import CellContext
from nbdist.rpc.wire import CELL_KEPT, CELL_NUMBER, CELL_RUN

# The delimiter of a message on the wire: the receiver, then this, then its parts.
DELIMITER = b"<IDS|MSG>"
IDLE = b'"idle"'
# Bytes at a time of a journal that is read from another host.
PIECE_BYTES = 1 << 22


class Journal:
    """The file of one cell; from any thread.

    Attributes:
        lost_bytes: The number of bytes that were not written, as the disk is full.
    """

    def __init__(self, path: Path, head: CellHead, message_id: str):
        """Begin the file anew; a reader of the one before still has that.

        Raises:
            OSError: If it cannot be written.
        """
        self.path, self.lost_bytes = path, 0
        self._parent = f'"{message_id}"'.encode()
        self._lock = threading.Lock()
        path.parent.mkdir(mode=0o700, exist_ok=True)
        # Not in the place of the old one: ext4 would write it to the disk first, for milliseconds.
        path.unlink(missing_ok=True)
        self._file = path.open("xb", buffering=0)
        self._file.write(head.line())

    def note_message(self, frames: Sequence[Any]) -> None:
        """Write a message down if it is of this cell; its last one ends the journal."""
        parts = [bytes(frame) for frame in frames]
        start = parts.index(DELIMITER) + 2  # behind the signature
        header, parent, *rest = parts[start:]
        if self._parent not in parent:
            return
        self._write(journal.pack_message([header, *rest]))
        if b'"status"' in header and IDLE in rest[1]:
            self.end()

    def note_reply(self, reply: dict[str, Any] | None) -> None:
        """Write down how the cell ended."""
        if reply is not None:
            self._write(journal.pack_reply(reply))

    def end(self) -> None:
        """Nothing more comes."""
        self._write(journal.pack_end(self.lost_bytes))
        with self._lock:
            self._file.close()

    def _write(self, record: bytes) -> None:
        with self._lock:
            if self._file.closed:
                return
            at = self._file.tell()
            try:
                if self._file.write(record) == len(record):
                    return
            except OSError:
                pass
            # The disk is full. Later records may be shorter: the reply, and the end.
            self.lost_bytes += len(record)
            self._file.truncate(at)
            self._file.seek(at)


class _WrittenDown:
    """A rank's iopub socket that writes what it sends into the journal first."""

    def __init__(self, socket: Any):
        self._socket = socket

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)

    def send_multipart(self, frames: Sequence[Any], *args: Any, **options: Any) -> Any:
        if (cell := _newest) is not None:
            with contextlib.suppress(ValueError):  # no message of a kernel
                cell.note_message(frames)
        return self._socket.send_multipart(frames, *args, **options)


_newest: Journal | None = None


@contextlib.contextmanager
def around_cell(cell: CellContext) -> Iterator[None]:
    """Write down what a kept cell says, and how it ends."""
    global _newest  # noqa: PLW0603  # one cell at a time
    ranks = cell.metadata.get(CELL_KEPT)
    if ranks is None:
        yield
        return
    _newest = _begin(cell, tuple(ranks))
    try:
        yield
    finally:
        if _newest is not None:
            _newest.note_reply(cell.reply)


def _begin(cell: CellContext, ranks: tuple[int, ...]) -> Journal | None:
    request = cell.kernel.get_parent("shell")
    head = CellHead(
        cell.metadata[CELL_RUN],
        cell.metadata.get(CELL_NUMBER),
        request["content"]["code"],
        ranks,
        time.monotonic(),
        os.getpid(),
        time.time(),
    )
    path = Path(os.environ["NBDIST_RUN"]) / journal.FOLDER / str(this_rank().place.rank)
    # All messages of a rank go through this socket, output of its forked children too.
    sender = getattr(cell.kernel.iopub_socket, "io_thread", cell.kernel.iopub_socket)
    if not isinstance(sender.socket, _WrittenDown):
        sender.socket = _WrittenDown(sender.socket)
    try:
        return Journal(path, head, request["header"]["msg_id"])
    except OSError:  # a full disk: whoever attaches is told that there is none
        return None


def read(run: int, offset: int) -> bytes | None:
    """A piece of the journal of a cell from here; None where that cell's is not there.

    From any thread: for a notebook that does not see this host's files.
    """
    path = Path(os.environ["NBDIST_RUN"]) / journal.FOLDER / str(this_rank().place.rank)
    with contextlib.suppress(OSError, ValueError), path.open("rb") as file:
        reader = journal.JournalReader()
        for _ in reader.take(file.readline()):
            pass
        # A damaged journal is handed out: the notebook reports the damage.
        is_other = reader.head is None or (run and reader.head.run != run)
        if is_other and not reader.is_damaged:
            return None
        file.seek(offset)
        return file.read(PIECE_BYTES)
    return None
