"""Looks at a rank's own models: digests of tensors, what they are parts of, what is not finite."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from nbdist.hang.rank import reset_models
from nbdist.lints.replicas import BUFFER, GRADIENT, PARAMETER, Difference, Look, ModelLook
from nbdist.parallel import build, live_models, registry
from nbdist.parallel.dp import fsdp1_state
from nbdist.parallel.prepared import Prepared
from nbdist.strategy.choice import label
from nbdist.strategy.tensor_layout import local_runs

# Elements that ranks compare at a time.
_PIECE = 1 << 20


@dataclass(frozen=True, slots=True)
class Held:
    """One tensor of a model on this rank.

    Attributes:
        kind, name: As in lints.replicas.ThreadSnapshot.
        tensor: Its own part, plain.
        part: As in lints.replicas.ThreadSnapshot.
    """

    kind: str
    name: str
    tensor: torch.Tensor
    part: str


@dataclass(frozen=True, slots=True)
class Found:
    """One model on this rank.

    Attributes:
        name: Of its variable, or its class.
        strategy: What it is under, for a person.
        held: Its tensors.
        notes: What is not to be compared, and why.
    """

    name: str
    strategy: str
    held: tuple[Held, ...]
    notes: tuple[str, ...] = ()


def look() -> tuple[ModelLook, ...]:
    """This rank's models: prepared ones, DDP and FSDP2 ones, and else those of its variables."""
    return tuple(
        ModelLook(one.name, one.strategy, tuple(map(_looked, one.held)), one.notes)
        for one in found()
    )


def spread(wanted: Sequence[Difference]) -> list[float]:
    """The largest difference of an element between the ranks of each of these tensors.

    Collective: every rank, with the same list of tensors that are finite.
    """
    own = {
        (model.name, held.kind, held.name): held.tensor for model in found() for held in model.held
    }
    return [_spread(one, own.get((one.model, one.kind, one.name))) for one in wanted]


def found() -> list[Found]:
    """The models of this rank, each once. This rank alone."""
    if len(registry.prepared()) > 1:
        gc.collect()  # of cells that were run again
    prepared = registry.prepared()
    known = live_models.variables()
    outers = {id(one.outer): one for one in prepared}
    inside = {id(m) for one in prepared for m in (*one.outer.modules(), one.base)}
    others = [
        one
        for one in live_models.find()
        if id(one.module) not in inside and id(one.module) not in outers
    ]
    covered = inside | {id(m) for one in others for m in one.module.modules()}
    titles = live_models.names([one.outer for one in prepared], known)
    result = [_prepared(titles[id(one.outer)], one) for one in prepared]
    result += [_wrapped(one) for one in others]
    if not result:
        result = [_plain(name, module) for name, module in _variables(covered)]
    return result


def _variables(covered: set[int]) -> Iterator[tuple[str, torch.nn.Module]]:
    """The models that variables hold themselves, and that are in no other."""
    space = live_models._namespace()  # noqa: SLF001  # the same package
    held = {n: v for n, v in space.items() if isinstance(v, torch.nn.Module) and n[:1] != "_"}
    inner = {id(m) for v in held.values() for m in v.modules() if m is not v}
    done = covered | inner
    for name, module in held.items():
        if id(module) not in done:
            done.add(id(module))
            yield name, module


def _prepared(name: str, one: Prepared) -> Found:
    choice = one.built.job.choice
    if choice.name == "deepspeed" or fsdp1_state.is_flat(one):
        note = f"under {choice.name} nothing is compared: pieces have no names"
        return Found(name, label(choice), tuple(_held_by(one.outer, "")), (note,))
    held = (*_values(one), *_gradients(one))
    notes: tuple[str, ...] = ()
    if choice.name == "single":
        notes = ("under single each rank is by itself: nothing is compared",)
    elif _is_halfway() and any(each.kind == GRADIENT for each in held):
        notes = ("in the middle of an accumulation gradients differ: they are not compared",)
    return Found(name, label(choice), held, notes)


def _values(one: Prepared) -> Iterator[Held]:
    there = build.tensors_of(one.base)
    for name in one.layouts:
        is_parameter = name in one.parameters
        value: torch.Tensor | None = there.get(name)
        if is_parameter:
            value = one.parameters[name]
        if value is not None and not value.is_meta:
            kind = PARAMETER if is_parameter else BUFFER
            yield Held(kind, name, _local(value), _part(one, name))


def _gradients(one: Prepared) -> Iterator[Held]:
    is_halfway = _is_halfway()
    for name, value in one.parameters.items():
        if value.grad is not None:
            is_other = is_halfway or _lies_otherwise(value)
            yield Held(GRADIENT, name, _local(value.grad), "" if is_other else _part(one, name))


def _part(one: Prepared, name: str) -> str:
    job = one.built.job
    is_alone = job.choice.name == "single"
    return "" if is_alone else str(local_runs(one.layouts[name], one.degrees, job.grid.rank))


def _wrapped(one: live_models.NamedModel) -> Found:
    module: Any = one.module
    if isinstance(module, DistributedDataParallel):
        ranks = dist.get_process_group_ranks(module.process_group)
        return Found(one.name, "DDP", tuple(_held_by(module.module, f"ddp {ranks}")))
    return Found(
        one.name, "FSDP2" if isinstance(module, FSDPModule) else "", tuple(_sharded(module))
    )


def _plain(name: str, module: torch.nn.Module) -> Found:
    note = "no wrapper and no prepare: nothing is compared"
    return Found(name, "by itself", tuple(_held_by(module, "")), (note,))


def _held_by(module: torch.nn.Module, part: str) -> Iterator[Held]:
    """Everything in a module, each with the same part."""
    for name, tensor in module.named_parameters():
        if not tensor.is_meta:
            yield Held(PARAMETER, name, _local(tensor), part)
    for name, buffer in module.named_buffers():
        if not buffer.is_meta:
            yield Held(BUFFER, name, _local(buffer), part)
    for name, tensor in module.named_parameters():
        if tensor.grad is not None:
            yield Held(GRADIENT, name, _local(tensor.grad), "" if _is_halfway() else part)


def _sharded(module: torch.nn.Module) -> Iterator[Held]:
    """Of a model of DTensors that nbdist has not prepared."""
    for held in _held_by(module, ""):
        own: torch.Tensor | None = None if held.kind == BUFFER else module.get_parameter(held.name)
        is_other = own is None or (held.kind == GRADIENT and _lies_otherwise(own))
        part = "" if is_other else _part_of(own)
        yield Held(held.kind, held.name, held.tensor, part)


def _part_of(tensor: torch.Tensor | None) -> str:
    """Where this rank is along the axes that split a DTensor; empty for a plain tensor."""
    if not isinstance(tensor, DTensor):
        return ""
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None or any(one.is_partial() for one in tensor.placements):
        return ""
    along = [
        (place, where if one.is_shard() else -1)
        for place, (one, where) in enumerate(zip(tensor.placements, coordinate, strict=True))
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


def _local(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return plain.detach()


def _looked(held: Held) -> Look:
    n_nan, n_inf = _not_finite(held.tensor)
    return Look(
        held.kind, held.name, held.part, reset_models.checksum(held.tensor), held.tensor.numel(),
        n_nan, n_inf,
    )  # fmt: skip


def _not_finite(tensor: torch.Tensor) -> tuple[int, int]:
    """(NaN, inf) elements. One pass where there are none."""
    if not tensor.numel() or not (tensor.is_floating_point() or tensor.is_complex()):
        return 0, 0
    total = tensor.sum(dtype=torch.float32 if tensor.dtype.itemsize < 4 else None)
    if bool(torch.isfinite(total)):
        return 0, 0
    return int(tensor.isnan().sum()), int(tensor.isinf().sum())


def _spread(wanted: Difference, own: torch.Tensor | None) -> float:
    """One tensor's. Collective: ranks that are not among its holders send what changes nothing."""
    members = {rank for group in wanted.groups for rank in group}
    is_member = dist.get_rank() in members and own is not None and own.numel() == wanted.count
    largest = 0.0
    for start in range(0, wanted.count, _PIECE):
        size = min(_PIECE, wanted.count - start)
        # On the CPU, for which there is a backend beside NCCL.
        ends = torch.full((2, size), -math.inf, dtype=torch.float64)
        if is_member:
            assert own is not None
            values = own.reshape(-1)[start : start + size].to("cpu", torch.float64)
            ends = torch.stack([values, -values])
        dist.all_reduce(ends, dist.ReduceOp.MAX)
        largest = max(largest, float(ends.sum(0).max()))
    return largest
