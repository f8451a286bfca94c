"""A checkpoint is saved: planned by all ranks together, then written by each for itself.

`begin`: all ranks agree on what is saved, or find it as the last save did (`known`), and copy it
to the host's memory if training goes on (`staging`). A thread of each does the rest (`finish`).
"""

from __future__ import annotations

import functools
import json
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from nbdist.checkpoint import folder as checkpoint_checkpoint_folder
from nbdist.checkpoint.manifest import Checkpoint, Versions
from nbdist.checkpoint.rank import (
    plain_state,
    plan_cache,
    save_thread,
    staging,
)
from nbdist.checkpoint.rank import (
    write as checkpoint_write,
)
from nbdist.checkpoint.rank.jobs import Job, Meter, keep, refuse_if_running
from nbdist.checkpoint.rank.live_objects import LiveObjects, Model, find
from nbdist.checkpoint.rank.save_thread import Write, named
from nbdist.checkpoint.rank.tensors import CheckpointTensors, tensors_of
from nbdist.checkpoint.results import Begun
from nbdist.core import host
from nbdist.core.host import Machine
from nbdist.core.versions import VERSION
from nbdist.errors import CheckpointError, NbdistError
from nbdist.parallel import registry
from nbdist.parallel.consensus import all_or_none, interrupts_held, rank, world_size
from nbdist.parallel.training_state import Generators, generators, same_random


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
    one = Write(Job(token, path, Meter()))
    with same_random():
        try:
            found = _agree(what, one)
            all_or_none(what, lambda: _take(one, found, is_copied=is_async))
            one.contents.held.clear()
            begun = Begun(
                models=tuple(model.name for model in found.models),
                optimizers=tuple(stepping.name for stepping in found.optimizers),
                own_bytes=one.contents.own_bytes(rank()),
                notes=_notes(found),
                stall_s=time.perf_counter() - began_s,
            )
        except BaseException:  # an interrupt too, until the thread has it
            save_thread.let_go(one)
            if rank() == 0 and one.new is not None:
                checkpoint_checkpoint_folder.abandon(one.path)
            raise
    with interrupts_held():
        keep(one.job, functools.partial(save_thread.run, one))
    return begun


def _agree(what: str, one: Write) -> LiveObjects:
    """Say what all ranks together write, and where. Collective: every rank."""
    recalled: list[plan_cache.CachedPlan | None] = []

    def own() -> _Told:
        refuse_if_running()
        recalled.append(plan_cache.lookup())
        return _told(one, recalled[0])

    told = all_or_none(what, own)
    one.processes = [rank.process for rank in told]
    one.generators = [rank.generators for rank in told]
    if recalled[0] is not None and plan_cache.agreed(recalled[0], [rank.known for rank in told]):
        found, one.contents = recalled[0].found, recalled[0].contents
        new = told[0].folder
    else:
        found = find(what)
        one.contents = _compared(what, found)
        plan_cache.store(one.job.token, found, one.contents)
        new = all_or_none(what, lambda: _describe(one, found))[0]
    one.new = Path(new)
    one.meter.total_bytes = 2 * one.contents.own_bytes(rank())
    return found


@dataclass(frozen=True, slots=True)
class _Told:
    """What a rank tells the others of itself.

    Attributes:
        process: Its machine, its pid, and when that process started.
        generators: States of its random generators.
        known: The last save, if its plan still counts here.
        folder: Where it is written, if rank 0 knows by then what.
    """

    process: tuple[Machine, int, str]
    generators: Generators
    known: plan_cache.Told | None
    folder: str = ""


def _told(one: Write, recalled: plan_cache.CachedPlan | None) -> _Told:
    pid = os.getpid()
    process = (host.this_machine(), pid, host.started(pid) or "")
    if recalled is None:
        return _Told(process, generators(), None)
    folder = _folder(one) if rank() == 0 else ""
    return _Told(process, generators(), recalled.told, folder)


def _compared(what: str, found: LiveObjects) -> CheckpointTensors:
    """What is saved, the same on all ranks. Collective: every rank."""
    taken: list[CheckpointTensors] = []

    def own() -> list[tuple[str, tuple[int, ...], str]]:
        taken.append(tensors_of(found))
        dtypes = taken[0].tensors.dtypes
        return [(name, shape, str(dtypes[name])) for name, shape in taken[0].tensors.shapes.items()]

    _compare(all_or_none(what, own))
    return taken[0]


def _compare(told: Sequence[list[tuple[str, tuple[int, ...], str]]]) -> None:
    for number, names in enumerate(told):
        if names == told[0]:
            continue
        odd = set(names) ^ set(told[0])
        detail = "{} {}".format(*min(odd)[:2]) if odd else "their order"
        raise NbdistError(
            f"The ranks 0 and {number} would save other tensors: {detail} differs. Run the cells "
            "that prepare models on all ranks again."
        )


def _folder(one: Write) -> str:
    """Make the folder in which it is written. On rank 0."""
    if one.new is None:
        one.new = checkpoint_checkpoint_folder.prepare(one.path, str(Path.cwd()))
    return str(one.new)


def _describe(one: Write, found: LiveObjects) -> str:
    """On rank 0 what goes beside the tensors, and the folder."""
    if rank() != 0:
        return ""
    one.plain = plain_state.states(found)  # first: they may be no plain data
    one.manifest = Checkpoint(
        models=tuple(model.saved() for model in found.models),
        optimizers=tuple(stepping.saved() for stepping in found.optimizers),
        versions=Versions(
            nbdist=VERSION,
            torch=torch.__version__,
            accelerate=_version("accelerate"),
            python=platform.python_version(),
        ),
        world_size=world_size(),
        strategy=registry.current(),
        saved_s=time.time(),
        files=(),
        step=plain_state.steps_made(one.plain),
        extra={
            "models": [model.name for model in found.models],
            "optimizers": [stepping.name for stepping in found.optimizers],
            "configs": {model.name: _config(model) for model in found.models},
            "accelerators": [_settings(one) for one in found.accelerators],
        },
    )
    return _folder(one)


_version = functools.cache(version)  # it reads the package's files


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


def _take(one: Write, found: LiveObjects, *, is_copied: bool) -> None:
    """Enter the folder, and take the boxes that this rank writes."""
    _enter(one)
    if one.manifest is None:
        _describe(one, found)
    own = dict(one.contents.own(rank()))
    if is_copied:
        # Also what is on the host already: the optimizer changes it in place.
        one.is_staged = True
        one.boxes = dict(zip(own, staging.copies(list(own.values())), strict=True))
    else:
        one.boxes = {spot: box.detach() for spot, box in own.items()}


def _enter(one: Write) -> None:
    if not one.folder.is_dir():
        raise CheckpointError(
            f"rank {rank()} on {host.this_machine().host} does not see {one.folder}, which rank 0 "
            "has made. A checkpoint goes to a folder that all hosts share."
        )
    with named(one):
        checkpoint_write.reserve(one.folder, rank())


def _notes(found: LiveObjects) -> tuple[str, ...]:
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
