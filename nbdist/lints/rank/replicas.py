"""Looks at a rank's own models: digests of tensors, what they are parts of, what is not finite."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from nbdist.hang.rank import reset_models
from nbdist.lints.rank import ddp, watch
from nbdist.lints.replicas import (
    BUFFER,
    GRADIENT,
    PARAMETER,
    Look,
    ModelLook,
    ReplicaDifference,
    UnreducedStep,
)
from nbdist.parallel.libraries import quantized
from nbdist.parallel.live import build, fsdp1_state, live_models, registry
from nbdist.parallel.live.prepared import Prepared
from nbdist.rpc.rank import namespace
from nbdist.strategy.choice import label
from nbdist.strategy.tensor_layout import local_runs

_ADDED = (
    "parameters were added after prepare ({count}, such as {name}), and ranks do not combine their "
    "gradients. Add them first, then prepare the model"
)
# Elements that ranks compare at a time.
_PIECE = 1 << 20


@dataclass(frozen=True, slots=True)
class LocalTensor:
    """A rank's own part of a tensor, as a plain one; other fields are as in lints.replicas.Look."""

    kind: str
    name: str
    tensor: torch.Tensor
    part: str


@dataclass(frozen=True, slots=True)
class LocalModel:
    """One model on this rank; the rest is as in lints.replicas.ModelLook."""

    name: str
    strategy: str
    tensors: tuple[LocalTensor, ...]
    notes: tuple[str, ...] = ()
    unreduced: UnreducedStep | None = None


def look() -> tuple[ModelLook, ...]:
    """Look at this rank's models: prepared, DDP and FSDP2 ones, or else those in variables."""
    return tuple(
        ModelLook(
            model.name, model.strategy, tuple(map(_look, model.tensors)), model.notes,
            model.unreduced,
        )
        for model in local_models()
    )  # fmt: skip


def spread(wanted: Sequence[ReplicaDifference]) -> list[float]:
    """The largest difference of an element between the ranks of each of these tensors.

    Collective: every rank, with the same list of tensors that are finite.
    """
    tensors = {
        (model.name, local.kind, local.name): local.tensor
        for model in local_models()
        for local in model.tensors
    }
    return [
        _spread(difference, tensors.get((difference.model, difference.kind, difference.name)))
        for difference in wanted
    ]


def local_models() -> list[LocalModel]:
    """The models of this rank, each once. This rank alone."""
    if len(registry.prepared()) > 1:
        gc.collect()  # of cells that were run again
    prepared = registry.prepared()
    variables = live_models.variables()
    outers = {id(model.outer): model for model in prepared}
    inside = {id(m) for model in prepared for m in (*model.outer.modules(), model.base)}
    others = [
        model
        for model in live_models.find()
        if id(model.module) not in inside and id(model.module) not in outers
    ]
    covered = inside | {id(m) for model in others for m in model.module.modules()}
    titles = live_models.names([model.outer for model in prepared], variables)
    result = [_from_prepared(titles[id(model.outer)], model) for model in prepared]
    result += [_from_wrapper(model) for model in others]
    if not result:
        note = "neither wrapped nor prepared: nothing is compared"
        result = [
            LocalModel(name, "by itself", tuple(_tensors_in(module, "")), (note,))
            for name, module in _variables(covered)
        ]
    return result


def _variables(covered: set[int]) -> Iterator[tuple[str, torch.nn.Module]]:
    """The models that variables hold themselves, and that are in no other."""
    models = live_models.user_modules()
    inner = {id(m) for v in models.values() for m in namespace.modules_in(v) if m is not v}
    skipped_ids = covered | inner
    for name, module in models.items():
        if id(module) not in skipped_ids:
            skipped_ids.add(id(module))
            yield name, module


def _from_prepared(name: str, prepared: Prepared) -> LocalModel:
    choice = prepared.built.job.choice
    if choice.name == "deepspeed" or fsdp1_state.is_flat(prepared):
        note = f"under {choice.name} nothing is compared: the shards have no names"
        return LocalModel(name, label(choice), tuple(_tensors_in(prepared.outer, "")), (note,))
    added = {} if choice.name == "single" else _added(prepared)
    tensors = (*_values(prepared), *_gradients(prepared), *_plain(added, "added"))
    notes = [_ADDED.format(count=len(added), name=next(iter(added)))] if added else []
    if choice.name == "single":
        notes.append("under single each rank trains alone: nothing is compared")
    elif _is_halfway() and any(local.kind == GRADIENT for local in tensors):
        notes.append("gradients differ during accumulation: they are not compared")
    unreduced = ddp.unreduced_in(prepared.outer)
    return LocalModel(name, label(choice), tensors, tuple(notes), unreduced)


def _values(prepared: Prepared) -> Iterator[LocalTensor]:
    values = {**build.tensors_of(prepared.base), **prepared.parameters}
    for name in prepared.layouts:
        value = values.get(name)
        if value is not None and not value.is_meta:
            kind = PARAMETER if name in prepared.parameters else BUFFER
            yield LocalTensor(kind, name, _local(value), _part(prepared, name))


def _local(parameter: torch.Tensor) -> torch.Tensor:
    return quantized.comparable(parameter, watch.local(parameter))


def _gradients(prepared: Prepared) -> Iterator[LocalTensor]:
    is_halfway = _is_halfway()
    for name, value in prepared.parameters.items():
        if value.grad is not None:
            part = "" if is_halfway or _lies_otherwise(value) else _part(prepared, name)
            yield LocalTensor(GRADIENT, name, watch.local(value.grad), part)


def _added(prepared: Prepared) -> dict[str, torch.Tensor]:
    """Name -> what this rank holds that the model got after prepare, such as adapters.

    All ranks should hold it alike, and nobody combines its gradients.
    """
    # What is around it may be prepared too: then that combines them.
    prepared_ids = {id(p) for model in registry.prepared() for p in model.parameters.values()}
    names = {name for several in prepared.built.names.values() for name in several}
    # FSDP puts gathered parameters in the place of the shards meanwhile.
    is_gathering = prepared.degrees.dp_shard > 1
    return {
        name: parameter
        for name, parameter in prepared.base.named_parameters()
        if id(parameter) not in prepared_ids
        and not parameter.is_meta
        and not (is_gathering and name in names)
    }


def _part(prepared: Prepared, name: str) -> str:
    job = prepared.built.job
    if job.choice.name == "single":
        return ""
    return str(local_runs(prepared.layouts[name], prepared.degrees, job.mesh.rank))


def _from_wrapper(model: live_models.NamedModel) -> LocalModel:
    module: Any = model.module
    if isinstance(module, DistributedDataParallel):
        ranks = dist.get_process_group_ranks(module.process_group)
        tensors = tuple(_tensors_in(module.module, f"ddp {ranks}"))
        return LocalModel(model.name, "DDP", tensors, unreduced=ddp.unreduced_in(module))
    strategy = "FSDP2" if isinstance(module, FSDPModule) else ""
    return LocalModel(model.name, strategy, tuple(_dtensors(module)))


def _tensors_in(module: torch.nn.Module, part: str) -> Iterator[LocalTensor]:
    """Everything in a module, each with the same part."""
    yield from _plain(dict(module.named_parameters()), part)
    for name, buffer in module.named_buffers():
        if not buffer.is_meta:
            yield LocalTensor(BUFFER, name, watch.local(buffer), part)


def _plain(parameters: Mapping[str, torch.Tensor], part: str) -> Iterator[LocalTensor]:
    """Parameters, then their gradients, each with the same part."""
    for name, tensor in parameters.items():
        if not tensor.is_meta:
            yield LocalTensor(PARAMETER, name, _local(tensor), part)
    gradient_part = "" if _is_halfway() else part
    for name, tensor in parameters.items():
        if tensor.grad is not None:
            yield LocalTensor(GRADIENT, name, watch.local(tensor.grad), gradient_part)


def _dtensors(module: torch.nn.Module) -> Iterator[LocalTensor]:
    """Yield the local parts of a model of DTensors that nbdist has not prepared."""
    for local in _tensors_in(module, ""):
        part = ""
        if local.kind != BUFFER:
            parameter = module.get_parameter(local.name)
            if local.kind == PARAMETER or not _lies_otherwise(parameter):
                part = _part_of(parameter)
        yield replace(local, part=part)


def _part_of(tensor: torch.Tensor) -> str:
    """Coordinates of this rank on axes that split a DTensor; empty for a plain tensor."""
    if not isinstance(tensor, DTensor):
        return ""
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None or any(placement.is_partial() for placement in tensor.placements):
        return ""
    along = [
        (place, where if placement.is_shard() else -1)
        for place, (placement, where) in enumerate(zip(tensor.placements, coordinate, strict=True))
    ]
    return f"{tensor.device_mesh.mesh.flatten().tolist()} {along}"


def _lies_otherwise(parameter: torch.Tensor) -> bool:
    """Whether a gradient does not lie as its parameter: tp can leave partial sums."""
    gradient = parameter.grad
    if not isinstance(gradient, DTensor):
        return isinstance(parameter, DTensor)
    return not isinstance(parameter, DTensor) or gradient.placements != parameter.placements


def _is_halfway() -> bool:
    """Whether an Accelerator is in the middle of an accumulation."""
    from accelerate.state import GradientState

    return not GradientState().sync_gradients


def _look(local: LocalTensor) -> Look:
    n_nan, n_inf = _not_finite(local.tensor)
    return Look(
        local.kind, local.name, local.part, reset_models.checksum(local.tensor),
        local.tensor.numel(), n_nan, n_inf,
    )  # fmt: skip


def _not_finite(tensor: torch.Tensor) -> tuple[int, int]:
    """(NaN, inf) elements. One pass where there are none."""
    if not tensor.numel() or not (tensor.is_floating_point() or tensor.is_complex()):
        return 0, 0
    total = tensor.sum(dtype=torch.float32 if tensor.dtype.itemsize < 4 else None)
    if bool(torch.isfinite(total)):
        return 0, 0
    return int(tensor.isnan().sum()), int(tensor.isinf().sum())


def _spread(wanted: ReplicaDifference, tensor: torch.Tensor | None) -> float:
    """One tensor's. Collective: ranks that are not among its holders send what changes nothing."""
    members = {rank for group in wanted.groups for rank in group}
    is_member = dist.get_rank() in members and tensor is not None and tensor.numel() == wanted.count
    largest = 0.0
    for start in range(0, wanted.count, _PIECE):
        size = min(_PIECE, wanted.count - start)
        # On the CPU, for which there is a backend beside NCCL.
        ends = torch.full((2, size), -math.inf, dtype=torch.float64)
        if is_member:
            assert tensor is not None
            values = tensor.reshape(-1)[start : start + size].to("cpu", torch.float64)
            ends = torch.stack([values, -values])
        dist.all_reduce(ends, dist.ReduceOp.MAX)
        largest = max(largest, float(ends.sum(0).max()))
    return largest
