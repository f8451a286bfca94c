"""A file beside a rank with its cell's messages: written as they are sent, read anywhere.

A kept rank writes each of its messages there before it sends it, so that nothing is lost when the
notebook's kernel ends in the middle of a cell. The file begins with a line of JSON (`CellHead`);
records follow, each a letter, a length, and content of that length: a message (its parts), the
reply, and the end, which is the last.
"""

from __future__ import annotations

import json
import os
import struct
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from nbdist.core.units import exact_size

# In the run's folder, one file per rank: that of its newest cell.
FOLDER = "journal"
MESSAGE, REPLY, END = b"m", b"r", b"e"
_RECORD = struct.Struct("<cI")
_PART = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class CellHead:
    """A cell that a kept rank runs, or has run last.

    Attributes:
        run: The cell's number on these ranks.
        number: The notebook's number; None where there was none.
        ranks: The ranks that run it.
        began_s: When, by the clock of the rank's host that does not jump (monotonic).
        pid: The rank's process.
        at_s: When it began, in Unix time.
    """

    run: int
    number: int | None
    code: str
    ranks: tuple[int, ...]
    began_s: float
    pid: int
    at_s: float = 0.0

    @property
    def label(self) -> str:
        """`cell [7]`."""
        return "a cell" if self.number is None else f"cell [{self.number}]"

    def line(self) -> bytes:
        """The head as the journal's first line."""
        return json.dumps(asdict(self)).encode() + b"\n"


def pack_message(parts: Sequence[bytes]) -> bytes:
    """A message as a record; its parts are header, metadata and content as JSON, then buffers."""
    body = b"".join(_PART.pack(len(part)) + part for part in parts)
    return _RECORD.pack(MESSAGE, len(body)) + body


def pack_reply(reply: dict[str, Any]) -> bytes:
    """The cell's reply as a record: its status, the error in it, and when it came."""
    names = ("status", "ename", "evalue", "traceback")
    content = {name: reply[name] for name in names if name in reply}
    body = json.dumps({**content, "ended_s": time.monotonic()}).encode()
    return _RECORD.pack(REPLY, len(body)) + body


def pack_end(lost_bytes: int = 0) -> bytes:
    """The record behind which nothing comes, with how much could not be written."""
    body = json.dumps({"lost_bytes": lost_bytes}).encode()
    return _RECORD.pack(END, len(body)) + body


@dataclass(frozen=True, slots=True)
class Glance:
    """The state of a journal's cell without its text.

    Attributes:
        status: The reply's, "ok" or "error"; empty before it, or where it could not be written.
        has_ended: Nothing more comes.
        changed_s: When something was written last, in Unix time.
    """

    head: CellHead
    status: str
    has_ended: bool
    changed_s: float


def head_of(path: Path) -> CellHead | None:
    """The cell that a journal is of; None where there is none."""
    try:
        with path.open("rb") as file:
            return _head(file)
    except (OSError, ValueError):
        return None


def _head(file: BinaryIO) -> CellHead | None:
    reader = JournalReader()
    reader.take(file.readline())
    return reader.head


def glance(path: Path) -> Glance | None:
    """The cell that a journal is of, and how far it is; None where there is none.

    Only where records begin is read, so that it is quick however long the text is.
    """
    status = ""
    try:
        with path.open("rb") as file:
            if (head := _head(file)) is None:
                return None
            changed_s = os.fstat(file.fileno()).st_mtime
            # A record that a rank is just writing is cut: it counts from the next time on.
            while len(start := file.read(_RECORD.size)) == _RECORD.size:
                kind, length = _RECORD.unpack(start)
                if kind == END:
                    return Glance(head, status, has_ended=True, changed_s=changed_s)
                if kind == REPLY:
                    body = file.read(length)
                    status = json.loads(body)["status"] if len(body) == length else ""
                else:
                    file.seek(length, os.SEEK_CUR)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return Glance(head, status, has_ended=False, changed_s=changed_s)


class JournalReader:
    """Takes a journal in pieces, as they are read; a piece may end anywhere.

    Attributes:
        head: The cell that it is of; None before its first line is whole.
        offset: How many bytes were taken.
        reply: The cell's reply with `ended_s`, when it came by the clock of the rank's host.
        has_ended: Nothing more comes.
        lost_bytes: How much of the output could not be written.
        is_damaged: Something else is in the file than a rank writes: what follows cannot be read.
    """

    def __init__(self) -> None:
        self.head: CellHead | None = None
        self.offset = 0
        self.reply: dict[str, Any] | None = None
        self.has_ended = False
        self.lost_bytes = 0
        self.is_damaged = False
        self._rest = b""

    def take(self, piece: bytes) -> list[Mapping[str, Any]]:
        """Return the messages that this piece completes; none any more behind a damaged record."""
        self.offset += len(piece)
        messages: list[Mapping[str, Any]] = []
        if not self.is_damaged:
            try:
                self._read(self._rest + piece, messages)
            except (ValueError, KeyError, TypeError, struct.error):
                self.is_damaged, self._rest = True, b""
        return messages

    def _read_head(self, data: bytes) -> int:
        """Read the first line and return the offset of the records; 0 before the line is whole."""
        if not b"{".startswith(data[:1]):
            raise ValueError(f"{data[:1]!r} begins no journal")
        line, newline, _ = data.partition(b"\n")
        if not newline:
            return 0
        head = json.loads(line)
        self.head = CellHead(**{**head, "ranks": tuple(head["ranks"])})
        return len(line) + 1

    def _read(self, data: bytes, messages: list[Mapping[str, Any]]) -> None:
        at = self._read_head(data) if self.head is None else 0
        while self.head is not None and len(data) >= at + _RECORD.size:
            kind, length = _RECORD.unpack_from(data, at)
            if kind not in {MESSAGE, REPLY, END}:
                raise ValueError(f"{kind!r} begins no record")
            end = at + _RECORD.size + length
            if len(data) < end:
                break
            body = data[at + _RECORD.size : end]
            if kind == MESSAGE:
                messages.append(_unpack_message(body))
            elif kind == REPLY:
                self.reply = json.loads(body)
            else:
                self.has_ended, self.lost_bytes = True, json.loads(body)["lost_bytes"]
            at = end
        self._rest = data[at:]


def by_date(
    pieces: Mapping[int, Iterable[Mapping[str, Any]]],
) -> list[tuple[int, Mapping[str, Any]]]:
    """The messages of ranks, each with its rank, in the order in which they were sent.

    Equal lines of ranks that are far apart in time would not be merged.
    """
    messages = [(rank, message) for rank, piece in pieces.items() for message in piece]
    return sorted(messages, key=lambda entry: entry[1]["header"].get("date", ""))


def loss_notes(readers: Mapping[int, JournalReader]) -> list[str]:
    """A sentence for each rank of whose output something is lost, in its file or before it."""
    notes = []
    for rank, reader in sorted(readers.items()):
        if reader.lost_bytes:
            size = exact_size(reader.lost_bytes)
            notes.append(
                f"rank {rank} could not write down {size} of its output: no space was left on its "
                "disk"
            )
        if reader.is_damaged:
            notes.append(
                f"the file with the output of rank {rank} is damaged: what the rank has said in "
                "this cell from there on is lost, its variables are not"
            )
    return notes


def _unpack_message(body: bytes) -> dict[str, Any]:
    parts = []
    at = 0
    while at < len(body):
        (length,) = _PART.unpack_from(body, at)
        at += _PART.size + length
        parts.append(body[at - length : at])
    header, metadata, content = (json.loads(part) for part in parts[:3])
    return {"header": header, "metadata": metadata, "content": content, "buffers": parts[3:]}
