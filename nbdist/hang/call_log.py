"""A rank's call log: one block of memory that the rank writes and others read, unasked.

    header, 16 words | 256 channels of 8 words | text of the channels | ring of 256 records

A word is 8 bytes in the host's order. The rank never waits for a reader and a reader never for
the rank, so what is read can be half written. Words are whole by themselves. A record is whole
when its sequence number is the same before and after the rest was copied: the number is taken
away first and written last. All times are the host's monotonic clock, in seconds.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterator, Mapping, Sequence
from mmap import mmap
from time import monotonic
from typing import overload

from nbdist.core.ranks import pack_ranks, unpack_ranks
from nbdist.hang.records import Call, CallLog, GroupRecord, SourceLine

WORD_BYTES = 8
LAYOUT_VERSION = 2
# Read with the other byte order it is another number, so such a log is refused as well.
MAGIC = int.from_bytes(b"nbdbox\0" + bytes([LAYOUT_VERSION]), "little")
MAX_CHANNELS = 256
MAX_RECORDS = 256
# More than this was written during a copy: the reader was put aside, and copies again.
MOST_TORN = 8
READ_TRIES = 5

# Words of the header.
_MAGIC, _RANK, _PID, _GENERATION, _RUN, _SINCE = range(6)
_HEADER_WORDS = 16
# Words of a channel. A dropped one keeps its text for the records that are still in the ring.
_KIND, _COUNT, _TEXT, _TEXT_BYTES, _GROUP, _SOURCE, _DESTINATION = range(7)
_CHANNEL_WORDS = 8
_UNUSED, _IS_GROUP, _IS_TRANSFER, _DROPPED = range(4)
_TEXT_SPACE_BYTES = 32_768
# Words of a record, then two texts.
_SEQUENCE, _STATE, _BEGAN, _ENDED, _NUMBER, _CALLED_IN = range(6)
_WHAT_BYTES = 104
_PLACE_BYTES = 208
_DESCRIPTION_BYTES = 40
# state, began, ended, number, run, channel, peer, generation; what; place.
_RECORD = struct.Struct(f"=QddQQqqQ{_WHAT_BYTES}s{_PLACE_BYTES}s")
_pack_record = _RECORD.pack_into
_RECORD_BYTES = WORD_BYTES + _RECORD.size
_PLACE = struct.Struct("=qq")

_CHANNELS_AT = _HEADER_WORDS * WORD_BYTES
_TEXT_AT = _CHANNELS_AT + MAX_CHANNELS * _CHANNEL_WORDS * WORD_BYTES
_RECORDS_AT = _TEXT_AT + _TEXT_SPACE_BYTES
_RECORDS_WORD = _RECORDS_AT // WORD_BYTES
_RECORD_WORDS = _RECORD_BYTES // WORD_BYTES
SIZE_BYTES = _RECORDS_AT + MAX_RECORDS * _RECORD_BYTES
# One word of every channel, and of every record: a reader takes these of all at once.
_KINDS = slice(_HEADER_WORDS, _HEADER_WORDS + MAX_CHANNELS * _CHANNEL_WORDS, _CHANNEL_WORDS)
_SEQUENCES = slice(_RECORDS_WORD, None, _RECORD_WORDS)
_STATES = slice(_RECORDS_WORD + _STATE, None, _RECORD_WORDS)

CALL_STATES = ("waiting", "issued", "done", "raised")
WAITING, ISSUED, DONE, RAISED = range(4)
CELL_STATES = ("finished", "running", "raised")
NO_CHANNEL = -1  # a call in a group that is not known
NO_PEER = -1
_NO_CELL = -1


# A recorded call, as the writer needs it again to change it: sequence, number, generation,
# channel, what, peer. A plain tuple: a collective is to cost less than 3 microseconds in all.
Entry = tuple[int, int, int, int, bytes, int]


class CallLogWriter:
    """The writing end, in SIZE_BYTES of memory, all zero, for a rank and its process.

    Calls may come from several threads and from a signal handler.
    """

    def __init__(self, memory: mmap | bytearray, rank: int, pid: int) -> None:
        if len(memory) != SIZE_BYTES:
            raise ValueError(f"a black box has {SIZE_BYTES} bytes, this memory has {len(memory)}")
        self.memory = memoryview(memory)
        self._words = self.memory.cast("Q")
        self._doubles = self.memory.cast("d")
        self._lock = threading.RLock()  # a signal handler may call while the lock is held
        self._sequence = 0
        self.run = 0  # of the newest cell
        self.generation = 0  # how often the groups have been recovered
        self._channels: dict[str | tuple[int, int, int], int] = {}
        self._used = self._free_text = 0
        self._dropped: list[int] = []
        self._words[_RANK], self._words[_PID] = rank, pid
        self._doubles[_SINCE] = monotonic()
        self._words[_MAGIC] = MAGIC  # last: before this nobody reads it

    def set_cell(self, run: int, state: str) -> None:
        """Tell that cell run `run` is "running", "finished" or "raised"."""
        self.run = run
        self._doubles[_SINCE] = monotonic()
        self._words[_RUN] = run * len(CELL_STATES) + CELL_STATES.index(state)

    def reset(self, generation: int) -> None:
        """Count from 0 again. Calls of an earlier generation are read as raised."""
        with self._lock:
            self.generation = generation
            for channel in self._channels.values():
                self._words[_channel_at(channel) + _COUNT] = 0
            self._words[_GENERATION] = generation

    def group(self, name: str, ranks: Sequence[int], description: str = "") -> int:
        """The channel of a group, made at its first call; NO_CHANNEL when there is no room."""
        with self._lock:
            channel = self._channels.get(name)
            described = (description or name).encode()[:_DESCRIPTION_BYTES]
            text = b"\0".join([name.encode(), described, pack_ranks(ranks)])
            return (
                self._new_channel(name, (_IS_GROUP, 0, 0, 0), text) if channel is None else channel
            )

    def transfer(self, group: int, source: int, destination: int) -> int:
        """The channel from one global rank to another; NO_CHANNEL when there is no room."""
        key = (group, source, destination)
        if key in self._channels or group == NO_CHANNEL:
            return self._channels.get(key, NO_CHANNEL)
        with self._lock:
            return self._new_channel(key, (_IS_TRANSFER, *key), b"")

    def drop(self, names: Sequence[str]) -> None:
        """Forget groups that were destroyed, and their transfers."""
        with self._lock:
            gone = {self._channels[name] for name in names if name in self._channels}
            for key, channel in list(self._channels.items()):
                if channel in gone or (isinstance(key, tuple) and key[0] in gone):
                    del self._channels[key]
                    self._words[_channel_at(channel) + _KIND] = _DROPPED
                    self._dropped.append(channel)

    def begin(
        self,
        channel: int,
        what: bytes,
        place: bytes,
        peer: int = NO_PEER,
        number: int | None = None,
    ) -> Entry:
        """Record that a call waits from now on, and count it in its channel.

        A number is given for one that is not to be counted: 0, or that which it has already.
        """
        words = self._words
        with self._lock:
            if channel == NO_CHANNEL:
                number = 0
            elif number is None:
                at = _HEADER_WORDS + channel * _CHANNEL_WORDS + _COUNT
                number = words[at] = words[at] + 1
            sequence = self._sequence = self._sequence + 1
            generation = self.generation
            # The same lines as in `wait`: every collective would pay for calling a shared function.
            at = _RECORD_WORDS * (sequence % MAX_RECORDS) + _RECORDS_WORD
            words[at] = 0
            _pack_record(
                self.memory, (at + 1) * WORD_BYTES, WAITING, monotonic(), 0.0,
                number, self.run, channel, peer, generation, what, place,
            )  # fmt: skip
            words[at] = sequence
        return (sequence, number, generation, channel, what, peer)

    def wait(self, entry: Entry, place: bytes) -> Entry:
        """Record that an issued call is waited for from now on, at another place."""
        sequence, number, generation, channel, what, peer = entry
        words, at = self._words, _record_at(sequence)
        if words[at] != sequence:
            # The ring has gone round: a new record, under its old number.
            return self.begin(channel, what, place, peer, number)
        with self._lock:
            words[at] = 0
            fields = (number, self.run, channel, peer, generation, what, place)
            start = (at + 1) * WORD_BYTES
            _pack_record(self.memory, start, WAITING, monotonic(), 0.0, *fields)
            words[at] = sequence
        return entry

    def end(self, entry: Entry, state: int) -> None:
        """Record that a call is DONE, ISSUED or has RAISED."""
        sequence, words = entry[0], self._words
        at = _RECORD_WORDS * (sequence % MAX_RECORDS) + _RECORDS_WORD
        if words[at] == sequence:
            if state != ISSUED:
                self._doubles[at + _ENDED] = monotonic()
            words[at + _STATE] = state

    def take_back(self, entry: Entry) -> None:
        """Record that a call has RAISED, and do not count it: it was not made.

        One that has ended, as when an interrupt comes just after it, stays as it is.
        """
        sequence, number, generation, channel, _, _ = entry
        at = _record_at(sequence)
        with self._lock:
            if self._words[at] == sequence and self._words[at + _STATE] != WAITING:
                return
            self.end(entry, RAISED)
            if number and generation == self.generation:
                self._words[_channel_at(channel) + _COUNT] -= 1

    def _new_channel(
        self, key: str | tuple[int, int, int], fields: tuple[int, int, int, int], text: bytes
    ) -> int:
        free = next(self._free_channels(len(text)), NO_CHANNEL)
        if free == NO_CHANNEL:
            return NO_CHANNEL
        at = _channel_at(free)
        start = self._words[at + _TEXT]
        if self._words[at + _TEXT_BYTES] < len(text):
            start = self._free_text
            self._free_text += len(text)
        if self._words[at + _KIND] != _UNUSED:
            # Records of a dropped channel are left out: the channel gets another name.
            for slot in map(_record_at, range(MAX_RECORDS)):
                if _RECORD.unpack_from(self.memory, (slot + 1) * WORD_BYTES)[5] == free:
                    self._words[slot] = 0
        self.memory[_TEXT_AT + start : _TEXT_AT + start + len(text)] = text
        values = (0, start, len(text), *fields[1:])
        for word, value in enumerate(values, _COUNT):
            self._words[at + word] = value
        self._words[at + _KIND] = fields[0]  # last: before this nobody reads it
        self._channels[key] = free
        return free

    def _free_channels(self, text_bytes: int) -> Iterator[int]:
        """Channels never used, then dropped ones of the same kind, the oldest first."""
        has_space = self._free_text + text_bytes <= _TEXT_SPACE_BYTES
        if has_space and self._used < MAX_CHANNELS:
            self._used += 1
            yield self._used - 1
        for channel in list(self._dropped):
            old_bytes = self._words[_channel_at(channel) + _TEXT_BYTES]
            if (old_bytes > 0) == (text_bytes > 0) and (has_space or old_bytes >= text_bytes):
                self._dropped.remove(channel)
                yield channel


def pack_what(op: str, detail: str) -> bytes:
    """An operation and its detail as they stand in a record, cut to fit."""
    return f"{op}\0{detail}".encode()[:_WHAT_BYTES]


def pack_place(place: SourceLine | None) -> bytes:
    """A place as it stands in a record, its source cut to fit."""
    if place is None:
        return b""
    cell = _NO_CELL if place.cell is None else place.cell
    text = f"{place.file}\0{place.source}".encode()
    return (_PLACE.pack(cell, place.line) + text)[:_PLACE_BYTES]


def consistent_copy(source: bytes | memoryview | mmap) -> bytes:
    """A copy of a log that may be written meanwhile, without its half-written records."""
    if isinstance(source, bytes):
        return source  # already one
    words = memoryview(source).cast("Q")
    for _ in range(READ_TRIES):
        first, states = words[_SEQUENCES].tobytes(), words[_STATES].tobytes()
        copy = memoryview(bytearray(source)).cast("Q")
        last = words[_SEQUENCES].tobytes()
        before, after = memoryview(first).cast("Q"), memoryview(last).cast("Q")
        torn = [] if first == last else [n for n in range(MAX_RECORDS) if before[n] != after[n]]
        if len(torn) <= MOST_TORN:
            break
    # An end is written before the state that announces it: the later end is whole.
    copy[_SEQUENCES], copy[_STATES] = before, memoryview(states).cast("Q")
    for slot in torn:
        copy[_record_at(slot)] = 0
    return copy.tobytes()


def read(source: bytes | memoryview | mmap, ahead_s: float = 0.0) -> CallLog:
    """Return what a rank's call log says at this moment.

    Args:
        source: The log, or a copy of it.
        ahead_s: How much our clock is ahead of the one by which a log of another host was written.

    Raises:
        ValueError: If it is no call log, or one of another version of nbdist.
    """
    if len(source) != SIZE_BYTES:
        raise ValueError(f"a black box has {SIZE_BYTES} bytes, this has {len(source)}")
    data = consistent_copy(source)
    words = memoryview(data).cast("Q")
    if words[_MAGIC] != MAGIC:
        raise ValueError(
            f"this is not a black box of layout {LAYOUT_VERSION}: "
            f"it begins with {data[:WORD_BYTES]!r}"
        )
    run, state = divmod(words[_RUN], len(CELL_STATES))
    names, groups, transfers = _read_channels(data, words)
    calls = _RecordedCalls(data, names, words[_GENERATION], ahead_s)
    return CallLog(
        rank=words[_RANK],
        pid=words[_PID],
        generation=words[_GENERATION],
        run=run,
        state=CELL_STATES[state],
        since_s=memoryview(data).cast("d")[_SINCE] + ahead_s,
        groups=groups,
        transfers=transfers,
        calls=calls,
        waits=calls.waits(),
    )


def newest_run(source: bytes | memoryview | mmap) -> int:
    """The cell run of the call that was recorded last, without reading the others; 0 for none.

    The log must not be written meanwhile.
    """
    words = memoryview(source).cast("Q")
    newest = max(words[_SEQUENCES].tolist())
    return words[_record_at(newest) + _CALLED_IN] if newest else 0


def _read_channels(
    data: bytes, words: memoryview[int]
) -> tuple[dict[int, str], dict[str, GroupRecord], dict[tuple[str, int, int], int]]:
    """Channel -> name of its group (dropped ones too), and what `CallLog` tells of channels."""
    names: dict[int, str] = {}
    groups: dict[str, GroupRecord] = {}
    transfers: dict[tuple[str, int, int], int] = {}
    # A transfer's group has been made before it, but can stand behind it: groups first.
    in_use = [c for c, kind in enumerate(words[_KINDS].tolist()) if kind != _UNUSED]
    for channel in sorted(in_use, key=lambda c: not words[_channel_at(c) + _TEXT_BYTES]):
        at = _channel_at(channel)
        kind, count, start, size, group, source, destination = words[at : at + _DESTINATION + 1]
        if size:
            text = data[_TEXT_AT + start : _TEXT_AT + start + size]
            name, _, rest = text.partition(b"\0")
            names[channel] = name.decode()
            if kind == _IS_GROUP:
                described, _, ranks = rest.partition(b"\0")
                groups[names[channel]] = GroupRecord(
                    names[channel], unpack_ranks(ranks), count, described.decode(errors="ignore")
                )
        else:
            names[channel] = names.get(group, "")
            if kind == _IS_TRANSFER:
                transfers[names[channel], source, destination] = count
    return names, groups, transfers


class _RecordedCalls(Sequence[Call]):
    """The calls of a log, oldest first, each read when it is asked for: mostly the last one is."""

    def __init__(
        self, data: bytes, names: Mapping[int, str], generation: int, ahead_s: float
    ) -> None:
        self._data, self._names = data, names
        self._generation, self._ahead_s = generation, ahead_s
        sequences = sorted(filter(None, memoryview(data).cast("Q")[_SEQUENCES].tolist()))
        self._slots = [sequence % MAX_RECORDS for sequence in sequences]
        self._read: dict[int, Call] = {}

    def __len__(self) -> int:
        return len(self._slots)

    @overload
    def __getitem__(self, index: int) -> Call: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Call, ...]: ...
    def __getitem__(self, index: int | slice) -> Call | tuple[Call, ...]:
        if isinstance(index, slice):
            return tuple(map(self._in_slot, self._slots[index]))
        return self._in_slot(self._slots[index])

    def __iter__(self) -> Iterator[Call]:
        return map(self._in_slot, self._slots)

    def __reversed__(self) -> Iterator[Call]:
        return map(self._in_slot, reversed(self._slots))

    def waits(self) -> tuple[Call, ...]:
        """Calls that wait; other calls are not read for this."""
        states = memoryview(self._data).cast("Q")[_STATES].tolist()
        calls = [self._in_slot(slot) for slot in self._slots if states[slot] == WAITING]
        return tuple(call for call in calls if call.state == CALL_STATES[WAITING])

    def _in_slot(self, slot: int) -> Call:
        call = self._read.get(slot)
        if call is None:
            call = self._read[slot] = self._read_slot(slot)
        return call

    def _read_slot(self, slot: int) -> Call:
        fields = _RECORD.unpack_from(self._data, (_record_at(slot) + 1) * WORD_BYTES)
        state, began_s, ended_s, number, run, channel, peer, generation, what, place = fields
        if state in (WAITING, ISSUED) and generation != self._generation:
            state = RAISED  # the groups have been replaced under it
        op, _, detail = what.rstrip(b"\0").decode(errors="ignore").partition("\0")
        cell, line = _PLACE.unpack_from(place)
        text = place[_PLACE.size :].rstrip(b"\0").decode(errors="ignore")
        file, _, source = text.partition("\0")
        source_line = SourceLine(None if cell == _NO_CELL else cell, file, line, source)
        has_ended = ended_s and state in (DONE, RAISED)
        return Call(
            op=op,
            detail=detail,
            group=self._names.get(channel, ""),
            number=number,
            peer=None if peer == NO_PEER else peer,
            place=source_line if line else None,
            run=run,
            began_s=began_s + self._ahead_s,
            ended_s=ended_s + self._ahead_s if has_ended else None,
            state=CALL_STATES[state],
        )


def _channel_at(channel: int) -> int:
    """The first word of the channel with this number."""
    return _HEADER_WORDS + channel * _CHANNEL_WORDS


def _record_at(sequence: int) -> int:
    """The first word of the record with this sequence number."""
    return _RECORDS_WORD + sequence % MAX_RECORDS * _RECORD_WORDS
