"""What a rank's thread does once a save has begun: its part is written, read back and compared.

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

from nbdist.checkpoint import folder as checkpoint_checkpoint_folder
from nbdist.checkpoint import manifest
from nbdist.checkpoint.manifest import Checkpoint, SavedFile
from nbdist.checkpoint.rank import dcp_metadata, plain_state, staging
from nbdist.checkpoint.rank import write as checkpoint_write
from nbdist.checkpoint.rank.dcp_planners import Saver, Spot, Writer
from nbdist.checkpoint.rank.jobs import Job, Meter
from nbdist.checkpoint.rank.tensors import CheckpointTensors
from nbdist.checkpoint.results import Saved
from nbdist.core import host
from nbdist.core.host import Machine
from nbdist.errors import CheckpointError
from nbdist.parallel.consensus import one_line, rank
from nbdist.parallel.training_state import Generators

# Nobody who writes is silent for so long, but on a disk that does not answer.
STALL_S = 300.0


@dataclass(slots=True)
class Write:
    """One save on this rank.

    Attributes:
        job: What others know of it.
        new: Where it is written, once that is made.
        contents: All tensors.
        processes: (machine, pid, when it started) of each rank.
        generators: States of each rank's random generators.
        began_s: By the monotonic clock.
        boxes: The boxes that this rank writes: copies, or views of what is trained.
        is_staged: Whether they are copies in the memory of `staging`, which is then this save's.
        manifest: All of it but the files; rank 0 has it.
        plain: The other states but the generators'; rank 0 has them.
    """

    job: Job
    new: Path | None = None
    contents: CheckpointTensors = field(default_factory=CheckpointTensors)
    processes: list[tuple[Machine, int, str]] = field(default_factory=list)
    generators: list[Generators] = field(default_factory=list)
    began_s: float = field(default_factory=time.monotonic)
    boxes: dict[Spot, torch.Tensor] = field(default_factory=dict)
    is_staged: bool = False
    manifest: Checkpoint | None = None
    plain: dict[str, Any] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        """Where the checkpoint will be."""
        return Path(self.job.path)

    @property
    def folder(self) -> Path:
        """Where it is written; it is made by now."""
        assert self.new is not None
        return self.new

    @property
    def meter(self) -> Meter:
        """How far it is."""
        return self.job.meter


def run(one: Write) -> None:
    """All of it, in the thread of saves. What fails is told by the job, and to rank 0."""
    try:
        with named(one):
            result = checkpoint_write.write(
                one.folder, one.contents, rank(), _values(one), one.meter
            )
            let_go(one)
            checkpoint_write.tell(one.folder, rank(), result)
        if rank() == 0:
            _finish(one)
        else:
            one.meter.phase = "done with its part"
    except BaseException as error:  # noqa: BLE001  # told to rank 0, and to who asks
        failure = _sentence(one, error)
        let_go(one)
        checkpoint_write.tell_failure(one.folder, rank(), failure)
        if rank() == 0:
            checkpoint_checkpoint_folder.abandon(one.path)
        one.job.failure = failure  # last: who hears of it may look what is left


def let_go(one: Write) -> None:
    """Nothing of what was saved is needed any more."""
    one.boxes.clear()
    if one.is_staged:  # otherwise another save may have its copies there
        staging.give_back()


def _values(one: Write) -> Callable[[Spot], torch.Tensor]:
    return lambda spot: one.boxes[spot].cpu().contiguous()


def _finish(one: Write) -> None:
    """Rank 0: when all have written, what belongs to all; then the folder gets its name."""
    results = checkpoint_write.results(
        one.folder, len(one.processes), one.meter, lambda other: _gone(one, other), STALL_S
    )
    one.meter.phase = "writing the manifest"
    assert one.manifest is not None
    with named(one):
        saver = Saver(one.contents.tensors, one.contents.parts, 0, _values(one))
        _, known = saver.create_global_plan([])
        Writer(one.folder).finish(known, _write_results(one.contents, results))
        data = (one.folder / dcp_metadata.FILE).read_bytes()
        if dcp_metadata.loads(data) != known:
            raise CheckpointError(f"{dcp_metadata.FILE} is not as it was written")
        states = plain_state.as_bytes(one.plain, one.generators)
        plain_state.loads(states)  # as a load will
        (one.folder / plain_state.FILE).write_bytes(states)
        if (one.folder / plain_state.FILE).read_bytes() != states:
            raise CheckpointError(f"{plain_state.FILE} is not as it was written")
        files = [
            *checkpoint_write.listed(results),
            *(_file(one.folder, n) for n in (dcp_metadata.FILE, plain_state.FILE)),
        ]
        saved = replace(one.manifest, files=tuple(files))
        checkpoint_write.clear(one.folder, len(one.processes))
        (one.folder / manifest.MANIFEST).write_text(manifest.text(saved), encoding="utf-8")
        one.meter.make_final()
        checkpoint_checkpoint_folder.commit(one.folder, one.path)
    one.meter.phase = "done"
    one.job.saved = Saved(
        path=str(one.path),
        size_bytes=saved.size_bytes,
        files=len(saved.files) + 1,
        tensors=len(known.state_dict_metadata),
        step=saved.step,
        strategy=saved.strategy,
        elapsed_s=time.monotonic() - one.began_s,
    )


def _file(folder: Path, name: str) -> SavedFile:
    path = folder / name
    return SavedFile(name, path.stat().st_size, manifest.checksum(path))


def _write_results(
    contents: CheckpointTensors, results: list[dict[str, Any]]
) -> list[list[WriteResult]]:
    """Where each box lies, as DCP's writer wants it; under each of a tensor's names."""
    found = []
    for result in results:
        for name, offsets, file, at, length in result["boxes"]:
            place = filesystem._StorageInfo(file, at, length)  # noqa: SLF001
            names = (name, *contents.tensors.aliases[name])
            found += [WriteResult(MetadataIndex(each, offsets), length, place) for each in names]
    return [found]


def _gone(one: Write, other: int) -> str:
    """That another rank's process on this machine has ended; nothing while it lives."""
    machine, pid, start = one.processes[other]
    if machine != host.this_machine() or host.started(pid) == start:
        return ""
    return f"rank {other} (process {pid}) ended while it wrote its part"


def _sentence(one: Write, error: BaseException) -> str:
    text = one_line(error)
    return text if text.startswith("rank ") else f"rank {rank()}: {text}"


@contextlib.contextmanager
def named(one: Write) -> Iterator[None]:
    """What the system refuses in here is told with rank, path and numbers."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{checkpoint_checkpoint_folder.problem(error, one.path)} It had written "
            f"{one.meter.done_bytes:,} bytes."
        ) from error
