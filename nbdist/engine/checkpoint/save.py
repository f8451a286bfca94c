"""A checkpoint is saved: planned by all ranks together, then written by each for itself.

    begin    all ranks agree on what is saved; a copy in the host's memory, if training goes on
    thread   write, read back, compare; rank 0 waits for the others' word, writes the manifest
             and renames the folder into its place
    state    how far it is, from any thread; the notebook asks over the control channel
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.storage import WriteResult

import nbdist
from nbdist.core import checkpoint, checkpoint_folder, host
from nbdist.core.checkpoint import Checkpoint, SavedFile, Versions
from nbdist.core.runs import Machine
from nbdist.core.saving import DONE, FAILED, RUNNING, Begun, Saved, Saving
from nbdist.engine.checkpoint import metadata, plain, writing
from nbdist.engine.checkpoint.contents import Contents, contents
from nbdist.engine.checkpoint.found import Found, look
from nbdist.engine.checkpoint.planners import Saver, Spot, Writer
from nbdist.engine.checkpoint.writing import Meter
from nbdist.engine.parallel import registry
from nbdist.engine.parallel.agreement import rank, same_random, sentence, together, world_size
from nbdist.errors import CheckpointError, NbdistError

# Nobody who writes is silent for so long, but on a disk that does not answer.
STALL_S = 300.0
_JOIN_S = 2.0


@dataclass(slots=True)
class _Job:
    """One save on this rank.

    Attributes:
        token: Names it, the same on all ranks.
        path: Where the checkpoint will be.
        new: Where it is written.
        contents: All tensors.
        boxes: The boxes that this rank writes: copies, or views of what is trained.
        manifest: All of it but the files; rank 0 has it.
        plain: The bytes of the other states; rank 0 has them.
        processes: (machine, pid, when it started) of each rank.
        meter: How far it is.
        began_s: By the monotonic clock.
    """

    token: str
    path: Path
    new: Path
    contents: Contents
    boxes: dict[Spot, torch.Tensor]
    manifest: Checkpoint | None
    plain: bytes
    processes: list[tuple[Machine, int, str]]
    meter: Meter
    began_s: float
    thread: threading.Thread | None = None
    failure: str = ""
    saved: Saved | None = None
    phase_s: dict[str, float] = field(default_factory=dict)

    @property
    def is_over(self) -> bool:
        """Whether it has failed, or is done."""
        return bool(self.failure) or self.saved is not None


_jobs: dict[str, _Job] = {}


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
        one = contents(found)  # refused by all ranks alike
        told = together(what, lambda: _told(one))
        _compare(told)
        target = Path(path)
        job = _Job(
            token=token, path=target, new=target, contents=one, boxes={}, manifest=None, plain=b"",
            processes=[process for process, _, _ in told],
            meter=Meter(2 * sum(box.nbytes for _, box in one.own(rank()))),
            began_s=time.monotonic(),
        )  # fmt: skip
        try:
            # Rank 0 first: it refuses what is no place for a checkpoint.
            new = together(what, lambda: _prepare(job, found, [r for _, _, r in told]))[0]
            together(what, lambda: _enter(job, Path(new)))
            together(what, lambda: _stage(job, is_copied=is_async))
        except BaseException:
            if rank() == 0 and job.manifest is not None:
                checkpoint_folder.abandon(target)
            raise
    _jobs.clear()
    _jobs[token] = job
    job.thread = threading.Thread(target=_run, args=(job,), name="nbdist-save", daemon=True)
    job.thread.start()
    own_bytes = sum(box.nbytes for box in job.boxes.values())
    return Begun(
        models=tuple(model.name for model in found.models),
        optimizers=tuple(stepping.name for stepping in found.optimizers),
        own_bytes=own_bytes,
        notes=_notes(found),
        stall_s=time.perf_counter() - began_s,
    )


def state(token: str) -> Saving:
    """How far a save is on this rank. From any thread; no rank is met."""
    job = _jobs.get(token)
    if job is None:
        return Saving(FAILED, failure="this rank knows of no such save: it has been replaced")
    kind = FAILED if job.failure else DONE if job.saved is not None or _is_written(job) else RUNNING
    meter = job.meter
    return Saving(
        kind, meter.phase, meter.done_bytes, meter.total_bytes, job.failure, job.saved
    )


def stop(token: str, why: str) -> bool:
    """Let a save end that is not over. From any thread.

    Returns:
        Whether there was one.
    """
    job = _jobs.get(token)
    if job is None or job.is_over:
        return False
    job.meter.stop(why)
    return True


def wait(token: str) -> Saving:
    """Wait until a save is over on this rank. No rank is met."""
    job = _jobs[token]
    assert job.thread is not None
    job.thread.join()
    return state(token)


def refuse_if_running() -> None:
    """Raises a CheckpointError while a save is going on."""
    for job in _jobs.values():
        if job.thread is not None and job.thread.is_alive():
            job.thread.join(_JOIN_S if job.is_over else 0.0)
            if job.thread.is_alive():
                raise CheckpointError(
                    f"{job.path} is still being saved ({job.meter.phase}). Wait until it is there."
                )


def _is_written(job: _Job) -> bool:
    return job.thread is not None and not job.thread.is_alive()


def _told(one: Contents) -> tuple[tuple[Machine, int, str], list[Any], dict[str, Any]]:
    """Who this rank is, what it would save, and its random generators."""
    pid = os.getpid()
    names = [(name, shape, str(one.tensors.dtypes[name])) for name, shape in one.tensors.shapes.items()]
    return (host.this_machine(), pid, host.started(pid) or ""), names, plain.own_random()


def _compare(told: list[tuple[Any, list[Any], Any]]) -> None:
    for number, (_, names, _) in enumerate(told):
        odd = [one for one in names if one not in told[0][1]] + [
            one for one in told[0][1] if one not in names
        ]
        if odd:
            raise NbdistError(
                f"The ranks would save other tensors: {odd[0][0]} {odd[0][1]} is on one of the "
                f"ranks 0 and {number} only. Run the cells that prepare models on all ranks again."
            )


def _prepare(job: _Job, found: Found, generators: list[dict[str, Any]]) -> str:
    """On rank 0: the folder in which it is written, and what goes beside the tensors."""
    if rank() != 0:
        return ""
    states = plain.states(found, generators)
    job.plain = plain.as_bytes(states)
    manifest = Checkpoint(
        models=tuple(model.saved() for model in found.models),
        optimizers=tuple(stepping.saved() for stepping in found.optimizers),
        versions=Versions(
            nbdist=nbdist.__version__,
            torch=torch.__version__,
            accelerate=importlib.metadata.version("accelerate"),
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
        },
    )
    new = checkpoint_folder.prepare(job.path, str(Path.cwd()))
    job.manifest = manifest
    return str(new)


def _enter(job: _Job, new: Path) -> None:
    if not new.is_dir():
        raise CheckpointError(
            f"rank {rank()} on {host.this_machine().host} does not see {new}, which rank 0 has "
            "made. A checkpoint goes to a folder that all hosts share."
        )
    job.new = new
    with _named(job):
        writing.reserve(new, rank())


def _stage(job: _Job, *, is_copied: bool) -> None:
    """Take the boxes that this rank writes; copies in the host's memory where they may change."""
    for spot, box in job.contents.own(rank()):
        if is_copied:
            # Also what is on the host already: the optimizer changes it in place.
            fresh = torch.empty(box.shape, dtype=box.dtype, device="cpu")
            job.boxes[spot] = fresh.copy_(box.detach())
        else:
            job.boxes[spot] = box.detach()
    job.contents.held.clear()


def _run(job: _Job) -> None:
    """The thread of one rank."""
    try:
        with _named(job):
            result = writing.write(job.new, job.contents, rank(), _values(job), job.meter)
            job.boxes.clear()
            writing.tell(job.new, rank(), result)
        if rank() == 0:
            _finish(job)
        else:
            job.meter.phase = "has written its part"
    except BaseException as error:  # noqa: BLE001  # told to rank 0, and to who asks
        job.failure = _sentence(job, error)
        job.boxes.clear()
        writing.tell_failure(job.new, rank(), job.failure)
        if rank() == 0:
            checkpoint_folder.abandon(job.path)


def _values(job: _Job) -> Callable[[Spot], torch.Tensor]:
    return lambda spot: job.boxes[spot].cpu().contiguous()


def _finish(job: _Job) -> None:
    """Rank 0: when all have written, what belongs to all; then the folder gets its name."""
    results = writing.results(
        job.new, len(job.processes), job.meter, lambda other: _gone(job, other), STALL_S
    )
    job.meter.phase = "writes the manifest"
    assert job.manifest is not None
    with _named(job):
        saver = Saver(job.contents.tensors, job.contents.parts, 0, _values(job))
        _, known = saver.create_global_plan([])
        Writer(job.new).finish(known, _write_results(job.contents, results))
        data = (job.new / metadata.FILE).read_bytes()
        if metadata.loads(data) != known:
            raise CheckpointError(f"{metadata.FILE} is not as it was written")
        (job.new / plain.FILE).write_bytes(job.plain)
        if (job.new / plain.FILE).read_bytes() != job.plain:
            raise CheckpointError(f"{plain.FILE} is not as it was written")
        files = [*writing.listed(results), *(_file(job.new, n) for n in (metadata.FILE, plain.FILE))]
        saved = _with_files(job.manifest, files)
        writing.clear(job.new, len(job.processes))
        (job.new / checkpoint.MANIFEST).write_text(checkpoint.text(saved), encoding="utf-8")
        job.meter.check()
        checkpoint_folder.commit(job.new, job.path)
    job.meter.phase = "done"
    job.saved = Saved(
        path=str(job.path),
        size_bytes=saved.size_bytes,
        files=len(saved.files) + 1,
        tensors=len(known.state_dict_metadata),
        step=saved.step,
        strategy=saved.strategy,
        elapsed_s=time.monotonic() - job.began_s,
    )


def _with_files(manifest: Checkpoint, files: list[SavedFile]) -> Checkpoint:
    from dataclasses import replace

    return replace(manifest, files=tuple(files))


def _file(folder: Path, name: str) -> SavedFile:
    path = folder / name
    return SavedFile(name, path.stat().st_size, checkpoint.checksum(path))


def _write_results(one: Contents, results: list[dict[str, Any]]) -> list[list[WriteResult]]:
    """Where each box lies, as DCP's writer wants it; under each of a tensor's names."""
    from torch.distributed.checkpoint import filesystem
    from torch.distributed.checkpoint.metadata import MetadataIndex

    found = []
    for result in results:
        for name, offsets, file, at, length in result["boxes"]:
            place = filesystem._StorageInfo(file, at, length)  # noqa: SLF001
            for each in (name, *one.tensors.aliases[name]):
                found.append(WriteResult(MetadataIndex(each, offsets), length, place))
    return [found]


def _gone(job: _Job, other: int) -> str:
    """That another rank's process on this machine has ended; nothing while it lives."""
    machine, pid, start = job.processes[other]
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
        parameter.grad is not None for model in found.models for parameter in model.one.parameters.values()
    )
    return tuple(notes) if not graded else (*notes, "gradients are not saved")


def _sentence(job: _Job, error: BaseException) -> str:
    text = sentence(error)
    return text if text.startswith("rank ") else f"rank {rank()}: {text}"


class _named:
    """What the system refuses is told with rank, path and numbers."""

    def __init__(self, job: _Job) -> None:
        self._job = job

    def __enter__(self) -> None:
        """Nothing."""

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, OSError):
            meter = self._job.meter
            raise CheckpointError(
                f"{checkpoint_folder.problem(error, self._job.path)} It had written "
                f"{meter.done_bytes:,} bytes."
            ) from error
