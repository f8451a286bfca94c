"""A checkpoint is saved: planned by all ranks together, then written by each for itself.

`begin`: all ranks agree on what is saved, or find it as the last save did (`plan_cache`), and copy
it to the host's memory if training goes on (`staging`). A thread of each does the rest
(`save_thread`).
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

from nbdist.checkpoint import folder as checkpoint_folder
from nbdist.checkpoint.manifest import ADAPTERS, Checkpoint, Versions
from nbdist.checkpoint.rank import plain_state, plan_cache, save_thread, staging
from nbdist.checkpoint.rank import write as checkpoint_write
from nbdist.checkpoint.rank.jobs import SaveJob, keep, refuse_if_running
from nbdist.checkpoint.rank.live_objects import CheckpointModel, LiveObjects, find
from nbdist.checkpoint.rank.save_thread import RankSave, explain_errors
from nbdist.checkpoint.rank.tensors import CheckpointTensors, tensors_of
from nbdist.checkpoint.results import SaveStarted
from nbdist.core import host
from nbdist.core.failures import ranks_on_hosts
from nbdist.core.host import Machine
from nbdist.core.versions import VERSION
from nbdist.errors import CheckpointError, NbdistError
from nbdist.parallel.base.consensus import all_or_none, interrupts_held, rank, world_size
from nbdist.parallel.base.training_state import Generators, generators, same_random
from nbdist.parallel.live import registry
from nbdist.parallel.reshard import own_buffers
from nbdist.parallel.reshard.own_buffers import RANK_0


def begin(path: str, token: str, is_async: bool, is_adapters: bool = False) -> SaveStarted:
    """Agree on what is saved, and let a thread of each rank write it. Collective: every rank.

    Args:
        path: Absolute, in a folder that all ranks see.
        token: The name of this save; new, and the same on all ranks.
        is_async: Copy the content first, so that it may change while it is written. Otherwise
            nothing of it may be changed before `state` says that it is over.
        is_adapters: Save the adapters of PEFT alone, not whole models.

    Raises:
        CheckpointError: No model is prepared, something cannot be saved, another save is going
            on, or the folder cannot be written. Nothing was changed.
        NbdistError: It failed on another rank.
    """
    began_s = time.perf_counter()
    what = f"Saving {path}"
    save = RankSave(SaveJob(token, path), is_adapters=is_adapters)
    with same_random():
        try:
            live = _agree(what, save)
            sees = all_or_none(what, lambda: _take(save, live, is_copied=is_async))
            _refuse_unshared(save, sees)
            save.contents.local.clear()
            models = {model.name: model.prepared for model in live.models}
            begun = SaveStarted(
                path=path,
                models=tuple(model.name for model in live.models),
                optimizers=tuple(optimizer.name for optimizer in live.optimizers),
                copied_bytes=save.contents.own_bytes(rank()),
                notes=(*_notes(live), *own_buffers.notes_on(models, RANK_0)),
                stall_s=time.perf_counter() - began_s,
            )
        except BaseException:  # an interrupt too, until the thread has it
            save_thread.let_go(save)
            if rank() == 0 and save.new is not None:
                checkpoint_folder.abandon(save.path)
            raise
    with interrupts_held():
        keep(save.job, functools.partial(save_thread.run, save))
    return begun


def _agree(what: str, save: RankSave) -> LiveObjects:
    """Say what all ranks together write, and where. Collective: every rank."""
    recalled: list[plan_cache.CachedPlan | None] = []

    def report() -> _RankReport:
        refuse_if_running()
        recalled.append(None if save.is_adapters else plan_cache.lookup())
        pid = os.getpid()
        process = (host.this_machine(), pid, host.started(pid) or "")
        if recalled[0] is None:
            return _RankReport(process, generators(), None)
        folder = _folder(save) if rank() == 0 else ""
        return _RankReport(process, generators(), recalled[0].key, folder)

    reports = all_or_none(what, report)
    save.processes = [report.process for report in reports]
    save.generators = [report.generators for report in reports]
    if recalled[0] is not None and plan_cache.is_agreed(
        recalled[0], [report.plan_key for report in reports]
    ):
        live, save.contents = recalled[0].live, recalled[0].contents
        new = reports[0].folder
    else:
        live = find(what, is_adapters=save.is_adapters)
        save.contents = _agree_on_tensors(what, live)
        if not save.is_adapters:
            plan_cache.store(save.job.token, live, save.contents)
        new = all_or_none(what, lambda: _describe(save, live))[0]
    save.new = Path(new)
    save.job.meter.total_bytes = 2 * save.contents.own_bytes(rank())
    return live


@dataclass(frozen=True, slots=True)
class _RankReport:
    """A rank's report to the others.

    Attributes:
        process: Its machine, its pid, and when that process started.
        plan_key: The last save, if its plan still counts here.
        folder: Where it is written, if rank 0 knows by then what.
    """

    process: tuple[Machine, int, str]
    generators: Generators
    plan_key: plan_cache.PlanKey | None
    folder: str = ""


def _agree_on_tensors(what: str, live: LiveObjects) -> CheckpointTensors:
    """Agree on the saved tensors, the same on all ranks. Collective: every rank."""
    contents: list[CheckpointTensors] = []

    def signature() -> list[tuple[str, tuple[int, ...], str]]:
        contents.append(tensors_of(live))
        dtypes = contents[0].dtypes
        return [(name, shape, str(dtypes[name])) for name, shape in contents[0].shapes.items()]

    signatures = all_or_none(what, signature)
    for number, names in enumerate(signatures):
        if names != signatures[0]:
            odd = set(names) ^ set(signatures[0])
            detail = "{} {}".format(*min(odd)[:2]) if odd else "their order"
            raise NbdistError(
                f"Ranks 0 and {number} would save different tensors: {detail} differs. Run the "
                "cells that prepare models on all ranks again."
            )
    return contents[0]


def _folder(save: RankSave) -> str:
    """Make the folder in which it is written. On rank 0."""
    if save.new is None:
        save.new = checkpoint_folder.prepare(save.path, str(Path.cwd()))
    return str(save.new)


def _describe(save: RankSave, live: LiveObjects) -> str:
    """On rank 0 what goes beside the tensors, and the folder."""
    if rank() != 0:
        return ""
    save.plain = plain_state.states(live)  # first: they may be no plain data
    save.manifest = Checkpoint(
        models=tuple(model.record() for model in live.models),
        optimizers=tuple(optimizer.record() for optimizer in live.optimizers),
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
        step=plain_state.steps_made(save.plain),
        extra={
            "models": [model.name for model in live.models],
            ADAPTERS: save.is_adapters,
            "optimizers": [optimizer.name for optimizer in live.optimizers],
            "configs": {model.name: _config(model) for model in live.models},
            "accelerators": [_settings(accelerator) for accelerator in live.accelerators],
        },
    )
    return _folder(save)


_version = functools.cache(version)  # it reads the package's files


def _config(model: CheckpointModel) -> Any:
    """The config of a model, where it has one as transformers' do; for a person to read."""
    to_dict = getattr(getattr(model.prepared.base, "config", None), "to_dict", None)
    return json.loads(json.dumps(to_dict(), default=str)) if callable(to_dict) else None


def _settings(accelerator: Any) -> dict[str, Any]:
    """The arguments of an Accelerator; for a person to read."""
    return {
        "mixed_precision": str(accelerator.mixed_precision),
        "gradient_accumulation_steps": accelerator.gradient_accumulation_steps,
        "split_batches": accelerator.split_batches,
        "even_batches": accelerator.even_batches,
    }


def _take(save: RankSave, live: LiveObjects, *, is_copied: bool) -> bool:
    """Enter the folder, and take the boxes that this rank writes; False if it is not seen here."""
    if not checkpoint_folder.is_saved_by(save.path, save.processes[0]):
        return False
    with explain_errors(save):
        checkpoint_write.reserve(save.folder, rank())
    if save.manifest is None:
        _describe(save, live)
    boxes = dict(save.contents.boxes_of(rank()))
    if is_copied:
        # Tensors on the host are copied too: the optimizer changes them in place.
        save.is_staged = True
        save.boxes = dict(zip(boxes, staging.copies(list(boxes.values())), strict=True))
    else:
        save.boxes = {spot: box.detach() for spot, box in boxes.items()}
    return True


def _refuse_unshared(save: RankSave, sees: Sequence[bool]) -> None:
    """Raise on every rank, in the same words, where some do not see the folder."""
    hosts = [machine.host for machine, _, _ in save.processes]
    blind = {number: host for number, host in enumerate(hosts) if not sees[number]}
    if blind:
        raise CheckpointError(
            f"{save.path} was not saved: rank 0 has made its folder on {hosts[0]}, and "
            f"{ranks_on_hosts(blind)} cannot see it. Save to a folder that all hosts share."
        )


def _notes(live: LiveObjects) -> tuple[str, ...]:
    notes = [
        f"{optimizer.others} parameters of {optimizer.name} belong to no prepared model: they and "
        "their optimizer state are not saved"
        for optimizer in live.optimizers
        if optimizer.others
    ]
    with_gradient = sum(
        parameter.grad is not None
        for model in live.models
        for parameter in model.prepared.parameters.values()
    )
    return tuple(notes) if not with_gradient else (*notes, "gradients are not saved")
