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

from nbdist.core import checkpoint, checkpoint_folder, host
from nbdist.core.checkpoint import Checkpoint, SavedFile
from nbdist.core.host import Machine
from nbdist.core.saving import Saved
from nbdist.engine.checkpoint import metadata, plain, staging, writing
from nbdist.engine.checkpoint.contents import Contents
from nbdist.engine.checkpoint.jobs import Job, Meter
from nbdist.engine.checkpoint.planners import Saver, Spot, Writer
from nbdist.engine.parallel.agreement import rank, sentence
from nbdist.engine.parallel.training_state import Generators
from nbdist.errors import CheckpointError

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
    contents: Contents = field(default_factory=Contents)
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
            result = writing.write(one.folder, one.contents, rank(), _values(one), one.meter)
            let_go(one)
            writing.tell(one.folder, rank(), result)
        if rank() == 0:
            _finish(one)
        else:
            one.meter.phase = "done with its part"
    except BaseException as error:  # noqa: BLE001  # told to rank 0, and to who asks
        failure = _sentence(one, error)
        let_go(one)
        writing.tell_failure(one.folder, rank(), failure)
        if rank() == 0:
            checkpoint_folder.abandon(one.path)
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
    results = writing.results(
        one.folder, len(one.processes), one.meter, lambda other: _gone(one, other), STALL_S
    )
    one.meter.phase = "writing the manifest"
    assert one.manifest is not None
    with named(one):
        saver = Saver(one.contents.tensors, one.contents.parts, 0, _values(one))
        _, known = saver.create_global_plan([])
        Writer(one.folder).finish(known, _write_results(one.contents, results))
        data = (one.folder / metadata.FILE).read_bytes()
        if metadata.loads(data) != known:
            raise CheckpointError(f"{metadata.FILE} is not as it was written")
        states = plain.as_bytes(one.plain, one.generators)
        plain.loads(states)  # as a load will
        (one.folder / plain.FILE).write_bytes(states)
        if (one.folder / plain.FILE).read_bytes() != states:
            raise CheckpointError(f"{plain.FILE} is not as it was written")
        files = [
            *writing.listed(results),
            *(_file(one.folder, n) for n in (metadata.FILE, plain.FILE)),
        ]
        saved = replace(one.manifest, files=tuple(files))
        writing.clear(one.folder, len(one.processes))
        (one.folder / checkpoint.MANIFEST).write_text(checkpoint.text(saved), encoding="utf-8")
        one.meter.make_final()
        checkpoint_folder.commit(one.folder, one.path)
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
    return SavedFile(name, path.stat().st_size, checkpoint.checksum(path))


def _write_results(contents: Contents, results: list[dict[str, Any]]) -> list[list[WriteResult]]:
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
    text = sentence(error)
    return text if text.startswith("rank ") else f"rank {rank()}: {text}"


@contextlib.contextmanager
def named(one: Write) -> Iterator[None]:
    """What the system refuses in here is told with rank, path and numbers."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{checkpoint_folder.problem(error, one.path)} It had written "
            f"{one.meter.done_bytes:,} bytes."
        ) from error
