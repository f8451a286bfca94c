"""A checkpoint is saved: planned by all ranks together, then written by each for itself.

`begin`: all ranks agree on what is saved, and copy it to the host's memory if training goes on.
A thread of each writes its part, reads it back and compares it; rank 0's waits for the others'
word, writes the manifest and renames the folder into its place.
"""

from __future__ import annotations

import json
import os
import platform
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult

import nbdist
from nbdist.core import checkpoint, checkpoint_folder, host
from nbdist.core.checkpoint import Checkpoint, SavedFile, Versions
from nbdist.core.runs import Machine
from nbdist.core.saving import Begun, Saved
from nbdist.engine.checkpoint import metadata, plain, writing
from nbdist.engine.checkpoint.contents import Contents, contents
from nbdist.engine.checkpoint.found import Found, Model, look
from nbdist.engine.checkpoint.jobs import Job, Meter, keep, refuse_if_running
from nbdist.engine.checkpoint.planners import Saver, Spot, Writer
from nbdist.engine.parallel import registry
from nbdist.engine.parallel.agreement import rank, same_random, sentence, together, world_size
from nbdist.engine.parallel.room import room_for
from nbdist.errors import CheckpointError, NbdistError

# Nobody who writes is silent for so long, but on a disk that does not answer.
STALL_S = 300.0


@dataclass(slots=True)
class _Write:
    """One save on this rank.

    Attributes:
        job: What others know of it.
        new: Where it is written.
        contents: All tensors.
        processes: (machine, pid, when it started) of each rank.
        generators: States of each rank's random generators.
        began_s: By the monotonic clock.
        boxes: The boxes that this rank writes: copies, or views of what is trained.
        manifest: All of it but the files; rank 0 has it.
        plain: The bytes of the other states; rank 0 has them.
    """

    job: Job
    new: Path
    contents: Contents
    processes: list[tuple[Machine, int, str]]
    generators: list[dict[str, Any]]
    began_s: float
    boxes: dict[Spot, torch.Tensor] = field(default_factory=dict)
    manifest: Checkpoint | None = None
    plain: bytes = b""

    @property
    def path(self) -> Path:
        """Where the checkpoint will be."""
        return Path(self.job.path)

    @property
    def meter(self) -> Meter:
        """How far it is."""
        return self.job.meter


def begin(path: str, token: str, is_async: bool) -> Begun:
    """Agree on what is saved, and let a thread of each rank write it. Collective: every rank.

    Args:
        path: Absolute, in a folder that all ranks see.
        token: Of this save; new, and the same on all ranks.
        is_async: Copy what is saved first, so that it may change while it is written. Otherwise
            nothing of it may be changed before `state` says that it is over.

    Raises:
        CheckpointError: No model is prepared, something cannot be saved, another save is going
            on, or the folder cannot be written. Nothing was changed.
        NbdistError: It failed on another rank.
    """
    began_s = time.perf_counter()
    what = f"Saving {path}"
    together(what, refuse_if_running)
    with same_random():
        found = look(what)
        one = _agreed(what, path, token, found)
        try:
            # Rank 0 first: it refuses what is no place for a checkpoint.
            new = together(what, lambda: _prepare(one, found))[0]
            together(what, lambda: _enter(one, Path(new)))
            together(what, lambda: _stage(one, is_copied=is_async))
        except BaseException:
            if rank() == 0 and one.manifest is not None:
                checkpoint_folder.abandon(one.path)
            raise
    one.job.thread = threading.Thread(target=_run, args=(one,), name="nbdist-save", daemon=True)
    own_bytes = sum(box.nbytes for box in one.boxes.values())
    keep(one.job)
    return Begun(
        models=tuple(model.name for model in found.models),
        optimizers=tuple(stepping.name for stepping in found.optimizers),
        own_bytes=own_bytes,
        notes=_notes(found),
        stall_s=time.perf_counter() - began_s,
    )


def _agreed(what: str, path: str, token: str, found: Found) -> _Write:
    """What all ranks together write. Collective: every rank."""
    taken: list[Contents] = []

    def own() -> tuple[Any, ...]:
        taken.append(contents(found))
        return _told(taken[0])

    told = together(what, own)
    _compare(told)
    meter = Meter(2 * sum(box.nbytes for _, box in taken[0].own(rank())))
    return _Write(
        job=Job(token, path, meter),
        new=Path(path),
        contents=taken[0],
        processes=[process for process, _, _ in told],
        generators=[generators for _, _, generators in told],
        began_s=time.monotonic(),
    )


def _told(one: Contents) -> tuple[tuple[Machine, int, str], list[Any], dict[str, Any]]:
    """Who this rank is, what it would save, and its random generators."""
    pid = os.getpid()
    names = [
        (name, shape, str(one.tensors.dtypes[name])) for name, shape in one.tensors.shapes.items()
    ]
    return (host.this_machine(), pid, host.started(pid) or ""), names, plain.own_random()


def _compare(told: Sequence[tuple[Any, ...]]) -> None:
    for number, (_, names, _) in enumerate(told):
        if names == told[0][1]:
            continue
        odd = set(names) ^ set(told[0][1])
        detail = "{} {}".format(*min(odd)[:2]) if odd else "their order"
        raise NbdistError(
            f"The ranks 0 and {number} would save other tensors: {detail} differs. Run the cells "
            "that prepare models on all ranks again."
        )


def _prepare(one: _Write, found: Found) -> str:
    """On rank 0: the folder in which it is written, and what goes beside the tensors."""
    if rank() != 0:
        return ""
    one.plain = plain.as_bytes(plain.states(found, one.generators))
    manifest = Checkpoint(
        models=tuple(model.saved() for model in found.models),
        optimizers=tuple(stepping.saved() for stepping in found.optimizers),
        versions=Versions(
            nbdist=nbdist.__version__,
            torch=torch.__version__,
            accelerate=version("accelerate"),
            python=platform.python_version(),
        ),
        world_size=world_size(),
        strategy=registry.current(),
        saved_s=time.time(),
        files=(),
        step=plain.steps_made(found),
        extra={
            "models": [model.name for model in found.models],
            "optimizers": [stepping.name for stepping in found.optimizers],
            "configs": {model.name: _config(model) for model in found.models},
            "accelerators": [_settings(one) for one in found.accelerators],
        },
    )
    new = checkpoint_folder.prepare(one.path, str(Path.cwd()))
    one.manifest = manifest
    return str(new)


def _config(model: Model) -> Any:
    """What a model was made with, where it says so as transformers' do; for a person to read."""
    tell = getattr(getattr(model.one.base, "config", None), "to_dict", None)
    return json.loads(json.dumps(tell(), default=str)) if callable(tell) else None


def _settings(accelerator: Any) -> dict[str, Any]:
    """What an Accelerator was made with; for a person to read."""
    return {
        "mixed_precision": str(accelerator.mixed_precision),
        "gradient_accumulation_steps": accelerator.gradient_accumulation_steps,
        "split_batches": accelerator.split_batches,
        "even_batches": accelerator.even_batches,
    }


def _enter(one: _Write, new: Path) -> None:
    if not new.is_dir():
        raise CheckpointError(
            f"rank {rank()} on {host.this_machine().host} does not see {new}, which rank 0 has "
            "made. A checkpoint goes to a folder that all hosts share."
        )
    one.new = new
    with _Named(one):
        writing.reserve(new, rank())


def _stage(one: _Write, *, is_copied: bool) -> None:
    """Take the boxes that this rank writes; copies in the host's memory where they may change."""
    for spot, box in one.contents.own(rank()):
        if is_copied:
            # Also what is on the host already: the optimizer changes it in place.
            fresh = room_for(tuple(box.shape), box.dtype, torch.device("cpu"))
            one.boxes[spot] = fresh.copy_(box.detach())
        else:
            one.boxes[spot] = box.detach()
    one.contents.held.clear()


def _run(one: _Write) -> None:
    """The thread of one rank."""
    try:
        with _Named(one):
            result = writing.write(one.new, one.contents, rank(), _values(one), one.meter)
            one.boxes.clear()
            writing.tell(one.new, rank(), result)
        if rank() == 0:
            _finish(one)
        else:
            one.meter.phase = "done with its part"
    except BaseException as error:  # noqa: BLE001  # told to rank 0, and to who asks
        one.job.failure = _sentence(one, error)
        one.boxes.clear()
        writing.tell_failure(one.new, rank(), one.job.failure)
        if rank() == 0:
            checkpoint_folder.abandon(one.path)


def _values(one: _Write) -> Callable[[Spot], torch.Tensor]:
    return lambda spot: one.boxes[spot].cpu().contiguous()


def _finish(one: _Write) -> None:
    """Rank 0: when all have written, what belongs to all; then the folder gets its name."""
    results = writing.results(
        one.new, len(one.processes), one.meter, lambda other: _gone(one, other), STALL_S
    )
    one.meter.phase = "writing the manifest"
    assert one.manifest is not None
    with _Named(one):
        saver = Saver(one.contents.tensors, one.contents.parts, 0, _values(one))
        _, known = saver.create_global_plan([])
        Writer(one.new).finish(known, _write_results(one.contents, results))
        data = (one.new / metadata.FILE).read_bytes()
        if metadata.loads(data) != known:
            raise CheckpointError(f"{metadata.FILE} is not as it was written")
        plain.loads(one.plain)  # as a load will
        (one.new / plain.FILE).write_bytes(one.plain)
        if (one.new / plain.FILE).read_bytes() != one.plain:
            raise CheckpointError(f"{plain.FILE} is not as it was written")
        files = [
            *writing.listed(results),
            *(_file(one.new, n) for n in (metadata.FILE, plain.FILE)),
        ]
        saved = replace(one.manifest, files=tuple(files))
        writing.clear(one.new, len(one.processes))
        (one.new / checkpoint.MANIFEST).write_text(checkpoint.text(saved), encoding="utf-8")
        one.meter.make_final()
        checkpoint_folder.commit(one.new, one.path)
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


def _gone(one: _Write, other: int) -> str:
    """That another rank's process on this machine has ended; nothing while it lives."""
    machine, pid, start = one.processes[other]
    if machine != host.this_machine() or host.started(pid) == start:
        return ""
    return f"rank {other} (process {pid}) ended while it wrote its part"


def _notes(found: Found) -> tuple[str, ...]:
    notes = [
        f"{one.others} parameters of {one.name} are of no prepared model: they are not saved, nor "
        "what it remembers of them"
        for one in found.optimizers
        if one.others
    ]
    graded = sum(
        parameter.grad is not None
        for model in found.models
        for parameter in model.one.parameters.values()
    )
    return tuple(notes) if not graded else (*notes, "gradients are not saved")


def _sentence(one: _Write, error: BaseException) -> str:
    text = sentence(error)
    return text if text.startswith("rank ") else f"rank {rank()}: {text}"


class _Named:
    """What the system refuses is told with rank, path and numbers."""

    def __init__(self, one: _Write) -> None:
        self._job = one

    def __enter__(self) -> None:
        """Nothing."""

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, OSError):
            meter = self._job.meter
            raise CheckpointError(
                f"{checkpoint_folder.problem(error, self._job.path)} It had written "
                f"{meter.done_bytes:,} bytes."
            ) from error
