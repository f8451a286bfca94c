"""Another strategy under live models: the same module, optimizer, groups, scheduler, closures.

    1  plan, and bring every rank its new part of everything     may fail; nothing has changed
       all ranks agree that they have it
    2  commit: modules, optimizers. No rank is met, SIGINT waits
       all ranks agree that they did; if not, each goes back to what it was
    3  the user's names and lists; what still holds old objects is told

Until the agreement of 2 both the old and the new parts are there.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Sequence

import torch

from nbdist.errors import NbdistError, OptionError
from nbdist.parallel import build, precision, registry
from nbdist.parallel.consensus import (
    CommitVote,
    all_or_none,
    interrupts_held,
    one_line,
    rank,
    world_size,
)
from nbdist.parallel.dp import fsdp, zero1
from nbdist.parallel.prepared import Prepared
from nbdist.parallel.reshard.common import Stepper, common_models, steppers_of
from nbdist.parallel.reshard.full_state import dtypes_of, local_state
from nbdist.parallel.reshard.optimizer_state import plan
from nbdist.parallel.reshard.rebind import RebindReport
from nbdist.parallel.reshard.redistribute import Reshard, redistribute
from nbdist.parallel.training_state import same_random
from nbdist.parallel.transform import ModelBuild
from nbdist.rpc.rank import progress
from nbdist.strategy.choice import Strategy, label, rows_of, steps_of
from nbdist.strategy.tensor_layout import transfers
from nbdist.switch.rank.commit import WHAT, Commit, ModelMove, ReceivedShards, display_name
from nbdist.switch.report import RankSwitchReport

# Of what is told while it lasts.
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
        return RankSwitchReport(
            before, choice, (), (), (), (), (note,), 0, time.perf_counter() - began_s
        )
    if len(registry.prepared()) > 1 or _fixed(before, choice):
        gc.collect()  # of cells that were run again, or what was deleted to make way
    with same_random(), progress.during(NAME):
        progress.tell("planning")
        found = common_models(WHAT)
        if found:
            _refuse_fixed(before, choice)
        # Loaders and optimizers that cannot follow refuse before anything changes.
        all_or_none(WHAT, lambda: registry.ask(before, choice))
        registry.grid_for(choice)
        notes: tuple[str, ...] = ()
        done, received = RebindReport(), 0
        if found:
            done, notes, received = _move(choice, found)
    if not found:
        registry.set_choice(choice)
    registry.tell(before, choice)
    return RankSwitchReport(
        before=before,
        after=choice,
        models=tuple(display_name(one.built) for one in found),
        rebound=tuple(done.names),
        lists=tuple(done.lists),
        stale=tuple(done.stale),
        notes=notes,
        moved_bytes=received,
        elapsed_s=time.perf_counter() - began_s,
        batch=_batch(before, choice),
    )


def _batch(before: Strategy, after: Strategy) -> tuple[int, int, float] | None:
    """Samples of one step before and after, of the first accelerator that says so; its rate."""
    for one in registry.watchers():
        size, lr = getattr(one, "batch_and_rate", lambda: (None, None))()
        if size is not None and lr is not None:
            was, now = (c.degrees.dp * max(c.options.accumulate, 1) for c in (before, after))
            return size * was, size * now, lr
    return None


def _fixed(before: Strategy, after: Strategy) -> str:
    """Why no live model goes from one to the other, if a row says so."""
    rows = [row for choice in (before, after) for row in rows_of(choice)]
    return next((row.fixed for row in rows if row.fixed), "")


def _refuse_fixed(before: Strategy, after: Strategy) -> None:
    reason = _fixed(before, after)
    if reason:
        raise OptionError(
            f"Live models cannot be switched from {label(before)} to {label(after)}: "
            f"{reason}. Save with accelerator.save_state(DIR), start afresh with "
            f"%dist_reset --strategy {after.name}, prepare again, and load with "
            "accelerator.load_state(DIR)."
        )


def _move(choice: Strategy, found: list[Prepared]) -> tuple[RebindReport, tuple[str, ...], int]:
    ballot = CommitVote(str(all_or_none(WHAT, time.time_ns)[0]))
    for one in found:
        fsdp.settle(one.built.job.root)
    models = _plan(choice, found)
    steppers = steppers_of(WHAT, found)
    brought = _bring(models, steppers)
    received = brought.received_bytes
    with interrupts_held():
        try:
            progress.tell("agreeing")
            all_or_none(WHAT, lambda: None)  # from here on nobody waits for data
        except BaseException as error:
            ballot.answer(one_line(error), is_waiting=False)  # some may have gone on
            raise
        progress.tell("committing")
        commit = Commit(choice, models, steppers, brought)
        commit.run(ballot)
        done, notes = commit.finish()
    return done, notes, received


def _plan(choice: Strategy, found: Sequence[Prepared]) -> list[ModelMove]:
    """Plan every model. Collective, as one rank's refusal is everybody's."""
    grid = registry.grid_for(choice)
    planned: list[ModelMove] = []

    def work() -> None:
        for place, one in enumerate(found):
            old = one.built.job
            _refuse_changed(one)
            job = ModelBuild(one.base, choice, grid, old.device, accelerator=old.accelerator)
            with build.bare(one.built):
                planned.append(ModelMove(one, place, build.plan(job)))

    all_or_none(WHAT, work)
    return planned


def _refuse_changed(one: Prepared) -> None:
    """A parameter that has come since is under no strategy, and on no rank the same."""
    here = build.names_of(one.base).keys()
    odd = sorted(here ^ one.built.names.keys())
    found = build.tensors_of(one.base)
    odd = odd or [name for name, p in one.parameters.items() if found[name] is not p]
    if odd:
        raise NbdistError(
            f"{', '.join(odd[:4])} of {one.built.title} changed since prepare(): the "
            "switch would lose it. Prepare the changed model in a fresh run: %dist_reset."
        )


def _bring(models: list[ModelMove], steppers: list[Stepper]) -> ReceivedShards:
    """Bring this rank's new parts. Collective; may be refused, alike on all ranks, at first."""
    old = {
        key: registry.state_side(one.built, n)
        for s in steppers
        for key, (one, n, _) in s.names.items()
    }
    planned = {id(model.one): model.next for model in models}
    new = {
        key: registry.state_side(planned[id(one)], n)
        for s in steppers
        for key, (one, n, _) in s.names.items()
    }
    moves: list[Reshard] = []
    for one in steppers:
        assert one.agreed is not None
        if "zero1" in steps_of(models[0].next.job.choice):
            zero1.check(one.optimizer)
        moves += plan(one.agreed, old, new)
    states = {label: t for one in steppers for label, t in one.local.tensors.items()}
    parameters, buffers, held = _values(models)
    job = models[0].next.job
    home = fsdp.parameter_device(job.choice, job.device)
    brought = ReceivedShards(received_bytes=_received_bytes([*moves, *parameters, *buffers]))
    everything = redistribute([*parameters, *moves], {**held, **states}, home)
    brought.states = {move.name: everything[move.name] for move in moves if move.name in everything}
    brought.values = {m.name: everything[m.name] for m in parameters if m.name in everything}
    brought.values |= redistribute(buffers, held, job.device)
    return brought


def _received_bytes(moves: list[Reshard]) -> int:
    """What this rank gets from others."""
    here = rank()
    return sum(
        math.prod(piece.shape) * move.dtype.itemsize
        for move in moves
        for piece in transfers(move.old, move.new, world_size())
        if piece.target == here and here not in piece.sources
    )


def _values(
    models: list[ModelMove],
) -> tuple[list[Reshard], list[Reshard], dict[str, torch.Tensor]]:
    """The moves of parameters, and of buffers, by unique name; and what this rank has of them."""
    parameters: list[Reshard] = []
    buffers: list[Reshard] = []
    held = {}
    for model in models:
        one, dtypes = model.one, dtypes_of(model.one)
        for name, tensor in local_state(one).items():
            held[registry.unique_name(model.place, name)] = tensor
        for name, dtype in dtypes.items():
            key = registry.unique_name(model.place, name)
            move = Reshard(key, dtype, one.side(name), model.next.side(name))
            (parameters if name in one.parameters else buffers).append(move)
    return parameters, buffers, held
