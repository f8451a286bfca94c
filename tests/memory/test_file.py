"""Files of memory: written for torch's viewer, and read without running anything of them."""

import copyreg
import gzip
import io
import os
import pickle
import pickletools
import random
import re
import struct
import subprocess
import sys
import time
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nbdist.core import safe_pickle
from nbdist.core.units import size
from nbdist.errors import SnapshotError
from nbdist.memory.file import PROTOCOL, read, read_folder, write, write_folder
from nbdist.memory.snapshot import OutOfMemory, Segment, Snapshot
from nbdist.memory.torch_reader import of_torch
from nbdist.memory.torch_writer import to_torch
from tests.support.memory_records import GPU, drawn


def plain_types(value: Any) -> set[type]:
    match value:
        case dict():
            inner = [*value, *value.values()]
        case list() | tuple():
            inner = list(value)
        case _:
            inner = []
    return {type(value)}.union(*map(plain_types, inner))


@pytest.mark.parametrize("name", ["rank0.pickle", "rank0.pickle.gz"])
def test_written_file_is_plain_and_comes_back(tmp_path: Path, name: str) -> None:
    """Of four types, in the protocol that torch's viewer takes; equal bytes for equal memory."""
    memory = drawn(5)
    path = tmp_path / name
    write(path, memory, "ddp", ["a note"])
    data = path.read_bytes()
    snapshot = read(path)

    whole = pickle.loads(gzip.decompress(data) if name.endswith("gz") else data)
    assert plain_types(whole) == {dict, list, str, int}
    assert to_torch(snapshot.ranks[0]) == to_torch(memory)
    assert (snapshot.strategy, snapshot.notes) == ("ddp", ("a note",))
    write(path, memory, "ddp", ["a note"])
    assert path.read_bytes() == data
    assert list(tmp_path.iterdir()) == [path]
    plain = gzip.decompress(data) if name.endswith("gz") else data
    assert plain[:2] == bytes([0x80, PROTOCOL])


# Instructions that the JavaScript of torch's viewer knows (torch/utils/viz/MemoryViz.js).
_VIEWER = {
    "PROTO", "FRAME", "STOP", "MARK", "MEMOIZE", "BINGET", "LONG_BINGET", "EMPTY_DICT",
    "EMPTY_LIST", "APPEND", "APPENDS", "SETITEM", "SETITEMS", "BININT", "BININT1", "BININT2",
    "LONG1", "SHORT_BINUNICODE", "BINUNICODE",
}  # fmt: skip


@pytest.mark.parametrize("seed", range(12))
def test_only_what_torchs_viewer_unpickles(tmp_path: Path, seed: int) -> None:
    """Of its instructions, and no number beyond 64 bits, which it would read as another type."""
    write(tmp_path / "one.pickle", drawn(seed))
    opcodes = list(pickletools.genops((tmp_path / "one.pickle").read_bytes()))

    assert {opcode.name for opcode, _, _ in opcodes} <= _VIEWER
    assert all(abs(value) < 2**63 for _, value, _ in opcodes if isinstance(value, int))


class Version(str):
    """As torch's own is: no plain text."""

    __slots__ = ()


def test_values_of_derived_classes_are_written_as_plain_ones(tmp_path: Path) -> None:
    """torch's version is a class of its own, numpy's numbers are too."""
    memory = replace(
        drawn(3),
        version=Version("2.13.0"),
        rank=np.int64(4),
        names=tuple(map(Version, drawn(3).names)),
        step_ends_ns=(np.int64(7),),
        segments=(Segment(np.int64(5), np.int64(64), np.int64(0), np.int64(1), Version("large")),),
        failures=(OutOfMemory(np.int64(7), np.int64(8), np.int64(9)),),
    )
    write(tmp_path / "one.pickle", memory)
    whole = pickle.loads((tmp_path / "one.pickle").read_bytes())

    assert plain_types(whole) == {dict, list, str, int}
    assert to_torch(read(tmp_path / "one.pickle").ranks[0]) == to_torch(memory)


def test_failed_write_leaves_what_was_there(tmp_path: Path, monkeypatch: Any) -> None:
    """A full disk leaves the older file, and nothing half."""
    path = tmp_path / "rank0.pickle"
    write(path, drawn(1))
    before = path.read_bytes()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pickle, "dump", full)
    with pytest.raises(SnapshotError, match=r"rank0\.pickle cannot be written: No space left"):
        write(path, drawn(2))
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_torchs_own_files(tmp_path: Path, protocol: int) -> None:
    """As _dump_snapshot writes them, tuples, truths and decimals in them; rank by the name."""
    path = tmp_path / "snapshot_rank12.pickle"
    path.write_bytes(pickle.dumps(GPU, protocol))

    assert to_torch(read(path).ranks[0]) == to_torch(of_torch(GPU, rank=12))


def test_history_of_another_device_is_found(tmp_path: Path) -> None:
    """A process that uses its third GPU alone."""
    only = [{**segment, "device": 2} for segment in GPU["segments"][:2]]
    whole = {"segments": only, "device_traces": [[], [], GPU["device_traces"][0]]}
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(whole))
    (memory,) = read(path, 4).ranks
    path.write_bytes(pickle.dumps({"segments": only}))

    assert (memory.rank, len(memory.blocks)) == (4, 5)
    assert len(read(path).ranks[0].blocks) == 3


class Calls:
    """Pickled, it is a call: what runs when anybody unpickles it plainly."""

    def __init__(self, *parts: Any):
        self.parts = parts

    def __reduce__(self) -> Any:
        return self.parts


class Stated:
    def __setstate__(self, state: Any) -> None:
        Path(state).mkdir()


class Linked:
    """Refers to something outside of the file."""


class _Persists(pickle._Pickler):
    def persistent_id(self, obj: Any) -> Any:
        return "outside" if isinstance(obj, Linked) else None


def _dumped(value: Any, protocol: int) -> bytes:
    file = io.BytesIO()
    _Persists(file, protocol).dump(value)
    return file.getvalue()


_RUNS = {
    "system": lambda mark: Calls(os.system, (f"mkdir {mark}",)),
    "eval": lambda mark: Calls(eval, (f"__import__('os').mkdir({str(mark)!r})",)),
    "exec": lambda mark: Calls(exec, (f"import os; os.mkdir({str(mark)!r})",)),
    "function": lambda mark: Calls(os.mkdir, (str(mark),)),
    "process": lambda mark: Calls(subprocess.check_call, (["mkdir", str(mark)],)),
    "item": lambda mark: Calls(dict, (), None, None, iter([(1, Calls(os.mkdir, (str(mark),)))])),
    "entry": lambda mark: Calls(list, (), None, iter([Calls(os.mkdir, (str(mark),))])),
    "state": lambda mark: Calls(copyreg._reconstructor, (Stated, object, None), str(mark)),
}
_GADGETS = {
    **_RUNS,
    "getattr": lambda mark: Calls(getattr, (Calls(__import__, ("os",)), "system")),
    "class": lambda mark: Stated,
    "persistent": lambda mark: Linked(),
}


def refusal(folder: Path, data: bytes) -> str:
    """What is said of a file that is refused; it begins with the file's name."""
    path = folder / "rank0.pickle"
    path.write_bytes(data)
    with pytest.raises(SnapshotError) as caught:
        read(path)

    assert str(caught.value).startswith(str(path))
    return str(caught.value)


@pytest.mark.parametrize("gadget", _GADGETS)
@pytest.mark.parametrize("protocol", range(6))
def test_hostile_file_runs_nothing(tmp_path: Path, gadget: str, protocol: int) -> None:
    """Wherever it hides, alone or deep inside of a valid snapshot."""
    mark = tmp_path / "ran"
    hostile = _GADGETS[gadget](mark)
    valid = to_torch(drawn(2))
    inside = {**valid, "segments": [*valid["segments"], {"blocks": [{"frames": [hostile]}]}]}
    as_key = {**valid, ("key", hostile): 1} if gadget in {"class", "persistent"} else valid
    for whole in (hostile, inside, {**as_key, "nbdist": hostile}):
        refusal(tmp_path, _dumped(whole, protocol))

        assert not mark.exists()


@pytest.mark.parametrize("gadget", _GADGETS)
@pytest.mark.parametrize("protocol", range(6))
def test_a_table_of_classes_lets_nothing_else_through(
    tmp_path: Path, gadget: str, protocol: int
) -> None:
    """As checkpoints are read: what is in the table is made, and nothing else is named."""
    table = {("collections", "OrderedDict"): OrderedDict}
    hostile = _GADGETS[gadget](tmp_path / "ran")
    for whole in (hostile, OrderedDict(inner=[hostile])):
        with pytest.raises(safe_pickle.Refused):
            safe_pickle.loads(_dumped(whole, protocol), table)

    assert not (tmp_path / "ran").exists()
    if protocol >= 2:
        assert safe_pickle.loads(_dumped(OrderedDict(a=1), protocol), table) == OrderedDict(a=1)


def test_a_table_of_classes_opens_no_other_way() -> None:
    """Neither what the process has registered by number, nor a memo as large as it likes."""
    table = {("collections", "OrderedDict"): OrderedDict}
    copyreg.add_extension("posix", "system", 7)
    try:
        pickle.loads(_proto(b"\x82\x07"))  # now pickle names it without asking
        with pytest.raises(safe_pickle.Refused, match="imports by a number"):
            safe_pickle.loads(_proto(b"\x82\x07"), table)
    finally:
        copyreg.remove_extension("posix", "system", 7)
    with pytest.raises(safe_pickle.Refused, match="counts more values than it has bytes"):
        safe_pickle.loads(_proto(b"Nr\xff\xff\xff\xff"), table)


@pytest.mark.parametrize("gadget", _RUNS)
def test_gadgets_are_real(tmp_path: Path, gadget: str) -> None:
    """Read plainly they run, so the test above would see it."""
    pickle.loads(pickle.dumps(_RUNS[gadget](tmp_path / "ran")))

    assert (tmp_path / "ran").exists()


def test_what_it_wanted_is_named(tmp_path: Path) -> None:
    """The name of what it imports, and that nothing was run."""
    for protocol in (2, 4):
        text = refusal(tmp_path, pickle.dumps([Calls(os.system, ("true",))], protocol))
        assert re.search(r"imports posix\.system .* nothing of this file was", text)


def _proto(*parts: bytes) -> bytes:
    return b"\x80\x04" + b"".join(parts) + b"."


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "is empty"),
        (b".", "is not a pickle of protocol 2 or later"),
        (b"(lp0\n.", "is not a pickle of protocol 2 or later"),
        (b'{"segments": []}', "is not a pickle of protocol 2 or later"),
        (_proto(), "is damaged"),
        (_proto(b"}" * 3, b"a"), "is damaged"),
        (_proto(b"h\x05"), "is damaged"),
        (_proto(b"]}}s"), "is damaged"),
        (_proto(b"\x82\x01"), "imports by a number"),
        (_proto(b"\x83\x01\x00"), "imports by a number"),
        (_proto(b"\x84\x01\x00\x00\x00"), "imports by a number"),
        (_proto(b"\x8b", struct.pack("<i", 2**31 - 1), b"1"), "a number of more than 255 bytes"),
        (_proto(b"\x8e", struct.pack("<Q", 2**62), b"1"), "has the instruction BINBYTES8"),
        (_proto(b"\x8d", struct.pack("<Q", 2**62), b"1"), "has the instruction BINUNICODE8"),
        (_proto(b"B", struct.pack("<I", 2**32 - 1), b"1"), "has the instruction BINBYTES"),
        (_proto(b"X", struct.pack("<I", 2**32 - 1), b"1"), "is cut off"),
        (_proto(b"Nr\xff\xff\xff\xff"), "counts more values than it has bytes"),
        (_proto(b"\x95", struct.pack("<Q", 2**63), b"N"), "is damaged"),
        (_proto(b"P1\n"), "refers to something outside"),
        (_proto(b"NQ"), "refers to something outside"),
        (_proto(b"\xff"), "byte 2 (0xff) is not a pickle instruction"),
        (_proto(b"C\x03abc"), "has the instruction SHORT_BINBYTES"),
        (_proto(b"\x8f"), "has the instruction EMPTY_SET"),
        (b"\x80\x63N.", "is damaged"),
        (_proto(b"]" * 10), "is not a memory snapshot: snapshot is a list"),
        (_proto(b"N"), "is not a memory snapshot: snapshot is nothing"),
        (_proto(b"}\x94\x8c\x08segmentsh\x00s"), "is not a memory snapshot: segments is a dict"),
        (_proto(b"\x8c\x03\xed\xa0\x80"), "is not a memory snapshot: snapshot is a text"),
    ],
)  # fmt: skip
def test_bombs_and_rubbish(tmp_path: Path, data: bytes, problem: str) -> None:
    """Refused at once with a reason, and without the memory that they ask for."""
    assert problem in refusal(tmp_path, data)


def test_deep_and_shared_lists_take_no_time(tmp_path: Path) -> None:
    """Many levels; one long list in many places; each is looked at once."""
    begin_s = time.process_time()
    assert "snapshot is a list" in refusal(tmp_path, _proto(b"]" * 10**5, b"a" * (10**5 - 1)))
    frame = {"filename": "a", "line": 1, "name": "f"}
    blocks = [{"size": 1, "state": "active"}] * 10**4
    segment = {"address": 1, "total_size": 10**4, "blocks": blocks}
    shared = pickle.dumps({"segments": [dict(segment) for _ in range(10**3)]}, 4)
    assert "same list as another segment" in refusal(tmp_path, shared)
    ours = to_torch(drawn(0))
    ours["nbdist"]["stacks"] = [[frame] * 10**4] * 10**4
    (tmp_path / "rank0.pickle").write_bytes(pickle.dumps(ours, 4))
    read(tmp_path / "rank0.pickle")

    assert time.process_time() - begin_s < 20


def test_many_containers_are_refused_before_they_are_made(tmp_path: Path, monkeypatch: Any) -> None:
    """64 bytes of memory for each byte of the file."""
    monkeypatch.setattr(safe_pickle, "MOST_CONTAINERS", 1000)
    text = refusal(tmp_path, _proto(b"(", b"}" * 2000, b"l"))

    assert "holds about 2001 lists and dicts, over 1000" in text


def test_huge_files(tmp_path: Path, monkeypatch: Any) -> None:
    """The bound is told; a small compressed file cannot unpack beyond it either."""
    path = tmp_path / "rank0.pickle"
    path.touch()
    os.truncate(path, 3 * 2**30)  # takes no room on the disk
    with pytest.raises(
        SnapshotError, match=rf"is too large: {size(3 * 2**30)} or more, and the limit is 1.1 GB"
    ):
        read(path)
    monkeypatch.setattr(safe_pickle, "MOST_BYTES", 10**6)
    packed = tmp_path / "rank1.pickle.gz"
    packed.write_bytes(gzip.compress(_proto(b"N" * 10**7), 1))
    assert packed.stat().st_size < 10**6
    with pytest.raises(SnapshotError, match=r"is too large"):
        read(packed)


@pytest.mark.parametrize("is_packed", [False, True])
def test_torn_file_at_every_byte(tmp_path: Path, is_packed: bool) -> None:
    """However far it was written or copied: refused, never half a snapshot."""
    path = tmp_path / ("rank0.pickle.gz" if is_packed else "rank0.pickle")
    write(path, drawn(42))
    data = path.read_bytes()
    for cut in range(len(data)):
        path.write_bytes(data[:cut])
        with pytest.raises(SnapshotError):
            read(path)


@pytest.mark.parametrize("seed", range(5))
def test_flipped_bytes(tmp_path: Path, seed: int) -> None:
    """Damage on the disk: read as it is, or refused; nothing else."""
    chance = random.Random(seed)
    path = tmp_path / "rank0.pickle"
    write(path, drawn(seed + 1))
    data = path.read_bytes()
    refused = 0
    for _ in range(120):
        torn = bytearray(data)
        for _ in range(chance.randint(1, 4)):
            torn[chance.randrange(len(torn))] = chance.randrange(256)
        path.write_bytes(torn)
        try:
            read(path)
        except SnapshotError:
            refused += 1
    assert refused > 20


def test_folder(tmp_path: Path) -> None:
    """One file per rank, in rank order; what cannot be read is told."""
    ranks = tuple(replace(drawn(rank), rank=rank) for rank in range(3))
    paths = write_folder(tmp_path / "new" / "one", Snapshot(ranks, "fsdp", ("guessed.",)))
    snapshot = read_folder(tmp_path / "new" / "one")

    assert [path.name for path in paths] == ["rank0.pickle", "rank1.pickle", "rank2.pickle"]
    assert [to_torch(rank) for rank in snapshot.ranks] == [to_torch(rank) for rank in ranks]
    assert (snapshot.strategy, snapshot.notes) == ("fsdp", ("guessed.",))
    paths[1].write_bytes(b"torn")
    snapshot = read_folder(tmp_path / "new" / "one")
    assert [rank.rank for rank in snapshot.ranks] == [0, 2]
    assert snapshot.notes[0].startswith(f"{paths[1]} is not a pickle")
    paths[1].write_bytes(paths[0].read_bytes())
    with pytest.raises(SnapshotError, match="holds two snapshots of rank 0"):
        read_folder(tmp_path / "new" / "one")
    with pytest.raises(SnapshotError, match="No snapshots found in"):
        read_folder(tmp_path)
    with pytest.raises(SnapshotError, match="is not a folder"):
        read_folder(tmp_path / "none")
    with pytest.raises(SnapshotError, match="cannot be read: No such file"):
        read(tmp_path / "none")
    with pytest.raises(SnapshotError, match="cannot be created"):
        write_folder(paths[0] / "below", snapshot)


def test_unreadable_sizes_do_not_reach_memory() -> None:
    """In a process with little memory to take, bombs are refused all the same."""
    program = (
        "import resource, struct\n"
        "from nbdist.core import safe_pickle\n"
        "resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))\n"
        "over = [b'Nr' + struct.pack('<I', 2**power) for power in (16, 24, 31)]\n"
        "for bomb in (*over, b'B' + b'\\xff' * 4):\n"
        "    try:\n"
        "        safe_pickle.loads(b'\\x80\\x04' + bomb + b'.')\n"
        "    except safe_pickle.Refused as error:\n"
        "        print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("\n") == 4
    assert "Memory" not in done.stdout
