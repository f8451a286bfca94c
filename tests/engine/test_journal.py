"""A rank's journal on a disk that fills up, and which messages are a cell's own."""

import json
from pathlib import Path

import pytest

from nbdist.cells.journal import CellHead, JournalReader, pack_end
from nbdist.engine.journal import DELIMITER, Journal

HEAD = CellHead(1, None, "pass", (0,), 0.0, 1)


def frames(text: str, parent: str = "mine", kind: str = "stream") -> list[bytes]:
    """A message as it goes over the wire."""
    content = {"execution_state": text} if kind == "status" else {"name": "stdout", "text": text}
    parts = [{"msg_type": kind}, {"msg_id": parent}, {}, content]
    return [b"topic", DELIMITER, b"signature", *(json.dumps(part).encode() for part in parts)]


def texts(reader: JournalReader, path: Path) -> list[str]:
    messages = reader.take(path.read_bytes())
    return [str(message["content"].get("text", "")) for message in messages]


def test_only_the_cell_s_own_messages_are_written_down_until_it_is_idle(tmp_path: Path) -> None:
    """Not those of a thread of an earlier cell; nothing behind the cell's last message."""
    journal = Journal(tmp_path / "journal" / "0", HEAD, "mine")
    for message in (
        frames("a"),
        frames("b", parent="other"),
        frames("c"),
        frames("idle", kind="status"),
        frames("late"),
    ):
        journal.note_message(message)
    reader = JournalReader()

    assert texts(reader, journal.path) == ["a", "c", ""]
    assert (reader.reply, reader.has_ended) == (None, True)
    assert journal.path.read_bytes().endswith(pack_end())


def test_a_full_disk_costs_output_and_neither_the_reply_nor_the_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record that does not fit is left out whole; what comes later and fits is there."""
    journal = Journal(tmp_path / "0", HEAD, "mine")
    journal.note_message(frames("a"))
    write, room = journal._file.write, [200]

    class Full:
        """The file, on a disk with little room."""

        def __getattr__(self, name: str) -> object:
            return getattr(file, name)

        def write(self, data: bytes) -> int:
            room[0] -= len(data)
            if room[0] < 0:
                room[0] += len(data)
                return write(data[:5])
            return write(data)

    file = journal._file
    monkeypatch.setattr(journal, "_file", Full())
    journal.note_message(frames("b" * 1000))
    journal.note_reply({"status": "ok"})
    journal.end()
    reader = JournalReader()

    assert texts(reader, journal.path) == ["a"]
    assert reader.reply is not None
    assert reader.reply["status"] == "ok"
    assert journal.lost_bytes > 1000
    assert (reader.has_ended, reader.lost_bytes) == (True, journal.lost_bytes)
    assert journal.path.read_bytes().endswith(pack_end(journal.lost_bytes))
