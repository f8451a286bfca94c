"""One rank's part of a save: written, read back, compared.

No rank is met, so it can run beside training, in a thread; ranks report to each other through small
files in the same folder.
"""

from __future__ import annotations

import io
import json
import os
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from nbdist.checkpoint.manifest import checksum_text
from nbdist.checkpoint.rank.dcp_planners import ChunkSavePlanner, ChunkWriter, spot
from nbdist.checkpoint.rank.jobs import Meter
from nbdist.checkpoint.rank.tensors import CheckpointTensors, Spot
from nbdist.core.units import exact_size
from nbdist.errors import CheckpointError

# A rank's failure overwrites this file in place, which needs no room on a full disk.
_FAILURE_BYTES = 4096
_PIECE_BYTES = 1 << 22
_PAUSE_S = 0.02
# A rank that writes is silent this long only on a disk that does not answer.
STALL_S = 300.0


class _Stream(io.RawIOBase):
    """A file that is written, with its checksum.

    torch's zip writer must not meet an error in the middle: what fails is raised by `flush`,
    which torch calls after each tensor.
    """

    def __init__(self, path: Path, meter: Meter) -> None:
        super().__init__()
        self._file = path.open("wb", buffering=0)
        self._meter = meter
        self._buffer = bytearray()
        self._error: BaseException | None = None
        self.size_bytes = 0
        self.crc32 = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        # torch gives a tensor in pieces of some kB.
        self._buffer += data
        count = memoryview(data).nbytes
        self.size_bytes += count
        if len(self._buffer) >= _PIECE_BYTES:
            self._put()
        return count

    def flush(self) -> None:
        self._put()
        if self._error is not None:
            raise self._error

    def _put(self) -> None:
        """Write the buffer; a failure is kept for `flush`."""
        self.crc32 = zlib.crc32(self._buffer, self.crc32)
        at = 0
        with memoryview(self._buffer) as view:
            while at < len(view) and self._error is None:
                try:
                    self._meter.check()
                    at += self._file.write(view[at : at + _PIECE_BYTES])
                except BaseException as error:  # noqa: BLE001  # raised by `flush`
                    self._error = error
        self._buffer.clear()

    def tell(self) -> int:
        return self.size_bytes

    def fileno(self) -> int:
        self.flush()
        return self._file.fileno()

    def close(self) -> None:
        if not self.closed:
            self._file.close()
            super().close()


class _Files(FileSystem):
    """File system in which torch's writer opens its files; notes each file written."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self.written: dict[str, _Stream] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        if mode != "wb":
            with super().create_stream(path, mode) as other:
                yield other
            return
        stream = self.written[Path(path).name] = _Stream(Path(path), self._meter)
        try:
            yield stream
        finally:
            stream.close()


def write(
    folder: Path,
    contents: CheckpointTensors,
    rank: int,
    value: Callable[[Spot], torch.Tensor],
    meter: Meter,
) -> dict[str, Any]:
    """Write a rank's boxes into a folder, read them back, and compare them bit for bit.

    `contents` is all that is saved; `value` gives a box, contiguous, on the host.

    Returns:
        Plain data: `files`, name -> (bytes, checksum); `boxes`, each with name, offsets, file and
        where it lies in that.

    Raises:
        OSError: A file could not be written or read.
        CheckpointError: What was read is not what was written.
        Cancelled: `meter` has been stopped.
    """

    def counted(box: Spot) -> torch.Tensor:
        tensor = value(box)
        meter.done_bytes += tensor.nbytes
        return tensor

    saver = ChunkSavePlanner(contents, rank, counted)
    writer, files = ChunkWriter(folder), _Files(meter)
    writer.fs = files
    plan = saver.create_local_plan()
    meter.phase = "writing"
    if not plan.items:
        return {"files": {}, "boxes": []}
    plan = writer.prepare_global_plan([*[SavePlan([])] * rank, plan])[rank]
    results = writer.write_data(plan, saver).wait()
    meter.phase = "comparing"
    for name, stream in files.written.items():
        in_file = [result for result in results if result.storage_data.relative_path == name]
        _compare(folder / name, stream.size_bytes, stream.crc32, in_file, value, meter)
    written = {n: (s.size_bytes, checksum_text(s.crc32)) for n, s in files.written.items()}
    return {"files": written, "boxes": [_box(result) for result in results]}


def _compare(
    path: Path,
    size_bytes: int,
    crc32: int,
    results: list[WriteResult],
    value: Callable[[Spot], torch.Tensor],
    meter: Meter,
) -> None:
    """Read a file from the disk and compare it with the tensors."""
    read_crc32 = 0
    at = 0
    with path.open("rb") as file:
        # From the disk, as far as the system does what it is asked for: not from its own memory.
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        for result in sorted(results, key=lambda result: result.storage_data.offset):
            meter.check()
            data = file.read(result.storage_data.length)
            read_crc32, at = zlib.crc32(data, read_crc32), at + len(data)
            name, offsets = spot(result.index)
            expected = value((name, offsets))
            if not _is_equal(data, expected):
                raise CheckpointError(
                    f"{name} from {list(offsets)} differs in {path} from what was written: the "
                    "disk or the memory corrupts data. This save is discarded."
                )
            meter.done_bytes += expected.nbytes
        rest = file.read()
        read_crc32, at = zlib.crc32(rest, read_crc32), at + len(rest)
    if (at, read_crc32) != (size_bytes, crc32):
        raise CheckpointError(
            f"{path} has {at:,} bytes and {checksum_text(read_crc32)}, but {size_bytes:,} bytes "
            f"with {checksum_text(crc32)} were written. This save is discarded."
        )


def _is_equal(data: bytes, expected: torch.Tensor) -> bool:
    """Whether a saved tensor has the same type, shape and bits."""
    try:
        loaded = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception:  # noqa: BLE001  # whatever damage does to it
        return False
    return (
        (loaded.dtype, loaded.shape) == (expected.dtype, expected.shape)
        and loaded.is_contiguous()
        and bool(torch.equal(_bits(loaded), _bits(expected)))
    )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8) if tensor.numel() else tensor


def _box(result: WriteResult) -> list[Any]:
    stored = result.storage_data
    name, offsets = spot(result.index)
    return [name, list(offsets), stored.relative_path, stored.offset, stored.length]


# The ranks' reports to each other are files.


def reserve(folder: Path, rank: int) -> None:
    """Make the file in which this rank says that it has failed."""
    _failure_file(folder, rank).write_bytes(b" " * _FAILURE_BYTES)


def tell(folder: Path, rank: int, result: Mapping[str, Any]) -> None:
    """Report what this rank has written."""
    path = _result_file(folder, rank)
    new = path.with_name(f"{path.name}.new")  # not with_suffix: the rank is the suffix
    new.write_text(json.dumps(result))
    new.rename(path)


def tell_failure(folder: Path, rank: int, text: str) -> None:
    """Report that this rank has failed; where even that fails, its job still has the failure."""
    data = text.encode()[: _FAILURE_BYTES // 2]
    with suppress(OSError), _failure_file(folder, rank).open("r+b") as file:
        file.write(data)


def results(
    folder: Path, world_size: int, meter: Meter, is_gone: Callable[[int], str]
) -> list[dict[str, Any]]:
    """Wait for the ranks' reports, and return the files that they have written.

    `is_gone` says that a rank's process has ended, or nothing.

    Raises:
        CheckpointError: A rank has failed, or has ended, or writes nothing any more; says which.
        Cancelled: `meter` has been stopped.
    """
    reports: dict[int, dict[str, Any]] = {}
    written: dict[int, tuple[int, float]] = {}
    while True:
        for rank in sorted(set(range(world_size)) - reports.keys()):
            if (path := _result_file(folder, rank)).exists():
                reports[rank] = json.loads(path.read_text())
            else:
                last = written.get(rank, (-1, 0.0))
                written[rank] = _check_progress(folder, rank, is_gone(rank), last)
        missing = [str(rank) for rank in range(world_size) if rank not in reports]
        if not missing:
            return [reports[rank] for rank in range(world_size)]
        meter.phase = f"waiting for rank {', '.join(missing)}"
        meter.wait(_PAUSE_S)


def _check_progress(
    folder: Path, rank: int, gone: str, last: tuple[int, float]
) -> tuple[int, float]:
    """How many bytes a rank has written, and since when so many; `last` is what it was before."""
    failure = _failure_file(folder, rank).read_bytes().strip()
    if why := failure.decode(errors="replace") or gone:
        raise CheckpointError(why)
    size_bytes = sum(file.stat().st_size for file in folder.glob(f"__{rank}_*"))
    if size_bytes != last[0]:
        return size_bytes, time.monotonic()
    if time.monotonic() - last[1] > STALL_S:
        raise CheckpointError(
            f"rank {rank} has written nothing for {STALL_S:.0f} s "
            f"({exact_size(size_bytes)} before that)"
        )
    return last


def clear(folder: Path, world_size: int) -> None:
    """Remove the files with the ranks' reports to each other."""
    for rank in range(world_size):
        _failure_file(folder, rank).unlink(missing_ok=True)
        _result_file(folder, rank).unlink(missing_ok=True)


def _failure_file(folder: Path, rank: int) -> Path:
    return folder / f".failed.{rank}"


def _result_file(folder: Path, rank: int) -> Path:
    return folder / f".done.{rank}"
