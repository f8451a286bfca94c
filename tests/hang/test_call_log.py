"""A call log: what is written is read back, also while it is being written."""

from __future__ import annotations

import mmap
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from nbdist.hang import call_log
from nbdist.hang.call_log import (
    DONE,
    ISSUED,
    MAX_CHANNELS,
    MAX_RECORDS,
    NO_CHANNEL,
    RAISED,
    SIZE_BYTES,
    CallLogWriter,
    pack_place,
    pack_what,
)
from nbdist.hang.records import Call, CallLog, GroupRecord, SourceLine

PLACE = SourceLine(cell=12, file="", line=7, source="dist.all_reduce(x)  # Σ")


def new_writer() -> tuple[bytearray, CallLogWriter]:
    """Memory of its own, and its writer."""
    memory = bytearray(SIZE_BYTES)
    return memory, CallLogWriter(memory, rank=3, pid=99)


def new_pair() -> tuple[bytearray, CallLogWriter, int]:
    """The same with the channel of a world of two ranks."""
    memory, writer = new_writer()
    return memory, writer, writer.group("0", (0, 1))


def read(memory: bytearray) -> CallLog:
    return call_log.read(memoryview(memory))


def test_new_box_tells_who_it_is() -> None:
    """Before anything happens: rank, process, no cell, no calls."""
    memory, _ = new_writer()
    log = read(memory)

    assert (log.rank, log.pid, log.generation, log.run, log.state) == (3, 99, 0, 0, "finished")
    assert [*log.groups, *log.transfers, *log.calls, *log.waits] == []


def test_call_is_read_as_it_was_made() -> None:
    """Every field of a waiting call, then its end."""
    memory, writer = new_writer()
    writer.set_cell(41, "running")
    world = writer.group("0", (0, 1, 2, 3), "default_pg")
    before_s = time.monotonic()
    entry = writer.begin(world, pack_what("all_reduce", "float32[3]"), pack_place(PLACE))
    after_s = time.monotonic()
    log = read(memory)
    call = log.waiting

    assert (log.run, log.state) == (41, "running")
    assert before_s <= log.calls[0].began_s <= after_s
    assert call is not None
    assert (call.op, call.detail, call.group, call.number) == ("all_reduce", "float32[3]", "0", 1)
    assert (call.peer, call.place, call.run, call.ended_s) == (None, PLACE, 41, None)
    assert log.groups == {"0": GroupRecord("0", (0, 1, 2, 3), 1, "default_pg")}

    writer.end(entry, DONE)
    done = read(memory).calls[0]
    assert done.state == "done"
    assert done.ended_s is not None
    assert done.ended_s >= done.began_s


def test_place_in_a_file_and_no_place() -> None:
    """A file's place has no cell; a call without a place has none."""
    memory, writer = new_writer()
    place = SourceLine(cell=None, file="train.py", line=90, source="loss.backward()")
    writer.begin(NO_CHANNEL, pack_what("wait", ""), pack_place(place))
    writer.begin(NO_CHANNEL, pack_what("wait", ""), pack_place(None))

    assert [call.place for call in read(memory).calls] == [place, None]


def test_long_texts_are_cut_and_stay_readable() -> None:
    """A name cut within a character loses that character and nothing else."""
    memory, writer = new_writer()
    place = SourceLine(cell=1, file="f" * 60, line=2, source="ä" * 500)
    writer.begin(NO_CHANNEL, pack_what("op", "ü" * 500), pack_place(place))
    call = read(memory).calls[0]

    assert call.place is not None
    assert call.place.file == "f" * 60
    assert set(call.place.source) == {"ä"}
    assert (call.op, set(call.detail)) == ("op", {"ü"})


def test_the_newest_call_tells_its_cell() -> None:
    """Of an empty log, in a cell without a call, in one with calls, and round the ring."""
    memory, writer, world = new_pair()
    runs = [call_log.newest_run(memory)]
    for run, calls in ((7, 1), (8, 0), (9, MAX_RECORDS + 3), (10, 0)):
        writer.set_cell(run, "running")
        for _ in range(calls):
            writer.end(writer.begin(world, b"all_reduce", b""), DONE)
        runs.append(call_log.newest_run(memory))

    assert runs == [0, 7, 7, 9, 9]
    assert read(memory).calls[-1].run == 9


def test_ring_keeps_the_newest() -> None:
    """Of 1000 calls the last 256 are read, oldest first, and the count is 1000."""
    memory, writer, world = new_pair()
    for _ in range(1000):
        writer.end(writer.begin(world, b"barrier\0", b""), DONE)
    log = read(memory)

    assert [call.number for call in log.calls] == list(range(1001 - MAX_RECORDS, 1001))
    assert log.groups["0"].calls == 1000


def test_only_calls_that_are_asked_for_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 256 mostly the last one, and those that wait."""
    memory, writer, world = new_pair()
    writer.begin(world, b"barrier\0", b"")
    for _ in range(MAX_RECORDS - 1):
        writer.end(writer.begin(world, b"all_reduce\0", b""), DONE)
    slots: list[int] = []
    original = call_log._RecordedCalls._read_slot

    def note(calls: call_log._RecordedCalls, slot: int) -> Call:
        slots.append(slot)
        return original(calls, slot)

    monkeypatch.setattr(call_log._RecordedCalls, "_read_slot", note)
    log = read(memory)
    ops = [call.op for call in (*log.waits, *log.calls[-1:], *log.calls[-1:])]
    n_slots = len(slots)

    assert ops == ["barrier", "all_reduce", "all_reduce"]
    assert n_slots == 2
    assert [call.number for call in reversed(log.calls)] == [*range(MAX_RECORDS, 0, -1)]
    assert [*log.calls] == [*log.calls[:]] == [log.calls[n] for n in range(len(log.calls))]
    assert len(slots) == MAX_RECORDS


def test_issued_call_that_is_waited_for() -> None:
    """It waits again under its number at another place, also when the ring has gone round."""
    memory, writer, world = new_pair()
    entry = writer.begin(world, pack_what("all_reduce", ""), pack_place(PLACE))
    writer.end(entry, ISSUED)
    assert [(c.state, c.ended_s) for c in read(memory).calls] == [("issued", None)]

    writer.end(writer.wait(entry, b""), DONE)
    assert [(c.state, c.number, c.place) for c in read(memory).calls] == [("done", 1, None)]

    for _ in range(MAX_RECORDS):
        writer.end(writer.begin(world, b"barrier\0", b""), DONE)
    writer.wait(entry, b"")
    waiting = read(memory).waiting
    assert waiting is not None
    assert (waiting.op, waiting.number) == ("all_reduce", 1)
    assert read(memory).groups["0"].calls == 1 + MAX_RECORDS


def test_end_of_an_overwritten_call_touches_no_other() -> None:
    """The record that took its slot stays as it is."""
    memory, writer, world = new_pair()
    old = writer.begin(world, b"old\0", b"")
    for _ in range(MAX_RECORDS):
        writer.begin(world, b"new\0", b"")
    writer.end(old, RAISED)

    assert {(call.op, call.state) for call in read(memory).calls} == {("new", "waiting")}


def test_raised_call_is_taken_back() -> None:
    """The next call has its number; a call of an earlier generation takes nothing back."""
    memory, writer, world = new_pair()
    first = writer.begin(world, b"a\0", b"")
    writer.take_back(first)
    assert read(memory).calls[0].state == "raised"
    second = writer.begin(world, b"b\0", b"")
    assert second[1] == 1
    writer.end(second, DONE)
    writer.take_back(second)  # too late
    assert (read(memory).calls[1].state, read(memory).groups["0"].calls) == ("done", 1)

    writer.reset(1)
    second = writer.begin(world, b"c\0", b"")
    writer.take_back(first)
    assert (second[1], read(memory).groups["0"].calls) == (1, 1)


def test_reset_counts_from_nothing_and_nothing_waits() -> None:
    """Calls that waited are read as raised; later ones of the new generation wait."""
    memory, writer, world = new_pair()
    transfer = writer.transfer(world, 0, 1)
    writer.begin(world, b"a\0", b"")
    writer.begin(transfer, b"send\0", b"", peer=1)
    writer.reset(5)
    log = read(memory)

    assert (log.generation, log.waiting) == (5, None)
    assert [call.state for call in log.calls] == ["raised", "raised"]
    assert (log.groups["0"].calls, dict(log.transfers)) == (0, {("0", 0, 1): 0})
    assert writer.begin(world, b"a\0", b"")[1] == 1
    assert read(memory).waiting is not None


def test_transfers_are_counted_apart() -> None:
    """Each direction and group has its own count, and the group's own is untouched."""
    memory, writer = new_writer()
    groups = [writer.group(name, (0, 1)) for name in ("0", "1")]
    for group, source, destination in ((0, 0, 1), (0, 0, 1), (0, 1, 0), (1, 0, 1)):
        channel = writer.transfer(groups[group], source, destination)
        writer.end(writer.begin(channel, b"send\0", b"", peer=destination), DONE)
    log = read(memory)

    assert log.transfers == {("0", 0, 1): 2, ("0", 1, 0): 1, ("1", 0, 1): 1}
    assert [group.calls for group in log.groups.values()] == [0, 0]
    assert [(c.group, c.number, c.peer) for c in log.calls][-1] == ("1", 1, 1)


@pytest.mark.parametrize(
    "ranks",
    [(5,), (0, 1, 2, 3), (1, 3, 5), (3, 1, 2), (0, 1, 4, 9, 10, 11), tuple(range(0, 4096, 8))],
)
def test_members_are_read_as_given(ranks: tuple[int, ...]) -> None:
    """Members come back in their order."""
    memory, writer = new_writer()
    writer.group("g", ranks)

    assert read(memory).groups["g"].ranks == ranks


def test_destroyed_groups_make_room() -> None:
    """2000 groups made and destroyed: always one left, and old calls keep their group's name."""
    memory, writer = new_writer()
    for index in range(2000):
        channel = writer.group(f"group {index}", (0, 1))
        assert channel != NO_CHANNEL, index
        writer.begin(writer.transfer(channel, 0, 1), b"send\0", b"")
        writer.begin(channel, pack_what("barrier", str(index)), b"")
        if index < 1999:
            writer.drop([f"group {index}"])
    log = read(memory)

    assert [*log.groups] == ["group 1999"]
    assert [*log.transfers] == [("group 1999", 0, 1)]
    named = [call for call in log.calls if call.op == "barrier"]
    assert len(named) > 64
    assert all(call.group == f"group {call.detail}" for call in named)


def test_full_table_is_told() -> None:
    """The 257th living group has no channel; its calls are still recorded, uncounted."""
    memory, writer = new_writer()
    channels = [writer.group(str(index), (0, 1)) for index in range(MAX_CHANNELS + 1)]

    assert NO_CHANNEL not in channels[:-1]
    assert channels[-1] == NO_CHANNEL
    assert writer.transfer(NO_CHANNEL, 0, 1) == NO_CHANNEL
    assert writer.begin(NO_CHANNEL, b"barrier\0", b"")[1] == 0
    assert read(memory).calls[0].group == ""


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (b"", "this has 0"),
        (bytes(SIZE_BYTES), "not a black box of layout"),
        (b"\0" * (SIZE_BYTES + 8), f"has {SIZE_BYTES} bytes"),
    ],
)
def test_what_is_no_box_is_told(source: bytes, message: str) -> None:
    """A wrong size or a wrong beginning raises with what was found."""
    with pytest.raises(ValueError, match=message):
        call_log.read(source)


WRITER = """
import mmap, os, sys
from nbdist.hang.call_log import SIZE_BYTES, DONE, CallLogWriter, pack_what
with open(sys.argv[1], "r+b") as file:
    writer = CallLogWriter(mmap.mmap(file.fileno(), SIZE_BYTES), 0, os.getpid())
world = writer.group("0", (0, 1))
print("ready", flush=True)
while True:
    number = writer._words[17] + 1
    writer.end(writer.begin(world, pack_what(f"op{number}", "x" * (number % 90)), b""), DONE)
"""


def test_box_is_read_while_another_process_writes(tmp_path: Path) -> None:
    """300 reads of a log written without a pause: no record mixes two calls, time goes on."""
    path = tmp_path / "box"
    path.write_bytes(bytes(SIZE_BYTES))
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        newest = []
        for _ in range(300):
            log = call_log.read(mapped)
            for call in log.calls:
                assert call.op == f"op{call.number}"
                assert call.detail == "x" * (call.number % 90)
                if call.state == "done":
                    assert call.ended_s is not None
                    assert 0 <= call.ended_s - call.began_s < 60
            numbers = [call.number for call in log.calls]
            assert numbers == sorted(set(numbers))
            newest += numbers[-1:]  # none if all was written anew during each of the copies
        assert len(newest) > 150
        assert newest == sorted(newest)
        assert newest[-1] > newest[0]
    finally:
        process.kill()
        process.wait()
        process.stdout.close()  # type: ignore[union-attr]


def test_threads_never_share_a_number() -> None:
    """Four threads, 2000 calls each: 8000 numbers."""
    memory, writer, world = new_pair()
    numbers: list[int] = []

    def calls() -> None:
        for _ in range(2000):
            entry = writer.begin(world, b"a\0", b"")
            numbers.append(entry[1])
            writer.end(entry, DONE)

    with ThreadPoolExecutor(4) as threads:
        for _ in range(4):
            threads.submit(calls)

    assert sorted(numbers) == list(range(1, 8001))
    assert read(memory).groups["0"].calls == 8000
