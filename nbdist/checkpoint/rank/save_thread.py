"""The thread of a rank's save: it writes the rank's part, reads it back and compares it.

No rank is met. Rank 0's waits for the others' word, writes the manifest and renames the folder
into its place.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult

from nbdist.checkpoint import folder as checkpoint_folder
from nbdist.checkpoint import manifest
from nbdist.checkpoint.manifest import Checkpoint, SavedFile
from nbdist.checkpoint.rank import dcp_metadata, plain_state, staging
from nbdist.checkpoint.rank import write as checkpoint_write
from nbdist.checkpoint.rank.dcp_planners import ChunkSavePlanner, ChunkWriter
from nbdist.checkpoint.rank.jobs import SaveJob
from nbdist.checkpoint.rank.tensors import CheckpointTensors, Spot
from nbdist.checkpoint.results import Saved
from nbdist.core import host
from nbdist.core.host import Machine
from nbdist.errors import CheckpointError
from nbdist.parallel.base.consensus import one_line, rank
from nbdist.parallel.base.training_state import Generators


@dataclass(slots=True)
class RankSave:
    """The state of one save on this rank.

    Attributes:
        new: Where it is written, once that is made.
        processes: (machine, pid, when it started) of each rank.
        generators: States of each rank's random generators.
        began_s: The save's begin on the monotonic clock.
        boxes: The boxes that this rank writes: copies, or views of what is trained.
        is_staged: Whether they are copies in the memory of `staging`, which is then this save's.
        manifest: All of it but the files; rank 0 has it.
        plain: The other states but the generators'; rank 0 has them.
        is_adapters: Whether only the adapters of PEFT are saved, not whole models.
    """

    job: SaveJob
    new: Path | None = None
    contents: CheckpointTensors = field(default_factory=CheckpointTensors)
    processes: list[tuple[Machine, int, str]] = field(default_factory=list)
    generators: list[Generators] = field(default_factory=list)
    began_s: float = field(default_factory=time.monotonic)
    boxes: dict[Spot, torch.Tensor] = field(default_factory=dict)
    is_staged: bool = False
    manifest: Checkpoint | None = None
    plain: dict[str, Any] = field(default_factory=dict)
    is_adapters: bool = False

    @property
    def path(self) -> Path:
        """Path at which the checkpoint will be."""
        return Path(self.job.path)

    @property
    def folder(self) -> Path:
        """Folder in which the checkpoint is written; exists by now."""
        assert self.new is not None
        return self.new


def run(save: RankSave) -> None:
    """All of it, in the thread of saves. A failure is reported by the job, and to rank 0."""
    try:
        with explain_errors(save):
            result = checkpoint_write.write(
                save.folder, save.contents, rank(), _values(save), save.job.meter
            )
            let_go(save)
            checkpoint_write.tell(save.folder, rank(), result)
        if rank() == 0:
            _finish(save)
        else:
            save.job.meter.phase = "done with its part"
    except BaseException as error:  # noqa: BLE001  # reported to rank 0, and to the notebook
        text = one_line(error)
        failure = text if text.startswith("rank ") else f"rank {rank()}: {text}"
        let_go(save)
        checkpoint_write.tell_failure(save.folder, rank(), failure)
        if rank() == 0:
            checkpoint_folder.abandon(save.path)
        save.job.failure = failure  # last: whoever sees it may look at the folder at once


def let_go(save: RankSave) -> None:
    """Drop the boxes, and give back the memory of their copies."""
    save.boxes.clear()
    if save.is_staged:  # otherwise another save may have its copies there
        staging.give_back()


def _values(save: RankSave) -> Callable[[Spot], torch.Tensor]:
    return lambda spot: save.boxes[spot].cpu().contiguous()


def _finish(save: RankSave) -> None:
    """Rank 0: wait for all ranks, write the metadata, then rename the folder into place."""
    results = checkpoint_write.results(
        save.folder, len(save.processes), save.job.meter, lambda other: _gone(save, other)
    )
    save.job.meter.phase = "writing the manifest"
    assert save.manifest is not None
    with explain_errors(save):
        saver = ChunkSavePlanner(save.contents, 0, _values(save))
        _, metadata = saver.create_global_plan([])
        writes = _write_results(save.contents, results)
        ChunkWriter(save.folder).finish(metadata, [writes])
        written = dcp_metadata.loads((save.folder / dcp_metadata.FILE).read_bytes())
        # torch 2.11's writer completes a copy of the metadata, 2.13's the metadata itself.
        tensors = metadata.state_dict_metadata
        places = {write.index: write.storage_data for write in writes}
        if written != replace(written, state_dict_metadata=tensors, storage_data=places):
            raise CheckpointError(f"{dcp_metadata.FILE} differs from what was written")
        states = plain_state.as_bytes(save.plain, save.generators)
        plain_state.loads(states)  # as a load will
        (save.folder / plain_state.FILE).write_bytes(states)
        if (save.folder / plain_state.FILE).read_bytes() != states:
            raise CheckpointError(f"{plain_state.FILE} differs from what was written")
        files = [
            SavedFile(name, *size_and_checksum)
            for result in results
            for name, size_and_checksum in result["files"].items()
        ]
        files += [
            SavedFile(path.name, path.stat().st_size, manifest.checksum(path))
            for path in (save.folder / dcp_metadata.FILE, save.folder / plain_state.FILE)
        ]
        saved = replace(save.manifest, files=tuple(files))
        checkpoint_write.clear(save.folder, len(save.processes))
        (save.folder / manifest.MANIFEST).write_text(manifest.text(saved), encoding="utf-8")
        save.job.meter.make_final()
        checkpoint_folder.commit(save.folder, save.path)
    save.job.meter.phase = "done"
    save.job.saved = Saved(
        path=str(save.path),
        size_bytes=saved.size_bytes,
        files=len(saved.files) + 1,
        tensors=len(metadata.state_dict_metadata),
        step=saved.step,
        strategy=saved.strategy,
        elapsed_s=time.monotonic() - save.began_s,
    )


def _write_results(contents: CheckpointTensors, results: list[dict[str, Any]]) -> list[WriteResult]:
    """Place of each box in the files, for DCP's writer, under each of a tensor's names."""
    write_results = []
    for result in results:
        for name, offsets, file, at, length in result["boxes"]:
            place = filesystem._StorageInfo(file, at, length)  # noqa: SLF001
            names = (name, *contents.aliases[name])
            write_results += [
                WriteResult(MetadataIndex(alias, offsets), length, place) for alias in names
            ]
    return write_results


def _gone(save: RankSave, other: int) -> str:
    """Says that another rank's process on this machine has ended; empty while it lives."""
    machine, pid, start = save.processes[other]
    if machine != host.this_machine() or host.started(pid) == start:
        return ""
    return f"rank {other} (process {pid}) ended while it wrote its part"


@contextlib.contextmanager
def explain_errors(save: RankSave) -> Iterator[None]:
    """Turn system errors into a CheckpointError with path and numbers."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{checkpoint_folder.problem(error, save.path)} It had written "
            f"{save.job.meter.done_bytes:,} bytes."
        ) from error
