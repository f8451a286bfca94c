"""A journal is read back whole, however its pieces fall."""

import json
import time
from typing import Any

import pytest

from nbdist.cells import journal
from nbdist.cells.journal import CellHead, JournalReader

HEAD = CellHead(7, 3, "print('hi')\n", (0, 2), 12.5, 99)
PARTS = [
    json.dumps(part).encode()
    for part in ({"msg_type": "stream"}, {}, {"name": "stdout", "text": "hi\n"})
]
WRITTEN = (
    HEAD.line()
    + journal.pack_message(PARTS)
    + journal.pack_message([*PARTS, b"\x00raw", b""])
    + journal.pack_reply({"status": "error", "ename": "E", "evalue": "v", "other": object()})
    + journal.pack_end(5)
)


# By name: the length differs with the digits of a time, from one worker of pytest to the next.
@pytest.mark.parametrize("size", [1, 7, len(WRITTEN)], ids=["bytes", "sevens", "whole"])
def test_it_is_read_in_any_pieces(size: int) -> None:
    """The head, two messages with their buffers, the reply, and the end."""
    reader = JournalReader()
    pieces = [WRITTEN[at : at + size] for at in range(0, len(WRITTEN), size)]
    messages = [message for piece in pieces for message in reader.take(piece)]

    assert (reader.head, reader.offset) == (HEAD, len(WRITTEN))
    assert [message["content"]["text"] for message in messages] == ["hi\n", "hi\n"]
    assert [message["buffers"] for message in messages] == [[], [b"\x00raw", b""]]
    assert reader.reply is not None
    assert reader.reply.pop("ended_s") <= time.monotonic()
    assert reader.reply == {"status": "error", "ename": "E", "evalue": "v"}
    assert (reader.has_ended, reader.lost_bytes) == (True, 5)


def test_a_record_that_is_not_whole_waits() -> None:
    """What a full disk has cut off, or is being written, is not handed out."""
    reader = JournalReader()

    assert len(reader.take(WRITTEN[:-30])) == 2
    assert reader.head == HEAD
    assert (reader.take(b""), reader.reply, reader.has_ended) == ([], None, False)


@pytest.mark.parametrize(
    ("written", "head", "n_messages"),
    [
        (b"\xf8" * 400 + WRITTEN[400:], None, 0),
        (b"{\xf8\n" + WRITTEN, None, 0),
        (b"{}\n" + WRITTEN, None, 0),
        (HEAD.line() + b"\xf8" * 40, HEAD, 0),
        (HEAD.line() + journal.pack_message(PARTS) + b"m\x02\0\0\0{}", HEAD, 1),
        (HEAD.line() + journal.pack_message(PARTS[:2]), HEAD, 0),
    ],
)
def test_what_is_damaged_is_told_and_ends_the_reading(
    written: bytes, head: CellHead | None, n_messages: int
) -> None:
    """What comes before it is handed out; nothing is raised, and the note names the rank."""
    reader = JournalReader()

    assert len(reader.take(written)) == n_messages
    assert reader.take(journal.pack_message(PARTS)) == []
    assert (reader.is_damaged, reader.head, reader.has_ended) == (True, head, False)
    [note] = journal.loss_notes({3: reader})
    assert "output of rank 3 is damaged" in note


def test_messages_of_ranks_are_in_the_order_of_their_dates() -> None:
    """Equal lines of ranks that are far apart are merged only then."""

    def message(date: str) -> dict[str, Any]:
        return {"header": {"date": date}}

    pieces = {0: [message("2"), message("4")], 1: [message("1"), message("2"), message("3")]}

    assert [(rank, m["header"]["date"]) for rank, m in journal.by_date(pieces)] == [
        (1, "1"),
        (0, "2"),
        (1, "2"),
        (1, "3"),
        (0, "4"),
    ]
