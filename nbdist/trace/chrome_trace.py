"""The file that torch's profiler writes (Chrome's trace format), as columns without a meaning yet.

`trace.read` gives them one. Format: https://docs.google.com/document/d/
1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU, as libkineto writes it (output_json.cpp).
"""

from __future__ import annotations

import json
import re
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from nbdist.errors import TraceError

CHUNK_BYTES = 8 * 2**20
HEADER_BYTES = 2**20
GZIP = b"\x1f\x8b"
EVENTS = re.compile(rb'"traceEvents"\s*:\s*\[')
# An event with a duration, as libkineto writes it. What stands before its time is the same for
# all calls of one name on one thread, so it is taken apart once for each.
_EVENT = re.compile(
    rb'"ph": "X",\s*("cat": "[^"]*",\s*"name": "(?:[^"\\]|\\.)*",\s*'
    rb'"pid": (?:"[^"]*"|-?\d+),\s*"tid": (?:"[^"]*"|-?\d+)),\s*'
    rb'"ts": (-?\d+(?:\.\d+)?),\s*"dur": (\d+(?:\.\d+)?)'
)
_THREAD = re.compile(
    rb'"ph": "M",\s*"name": "thread_name",\s*"ts": [\d.]+,\s*"pid": ("[^"]*"|-?\d+),\s*'
    rb'"tid": ("[^"]*"|-?\d+),\s*"args": (\{[^}]*\})'
)
# Events whose notes are read: those of collectives and annotations only, as they are large.
_WANTED = re.compile(
    rb'"cat": "(?:(?:gpu_)?user_annotation"'
    rb'|kernel",\s*"name": "nccl'
    rb'|cpu_op",\s*"name": "(?:gloo:|c10d::|_c10d_functional::))'
)
_ARGS = re.compile(rb'[^{}]*?"dur": [\d.]+[\s,]*"args": (\{[^{}]*\})')
_BASE = re.compile(rb'"baseTimeNanoseconds": (\d+)')

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Head:
    """The fields that all calls of one name on one thread have in common.

    Attributes:
        category: The profiler's: "cpu_op", "kernel".
        process: A number of the system, or of a GPU.
        thread: Likewise, or of a stream.
    """

    category: str
    name: str
    process: str
    thread: str


@dataclass(frozen=True, slots=True)
class RawTrace:
    """A file's events with a duration, in the order of the file.

    Attributes:
        start_ns, duration_ns: Since `base_ns`; at least 0.
        head, heads: Of each event a place in heads, which has each once.
        args: Event -> the profiler's notes on it, where `wants_args` asked for them.
        threads: (process, thread) -> its names.
        header: The part before the events: the rank, process groups, versions.
        base_ns: Since 1970, where the file says it; 0 otherwise.
        problem: Why something is missing, as a sentence.
    """

    start_ns: Integers
    duration_ns: Integers
    head: npt.NDArray[np.int32]
    heads: tuple[Head, ...]
    args: Mapping[int, Mapping[str, Any]]
    threads: Mapping[tuple[str, str], tuple[str, ...]]
    header: Mapping[str, Any]
    base_ns: int = 0
    problem: str = ""

    def __len__(self) -> int:
        return len(self.start_ns)


class _Foreign(Exception):
    """Valid JSON perhaps, but not as libkineto lays it out."""


def read(path: Path) -> RawTrace:
    """Read a trace, plain or compressed.

    A file of libkineto is read piece by piece: 3.3 s and 0.2 GB for 10^6 events (415 MB), where
    json alone takes 21 s and 2.4 GB. Any other is left to json.

    Raises:
        TraceError: If it cannot be read, or holds no trace. A file that is cut off is read as far
            as it goes, and `problem` says so.
    """
    try:
        with path.open("rb") as file:
            try:
                return _Scan(path).read(file)
            except _Foreign:
                file.seek(0)
                return _from_json(path, file)
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror or error}.") from error


def _chunks(file: BinaryIO) -> Iterator[bytes]:
    """A file piece by piece, unpacked if it is compressed.

    Raises:
        EOFError, zlib.error: Once all that can be unpacked has been given.
    """
    first = file.read(CHUNK_BYTES)
    if not first.startswith(GZIP):
        while first:
            yield first
            first = file.read(CHUNK_BYTES)
        return
    unpacker = zlib.decompressobj(wbits=31)
    while first and not unpacker.eof:
        while first:
            yield unpacker.decompress(first, CHUNK_BYTES)
            first = unpacker.unconsumed_tail
        first = file.read(CHUNK_BYTES)
    yield unpacker.flush()
    if not unpacker.eof:
        raise EOFError("its compressed data ends too early")


@dataclass(slots=True)
class _Scan:
    """Reads libkineto's own layout with three regular expressions."""

    path: Path
    table: defaultdict[bytes, int] = field(default_factory=defaultdict)
    heads: list[npt.NDArray[np.int32]] = field(default_factory=list)
    starts: list[Integers] = field(default_factory=list)
    durations: list[Integers] = field(default_factory=list)
    args: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    threads: dict[tuple[str, str], tuple[str, ...]] = field(default_factory=dict)
    count: int = 0
    problem: str = ""

    def read(self, file: BinaryIO) -> RawTrace:
        self.table.default_factory = self.table.__len__
        chunks = self._readable(file)
        header, rest = _header(next(chunks, b""))
        if rest is None or rest.count(b'"ph": "') != rest.count(b'"ph"'):
            raise _Foreign
        text = rest
        for chunk in chunks:
            text += chunk
            cut = text.rfind(b'"ph"')
            if cut > 0:
                self._take(text[:cut])
                text = text[cut:]
        is_whole = text.rstrip().endswith(b"}") and b"]" in text
        self._take(text, is_last=True)
        if not is_whole and not self.problem:
            self.problem = f"{self.path.name} is cut off"
        if base := _BASE.search(text):
            header.setdefault("baseTimeNanoseconds", int(base.group(1)))
        return self._whole(header)

    def _readable(self, file: BinaryIO) -> Iterator[bytes]:
        try:
            yield from _chunks(file)
        except (EOFError, zlib.error) as error:
            self.problem = f"{self.path.name} is cut off or damaged ({error})"

    def _take(self, text: bytes, *, is_last: bool = False) -> None:
        matches = _EVENT.findall(text)
        if len(matches) < text.count(b'"ph": "X"') - is_last:
            raise _Foreign
        for process, thread, args in _THREAD.findall(text):
            key = (_plain(process), _plain(thread))
            name = str(_parse(args).get("name", ""))
            self.threads[key] = (*self.threads.get(key, ()), name)
        if not matches:
            return
        heads, starts, durations = zip(*matches, strict=True)
        numbers = np.fromiter(map(self.table.__getitem__, heads), np.int32, len(heads))
        self.heads.append(numbers)
        self.starts.append(_nanoseconds(starts))
        self.durations.append(_nanoseconds(durations))
        is_wanted = np.array([_WANTED.match(head) is not None for head in self.table])
        wanted = np.flatnonzero(is_wanted[numbers])
        for number, match in zip(wanted, _WANTED.finditer(text), strict=False):
            if noted := _ARGS.match(text, match.end()):
                self.args[self.count + int(number)] = _parse(noted.group(1))
        self.count += len(matches)

    def _whole(self, header: Mapping[str, Any]) -> RawTrace:
        return RawTrace(
            start_ns=np.concatenate([*self.starts, np.empty(0, np.int64)]),
            duration_ns=np.concatenate([*self.durations, np.empty(0, np.int64)]),
            head=np.concatenate([*self.heads, np.empty(0, np.int32)]),
            heads=tuple(map(_head, self.table)),
            args=self.args,
            threads=self.threads,
            header=header,
            base_ns=int(header.get("baseTimeNanoseconds", 0)),
            problem=self.problem,
        )


def _header(text: bytes) -> tuple[dict[str, Any], bytes | None]:
    """Return the part before the events, and the rest; None for the rest without events."""
    match = EVENTS.search(text, 0, HEADER_BYTES)
    if match is None:
        return {}, None
    try:
        header: dict[str, Any] = json.loads(text[: match.start()] + b'"traceEvents": []}')
    except ValueError:
        raise _Foreign from None
    return header, text[match.end() :]


def _nanoseconds(texts: tuple[bytes, ...]) -> Integers:
    """Microseconds with a decimal point, exactly: as floats the last digit would be lost."""
    joined = b" ".join(texts)
    # All have three decimals (torch from 2.5 on), or none.
    if joined.count(b".") == len(texts) and all(text[-4:-3] == b"." for text in texts):
        return np.fromstring(joined.replace(b".", b"").decode(), np.int64, sep=" ")
    return np.rint(np.fromstring(joined.decode(), np.float64, sep=" ") * 1000).astype(np.int64)


def _head(text: bytes) -> Head:
    record = json.loads(b"{" + text + b"}")
    return Head(record["cat"], record["name"], str(record["pid"]), str(record["tid"]))


def _plain(text: bytes) -> str:
    return str(json.loads(text))


def _parse(text: bytes) -> Mapping[str, Any]:
    try:
        parsed = json.loads(text)
    except ValueError:
        return {}
    return parsed if isinstance(parsed, dict) else {}


def _from_json(path: Path, file: BinaryIO) -> RawTrace:
    try:
        content = json.loads(b"".join(_chunks(file)).decode("utf-8", "replace"))
    except (ValueError, EOFError, zlib.error) as error:
        raise TraceError(
            f"{path} is not a trace, or is cut off: it cannot be read as JSON ({error})."
        ) from error
    header = {} if isinstance(content, list) else content
    events = content if isinstance(content, list) else header.pop("traceEvents", None)
    if not isinstance(events, list):
        raise TraceError(
            f"{path} is not a trace: it has no list `traceEvents`. Use a file that "
            "torch.profiler's export_chrome_trace wrote."
        )
    return _from_events([event for event in events if isinstance(event, dict)], header)


def _from_events(events: Iterable[Mapping[str, Any]], header: Mapping[str, Any]) -> RawTrace:
    table: defaultdict[Head, int] = defaultdict()
    table.default_factory = table.__len__
    threads: dict[tuple[str, str], tuple[str, ...]] = {}
    args: dict[int, Mapping[str, Any]] = {}
    numbers: list[int] = []
    starts: list[int] = []
    durations: list[int] = []
    for event in events:
        key = (str(event.get("pid", "")), str(event.get("tid", "")))
        raw_args = event.get("args")
        notes: Mapping[str, Any] = raw_args if isinstance(raw_args, dict) else {}
        if event.get("ph") == "M" and event.get("name") == "thread_name":
            threads[key] = (*threads.get(key, ()), str(notes.get("name", "")))
        if event.get("ph") != "X" or "ts" not in event:
            continue
        head = Head(str(event.get("cat", "")), str(event.get("name", "")), *key)
        category_and_name = json.dumps({"cat": head.category, "name": head.name})[1:-1]
        if _WANTED.match(category_and_name.encode()):
            args[len(numbers)] = notes
        numbers.append(table[head])
        starts.append(round(float(event["ts"]) * 1000))
        durations.append(round(float(event.get("dur", 0)) * 1000))
    return RawTrace(
        start_ns=np.array(starts, np.int64),
        duration_ns=np.array(durations, np.int64),
        head=np.array(numbers, np.int32),
        heads=tuple(table),
        args=args,
        threads=threads,
        header=header,
        base_ns=int(header.get("baseTimeNanoseconds", 0) or 0),
    )
