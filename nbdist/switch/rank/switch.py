"""Another strategy under live models: the same module, optimizer, groups, scheduler, closures.

    1  plan, and bring every rank its new part of everything     may fail; nothing has changed
       all ranks agree that they have it
    2  commit: modules, optimizers. No rank is met, SIGINT waits
       all ranks agree that they did; if not, each goes back to what it was
    3  the user's names and lists are updated; what still holds old objects is reported

Until all ranks have committed, both the old and the new parts are there.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from nbdist.errors import NbdistError, OptionError
from nbdist.parallel.base import precision
from nbdist.parallel.base.consensus import (
    CommitVote,
    all_or_none,
    interrupts_held,
    one_line,
    rank,
    world_size,
)
from nbdist.parallel.base.mesh import ParallelMesh
from nbdist.parallel.base.training_state import same_random
from nbdist.parallel.base.transform import ModelBuild
from nbdist.parallel.dp import fsdp
from nbdist.parallel.live import build, live_models, registry
from nbdist.parallel.live.prepared import Prepared
from nbdist.parallel.optimizers import rules
from nbdist.parallel.reshard.common import OptimizerHandle, common_models, common_optimizers
from nbdist.parallel.reshard.full_state import dtypes_of, local_state
from nbdist.parallel.reshard.optimizer_state import plan
from nbdist.parallel.reshard.redistribute import Reshard, redistribute
from nbdist.rpc.rank import progress
from nbdist.strategy.choice import Strategy, label, rows_of
from nbdist.strategy.tensor_layout import transfers
from nbdist.switch.rank import copies
from nbdist.switch.rank.commit import WHAT, Commit, ModelMove, display_name
from nbdist.switch.report import RankSwitchReport

# Of its progress.
NAME = "switch"


def switch(choice: Strategy) -> RankSwitchReport:
    """Put this rank's models and optimizers under another strategy.

    Collective: every rank, with the same choice, between steps. Gradients are cleared. Random
    generators stay as they are.

    Raises:
        OptionError: It cannot be had with these models, or not from the current strategy.
        NbdistError: It failed on a rank, or ranks differ. Nothing has changed anywhere.
    """
    began_s = time.perf_counter()
    choice, before = precision.with_accelerator_precision(choice), registry.current()
    if choice == before:
        note = f"{label(choice)} with these options is the current strategy; nothing was done"
        elapsed_s = time.perf_counter() - began_s
        return RankSwitchReport(before, choice, notes=(note,), elapsed_s=elapsed_s)
    # Why no live model goes from one to the other, if a row says so.
    rows = [*rows_of(before), *rows_of(choice)]
    reason = next((row.fixed for row in rows if row.fixed), "")
    if len(registry.prepared()) > 1 or reason:
        gc.collect()  # of cells that were run again, or what was deleted to make way
    with same_random(), progress.during(NAME), live_models.built_jointly():
        progress.tell("planning")
        models = common_models(WHAT)
        if models and reason:
            raise OptionError(_fixed(before, choice, reason))
        # Loaders and optimizers that cannot follow refuse before anything changes.
        all_or_none(WHAT, lambda: registry.ask(before, choice))
        all_or_none(WHAT, live_models.refuse_alone)
        registry.mesh_for(choice)
        report = RankSwitchReport(before, choice)
        if models:
            report = _move(report, models)
        else:
            registry.set_choice(choice)
    for watcher in registry.watchers():
        watcher.after_switch(before, choice)
    return replace(
        report,
        models=tuple(display_name(model.built) for model in models),
        elapsed_s=time.perf_counter() - began_s,
        batch=_batch(before, choice),
    )


def refusal(choice: Strategy) -> str:
    """Why the models of this rank cannot be switched to a strategy; "" where they can.

    Plans as a switch does, which nothing changes and no rank is met for; so what depends on other
    ranks is not in it. Random generators stay as they are.
    """
    choice, rows = precision.with_accelerator_precision(choice), rows_of(registry.current())
    models = registry.prepared()
    reason = next((row.fixed for row in [*rows, *rows_of(choice)] if row.fixed), "")
    coordinate = choice.degrees.coordinate(0 if choice.name == "single" else rank())
    mesh = ParallelMesh(choice.degrees, rank(), coordinate, None)
    if models and reason:
        return _fixed(registry.current(), choice, reason)
    try:
        with same_random():
            planned = {id(model): _plan_model(model, choice, mesh) for model in models}
            for optimizer in registry.bound_optimizers():
                _check_optimizer(optimizer, choice, registry.names_in(optimizer), planned)
    except OptionError as error:
        return str(error)
    return ""


def _check_optimizer(
    optimizer: torch.optim.Optimizer,
    choice: Strategy,
    names: Mapping[str, tuple[Prepared, str, torch.Tensor]],
    planned: Mapping[int, build.Built],
) -> None:
    """Refuse an optimizer that a strategy does not go with, by its models' plans (by id)."""
    layouts = [planned[id(model)].layouts[name] for model, name, _ in names.values()]
    rules.check(optimizer, choice, layouts)


def _fixed(before: Strategy, choice: Strategy, reason: str) -> str:
    return (
        f"Live models cannot be switched from {label(before)} to {label(choice)}: {reason}. Save "
        f"with accelerator.save_state(DIR), start afresh with %dist_reset --strategy "
        f"{choice.name}, prepare again, and load with accelerator.load_state(DIR)."
    )


def _batch(before: Strategy, after: Strategy) -> tuple[int, int, float] | None:
    """Samples of one step before and after, of the first accelerator that says so; its rate."""
    for watcher in registry.watchers():
        size, lr = getattr(watcher, "batch_and_rate", lambda: (None, None))()
        if size is not None and lr is not None:
            was, now = (c.degrees.dp * max(c.options.accumulate, 1) for c in (before, after))
            return size * was, size * now, lr
    return None


def _move(report: RankSwitchReport, prepared: list[Prepared]) -> RankSwitchReport:
    vote = CommitVote(str(all_or_none(WHAT, time.time_ns)[0]))
    for model in prepared:
        fsdp.settle(model.built.job.root)
    moves = _plan(report.after, prepared)
    handles = common_optimizers(WHAT, prepared)
    shards, received_bytes = _bring(moves, handles)
    layouts = [copies.layout_of(model) for model in prepared]
    with interrupts_held():
        try:
            progress.tell("agreeing")
            all_or_none(WHAT, lambda: None)  # from here on nobody waits for data
        except BaseException as error:
            vote.answer(one_line(error), is_waiting=False)  # some may have gone on
            raise
        progress.tell("committing")
        commit = Commit(report.after, moves, handles, shards)
        commit.run(vote)
        rebinds, notes = commit.finish()
    return replace(
        report,
        rebound=tuple(rebinds.names),
        lists=tuple(rebinds.lists),
        stale=tuple(rebinds.stale),
        notes=(*notes, *copies.notes(layouts)),
        moved_bytes=received_bytes,
    )


def _plan(choice: Strategy, models: Sequence[Prepared]) -> list[ModelMove]:
    """Plan every model. Collective, as one rank's refusal is everybody's."""
    mesh = registry.mesh_for(choice)
    planned: list[ModelMove] = []

    def work() -> None:
        for place, model in enumerate(models):
            _refuse_changed(model)
            planned.append(ModelMove(model, place, _plan_model(model, choice, mesh)))

    all_or_none(WHAT, work)
    return planned


def _plan_model(model: Prepared, choice: Strategy, mesh: ParallelMesh) -> build.Built:
    old = model.built.job
    job = ModelBuild(model.base, choice, mesh, old.device, accelerator=old.accelerator)
    with build.bare(model.built):
        return build.plan(job)


def _refuse_changed(model: Prepared) -> None:
    """A parameter that has come since is under no strategy, and on no rank the same."""
    here = build.names_of(model.base).keys()
    odd = sorted(here ^ model.built.names.keys())
    tensors = build.tensors_of(model.base)
    odd = odd or [name for name, p in model.parameters.items() if tensors[name] is not p]
    if odd:
        raise NbdistError(
            f"{', '.join(odd[:4])} of {model.built.title} changed after prepare(), and a switch "
            "would lose the change. Run %dist_reset, then prepare the changed model."
        )


def _bring(
    moves: list[ModelMove], handles: list[OptimizerHandle]
) -> tuple[dict[str, torch.Tensor], int]:
    """Bring this rank's new parts. Collective; may be refused, alike on all ranks, at first.

    Returns:
        Those of parameters and buffers by unique name, of optimizers' states by label; and how
        many bytes have come from other ranks.
    """
    job = moves[0].next.job
    planned = {id(move.model): move.next for move in moves}
    # What lies where parameters do, and buffers, which always lie on the device.
    homed: list[Reshard] = []
    buffers: list[Reshard] = []
    local: dict[str, torch.Tensor] = {}
    for handle in handles:
        _check_optimizer(handle.optimizer, job.choice, handle.names, planned)
        old, new = {}, {}
        for key, (model, name, _) in handle.names.items():
            old[key] = registry.state_side(model.built, name)
            new[key] = registry.state_side(planned[id(model)], name)
        homed += plan(handle.agreed, old, new)
        local |= handle.local.tensors
    for move in moves:
        for name, tensor in local_state(move.model).items():
            local[registry.unique_name(move.place, name)] = tensor
        for name, dtype in dtypes_of(move.model).items():
            key = registry.unique_name(move.place, name)
            reshard = Reshard(key, dtype, move.model.side(name), move.next.side(name))
            (homed if name in move.model.parameters else buffers).append(reshard)
    here = rank()
    received_bytes = sum(
        math.prod(transfer.shape) * reshard.dtype.itemsize
        for reshard in (*homed, *buffers)
        for transfer in transfers(reshard.old, reshard.new, world_size())
        if transfer.target == here and here not in transfer.sources
    )
    shards = redistribute(homed, local, fsdp.parameter_device(job.choice, job.device))
    return shards | redistribute(buffers, local, job.device), received_bytes
