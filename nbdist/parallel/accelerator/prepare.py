"""Models and optimizers are put under the strategy that counts; what is known of them."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from nbdist.errors import NbdistError, OptionError
from nbdist.parallel.base import events, module_patches
from nbdist.parallel.base.consensus import all_or_none
from nbdist.parallel.base.mesh import ParallelMesh
from nbdist.parallel.base.training_state import same_random
from nbdist.parallel.base.transform import ModelBuild
from nbdist.parallel.dp import fsdp, zero1
from nbdist.parallel.libraries import quantized
from nbdist.parallel.live import build, live_models
from nbdist.parallel.live.prepared import Prepared
from nbdist.parallel.live.registry import (
    agree_on_numbers,
    bound_optimizers,
    cached_mesh,
    current,
    device,
    last_number,
    mesh_for,
    names_in,
    owner_names,
    prepared,
    prepared_of,
    register,
    state_side,
)
from nbdist.parallel.optimizers import first_step, muon, rules
from nbdist.parallel.reshard.full_state import shard_into
from nbdist.parallel.reshard.rebind import has_hooks
from nbdist.parallel.reshard.redistribute import Reshard, redistribute
from nbdist.strategy.choice import Degrees, Strategy, steps_of
from nbdist.strategy.tensor_layout import Placement, TensorLayout


def prepare_model(model: torch.nn.Module, accelerator: Any = None) -> torch.nn.Module:
    """Put a model under the current strategy and return what is called in its place.

    Collective: every rank, with a like model. Every rank gets rank 0's values. The module stays
    the same object and keeps its parameters' names; parameters that the strategy splits are
    others. One that is prepared already stays as it is. The accelerator's options count beside
    the strategy's.

    Raises:
        OptionError: The strategy does not go with the model, or it is sharded already.
        NbdistError: Ranks' models differ, or it failed on another rank. Nothing was changed.
    """
    existing = prepared_of(model)
    if existing is not None:
        return existing.outer
    choice = current()
    with same_random():
        if live_models.is_alone():
            _refuse_sharded(model, choice)
            job = ModelBuild(model, choice, _grid_alone(choice), device(), accelerator=accelerator)
            built = build.plan(job)
            tensors = build.tensors_of(model)
            values = {name: tensors[name].detach().to(job.device) for name in built.layouts}
            outer = _commit(built, values)
            live_models.note_alone(outer)
            return outer
        job = ModelBuild(model, choice, mesh_for(choice), device(), accelerator=accelerator)
        what = f"Preparing {type(model).__name__}"
        planned: list[build.Built] = []
        sketches, strides = zip(*all_or_none(what, lambda: _sketch(planned, job)), strict=True)
        agree_on_numbers(all_or_none(what, lambda: _compare(sketches)))
        planned[0].strides = strides[0]  # rank 0's, as its values
        for tell in events.before_build:
            tell(model, choice)
        for act in events.on_prepare:
            act(type(model).__name__, build.tensors_of(model).values())
        return _commit(planned[0], _first_values(planned[0]))


def bind(optimizer: Optimizer) -> None:
    """Give an optimizer the parameters that prepared models have now. This rank alone.

    The optimizer, its groups and their lists stay the same objects. State that it has already is
    taken to be the same on all ranks. Parameters that this rank does not hold stay in the groups,
    on meta: they never have a gradient, and places in the groups are equal on all ranks.

    Raises:
        OptionError: The strategy does not go with the optimizer. Nothing was changed.
    """
    names = names_in(optimizer)
    if not names:
        return
    choice, layouts = current(), [model.layouts[name] for model, name, _ in names.values()]
    rules.check(optimizer, choice, layouts)
    before, after = {}, {}
    is_new = optimizer not in bound_optimizers()  # its state, if there is any, is whole
    if is_new and "flat" in rules.ways(choice, layouts):
        rules.name_unknown(optimizer)
    for key, (model, name, parameter) in names.items():
        is_other = parameter is not model.parameters[name]
        if is_other or (is_new and state_side(model.built, name) != model.whole(name)):
            before[key], after[key] = parameter, model.parameters[name]
    if before:
        new = {key: state_side(names[key][0].built, names[key][1]) for key in before}
        old = {key: names[key][0].whole(names[key][1]) for key in before}
        shard_into(optimizer, before, after, old, new)
        replace_parameters(optimizer, {id(before[key]): after[key] for key in before})
    attach_steps(optimizer, prepared())


def replace_parameters(optimizer: Optimizer, fresh: Mapping[int, torch.Tensor]) -> None:
    """Put parameters in others' places (by id), in the lists that there are."""
    for group in optimizer.param_groups:
        parameters = group["params"]
        parameters[:] = [fresh.get(id(parameter), parameter) for parameter in parameters]


def attach_steps(optimizer: Optimizer, models: list[Prepared]) -> None:
    """Add to an optimizer's step what the strategy needs, in place of what it has. This rank."""
    bound = bound_optimizers()
    detach = bound.get(optimizer)
    if detach is not None:
        detach()
    # Before zero1, which hides gradients.
    detaches = [first_step.attach(optimizer), muon.attach(optimizer)]
    if "zero1" in steps_of(current()):
        owners = {
            id(model.parameters[name]): owner
            for model in models
            for name, owner in owner_names(model.built).items()
        }
        detaches.append(zero1.attach(optimizer, owners, cached_mesh().group("dp_replicate")))
    bound[optimizer] = functools.partial(_call_all, tuple(filter(None, detaches)))


def _call_all(functions: Iterable[Callable[[], None]]) -> None:
    for function in functions:
        function()


Strides = dict[str, tuple[int, ...]]


class _Sketched(NamedTuple):
    """The facts of a tensor in which all ranks' models have to agree."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    constants: str  # a digest of packed weights' constants


def _sketch(planned: list[build.Built], job: ModelBuild) -> tuple[list[_Sketched], Strides]:
    """Plan; say what all ranks' models must have alike, and the order in memory of this one's."""
    _refuse_sharded(job.base, job.choice)
    tensors = build.tensors_of(job.base)
    missing = [name for name, tensor in tensors.items() if tensor.is_meta]
    if missing and job.mesh.rank == 0:
        raise OptionError(
            f"{missing[0]} is on the meta device and has no values ({len(missing)} such tensors). "
            "Build the model on a real device, at least on rank 0, whose values all ranks get."
        )
    built = build.plan(job)
    planned.append(built)
    tensors_here = [
        _Sketched(name, tuple(tensor.shape), str(tensor.dtype), quantized.constants(tensor))
        for name, tensor in ((name, tensors[name]) for name in built.names)
    ]
    return tensors_here, built.strides


def _refuse_sharded(model: torch.nn.Module, choice: Strategy) -> None:
    """Refuse a model of which another library has given this rank a part. Meets no rank.

    Raises:
        OptionError: It holds DTensors or FSDP modules; or DDP, where the strategy splits models.
    """
    title = type(model).__name__
    split = [name for name, t in build.tensors_of(model).items() if isinstance(t, DTensor)]
    sharded = [m for m in model.modules() if isinstance(m, FSDPModule | FullyShardedDataParallel)]
    if split or sharded:
        what = f"{split[0]} is a DTensor" if split else "each rank has a part of it"
        raise OptionError(
            f"{title} is sharded already: {what}. Give prepare the whole model, without "
            "fully_shard, FSDP, parallelize_module or transformers' distributed_config; "
            f"%dist_strategy shards it (the strategy is {choice.name} now)."
        )
    if choice.degrees.is_split and any(
        isinstance(m, DistributedDataParallel) for m in model.modules()
    ):
        raise OptionError(
            f"{title} is in torch's DistributedDataParallel already, which does not go with "
            f"{choice.name}. Give prepare the model that is in it: its `.module`."
        )


def _compare(sketches: Sequence[list[_Sketched]]) -> int:
    """Refuse ranks whose models differ; else how many numbers this rank has given."""
    for rank, sketch in enumerate(sketches):
        if sketch == sketches[0]:
            continue
        differing = set(sketch) ^ set(sketches[0])
        odd = next((tensor for tensor in (*sketch, *sketches[0]) if tensor in differing), None)
        detail = f"{odd.name} {odd.shape} is on only one of them" if odd else "the order differs"
        if odd and odd.constants:
            detail = f"{odd.name} was quantized from other weights"
        raise NbdistError(
            f"The model of rank {rank} differs from rank 0's: {detail}. Build the same model on "
            "every rank."
        )
    return last_number()


def _first_values(built: build.Built) -> dict[str, torch.Tensor]:
    """Return this rank's part of rank 0's values. Collective."""
    tensors = build.tensors_of(built.job.base)
    degrees = built.job.mesh.degrees
    moves: dict[bool, list[Reshard]] = {True: [], False: []}
    values = {}
    for name, layout in built.layouts.items():
        tensor = tensors[name].detach()
        if built.job.mesh.rank == 0:
            values[name] = tensor
        old = Placement(TensorLayout(layout.shape, ranks=frozenset({0})), Degrees())
        is_parameter = isinstance(tensors[name], torch.nn.Parameter)
        moves[is_parameter].append(Reshard(name, tensor.dtype, old, Placement(layout, degrees)))
    home = fsdp.parameter_device(built.job.choice, built.job.device)
    return {
        **redistribute(moves[True], values, home),
        **redistribute(moves[False], values, built.job.device),
    }


def _grid_alone(choice: Strategy) -> ParallelMesh:
    """A mesh that needs no other rank: of ddp, over all ranks.

    Raises:
        OptionError: Other strategies split the model, so one rank cannot build it.
    """
    if choice.name not in ("single", "ddp") or not choice.degrees.dp == choice.degrees.product:
        raise OptionError(
            f"This rank replaced another and is not up to date, and under {choice.name} all ranks "
            "build a model together. Run the cells that build it again on all ranks, then load a "
            "saved state."
        )
    rank = dist.get_rank()
    alone = ParallelMesh(choice.degrees, rank, choice.degrees.coordinate(rank), None)
    if choice.name == "ddp" and choice.degrees.dp > 1:
        assert dist.group.WORLD is not None
        alone._groups["dp_replicate",] = dist.group.WORLD  # noqa: SLF001  # its own table
    return alone


def _commit(built: build.Built, local: Mapping[str, torch.Tensor]) -> torch.nn.Module:
    """Change the model; as it was before where that fails. This rank alone."""
    base = built.job.base
    snapshots = module_patches.snapshot_modules(base)
    tensors = build.tensors_of(base)
    old = {name: tensors[name] for name in built.parameter_names}
    values = {name: (tensor.data, tensor.grad) for name, tensor in old.items()}
    try:
        outer = build.commit(built, local, keeps_parameters=True)
    except BaseException:
        module_patches.restore(snapshots)
        for name, (value, gradient) in values.items():
            old[name].data, old[name].grad = value, gradient
        raise
    others = {name: old[name] for name in old if old[name] is not built.parameters[name]}
    _tell_hooks(built, others)
    register(built, others)
    return outer


def _tell_hooks(built: build.Built, replaced: Mapping[str, torch.Tensor]) -> None:
    """Say which parameters of this rank had hooks of the user's that are left behind with them."""
    hooked = [
        name
        for name, parameter in replaced.items()
        if has_hooks(parameter) and not built.parameters[name].is_meta
    ]
    if hooked:
        print(  # noqa: T201  # into the cell's output
            f"prepare: {', '.join(hooked[:3])}{' and others' if len(hooked) > 3 else ''} had hooks "
            "of yours (register_hook, register_post_accumulate_grad_hook). "
            f"{built.job.choice.name} has put other parameters in their place, so these hooks do "
            "not run. Set them after prepare(), on the parameters of the model that it returns.",
            file=sys.stderr,
        )
