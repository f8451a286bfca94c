"""A journal is read back whole, however its pieces fall."""

import json

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


@pytest.mark.parametrize("size", [1, 7, len(WRITTEN)])
def test_it_is_read_in_any_pieces(size: int) -> None:
    """The head, two messages with their buffers, the reply, and the end."""
    reader = JournalReader()
    pieces = [WRITTEN[at : at + size] for at in range(0, len(WRITTEN), size)]
    records = [record for piece in pieces for record in reader.take(piece)]
    messages = [record.content for record in records[:2]]

    assert reader.head == HEAD
    assert [record.kind for record in records] == [
        journal.MESSAGE,
        journal.MESSAGE,
        journal.REPLY,
        journal.END,
    ]
    assert [message["content"]["text"] for message in messages] == ["hi\n", "hi\n"]
    assert [message["buffers"] for message in messages] == [[], [b"\x00raw", b""]]
    assert {key: records[2].content[key] for key in ("status", "ename", "evalue")} == {
        "status": "error",
        "ename": "E",
        "evalue": "v",
    }
    assert "other" not in records[2].content
    assert records[3].content == {"lost_bytes": 5}


def test_a_record_that_is_not_whole_waits() -> None:
    """What a full disk has cut off, or is being written, is not handed out."""
    reader = JournalReader()

    assert list(reader.take(WRITTEN[:-30])) != []
    assert reader.head == HEAD
    assert list(reader.take(b"")) == []
