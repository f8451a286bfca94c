"""Files of memory: the pickle that torch's `_dump_snapshot` writes and its viewer opens."""

from __future__ import annotations

import gzip
import pickle
import re
import secrets
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nbdist.core import safe_pickle
from nbdist.core.typed_json import Misfit, Value
from nbdist.core.units import size
from nbdist.errors import SnapshotError
from nbdist.memory import own_format
from nbdist.memory.snapshot import RankMemory, Snapshot
from nbdist.memory.torch_reader import of_torch
from nbdist.memory.torch_writer import to_torch

# torch's viewer reads protocols 2 to 4.
PROTOCOL = 4
NAME = "rank{rank}.pickle"
_GZIP = b"\x1f\x8b"
_RANK_IN_NAME = re.compile(r"rank[-_]?(\d{1,9})")


def write(path: Path, memory: RankMemory, strategy: str = "", notes: Sequence[str] = ()) -> None:
    """Write a rank's allocations, for torch's viewers and for `read`.

    The file is replaced at once, when all is written; it is compressed if it ends in `.gz`.

    Raises:
        SnapshotError: If it cannot be written; what was there is as it was.
    """
    content = to_torch(memory)
    content[own_format.OURS] |= {"strategy": strategy, "notes": list(notes)}
    half = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with half.open("xb") as file:
            if path.suffix == ".gz":
                with gzip.GzipFile("", "wb", 6, file, mtime=0) as packed:
                    pickle.dump(content, packed, PROTOCOL)
            else:
                pickle.dump(content, file, PROTOCOL)
        half.replace(path)
    except OSError as error:
        half.unlink(missing_ok=True)
        raise SnapshotError(f"{path} cannot be written: {error.strerror or error}.") from error


def read(path: Path, rank: int = 0) -> Snapshot:
    """Read one rank's memory from a file; no code in the file is run.

    Args:
        path: As `write`, or torch's `_dump_snapshot`, writes it; compressed or not.
        rank: Whose it is, where neither the file nor its name tells.

    Raises:
        SnapshotError: If it cannot be read, or is no snapshot.
    """
    named = _RANK_IN_NAME.search(path.name)
    try:
        whole = safe_pickle.loads(_content(path))
    except safe_pickle.Refused as error:
        raise SnapshotError(f"{path} {error}.") from None
    try:
        memory = of_torch(
            whole, rank=int(named.group(1)) if named else rank, device_index=_device(whole)
        )
        ours = Value(whole.get(own_format.OURS, {}), own_format.OURS)
        strategy, notes = ours.get("strategy", "").text(), ours.get("notes", ()).texts()
    except (SnapshotError, Misfit) as error:
        raise SnapshotError(f"{path} is not a memory snapshot: {str(error).rstrip('.')}.") from None
    return Snapshot((memory,), strategy, notes)


def _content(path: Path) -> bytes:
    """All of a file, unpacked if it is compressed."""
    most = safe_pickle.MOST_BYTES
    try:
        with path.open("rb") as file:
            is_packed = file.read(len(_GZIP)) == _GZIP
            file.seek(0)
            with gzip.GzipFile(fileobj=file) if is_packed else file as unpacked:
                data = unpacked.read(most + 1)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise safe_pickle.Refused(f"is cut off or damaged ({error})") from None
    except OSError as error:
        raise safe_pickle.Refused(f"cannot be read: {error.strerror or error}") from None
    if len(data) > most:
        raise safe_pickle.Refused(
            f"is too large: {size(max(len(data), path.stat().st_size))} or more, and the limit is "
            f"{size(most)}. Record fewer steps, or use --no-stacks"
        )
    return data


def _device(snapshot: Any) -> int:
    """Which of a file's devices has a history, or else memory; 0 where none has."""
    whole = Value(Value(snapshot, "snapshot").mapping(), "")
    traces = whole.get("device_traces", ()).sequence()
    with_history = [
        number for number, events in enumerate(traces) if type(events) is list and events
    ]
    if with_history:
        return with_history[0]
    segments = whole.get("segments", ()).entries()
    return min((segment.get("device", 0).whole(0) for segment in segments), default=0)


def read_folder(folder: Path) -> Snapshot:
    """The snapshots of a folder: one file per rank, *.pickle or *.pickle.gz.

    If only some files can be read, the notes say why the others cannot.

    Raises:
        SnapshotError: If there is none, or none can be read, or two are of one rank.
    """
    if not folder.is_dir():
        raise SnapshotError(f"{folder.absolute()} is not a folder.")
    paths = sorted(
        path for path in folder.iterdir()
        if path.name.endswith((".pickle", ".pickle.gz")) and not path.name.startswith(".")
    )  # fmt: skip
    if not paths:
        raise SnapshotError(
            f"No snapshots found in {folder.absolute()}. Expected *.pickle or *.pickle.gz, one "
            "file per rank, as %dist_memory --save or torch.cuda.memory._dump_snapshot writes."
        )
    ranks: dict[int, RankMemory] = {}
    strategies: list[str] = []
    notes: list[str] = []
    problems: list[str] = []
    for number, path in enumerate(paths):
        try:
            snapshot = read(path, number)
        except SnapshotError as error:
            problems.append(str(error))
            continue
        (memory,) = snapshot.ranks
        if memory.rank in ranks:
            raise SnapshotError(
                f"{folder.absolute()} holds two snapshots of rank {memory.rank} (one is "
                f"{path.name}). Put each in a folder of its own."
            )
        ranks[memory.rank] = memory
        strategies.append(snapshot.strategy)
        notes += snapshot.notes
    if not ranks:
        raise SnapshotError(" ".join(problems))
    return Snapshot(
        tuple(ranks[rank] for rank in sorted(ranks)),
        next(filter(None, strategies), ""),
        tuple(dict.fromkeys((*problems, *notes))),
    )


def write_folder(folder: Path, snapshot: Snapshot) -> tuple[Path, ...]:
    """Write a file per rank into a folder, which is made; files of the same names are replaced.

    Raises:
        SnapshotError: If one cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SnapshotError(f"{folder} cannot be created: {error.strerror or error}.") from error
    paths = []
    for rank in snapshot.ranks:
        path = folder / NAME.format(rank=rank.rank)
        write(path, rank, snapshot.strategy, snapshot.notes)
        paths.append(path)
    return tuple(paths)
