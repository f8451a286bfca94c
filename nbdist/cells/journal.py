"""What one rank's cell has said, in a file beside the rank: written as it is sent, read anywhere.

A kept rank writes each of its messages there before it sends it, so that nothing is lost when the
notebook's kernel ends in the middle of a cell. The file begins with a line of JSON (`CellHead`);
records follow, each a letter, the length of what follows, and that: a message (its parts), the
reply, and the end, behind which nothing comes.
"""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

# In the run's folder, one file per rank: that of its newest cell.
FOLDER = "journal"
MESSAGE, REPLY, END = b"m", b"r", b"e"
_RECORD = struct.Struct("<cI")
_PART = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class CellHead:
    """A cell that a kept rank runs, or has run last.

    Attributes:
        run: Its number on these ranks.
        number: The notebook's; None where there was none.
        ranks: Those that run it.
        began_s: When, by the clock of the rank's host that does not jump (monotonic).
        pid: The rank's process.
    """

    run: int
    number: int | None
    code: str
    ranks: tuple[int, ...]
    began_s: float
    pid: int

    def line(self) -> bytes:
        """The head as the journal's first line."""
        return json.dumps(asdict(self)).encode() + b"\n"


@dataclass(frozen=True, slots=True)
class Record:
    """One record: a raw message, or a reply with its status, or the end with what was lost."""

    kind: bytes
    content: dict[str, Any]


def pack_message(parts: Sequence[bytes]) -> bytes:
    """A message as a record; its parts are header, metadata and content as JSON, then buffers."""
    body = b"".join(_PART.pack(len(part)) + part for part in parts)
    return _RECORD.pack(MESSAGE, len(body)) + body


def pack_reply(reply: dict[str, Any]) -> bytes:
    """The cell's reply as a record: its status, the error that it tells of, and when it came."""
    names = ("status", "ename", "evalue", "traceback")
    content = {name: reply[name] for name in names if name in reply}
    body = json.dumps({**content, "ended_s": time.monotonic()}).encode()
    return _RECORD.pack(REPLY, len(body)) + body


def pack_end(lost_bytes: int = 0) -> bytes:
    """The record behind which nothing comes, with how much could not be written."""
    body = json.dumps({"lost_bytes": lost_bytes}).encode()
    return _RECORD.pack(END, len(body)) + body


class JournalReader:
    """Takes a journal in pieces, as they are read; a piece may end anywhere."""

    def __init__(self) -> None:
        self.head: CellHead | None = None
        self._rest = b""

    def take(self, piece: bytes) -> Iterator[Record]:
        """The records that are whole with this piece."""
        data = self._rest + piece
        at = 0
        if self.head is None:
            line, newline, _ = data.partition(b"\n")
            if not newline:
                self._rest = data
                return
            head = json.loads(line)
            self.head = CellHead(**{**head, "ranks": tuple(head["ranks"])})
            at = len(line) + 1
        while len(data) >= at + _RECORD.size:
            kind, length = _RECORD.unpack_from(data, at)
            end = at + _RECORD.size + length
            if len(data) < end:
                break
            yield Record(kind, _content(kind, data[at + _RECORD.size : end]))
            at = end
        self._rest = data[at:]


def _content(kind: bytes, body: bytes) -> dict[str, Any]:
    if kind != MESSAGE:
        words: dict[str, Any] = json.loads(body)
        return words
    parts = []
    at = 0
    while at < len(body):
        (length,) = _PART.unpack_from(body, at)
        at += _PART.size + length
        parts.append(body[at - length : at])
    header, metadata, content = (json.loads(part) for part in parts[:3])
    return {"header": header, "metadata": metadata, "content": content, "buffers": parts[3:]}
