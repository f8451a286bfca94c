"""A checkpoint is loaded into live models and optimizers, whatever the ranks and the strategy.

First the manifest, files, names and shapes, and every rank's parts, read into memory of their own:
all of this may fail. Then all ranks agree that they have them, and values are put in place. SIGINT
waits; nothing there depends on another rank, but FSDP1's own scattering.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from nbdist.checkpoint import folder as checkpoint_folder
from nbdist.checkpoint import manifest
from nbdist.checkpoint.chunks import own_chunks
from nbdist.checkpoint.manifest import Checkpoint
from nbdist.checkpoint.mismatch import mismatches
from nbdist.checkpoint.rank import dcp_metadata, plain_state, restore
from nbdist.checkpoint.rank.dcp_planners import ChunkLoadPlanner
from nbdist.checkpoint.rank.jobs import refuse_if_running
from nbdist.checkpoint.rank.live_objects import (
    CheckpointModel,
    LiveObjects,
    PreparedOptimizer,
    find,
)
from nbdist.checkpoint.results import Loaded
from nbdist.core.failures import ranks_on_hosts
from nbdist.core.finding import BAD
from nbdist.core.host import this_machine
from nbdist.errors import CheckpointError, NbdistError
from nbdist.parallel.base.consensus import (
    CommitVote,
    all_or_none,
    interrupts_held,
    one_line,
    raise_failures,
    rank,
    world_size,
)
from nbdist.parallel.base.training_state import same_random
from nbdist.parallel.live import registry
from nbdist.rpc.rank import progress
from nbdist.strategy.tensor_layout import Placement, local_shape

T = TypeVar("T")
U = TypeVar("U", CheckpointModel, PreparedOptimizer)


def load(path: str, is_models_only: bool = False) -> Loaded:
    """Read a checkpoint into the models and optimizers that are prepared. Collective: every rank.

    Gradients are cleared. Models, parameters, optimizers, groups and schedulers stay the same
    objects.

    Args:
        path: Absolute; every rank reads there.
        is_models_only: Leave optimizers, schedulers, loaders, random generators as they are.

    Raises:
        CheckpointError: There is none, it is torn, foreign or of another format, or it does not
            fit; says which tensor and which shape. Nothing was changed.
        NbdistError: It failed on another rank. Nothing was changed.
    """
    began_s = time.perf_counter()
    what, folder = f"Loading {path}", Path(path)
    all_or_none(what, refuse_if_running)
    all_or_none(what, lambda: rank() == 0 and checkpoint_folder.recover(folder))
    saved = _manifest(what, folder)
    with same_random(), progress.during("loading"):
        live = find(what, is_adapters=bool(saved.extra.get(manifest.ADAPTERS)))
        all_or_none(what, lambda: _check_files(folder, saved))
        if is_models_only:
            live.optimizers, live.accelerators = [], []
            saved = replace(saved, optimizers=(), extra={**saved.extra, "optimizers": []})
        prepared: list[tuple[restore.RestorePlan, dict[str, Any], int]] = []
        all_or_none(what, lambda: prepared.append(_prepare(folder, saved, live)))
        plan, states, read_bytes = prepared[0]
        _put(what, plan)
    notes = list(plan.notes)
    if not is_models_only:
        notes += restore.restore_generators(states, saved)
    return Loaded(
        path=path,
        models=tuple(model.name for model in live.models),
        optimizers=tuple(optimizer.name for optimizer in live.optimizers),
        step=saved.step,
        saved_as=saved.strategy,
        loaded_as=registry.current(),
        saved_size=saved.world_size,
        read_bytes=read_bytes,
        notes=tuple(notes),
        elapsed_s=time.perf_counter() - began_s,
    )


def _prepare(
    folder: Path, saved: Checkpoint, live: LiveObjects
) -> tuple[restore.RestorePlan, dict[str, Any], int]:
    """Read and plan: all that can fail. This rank alone.

    Returns:
        What is changed, the plain states, and bytes of tensors that this rank has read.
    """
    match = _match(folder, saved, live)
    metadata, states = dcp_metadata.read(folder, saved), plain_state.read(folder)
    shapes = {
        name: tuple(stored.size)
        for name, stored in metadata.state_dict_metadata.items()
        if isinstance(stored, TensorStorageMetadata)
    }
    values = _fill(folder, metadata, restore.wanted_placements(states, match, shapes))
    read_bytes = sum(tensor.nbytes for tensor in values.values())
    return restore.plan(states, values, match), states, read_bytes


def _put(what: str, plan: restore.RestorePlan) -> None:
    """Put all in place, where every rank can. Collective: every rank.

    Raises:
        NbdistError: A rank cannot; nothing was changed. Or putting it in place failed here.
    """
    vote = CommitVote(str(all_or_none(what, time.time_ns)[0]))
    try:
        all_or_none(what, lambda: restore.restore_objects(plan))
        with interrupts_held():
            _vote(what, vote)
            _commit(what, plan)
    except BaseException:
        restore.put_objects_back(plan)
        raise


def _vote(what: str, vote: CommitVote) -> None:
    """All ranks go on, or none does, also where an abort reaches only some of them."""
    try:
        all_or_none(what, lambda: None)
    except BaseException as error:
        vote.answer(one_line(error), is_waiting=False)  # some may have gone on
        raise
    raise_failures(what, vote.answer(""))


def _commit(what: str, plan: restore.RestorePlan) -> None:
    try:
        restore.commit(plan)
    except Exception as error:
        raise NbdistError(
            f"{what} failed on rank {rank()} while values were put in place, so models hold only "
            f"some of them: {one_line(error)}. Load again, this checkpoint or another one."
        ) from error


def _manifest(what: str, folder: Path) -> Checkpoint:
    """The manifest, which is the same on all ranks. Collective: every rank.

    Raises:
        CheckpointError: There is none, or hosts find different ones; the same on all ranks.
    """

    def look() -> tuple[str, Checkpoint | str]:
        try:
            return this_machine().host, manifest.read(folder)
        except CheckpointError as error:
            return this_machine().host, str(error)

    looks = all_or_none(what, look)
    _, first = looks[0]
    odd = {number: host for number, (host, seen) in enumerate(looks) if seen != first}
    if odd:
        rest = {number: host for number, (host, _) in enumerate(looks) if number not in odd}
        raise CheckpointError(
            f"{folder} is not the same on all hosts: {ranks_on_hosts(rest)}: {_seen(first)}; "
            f"{ranks_on_hosts(odd)}: {_seen(looks[min(odd)][1])}. Load from a folder that all "
            "hosts share."
        )
    if isinstance(first, str):
        raise CheckpointError(first)
    return first


def _seen(seen: Checkpoint | str) -> str:
    if isinstance(seen, str):
        return seen.rstrip(".")
    return f"a checkpoint of step {seen.step}, saved by {seen.world_size} ranks"


def _check_files(folder: Path, saved: Checkpoint) -> None:
    """Each file is read by one rank and compared with its checksum; lengths by all."""
    progress.tell("comparing files with their checksums")
    manifest.check_files(folder, saved)
    rank_share = replace(saved, files=saved.files[rank() :: world_size()])
    manifest.check_files(folder, rank_share, reads_all=True)


def _match(folder: Path, saved: Checkpoint, live: LiveObjects) -> restore.RestoreMatch:
    """Which live object takes over which saved one.

    Raises:
        CheckpointError: Something does not fit; the first few of it, and how many there are.
    """
    extra = saved.extra
    models = _pair(folder, "models", extra, saved.models, live.models)
    optimizers = _pair(folder, "optimizers", extra, saved.optimizers, live.optimizers)
    there = {model.name: old for old, _, model in models}
    wrong = mismatches(
        replace(
            saved,
            models=tuple(record for _, record, _ in models),
            optimizers=tuple(record for _, record, _ in optimizers),
        ),
        [model.record() for _, _, model in models],
        [optimizer.record(there) for _, _, optimizer in optimizers],
    )
    bad = [finding for finding in wrong if finding.verdict == BAD]
    if bad:
        text = " ".join(f"{finding.name}: {finding.found}." for finding in bad[:3])
        more = f" And {len(bad) - 3} more kinds of difference." if len(bad) > 3 else ""
        advice = bad[0].what[:1].upper() + bad[0].what[1:]
        raise CheckpointError(f"{folder} does not fit: {text}{more} {advice}. Nothing was changed.")
    notes = tuple(
        f"{finding.name}: {finding.found}; {finding.why}"
        for finding in wrong
        if finding.verdict != BAD
    )
    return restore.RestoreMatch(
        live,
        [(old, model) for old, _, model in models],
        [(old, optimizer) for old, _, optimizer in optimizers],
        notes,
    )


def _pair(
    folder: Path, what: str, extra: Mapping[str, Any], records: Sequence[T], live: Sequence[U]
) -> list[tuple[str, T, U]]:
    """(name there, the manifest's record of it, live one): by names, or the only one of each."""
    old, new = [str(name) for name in extra.get(what, ())], [item.name for item in live]
    if sorted(old) == sorted(new):
        there = dict(zip(old, records, strict=True))
        return [(item.name, there[item.name], item) for item in live]
    if len(old) == len(new) == 1:
        return [(old[0], records[0], live[0])]
    raise CheckpointError(
        f"{folder} does not fit: its {what} are {', '.join(old) or 'none'}, but here they are "
        f"{', '.join(new) or 'none'}. Give the variables the same names, or prepare as many as "
        "were saved. Nothing was changed."
    )


def _fill(
    folder: Path, metadata: Metadata, wanted: Mapping[str, Placement]
) -> dict[str, torch.Tensor]:
    """Read this rank's part of each tensor from whichever files it is in."""
    values, targets = {}, {}
    for name, side in wanted.items():
        stored = metadata.state_dict_metadata.get(name)
        if not isinstance(stored, TensorStorageMetadata):
            raise CheckpointError(
                f"{folder} has no {name}, which its manifest lists. Load another checkpoint."
            )
        if tuple(stored.size) != side.layout.shape:
            raise CheckpointError(
                f"{folder} does not fit: {name} has shape {tuple(stored.size)} there and "
                f"{side.layout.shape} here. Nothing was changed."
            )
        shape = local_shape(side.layout, side.degrees, rank())
        if shape is None:
            continue
        values[name] = torch.empty(shape, dtype=stored.properties.dtype)
        targets[name] = (values[name], own_chunks(side, world_size(), rank()))
    planner, reader = ChunkLoadPlanner(targets), FileSystemReader(folder)
    planner.set_up_planner({}, metadata)
    reader.set_up_storage_reader(metadata, is_coordinator=False)
    try:
        reader.read_data(planner.create_local_plan(), planner).wait()
    except OSError as error:
        raise CheckpointError(
            f"{folder} cannot be read: {error.strerror or error} ({error.filename})."
        ) from error
    return values
